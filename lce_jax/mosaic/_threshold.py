"""Which tiles carry gradient, from the forward's own maxima.

A tile, a row block by a vocabulary tile, is live if it holds a label, a candidate, or a probability of at least the
threshold. What the forward keeps of each tile tells that as soon as the whole vocabulary's lse is known, so the
backward never touches the others.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp

from lce_jax._types import Case
from lce_jax.mathematics._statistics import Normalizer
from lce_jax.mosaic import _edge, _live_tiles, _operands
from lce_jax.mosaic._call import KernelCall
from lce_jax.mosaic._host import TRACED
from lce_jax.mosaic.common import _select as kernels
from lce_jax.mosaic.common._tiles import live_shape

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Float, Int


class TileStatistics(NamedTuple):
    """What the forward keeps for `select`."""

    maxima: Float[Array, "tiles kept Tp"]  # of each vocabulary tile the largest x, and Σ e^u if probabilities are asked
    targets: Int[Array, "Tp"]
    scale: Float[Array, "Tp"]
    always: Any  # a vocabulary tile that is live whatever it holds, or -1
    held: Int[Array, "tiles blocks"] | None = None  # 1 where a tile holds a candidate


def tile_statistics(call: KernelCall, maxima: Float[Array, "tiles kept Tp"]) -> TileStatistics:
    """Of a shard."""
    always = jnp.asarray(always_live(call), jnp.int32)
    of_tokens = call.prepared.targets, call.prepared.scale
    return TileStatistics(maxima, *of_tokens, always, held(call, call.operands.candidates))


def held(call: KernelCall, columns: Int[Array, "T K"] | None) -> Int[Array, "tiles blocks"] | None:
    """The tiles that hold one of these columns, -1 for none."""
    if columns is None:
        return None
    sizes, shape = (call.shape.row_block, call.shape.tile), live_shape(call.case)
    return call.host.compute(_live_tiles.held, columns, call.prepared.num_rows, sizes, shape)


def always_live(call: KernelCall) -> Int[Array, ""] | int:
    """The tile where padding begins, which `_edge` contracts; -1 if there is none."""
    return -1 if call.operands.num_columns is None else _edge.contracted_tiles(call)


def select(
    case: Case, tiles: TileStatistics, of_rows: Normalizer, num_rows: Any
) -> tuple[Int[Array, "tiles blocks"], Float[Array, "T"] | None]:
    """The live tiles, and the probability of each token in the others, 0 after the first ``num_rows``; None: all.

    A row whose sum is NaN makes its row block live everywhere, so that its gradient is NaN as well.
    """
    padded, count = tiles.targets.shape[0], case.num_tokens if num_rows is None else num_rows
    merged = jnp.concatenate([_operands.pad(x, padded) for x in (of_rows.max, of_rows.sumexp)])
    numbers = TRACED.numbers(count, padded, tiles.always)
    live, masses = kernels.select(case, tiles.maxima, tiles.targets, tiles.scale, merged, 0, numbers, tiles.held)
    if masses is None:
        return live, None
    dropped = functools.reduce(jnp.add, masses)[: case.num_tokens]  # in their order
    return live, jnp.where(jnp.arange(case.num_tokens, dtype=jnp.int32) < count, dropped, 0.0)
