"""The backward's kernels without a product: dlogits from the cache, of one head (eqs. 4, 5) or two (eqs. 8, 10).

In base 2, a cached exponential e gives u = log2 e + (tile maximum - maximum)·scale. All but log2 e is one number per
row and tile, so an element costs one logarithm and two multiplications: dz = e (a + b log2 e). With two heads, one
number per head, row and tile likewise makes a tile's numbers relative to the whole vocabulary.

The kernels read the cache once, block by block, at the speed of memory. TMA loads and stores the blocks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax.mathematics._kl import Direction, KLCoefficients
from lce_jax.mathematics._logprobs import FP16_SHIFT
from lce_jax.mosaic import _pallas
from lce_jax.mosaic._call import Generation
from lce_jax.mosaic._chunks import Cache, KLCache
from lce_jax.mosaic._operands import KLOperands, Prepared, RowFactors, Span
from lce_jax.mosaic._pallas import pl, plgpu
from lce_jax.mosaic.common import _logits
from lce_jax.mosaic.common._heads import (
    RATIOS,
    MixtureFactors,
    Reference,
    load_fields,
    relative_log_ratio,
    relative_signs,
)
from lce_jax.mosaic.common._logits import AccumulatorLayout, differentiate_softcap
from lce_jax.mosaic.common._tiles import ROW_BLOCK, TILE_N, ceil_div, swizzled
from lce_jax.types._types import Call

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Float, Int


ROWS = 64  # how many rows a block has
COLUMNS = 128  # how many columns a block has
BLOCK = (ROWS, COLUMNS)
ACCUMULATOR = AccumulatorLayout(ROWS)
PER_TILE = TILE_N // COLUMNS
RESERVED_BYTES = 1 << 10  # shared memory that the system reserves in each kernel block
STAGES = 2
SLOTS = 2  # the number of staging slots in shared memory

along = functools.partial(ACCUMULATOR.along_rows, columns=COLUMNS)


@dataclasses.dataclass(frozen=True)
class BlockWalk:
    """The blocks of the span that one kernel block computes: every ``stride``-th block, row by row."""

    first_tile: Any
    num_steps: Any
    first: Any
    stride: Any
    per_row: Any  # how many blocks lie side by side in a row

    @classmethod
    def of(cls, span: Span) -> BlockWalk:
        """Returns the walk of this kernel block."""
        first_tile = _logits.first_tile(span)
        per_row = span.num_tiles * PER_TILE
        blocks = ceil_div(span.num_rows, ROW_BLOCK) * (ROW_BLOCK // ROWS) * per_row
        first, stride = lax.axis_index("block"), lax.axis_size("block")
        return cls(first_tile, lax.div(jnp.maximum(blocks - 1 - first + stride, 0), stride), first, stride, per_row)

    def block(self, step: Any) -> Block:
        """Returns the block that the kernel block computes in this ``step``."""
        number = self.first + step * self.stride
        row, column = lax.div(number, self.per_row), lax.rem(number, self.per_row)
        return Block(row, column, self.first_tile + lax.div(column, jnp.int32(PER_TILE)))

    def cached_place(self, step: Any) -> tuple[Any, Any]:
        """Returns the (row, column) of a step's block in the cache, counted in blocks."""
        block = self.block(step)
        return block.row, self.first_tile * PER_TILE + block.column


@dataclasses.dataclass(frozen=True)
class Block:
    """The place of a block, counted in blocks."""

    row: Any
    column: Any  # relative to the span's first column
    tile: Any  # the number of the block's vocabulary tile in the shard

    @property
    def rows(self) -> Any:
        """The rows of the block in the arrays."""
        return pl.ds(self.row * ROWS, ROWS)

    @property
    def columns(self) -> Any:
        """The columns of the block, relative to the span's first column."""
        return pl.ds(self.column * COLUMNS, COLUMNS)


type Gradient = Callable[[Block, Sequence[Array]], Array]  # (block, its cached values in float32) -> dlogits


def kernel(
    generation: Generation,
    body: Callable[..., None],
    output: Any,
    call: Call,
    name: str,
    cached: Sequence[Any],
    updated: Any,
) -> Any:
    """Returns a kernel that runs ``body`` on as many kernel blocks as fit the GPU."""
    _, needed = plan_shared_memory(generation, cached, output)
    per_core = (generation.smem_limit + RESERVED_BYTES) // (needed + RESERVED_BYTES)
    return _pallas.kernel(
        body,
        out_type=[output],
        grid=(call.device.core_count * per_core,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name=name,
        updated=updated,
    )


def plan_shared_memory(generation: Generation, cached: Sequence[Any], output: Any) -> tuple[bool, int]:
    """Returns whether TMA stores results through shared memory, and how many bytes of it a kernel block needs.

    The memory holds the stages of the ``cached`` arrays, and the staging slots if there is room for them.
    """
    alone = ROWS * COLUMNS * STAGES * sum(x.dtype.itemsize for x in cached)
    staged = alone + ROWS * COLUMNS * SLOTS * output.dtype.itemsize
    is_staged = generation.machine.has_tma and staged <= generation.smem_limit
    return is_staged, staged if is_staged else alone


def walk_blocks(
    generation: Generation, walk: BlockWalk, cached: Sequence[Any], output: Any, gradient: Gradient
) -> None:
    """Computes ``gradient`` of each block of the ``cached`` arrays, and stores it in ``output``."""
    staged, _ = plan_shared_memory(generation, cached, output)
    swizzle = swizzled(COLUMNS, output.dtype.itemsize)
    staging = plgpu.SMEM((SLOTS, *BLOCK), output.dtype, transforms=swizzle) if staged else None
    more = {} if generation.machine.has_tma else {"oob_fill_mode": plgpu.OOBFillMode.PROMISE_IN_BOUNDS}

    @functools.partial(pl.run_scoped, slots=staging)
    def run(slots: Any) -> None:
        def body(index: Any, *refs: Any) -> None:
            block = walk.block(index[0])
            values = [_pallas.load(ref, ACCUMULATOR.layout).astype(jnp.float32) for ref in refs]
            d, destination = gradient(block, values), output.at[block.rows, block.columns]
            if staged:
                _send(d, slots, index[0], destination)
            else:
                _pallas.store(destination, d.astype(output.dtype))

        swizzles = (swizzled(COLUMNS, x.dtype.itemsize) for x in cached)
        specs = [plgpu.BlockSpec(BLOCK, walk.cached_place, transforms=one, **more) for one in swizzles]
        plgpu.emit_pipeline(body, grid=(walk.num_steps,), in_specs=specs, max_concurrent_steps=STAGES)(*cached)
        if staged:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _send(d: Array, slots: Any, step: Any, destination: Any) -> None:
    """Rounds a block and starts its store, through the staging slot of its step."""
    slot = lax.rem(step, jnp.int32(SLOTS))
    plgpu.wait_smem_to_gmem(SLOTS - 1, wait_read_only=True)
    slots[slot] = d.astype(slots.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(slots.at[slot], destination)


def cached_dlogits(
    generation: Generation,
    prepared: Prepared,
    call: Call,
    factors: Float[Array, "factors Tp"],
    cache: Cache,
    span: Int[Array, "fields"],
    columns: int,
    overwrites: bool,
) -> Float[Array, "T columns"]:
    """Computes the dlogits of the tiles in ``span``: gradients with respect to raw products, in the weight's dtype.

    The result has ``columns`` columns, of which the span's tiles fill the first.

    Cached exponentials have the relative precision of the weight's dtype, like the result. Padding gets zeros. Tiles
    after the span, and row blocks without an unmasked row, are not cached and not written. If ``overwrites``, gradients
    overwrite the whole cache; each block is read before it is written.
    """
    output = jax.ShapeDtypeStruct((prepared.hidden.shape[0], columns), call.dtype)
    body, updated = functools.partial(_kernel, generation, call), {0: 0} if overwrites else None
    (result,) = kernel(generation, body, output, call, "lce_cached_dlogits", [cache.exponentials], updated)(
        cache.exponentials,
        cache.max,
        factors,
        prepared.row_scale,
        prepared.targets,
        prepared.holds_target,
        span,
    )
    return result


class Refs(NamedTuple):
    """The arrays that the kernel reads and writes, except the exponentials."""

    tile_max: Any  # [tiles of the cache, Tp]
    factors: Any  # [3 or 4, Tp]
    row_scale: Any  # [Tp]
    targets: Any  # [Tp]
    holds_target: Any  # [row blocks, tiles of the shard]
    output: Any  # [T, columns]


def _kernel(
    generation: Generation,
    call: Call,
    exponentials: Any,  # [T, columns of the cache]
    tile_max: Any,
    factors: Any,
    row_scale: Any,
    targets: Any,
    holds_target: Any,
    scalars: Any,  # a `Span`
    output: Any,
) -> None:
    refs, span = Refs(tile_max, factors, row_scale, targets, holds_target, output), Span.unpack(scalars)
    gradient = functools.partial(_block_gradient, call, refs, span)
    walk_blocks(generation, BlockWalk.of(span), [exponentials], output, gradient)


def _block_gradient(call: Call, refs: Refs, span: Span, block: Block, values: Sequence[Array]) -> Array:
    """Loads the factors of a block's rows, and computes eqs. 4 and 5."""
    load = functools.partial(ACCUMULATOR.load_rows, rows=block.rows)
    row_block = lax.div(block.row, jnp.int32(ROW_BLOCK // ROWS))
    rows = ACCUMULATOR.load_factors(refs.factors, block.rows)
    label = load(refs.targets) - (span.column + block.column * COLUMNS)
    holds = refs.holds_target[row_block, block.tile] > 0
    row_scale, highest = load(refs.row_scale), load(refs.tile_max.at[block.tile])
    e, log2_e = decode_exponentials(values[0], refs.output.dtype)
    d = _gradient(e, log2_e, rows, (highest - rows.max) * row_scale)
    d = _differentiate_softcap(call, d, log2_e, highest, row_scale)
    return ACCUMULATOR.put_target(d, rows, label, holds)


def decode_exponentials(e: Array, dtype: Any) -> tuple[Array, Array]:
    """Returns the exponentials that were cached in ``dtype``, and their logarithms, which are finite."""
    if dtype == jnp.float16:
        e = e * 2.0**-FP16_SHIFT
    return e, jnp.log2(jnp.maximum(e, jnp.finfo(jnp.float32).tiny))


def _gradient(e: Array, log2_e: Array, rows: RowFactors, down: Array) -> Array:
    """Computes eq. 4 on a block of exponentials, without the label's term.

    ``down`` is the dᵢ of eq. 2. Its exponential is computed first, because ``slope`` times ``down`` may overflow.
    """
    factor = jnp.exp2(down)
    if rows.slope is None:
        return e * along(rows.constant * factor)
    return e * (along(rows.constant * factor + rows.slope * (down * factor)) + along(rows.slope * factor) * log2_e)


def _differentiate_softcap(call: Call, d: Array, u: Array, highest: Array, row_scale: Array) -> Array:
    """Turns ``d`` into the gradient with respect to the raw products (eq. 5). ``u``: (x - highest)·scale, in base 2.

    In masked rows the scale is 0, e is 1, and everything else is 0.
    """
    if call.logit_softcap is None:
        return d
    return differentiate_softcap(call, d, along(highest) + u * along(1.0 / jnp.maximum(row_scale, 1e-30)))


def cached_kl_dlogits(
    generation: Generation,
    calls: tuple[Call, Call],
    operands: KLOperands,
    factors: Float[Array, "fields Tp"],
    cache: KLCache,
    span: Int[Array, "fields"],
    columns: int,
    direction: Direction,
    overwrites: bool,
) -> Float[Array, "Tp columns"]:
    """Computes the same as `kl_dlogits`, from the cache. If ``overwrites``, gradients overwrite the whole cache."""
    call = calls[direction == "forward"]  # the student's call
    output = jax.ShapeDtypeStruct((factors.shape[1], columns), call.dtype)
    body = functools.partial(_kl_kernel, generation, call, direction)
    row_scales = [head.row_scale for head in operands.heads]
    updated = {0: 0} if overwrites else None
    run = kernel(generation, body, output, call, "lce_cached_kl_dlogits", cache[:2], updated)
    return run(*cache, *row_scales, factors, span)[0]


def _kl_kernel(
    generation: Generation,
    call: Call,
    direction: Direction,
    e: Any,
    ratio: Any,
    references: Any,  # [tiles of the cache, 3, Tp]
    scale_p: Any,  # [Tp]
    scale_q: Any,
    factors: Any,  # [fields, Tp]
    scalars: Any,  # a `Span`
    output: Any,
) -> None:
    gradient = functools.partial(_kl_block_gradient, call, direction, references, (scale_p, scale_q), factors)
    walk_blocks(generation, BlockWalk.of(Span.unpack(scalars)), [e, ratio], output, gradient)


class KLBlock(NamedTuple):
    """The cached values of a block (`mathematics._kl.CachedRatios`), and its tile's numbers for each row."""

    e: Array
    log2_e: Array
    ratio: Array
    k_p: Array  # the k of eq. 0 in base 2
    k_q: Array
    max_p: Array  # the tile's `KLStatistics.references`
    max_q: Array
    at_p: Array

    def down(self, rows: KLCoefficients | MixtureFactors) -> tuple[Array, Array]:
        """Computes each head's dᵢ of eq. 2."""
        return (self.max_p - rows.max_p) * self.k_p, (self.max_q - rows.max_q) * self.k_q


def _kl_block_gradient(
    call: Call,
    direction: Direction,
    references: Any,
    row_scales: Sequence[Any],
    factors: Any,
    block: Block,
    values: Sequence[Array],
) -> Array:
    """Loads the factors of a block's rows, and computes eq. 8 or 10, times the derivative of the softcap."""
    load = functools.partial(ACCUMULATOR.load_rows, rows=block.rows)
    k_p, k_q = map(load, row_scales)
    max_p, max_q, at_p = (load(references.at[block.tile, i]) for i in range(3))
    kind: Any = MixtureFactors if direction in RATIOS else KLCoefficients
    rows = load_fields(kind, factors, load)
    cached = KLBlock(*decode_exponentials(values[0], call.dtype), values[1], k_p, k_q, max_p, max_q, at_p)
    gradient, u = KL_GRADIENTS[direction](cached, rows)
    student = (max_q, k_q) if direction == "forward" else (max_p, k_p)
    gradient = _differentiate_softcap(call, gradient, u, *student)
    return jnp.where(cached.e > 0.0, gradient, 0.0)  # on padding the ratio is arbitrary


def _forward_gradient(x: KLBlock, rows: KLCoefficients) -> tuple[Array, Array]:
    """Computes eq. 8 of a block, and the student's u."""
    down_p, down_q = x.down(rows)
    of_p = along(rows.factor_p * jnp.exp2(down_p))
    below_p, below_q = jnp.minimum(-x.ratio, 0.0), jnp.minimum(x.ratio, 0.0)
    of_q, u = along(rows.factor_q * jnp.exp2(down_q)), x.log2_e + below_q
    return x.e * (jnp.exp2(below_q) * of_q - jnp.exp2(below_p) * of_p), u


def _reverse_gradient(x: KLBlock, rows: KLCoefficients) -> tuple[Array, Array]:
    """Computes eq. 8 of a block, and the student's u."""
    down_p, _ = x.down(rows)
    of_p = along(rows.factor_p * jnp.exp2(down_p))
    to_distance = (x.at_p - rows.at_p) * x.k_q - down_p
    return x.e * of_p * -(x.ratio + along(to_distance) + along(rows.mean)), x.log2_e


def _mixture_gradient(slope: Slope, x: KLBlock, rows: MixtureFactors) -> tuple[Array, Array]:
    """Computes eq. 10 of a block, and the student's u."""
    down_p, down_q = x.down(rows)
    of_p = along(rows.factor_p * jnp.exp2(down_p))
    t = slope(x, rows, x.ratio + along(down_q - down_p + rows.log_sums), down_p)
    return x.e * of_p * (t - along(rows.mean)), x.log2_e


def _log_slope(x: KLBlock, rows: MixtureFactors, d: Array, down_p: Array) -> Array:
    """Computes the t - t₀ of eq. 9."""
    to_distance = (x.max_q - rows.at_p) * x.k_q - down_p
    reference = Reference(*map(along, (rows.base, rows.other, rows.start, rows.most)))
    return relative_log_ratio(d, x.ratio + along(to_distance), reference)


def _sign_slope(_: KLBlock, rows: MixtureFactors, d: Array, __: Array) -> Array:
    """Computes the t - t₀ of eq. 11."""
    return relative_signs(d, along(rows.slope))


# (block, factors of its rows, d, down_p) -> t - t₀
type Slope = Callable[[KLBlock, MixtureFactors, Array, Array], Array]
type KLGradient = Callable[[KLBlock, Any], tuple[Array, Array]]  # (block, factors of its rows) -> dlogits, u

KL_GRADIENTS: dict[Direction, KLGradient] = {
    "forward": _forward_gradient,
    "reverse": _reverse_gradient,
    "jsd": functools.partial(_mixture_gradient, _log_slope),
    "tv": functools.partial(_mixture_gradient, _sign_slope),
}
