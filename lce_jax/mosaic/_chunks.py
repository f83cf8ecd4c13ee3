"""Sizes of the backward's chunks and the forward's launches; memory for dhidden and the cache.

A chunk of dlogits exists in memory as a whole, so a budget of bytes limits it. Within the budget, the fastest size is
chosen. Its cost: each chunk leaves multiprocessors idle in its last wave of tiles, and reads and writes dhidden once.

The product of a chunk of dlogits with its part of the weight is added to fp32 sums of dhidden, which the caller rounds
once. If one launch computes all of dhidden and the caller allows it, the kernel rounds, and its output has the weight's
dtype.

The cache holds exponentials of the forward, so that the backward does not recompute their logits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp

from lce_jax.mathematics import _kl
from lce_jax.mathematics._kl import KLStatistics
from lce_jax.mathematics._statistics import sum_in_order
from lce_jax.mosaic._host import Host, greatest, least
from lce_jax.mosaic._operands import Geometry
from lce_jax.types._types import Call
from lce_jax.xla._kl import KLPlan

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Float


MAX_SPLITS = 4  # the largest number of parts into which the contraction over the vocabulary is split


def dhidden_shape(call: Call, shape: Geometry) -> tuple[int, int, int]:
    """Returns the shape [splits, tokens, hidden] of the kernels' output for dhidden, in whole tiles.

    The sum of the splits is dhidden. There are several if one has fewer tiles than the GPU has multiprocessors.
    """
    rows, columns = shape.padded_tokens, -(-call.hidden_size // shape.tile) * shape.tile
    num_tiles = rows // shape.row_block * (columns // shape.tile)
    most = MAX_SPLITS if num_tiles < call.device.core_count else 1  # each chunk reads and writes each array

    def waves(splits: int) -> float:
        return -(-num_tiles * splits // call.device.core_count) / splits

    return min(range(1, most + 1), key=waves), rows, columns


def empty_dhidden(host: Host, call: Call, shape: Geometry, rounds: bool) -> Float[Array, "splits Tp Hp"]:
    """Returns memory for the kernels' dhidden, in the weight's dtype if the kernels round it (``rounds``).

    Several splits are in fp32, because they are summed after the kernels.
    """
    splits = dhidden_shape(call, shape)
    return host.empty(splits, call.dtype if rounds and splits[0] == 1 else jnp.float32)


def sum_dhidden(sums: Float[Array, "splits Tp Hp"] | None, call: Call) -> Float[Array, "T H"] | None:
    """Sums the splits of dhidden, and removes padding."""
    if sums is None:
        return None
    return sum_in_order(sums)[: call.num_tokens, : call.hidden_size]


class Cache(NamedTuple):
    """What the forward caches of the first vocabulary tiles, which the backward then does not recompute."""

    exponentials: Float[Array, "T columns"]  # e^((x - max) k) in whole tiles, in the weight's dtype
    max: Float[Array, "tiles Tp"]  # each tile's largest x

    @property
    def num_tiles(self) -> int:
        """How many tiles are cached."""
        return self.max.shape[0]


class KLCache(NamedTuple):
    """The `mathematics._kl.CachedRatios` of the first vocabulary tiles, which the backward does not recompute."""

    e: Float[Array, "Tp columns"]  # in whole tiles
    ratio: Float[Array, "Tp columns"]  # in base 2
    references: Float[Array, "tiles 3 Tp"]  # the references of each tile

    @property
    def num_tiles(self) -> int:
        """How many tiles are cached."""
        return self.references.shape[0]


def empty_cache(host: Host, call: Call, shape: Geometry, num_tiles: int) -> Cache:
    """Returns memory for the cache, which the forward fills."""
    return Cache(
        host.empty((shape.tokens, num_tiles * shape.tile), call.dtype),
        host.empty((num_tiles, shape.padded_tokens), jnp.float32),
    )


def empty_kl_cache(host: Host, plan: KLPlan, shape: Geometry, num_tiles: int) -> KLCache:
    """Returns memory for the cache of two heads, which the forward fills."""
    columns = shape.padded_tokens, num_tiles * shape.tile
    e, ratio = (host.empty(columns, dtype) for dtype in plan.cached_dtypes)
    return KLCache(e, ratio, host.empty((num_tiles, _kl.REFERENCES, shape.padded_tokens), jnp.float32))


def count_cached_tiles(call: Call, shape: Geometry) -> int:
    """Returns how many tiles fit ``cache_bytes``; 0 if the backward visits only active tiles."""
    if call.gradient_threshold:
        return 0
    return min(shape.num_tiles, call.cache_budget // cached_tile_bytes(call, shape))


def cached_tile_bytes(call: Call, shape: Geometry) -> int:
    """Returns the bytes of one tile's exponentials and its maxima, one per token."""
    return shape.tokens * shape.tile * call.dtype.itemsize + shape.padded_tokens * 4


def count_cached_kl_tiles(plan: KLPlan, shape: Geometry) -> int:
    """Returns how many tiles of a call with two heads fit ``cache_bytes``."""
    return min(shape.count_tiles(plan.columns), plan.calls.student.cache_budget // cached_kl_tile_bytes(plan, shape))


def cached_kl_tile_bytes(plan: KLPlan, shape: Geometry) -> int:
    """Returns the bytes that a cached tile takes in a call with two heads."""
    return shape.padded_tokens * (plan.cached_item_bytes * shape.tile + 4 * _kl.REFERENCES)


def can_overwrite_cache(shape: Geometry) -> bool:
    """Whether dlogits can overwrite the exponentials, with all cached tiles in one chunk.

    They cannot if V is not a multiple of the atom: each chunk's columns of the weight are copied, so chunks are small.
    """
    return shape.whole_atoms


type Piece = tuple[int, int, bool]  # tiles [start, stop), and whether their launch reads a copy of the weight

KL_FIELDS = len(KLStatistics._fields)
GROUP = 16  # the number of vocabulary tiles whose statistics one thread joins; then the groups are joined


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """The memory that the passes may take, and the cost of a chunk on this generation of GPUs."""

    dhidden_waves: float  # the time to read and write one token's dhidden in fp32, in waves of tiles
    temporary_bytes: int = 345_000_000  # for the backward's dhidden in fp32 and one chunk of dlogits
    chunk_columns: int = 8192  # a chunk has at least this many columns, even if it exceeds `temporary_bytes`
    chunk_bytes: int = 11 << 28  # but a chunk's dlogits have at most this size: from 180,000 tokens on it is narrower
    statistics_bytes: int = 160 << 20  # for the forward's partial statistics; if these take more, several launches


class Chunks(NamedTuple):
    """How a part of the vocabulary is split into chunks."""

    num_tiles: int  # the tiles of a chunk
    in_cache: bool  # whether a chunk's dlogits overwrite the cache, after the cached tiles have been used


def choose_chunks(call: Call, shape: Geometry, budget: Budget, num_tiles: int, cached: int = 0) -> Chunks:
    """Splits ``num_tiles`` tiles into chunks, which use the memory of ``cached`` tiles if it is large enough."""
    size = choose_chunk_tiles(call, shape, budget, num_tiles) if num_tiles else 0
    if size > cached or not size:
        return Chunks(size, in_cache=False)
    return Chunks(choose_chunk_tiles(call, shape, budget, num_tiles, cached), in_cache=True)


def choose_chunk_tiles(call: Call, shape: Geometry, budget: Budget, num_tiles: int, free: int = 0) -> int:
    """Returns how many of ``num_tiles`` tiles a chunk of the backward covers: the fastest number within the budget.

    The cost is the number of waves of tiles over the multiprocessors, plus the traffic of dhidden for each chunk.
    ``free``: how many tiles have memory outside the budget.
    """
    tile_bytes = shape.tokens * shape.tile * call.dtype.itemsize
    for_dlogits = budget.temporary_bytes - math.prod(dhidden_shape(call, shape)) * 4
    most = min(num_tiles, max(for_dlogits // tile_bytes, _least_tiles(shape, budget, tile_bytes), free))

    def cost(chunk: int) -> float:
        full, rest = divmod(num_tiles, chunk)
        waves = [-(-shape.row_blocks * size // call.device.core_count) for size in (chunk, rest)]
        return full * waves[0] + waves[1] + -(-num_tiles // chunk) * (1 + shape.tokens * budget.dhidden_waves)

    return min(range(most, most // 2, -1), key=cost)


def choose_launch_groups(fields: int, shape: Geometry, budget: Budget) -> int:
    """Returns how many groups of tiles one launch of the forward covers: launches are about equal, and fit the budget.

    ``fields``: how many statistics a token has per tile.
    """
    tile_bytes = 4 * fields * shape.padded_tokens
    groups = count_groups(shape)
    most = max(budget.statistics_bytes // tile_bytes - groups, 1)  # the groups' statistics need memory, too
    if shape.num_tiles <= most:
        return groups
    return -(-groups // -(-groups // max(most // GROUP, 1)))


def choose_launch_tiles(fields: int, shape: Geometry, budget: Budget) -> int:
    """Returns how many vocabulary tiles a launch of the forward covers at most."""
    return min(choose_launch_groups(fields, shape, budget) * GROUP, shape.num_tiles)


def plan_launches(first: Any, last: Any, pieces: Iterable[Piece]) -> Iterator[tuple[Any, Any, Piece]]:
    """Yields the launches for the tiles from ``first`` to ``last``: (first tile, number of tiles, piece).

    Launches that are statically empty are skipped.
    """
    for piece in pieces:
        begin = greatest(first, piece[0])
        count = greatest(least(last, piece[1]) - begin, 0)
        if not isinstance(count, int) or count:
            yield begin, count, piece


def count_part_groups(shape: Geometry) -> int:
    """Returns the number of groups of tiles in a part of the vocabulary."""
    return -(-shape.part_tiles // GROUP)


def count_groups(shape: Geometry) -> int:
    """Returns the number of groups of tiles in a shard."""
    parts, rest = divmod(shape.num_tiles, shape.part_tiles)
    return parts * count_part_groups(shape) + -(-rest // GROUP)


def first_tile(shape: Geometry, group: Any) -> Any:
    """Returns the first tile of a group. The last group of a part may have fewer tiles than others."""
    missing = count_part_groups(shape) * GROUP - shape.part_tiles  # how many tiles a part's last group lacks
    return group * GROUP - (group // count_part_groups(shape) * missing if shape.has_parts else 0)


def choose_active_slots(call: Call, shape: Geometry, budget: Budget, group: int) -> int:
    """Returns how many active tiles' dlogits a batch has room for within the budget; several waves are full waves."""
    of_tile = -(-shape.row_blocks // group) * group
    slot_bytes = shape.row_block * shape.tile * call.dtype.itemsize
    for_dlogits = budget.temporary_bytes - math.prod(dhidden_shape(call, shape)) * 4
    least = max(_least_tiles(shape, budget, of_tile * slot_bytes), 2) * of_tile
    most = max(for_dlogits // slot_bytes, least)
    cores = call.device.core_count
    return min(of_tile * shape.num_tiles, max(most // cores * cores, least))


def _least_tiles(shape: Geometry, budget: Budget, tile_bytes: int) -> int:
    """Returns how many vocabulary tiles' dlogits may always exist at the same time, whatever the number of tokens."""
    return max(min(budget.chunk_columns // shape.tile, budget.chunk_bytes // tile_bytes), 1)
