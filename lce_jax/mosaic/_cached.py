"""The backward's other kernel: dlogits (eqs. 4, 5) from cached exponentials, one pass at the speed of memory.

With u = log2 e + (tile maximum - shift), everything but log2 e is one number per row and tile, so an element costs
one logarithm and two multiplications: dz = e (a + b log2 e).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax import _compat
from lce_jax._compat import pl, plgpu
from lce_jax._types import Case
from lce_jax.mosaic import _config, _pipeline
from lce_jax.mosaic._config import ROW_BLOCK, TILE_N, WARPGROUP_ROWS
from lce_jax.mosaic._operands import RowFactors, Span

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

    from lce_jax.mosaic._operands import Prepared

COLUMNS = 128  # of a block: two blocks in and two out are 64 KiB, so that three kernel blocks share a multiprocessor
BLOCK = (WARPGROUP_ROWS, COLUMNS)
BLOCKS_PER_CORE = 3
STAGES = 2
SLOTS = 2  # of the staging memory
FP16_SHIFT = 15.0  # cached fp16 exponentials are 2^15 times themselves: (0, 1] would waste half of fp16's exponents


class Cache(NamedTuple):
    """What the backward needs of the first vocabulary tiles to spare their recomputation."""

    exponentials: Float[Array, "T columns"]  # exp2(z - max) in the weight's dtype; columns a multiple of 256
    max: Float[Array, "tiles Tp"]  # each tile's maximum, bits


def empty(case: Case, num_tiles: int) -> Cache:
    """For the forward to fill."""
    shape = _config.geometry(case)
    return Cache(
        lax.empty((shape.tokens, num_tiles * TILE_N), case.dtype),
        lax.empty((num_tiles, shape.padded_tokens), jnp.float32),
    )


def dlogits(
    prepared: Prepared,
    case: Case,
    rows: RowFactors,
    cache: Cache,
    span: Int[Array, "fields"],
    columns: int,
    overwrites: bool,
    interpret: Any = None,
) -> Float[Array, "T columns"]:
    """The gradient in the span's raw products, in the weight's dtype, at the beginning of ``columns``.

    The exponentials have the relative precision of that dtype, which is the precision of the result. Zero on padding;
    tiles behind the span and row blocks without a live row, which the forward did not keep, are left unwritten. With
    ``overwrites`` the gradient takes the place of all of the cache, block by block, each read before it is written.
    """
    output = jax.ShapeDtypeStruct((_config.geometry(case).tokens, columns), case.dtype)
    (result,) = _compat.mosaic_kernel(
        functools.partial(_kernel, case),
        out_type=[output],
        grid=(case.device.core_count * BLOCKS_PER_CORE,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="lce_cached_dlogits",
        interpret=interpret,
        updated={0: 0} if overwrites else None,
    )(
        cache.exponentials,
        cache.max,
        jnp.stack(jax.tree.leaves(rows)),
        prepared.scale,
        prepared.targets,
        prepared.holds_target,
        span,
    )
    return result


def _kernel(
    case: Case,
    exponentials: Any,  # [T, columns of the cache]
    tile_max: Any,  # [tiles of the cache, Tp]
    factors: Any,  # [3 or 4, Tp]
    scale: Any,  # [Tp]
    targets: Any,  # [Tp]
    holds_target: Any,  # [row blocks, tiles of the shard]
    scalars: Any,  # a `Span`
    output: Any,  # [T, columns]
) -> None:
    span = Span.unpack(scalars)
    first_tile = span.first_tile
    per_row_block = span.num_tiles * (TILE_N // COLUMNS)
    units = _pipeline.ceil_div(span.num_rows, ROW_BLOCK) * (ROW_BLOCK // WARPGROUP_ROWS) * per_row_block
    first, stride = lax.axis_index("block"), lax.axis_size("block")

    def position(step: Any) -> tuple[Any, Any]:
        unit = first + step * stride
        return lax.div(unit, per_row_block), lax.rem(unit, per_row_block)

    def cached_block(step: Any) -> tuple[Any, Any]:
        row_block, column_block = position(step)
        return row_block, first_tile * (TILE_N // COLUMNS) + column_block

    def body(slots: Any, index: Any, e_ref: Any) -> None:
        row_block, column_block = position(index[0])
        block_rows = pl.ds(row_block * WARPGROUP_ROWS, WARPGROUP_ROWS)
        load = functools.partial(_pipeline.load_rows, rows=block_rows)
        tile = first_tile + lax.div(column_block, jnp.int32(TILE_N // COLUMNS))
        cta_rows = lax.div(row_block, jnp.int32(ROW_BLOCK // WARPGROUP_ROWS))

        rows = _pipeline.load_factors(factors, block_rows)
        label = load(targets) - (span.column + column_block * COLUMNS)
        row_scale = load(scale) if case.options.logit_softcap is not None else None
        e = plgpu.load(e_ref, layout=_pipeline.MATRIX, optimized=False).astype(jnp.float32)
        holds = holds_target[cta_rows, tile] > 0
        d = _gradient(e, rows, load(tile_max.at[tile]), row_scale, label, holds, output.dtype)
        slot = lax.rem(index[0], jnp.int32(SLOTS))
        plgpu.wait_smem_to_gmem(SLOTS - 1, wait_read_only=True)
        slots[slot] = d.astype(output.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(slots.at[slot], output.at[block_rows, pl.ds(column_block * COLUMNS, COLUMNS)])

    itemsize = case.dtype.itemsize
    staging = plgpu.SMEM((SLOTS, *BLOCK), case.dtype, transforms=_pipeline.swizzled(output.shape[1], itemsize))

    @functools.partial(pl.run_scoped, slots=staging)
    def run(slots: Any) -> None:
        plgpu.emit_pipeline(
            functools.partial(body, slots),
            grid=(lax.div(jnp.maximum(units - 1 - first + stride, 0), stride),),
            in_specs=[plgpu.BlockSpec(BLOCK, cached_block, transforms=_pipeline.swizzled(TILE_N, itemsize))],
            max_concurrent_steps=STAGES,
        )(exponentials)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _gradient(
    e: Array, rows: RowFactors, highest: Array, row_scale: Array | None, label: Array, holds: Any, dtype: Any
) -> Array:
    """Eqs. 4 and 5 on a block of exponentials; ``label`` counts from its first column."""
    along = functools.partial(_pipeline.along_rows, columns=COLUMNS)
    if dtype == jnp.float16:
        e = e * 2.0**-FP16_SHIFT
    log2_e = jnp.log2(jnp.maximum(e, jnp.finfo(jnp.float32).tiny))
    down = highest - rows.shift
    factor = jnp.exp2(down)
    if rows.slope is None:
        d = e * along(rows.constant * factor)
    else:
        d = e * (along((rows.constant + rows.slope * down) * factor) + along(rows.slope * factor) * log2_e)

    def add_target() -> Array:
        columns = plgpu.broadcasted_iota(jnp.int32, BLOCK, 1, layout=_pipeline.MATRIX)
        return jnp.where(columns == along(label), d + along(rows.target), d)

    d = lax.cond(holds, add_target, lambda: d)
    if row_scale is not None:
        inverse = 1.0 / jnp.maximum(row_scale, 1e-30)  # 0 on rows left out, where e is 1 and all else is 0
        tanh = (log2_e + along(highest)) * along(inverse)
        d = d * (1.0 - tanh * tanh)
    return d
