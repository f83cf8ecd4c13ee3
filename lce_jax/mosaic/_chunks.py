"""What decides how much of the vocabulary one launch covers: the backward's chunks, the forward's launches.

A chunk of dlogits lies in memory as a whole, so a chunk is bounded by a budget of bytes. Within the budget the size is
chosen by time: each chunk leaves multiprocessors idle in its last wave of tiles, and reads and writes dhidden once.

The product of each chunk of dlogits with its part of the weight adds to fp32 sums of dhidden, which the caller rounds
once. Where one launch writes all of dhidden, and the caller allows it, the kernel rounds: its output then has the
weight's dtype.

The cache are the exponentials that the forward keeps, which spare the backward their recomputation.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp

from lce_jax.mathematics import _kl
from lce_jax.mathematics._kl import KLStatistics
from lce_jax.mosaic import _operands
from lce_jax.mosaic._host import Host, greatest, least
from lce_jax.mosaic._operands import Geometry
from lce_jax.types._types import Call
from lce_jax.xla._kl import KLPlan

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Float


MAX_SPLITS = 4  # of the contraction over the vocabulary


def dhidden_shape(call: Call, shape: Geometry) -> tuple[int, int, int]:
    """(splits, tokens, hidden): whole tiles, and several arrays where one has fewer tiles than there are cores."""
    rows, columns = shape.padded_tokens, -(-call.hidden_size // shape.tile) * shape.tile
    num_tiles = rows // shape.row_block * (columns // shape.tile)
    most = MAX_SPLITS if num_tiles < call.device.core_count else 1  # each array is read and written once a chunk

    def waves(splits: int) -> float:
        return -(-num_tiles * splits // call.device.core_count) / splits

    return min(range(1, most + 1), key=waves), rows, columns


def empty_dhidden(host: Host, call: Call, shape: Geometry, rounds: bool) -> Float[Array, "splits Tp Hp"]:
    """The memory for the kernels' output, in the weight's dtype if they round.

    Splits are added up after the kernels, so they stay fp32.
    """
    splits = dhidden_shape(call, shape)
    return host.empty(splits, call.dtype if rounds and splits[0] == 1 else jnp.float32)


def total_dhidden(sums: Float[Array, "splits Tp Hp"] | None, call: Call) -> Float[Array, "T H"] | None:
    """The sum of the splits, without padding."""
    if sums is None:
        return None
    dhidden = sums[0] if sums.shape[0] == 1 else jnp.sum(sums, axis=0)
    return dhidden[: call.num_tokens, : call.hidden_size]


class Cache(NamedTuple):
    """What the backward needs of the first vocabulary tiles to spare their recomputation."""

    exponentials: Float[Array, "T columns"]  # e^((x - max) k), in the weight's dtype; whole tiles
    max: Float[Array, "tiles Tp"]  # each tile's largest x

    @property
    def num_tiles(self) -> int:
        """How many are kept."""
        return self.max.shape[0]


class KLCache(NamedTuple):
    """The `mathematics._kl.CachedRatios` of the first vocabulary tiles, whose products the backward does not repeat."""

    e: Float[Array, "Tp columns"]  # whole tiles
    ratio: Float[Array, "Tp columns"]  # in base 2
    references: Float[Array, "tiles 3 Tp"]  # of each tile

    @property
    def num_tiles(self) -> int:
        """How many are kept."""
        return self.references.shape[0]


def empty_cache(host: Host, call: Call, shape: Geometry, num_tiles: int) -> Cache:
    """Memory for the forward to fill."""
    return Cache(
        host.empty((shape.tokens, num_tiles * shape.tile), call.dtype),
        host.empty((num_tiles, shape.padded_tokens), jnp.float32),
    )


def empty_kl_cache(host: Host, plan: KLPlan, shape: Geometry, num_tiles: int) -> KLCache:
    """The same of two heads."""
    columns = shape.padded_tokens, num_tiles * shape.tile
    e, ratio = (host.empty(columns, dtype) for dtype in plan.cached_dtypes)
    return KLCache(e, ratio, host.empty((num_tiles, _kl.REFERENCES, shape.padded_tokens), jnp.float32))


def num_cached_tiles(call: Call, shape: Geometry) -> int:
    """The vocabulary tiles whose exponentials fit ``cache_bytes``; none if the backward visits live tiles alone."""
    if call.gradient_threshold:
        return 0
    return min(shape.num_tiles, call.cache_budget // cached_tile_bytes(call, shape))


def cached_tile_bytes(call: Call, shape: Geometry) -> int:
    """The bytes of one tile's exponentials and of its maximum per token."""
    return shape.tokens * shape.tile * call.dtype.itemsize + shape.padded_tokens * 4


def num_cached_kl_tiles(plan: KLPlan, shape: Geometry) -> int:
    """`num_cached_tiles` of two heads."""
    return min(shape.tiles_of(plan.columns), plan.calls.student.cache_budget // cached_kl_tile_bytes(plan, shape))


def cached_kl_tile_bytes(plan: KLPlan, shape: Geometry) -> int:
    """`cached_tile_bytes` of two heads."""
    return shape.padded_tokens * (plan.cached_item_bytes * shape.tile + 4 * _kl.REFERENCES)


def can_overwrite_cache(shape: Geometry) -> bool:
    """Whether dlogits can take the place of the exponentials, all cached tiles as one chunk.

    Where V is no multiple of the atom, a chunk's part of the weight is copied, so chunks must stay small.
    """
    return shape.whole_atoms


type Piece = tuple[int, int, bool]  # tiles [start, stop), and which of two kinds of launch they take

KL_FIELDS = len(KLStatistics._fields)
KL_MERGED = KL_FIELDS + 3  # numbers of each token and tile: XLA stores three more as it merges them
GROUP = 16  # vocabulary tiles whose statistics are joined first, one thread per token and group; then the groups are


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """The memory that the passes may take, and what a chunk costs on this generation of GPUs."""

    dhidden_waves: float  # waves of tiles that last as long as reading and writing one token's dhidden in fp32
    temporary_bytes: int = 345_000_000  # of the backward: dhidden in fp32 and one chunk of dlogits
    chunk_columns: int = 8192  # at least so many in a chunk, beyond those bytes: each chunk reads and writes dhidden
    chunk_bytes: int = 11 << 28  # that may take for dlogits: fewer columns from 180,000 tokens on
    statistics_bytes: int = 160 << 20  # of the forward's partial statistics; more take several launches


def chunk_tiles(call: Call, shape: Geometry, budget: Budget, num_tiles: int) -> int:
    """Vocabulary tiles per chunk of the backward, of ``num_tiles``: within the budget, the fastest number.

    The cost is counted in waves of tiles over the multiprocessors; each chunk also reads and writes dhidden.
    """
    tile_bytes = shape.tokens * shape.tile * call.dtype.itemsize
    for_dlogits = budget.temporary_bytes - math.prod(dhidden_shape(call, shape)) * 4
    most = min(num_tiles, max(for_dlogits // tile_bytes, _least_tiles(shape, budget, tile_bytes)))

    def cost(chunk: int) -> float:
        whole, rest = divmod(num_tiles, chunk)
        waves = [-(-shape.row_blocks * size // call.device.core_count) for size in (chunk, rest)]
        return whole * waves[0] + waves[1] + -(-num_tiles // chunk) * (1 + shape.tokens * budget.dhidden_waves)

    return min(range(most, most // 2, -1), key=cost)


def launch_groups(call: Call, shape: Geometry, budget: Budget) -> int:
    """Groups of vocabulary tiles per launch of the forward: partial statistics within the budget, even launches."""
    tile_bytes = 4 * math.prod(_operands.statistics_shape(call, shape, 1))
    groups = num_groups(shape)
    most = max(budget.statistics_bytes // tile_bytes - groups, 1)  # the groups' statistics lie beside them
    if shape.num_tiles <= most:
        return groups
    return -(-groups // -(-groups // max(most // GROUP, 1)))


def launch_tiles(call: Call, shape: Geometry, budget: Budget) -> int:
    """Vocabulary tiles that a launch of the forward has at most."""
    return min(launch_groups(call, shape, budget) * GROUP, shape.num_tiles)


def launch_kl_tiles(shape: Geometry, budget: Budget, columns: int) -> int:
    """The same of two heads: partial statistics within the budget, even launches."""
    num_tiles = shape.tiles_of(columns)
    most = max(budget.statistics_bytes // (4 * KL_MERGED * shape.padded_tokens), 1)
    return -(-num_tiles // -(-num_tiles // most))


def launches(first: Any, last: Any, pieces: Iterable[Piece]) -> Iterator[tuple[Any, Any, Piece]]:
    """The launches for the tiles from ``first`` to ``last``: the first tile of each, how many, and its piece.

    Those that are known to be empty are left out.
    """
    for piece in pieces:
        begin = greatest(first, piece[0])
        count = greatest(least(last, piece[1]) - begin, 0)
        if not isinstance(count, int) or count:
            yield begin, count, piece


def part_groups(shape: Geometry) -> int:
    """The groups of tiles of a part of the vocabulary."""
    return -(-shape.part_tiles // GROUP)


def num_groups(shape: Geometry) -> int:
    """The groups of tiles of a shard."""
    parts, rest = divmod(shape.num_tiles, shape.part_tiles)
    return parts * part_groups(shape) + -(-rest // GROUP)


def first_tile(shape: Geometry, group: Any) -> Any:
    """The first tile of a group. A group ends where its part does."""
    missing = part_groups(shape) * GROUP - shape.part_tiles  # of a part's last group
    return group * GROUP - (group // part_groups(shape) * missing if shape.has_parts else 0)


def live_slots(call: Call, shape: Geometry, budget: Budget, group: int) -> int:
    """Tiles of dlogits that a batch of live tiles may take: within the budget, and whole waves where it has several."""
    of_tile = -(-shape.row_blocks // group) * group
    slot_bytes = shape.row_block * shape.tile * call.dtype.itemsize
    for_dlogits = budget.temporary_bytes - math.prod(dhidden_shape(call, shape)) * 4
    least = max(_least_tiles(shape, budget, of_tile * slot_bytes), 2) * of_tile
    most = max(for_dlogits // slot_bytes, least)
    cores = call.device.core_count
    return min(of_tile * shape.num_tiles, max(most // cores * cores, least))


def _least_tiles(shape: Geometry, budget: Budget, tile_bytes: int) -> int:
    """Vocabulary tiles whose dlogits may exist at a time, however many tokens there are."""
    return max(min(budget.chunk_columns // shape.tile, budget.chunk_bytes // tile_bytes), 1)
