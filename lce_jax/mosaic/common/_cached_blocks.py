"""How the backward's kernels read a cache: one pass at the speed of memory, block by block, in and out by TMA."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

from lce_jax._types import Case
from lce_jax.mosaic import _pallas
from lce_jax.mosaic._pallas import pl, plgpu
from lce_jax.mosaic._span import Span
from lce_jax.mosaic.common import _logits
from lce_jax.mosaic.common._held import Held
from lce_jax.mosaic.common._machine import ceil_div, swizzled
from lce_jax.mosaic.common._tiles import ROW_BLOCK, TILE_N

if TYPE_CHECKING:
    from lce_jax._shapes import Array

ROWS = 64  # of a block
COLUMNS = 128  # of a block
BLOCK = (ROWS, COLUMNS)
HELD = Held(ROWS)
PER_TILE = TILE_N // COLUMNS
SHARED_BYTES = 192 << 10  # of a multiprocessor, for the blocks of all kernel blocks on it
STAGES = 2
SLOTS = 2  # of the staging memory

along = functools.partial(HELD.along_rows, columns=COLUMNS)


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

    def block(self, step: Any) -> Block:
        """That of a step."""
        number = self.first + step * self.stride
        row, column = lax.div(number, self.per_row), lax.rem(number, self.per_row)
        return Block(row, column, self.first_tile + lax.div(column, jnp.int32(PER_TILE)))

    def cached_place(self, step: Any) -> tuple[Any, Any]:
        """The (row, column) of a step's block, in the cache."""
        block = self.block(step)
        return block.row, self.first_tile * PER_TILE + block.column


@dataclasses.dataclass(frozen=True)
class Block:
    """Where a block lies."""

    row: Any  # in blocks
    column: Any  # in blocks, of the span
    tile: Any  # of the shard

    @property
    def rows(self) -> Any:
        """Its rows."""
        return pl.ds(self.row * ROWS, ROWS)

    @property
    def columns(self) -> Any:
        """Its columns, of the span."""
        return pl.ds(self.column * COLUMNS, COLUMNS)


type Gradient = Callable[[Block, Sequence[Array]], Array]  # of what is cached of a block, in float32


def kernel(body: Callable[..., None], output: Any, case: Case, name: str, cached: Sequence[Any], updated: Any) -> Any:
    """``body`` on as many kernel blocks as there is room for the ``cached`` arrays' blocks."""
    in_flight = STAGES * sum(x.dtype.itemsize for x in cached) + SLOTS * output.dtype.itemsize
    per_core = SHARED_BYTES // (ROWS * COLUMNS * in_flight)
    return _pallas.kernel(
        body,
        out_type=[output],
        grid=(case.device.core_count * per_core,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name=name,
        updated=updated,
    )


def walk_blocks(walk: Walk, cached: Sequence[Any], output: Any, gradient: Gradient) -> None:
    """Writes ``gradient`` of each block of the ``cached`` arrays to ``output``."""
    staging = plgpu.SMEM((SLOTS, *BLOCK), output.dtype, transforms=_transforms(output))

    @functools.partial(pl.run_scoped, slots=staging)
    def run(slots: Any) -> None:
        def body(index: Any, *refs: Any) -> None:
            block = walk.block(index[0])
            values = [plgpu.load(ref, layout=HELD.layout, optimized=False).astype(jnp.float32) for ref in refs]
            _send(gradient(block, values), slots, index[0], output.at[block.rows, block.columns])

        specs = [plgpu.BlockSpec(BLOCK, walk.cached_place, transforms=_transforms(x)) for x in cached]
        plgpu.emit_pipeline(body, grid=(walk.num_steps,), in_specs=specs, max_concurrent_steps=STAGES)(*cached)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _transforms(x: Any) -> Any:
    return swizzled(COLUMNS, x.dtype.itemsize)


def _send(d: Array, slots: Any, step: Any, destination: Any) -> None:
    """Rounds a block and starts its copy out through the slot of its step."""
    slot = lax.rem(step, jnp.int32(SLOTS))
    plgpu.wait_smem_to_gmem(SLOTS - 1, wait_read_only=True)
    slots[slot] = d.astype(slots.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(slots.at[slot], destination)
