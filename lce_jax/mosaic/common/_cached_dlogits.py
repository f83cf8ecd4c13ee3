"""The backward's other kernel: dlogits (eqs. 4, 5) from cached exponentials, one pass at the speed of memory.

In base 2, u = log2 e + (tile maximum - maximum)·scale: everything but log2 e is one number per row and tile. So an
element costs one logarithm and two multiplications: dz = e (a + b log2 e).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax._types import Case
from lce_jax.mathematics._dlogits import FP16_SHIFT
from lce_jax.mosaic import _pallas
from lce_jax.mosaic._cache import Cache
from lce_jax.mosaic._operands import Prepared, RowFactors
from lce_jax.mosaic._pallas import pl, plgpu
from lce_jax.mosaic._span import Span
from lce_jax.mosaic.common import _logits
from lce_jax.mosaic.common._held import Held
from lce_jax.mosaic.common._machine import ceil_div, swizzled
from lce_jax.mosaic.common._tiles import ROW_BLOCK, TILE_N

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Float, Int

ROWS = 64  # of a block
COLUMNS = 128  # of a block: two blocks in and two out are 64 KiB, so that three kernel blocks share a multiprocessor
BLOCK = (ROWS, COLUMNS)
HELD = Held(plgpu.Layout.WGMMA, ROWS)  # registers alone: every generation has it
PER_TILE = TILE_N // COLUMNS
BLOCKS_PER_CORE = 3
STAGES = 2
SLOTS = 2  # of the staging memory


def dlogits(
    prepared: Prepared,
    case: Case,
    factors: Float[Array, "factors Tp"],
    cache: Cache,
    span: Int[Array, "fields"],
    columns: int,
    overwrites: bool,
) -> Float[Array, "T columns"]:
    """The gradient in the span's raw products, in the weight's dtype, at the beginning of ``columns``.

    The exponentials have the relative precision of that dtype, which is the precision of the result. Zero on padding;
    tiles after the span and row blocks without a live row, which the forward did not keep, are left unwritten. With
    ``overwrites`` the gradient takes the place of all of the cache, block by block, each read before it is written.
    """
    output = jax.ShapeDtypeStruct((prepared.hidden.shape[0], columns), case.dtype)
    (result,) = _pallas.kernel(
        functools.partial(_kernel, case),
        out_type=[output],
        grid=(case.device.core_count * BLOCKS_PER_CORE,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="lce_cached_dlogits",
        updated={0: 0} if overwrites else None,
    )(
        cache.exponentials,
        cache.max,
        factors,
        prepared.scale,
        prepared.targets,
        prepared.holds_target,
        span,
    )
    return result


class Refs(NamedTuple):
    """What the kernel reads and writes beside the exponentials."""

    tile_max: Any  # [tiles of the cache, Tp]
    factors: Any  # [3 or 4, Tp]
    scale: Any  # [Tp]
    targets: Any  # [Tp]
    holds_target: Any  # [row blocks, tiles of the shard]
    output: Any  # [T, columns]


@dataclasses.dataclass(frozen=True)
class Walk:
    """Which blocks of the span one kernel block takes: every ``stride``-th, row by row."""

    first_tile: Any
    num_steps: Any
    first: Any
    stride: Any
    per_row: Any  # blocks that lie side by side

    @classmethod
    def of(cls, span: Span) -> Walk:
        """The walk of this kernel block."""
        first_tile = _logits.first_tile(span)
        per_row = span.num_tiles * PER_TILE
        blocks = ceil_div(span.num_rows, ROW_BLOCK) * (ROW_BLOCK // ROWS) * per_row
        first, stride = lax.axis_index("block"), lax.axis_size("block")
        return cls(first_tile, lax.div(jnp.maximum(blocks - 1 - first + stride, 0), stride), first, stride, per_row)

    def block(self, step: Any) -> tuple[Any, Any]:
        """The (row, column) of a step's block, in the span."""
        number = self.first + step * self.stride
        return lax.div(number, self.per_row), lax.rem(number, self.per_row)

    def cached_block(self, step: Any) -> tuple[Any, Any]:
        """The (row, column) of a step's block, in the cache."""
        row, column = self.block(step)
        return row, self.first_tile * PER_TILE + column


def _kernel(
    case: Case,
    exponentials: Any,  # [T, columns of the cache]
    tile_max: Any,
    factors: Any,
    scale: Any,
    targets: Any,
    holds_target: Any,
    scalars: Any,  # a `Span`
    output: Any,
) -> None:
    refs = Refs(tile_max, factors, scale, targets, holds_target, output)
    span = Span.unpack(scalars)
    walk = Walk.of(span)
    itemsize = case.dtype.itemsize
    staging = plgpu.SMEM((SLOTS, *BLOCK), case.dtype, transforms=swizzled(output.shape[1], itemsize))

    @functools.partial(pl.run_scoped, slots=staging)
    def run(slots: Any) -> None:
        def body(index: Any, e_ref: Any) -> None:
            row, column = walk.block(index[0])
            rows = pl.ds(row * ROWS, ROWS)
            d = _block_gradient(case, refs, span, walk, row, rows, column, e_ref)
            _send(d, slots, index[0], output.at[rows, pl.ds(column * COLUMNS, COLUMNS)])

        plgpu.emit_pipeline(
            body,
            grid=(walk.num_steps,),
            in_specs=[plgpu.BlockSpec(BLOCK, walk.cached_block, transforms=swizzled(TILE_N, itemsize))],
            max_concurrent_steps=STAGES,
        )(exponentials)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _block_gradient(
    case: Case, refs: Refs, span: Span, walk: Walk, row: Any, block_rows: Any, column: Any, e_ref: Any
) -> Array:
    """The gradient of one block: loads what its rows need, then eqs. 4 and 5."""
    load = functools.partial(HELD.load_rows, rows=block_rows)
    tile = walk.first_tile + lax.div(column, jnp.int32(PER_TILE))
    row_block = lax.div(row, jnp.int32(ROW_BLOCK // ROWS))
    rows = HELD.load_factors(refs.factors, block_rows)
    label = load(refs.targets) - (span.column + column * COLUMNS)
    e = plgpu.load(e_ref, layout=HELD.layout, optimized=False).astype(jnp.float32)
    holds = refs.holds_target[row_block, tile] > 0
    scale, highest = load(refs.scale), load(refs.tile_max.at[tile])
    e, log2_e = _of_cache(e, refs.output.dtype)
    d = _gradient(e, log2_e, rows, (highest - rows.max) * scale)
    d = d if case.options.logit_softcap is None else d * _cap_derivative(log2_e, highest, scale)
    return HELD.with_target(d, rows, label, holds)


def _of_cache(e: Array, dtype: Any) -> tuple[Array, Array]:
    """The exponentials and their logarithms, which are finite."""
    if dtype == jnp.float16:
        e = e * 2.0**-FP16_SHIFT
    return e, jnp.log2(jnp.maximum(e, jnp.finfo(jnp.float32).tiny))


def _gradient(e: Array, log2_e: Array, rows: RowFactors, down: Array) -> Array:
    """Eq. 4 on a block of exponentials, but for the label.

    ``down`` is the dᵢ of eq. 2. Its exponential is taken first, because ``slope`` times ``down`` may overflow.
    """
    along = functools.partial(HELD.along_rows, columns=COLUMNS)
    factor = jnp.exp2(down)
    if rows.slope is None:
        return e * along(rows.constant * factor)
    return e * (along(rows.constant * factor + rows.slope * (down * factor)) + along(rows.slope * factor) * log2_e)


def _cap_derivative(log2_e: Array, highest: Array, scale: Array) -> Array:
    """The 1 - tanh² of eq. 5. The scale is 0 on rows left out, where e is 1 and all else 0."""
    along = functools.partial(HELD.along_rows, columns=COLUMNS)
    tanh = along(highest) + log2_e * along(1.0 / jnp.maximum(scale, 1e-30))
    return 1.0 - tanh * tanh


def _send(d: Array, slots: Any, step: Any, destination: Any) -> None:
    """Rounds a block and starts its copy out through the slot of its step."""
    slot = lax.rem(step, jnp.int32(SLOTS))
    plgpu.wait_smem_to_gmem(SLOTS - 1, wait_read_only=True)
    slots[slot] = d.astype(slots.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(slots.at[slot], destination)
