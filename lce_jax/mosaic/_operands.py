"""The operands and results of the kernels, and how a call is divided into tiles.

* `Geometry`: padded tokens, row blocks, vocabulary tiles, and the parts of the vocabulary if it is cut into parts.
* `Span`: the range of the vocabulary that one launch covers, as the scalars that a kernel gets.
* `Prepared`: the padded operands, with scales in base 2 and marks of padding columns and targets.
* `RowFactors`: the coefficients of eq. 4 in base 2.
* Lists of fields: the forward's output has the statistics of each tile, in base 2, as [tiles, fields, tokens].
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from lce_jax.mathematics import _logprobs, _statistics
from lce_jax.mathematics._kl import KLStatistics
from lce_jax.mathematics._statistics import MASKED
from lce_jax.types._types import RESULTS, Call, Operands, RowCoefficients, ShardStatistics

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Float, Int


class Tiling(NamedTuple):
    """The tile sizes of a generation."""

    row_block: int  # tokens of a tile of logits
    tile: int  # vocabulary columns of a tile of logits
    atom: int  # rows that a copy into shared memory moves at least; it moves whole atoms
    most_clustered: int  # the most row blocks that share an operand; per-token vectors are padded to whole such groups


@dataclasses.dataclass(frozen=True)
class Geometry:
    """The shapes of a call as the kernels see them."""

    row_block: int  # tokens of a tile of logits
    tile: int  # vocabulary columns of a tile of logits
    atom: int  # rows that a copy into shared memory moves at least
    tokens: int  # T, padded to whole atoms and to one row block
    padded_tokens: int  # the length of per-token vectors: whole groups of row blocks
    row_blocks: int
    num_tiles: int  # tiles of the vocabulary; the last one of each part may be ragged
    whole_atoms: bool  # whether V is a multiple of the atom, so that kernels can read any chunk of the weight in place
    part_columns: int  # columns of a part of the vocabulary, which begins with a new tile; V if there are no parts
    part_tiles: int

    @property
    def has_parts(self) -> bool:
        """Whether the vocabulary has several parts, of which the last may be smaller."""
        return self.part_tiles < self.num_tiles

    @property
    def overhang(self) -> int:
        """How many more columns the tiles of a part have than the part itself."""
        return self.part_tiles * self.tile - self.part_columns

    def column(self, tile: Any) -> Any:
        """Returns the first column of a tile."""
        return tile * self.tile - (tile // self.part_tiles * self.overhang if self.has_parts else 0)

    def place(self, column: Any) -> Any:
        """Returns a column's place among all tiles: the tile's number times its size, plus the place in the tile."""
        return column + (column // self.part_columns * self.overhang if self.has_parts else 0)

    def count_tiles(self, columns: int) -> int:
        """Returns the number of tiles that hold the first ``columns`` columns."""
        parts, rest = divmod(columns, self.part_columns)
        return parts * self.part_tiles + -(-rest // self.tile)


def make_geometry(call: Call, tiling: Tiling) -> Geometry:
    """Computes the shapes of ``call`` for the kernels."""
    tokens = max(-(-call.num_tokens // tiling.atom) * tiling.atom, tiling.row_block)
    row_blocks = -(-tokens // tiling.row_block)
    part = min(call.vocab_part_size or call.columns, call.columns)
    part_tiles, (parts, rest) = -(-part // tiling.tile), divmod(call.columns, part)
    return Geometry(
        row_block=tiling.row_block,
        tile=tiling.tile,
        atom=tiling.atom,
        tokens=tokens,
        padded_tokens=-(-row_blocks // tiling.most_clustered) * tiling.most_clustered * tiling.row_block,
        row_blocks=row_blocks,
        num_tiles=parts * part_tiles + -(-rest // tiling.tile),
        whole_atoms=call.columns % tiling.atom == 0,
        part_columns=part,
        part_tiles=part_tiles,
    )


class Span(NamedTuple):
    """What one launch covers. These numbers are known at run time, so one compiled kernel serves all chunks."""

    num_rows: Any  # unmasked rows
    num_columns: Any  # unpadded columns of the shard
    column: Any  # the first column: the number of its tile in the shard, times the tile's columns
    num_tiles: Any  # vocabulary tiles
    depth: Any = 0  # the number of columns that a product contracts
    offset: Any = 0  # the place of the first column in the weight, and in the dweight, that the kernel gets
    slot: Any = 0  # the place of the first tile in the array of partial statistics
    adds: Any = 0  # 1: the product is added to the sums of dhidden; 0: it overwrites them
    adds_dweight: Any = 0  # 1: the product is added to a float32 sum of dweight; 0: it overwrites that

    @classmethod
    def unpack(cls, scalars: Any) -> Span:
        """Reads the numbers from the array that a kernel gets."""
        return cls(*(scalars[i] for i in range(len(cls._fields))))


LOG2E = 1.4426950408889634  # from nats to base 2


class Prepared(NamedTuple):
    """The operands as the kernels take them."""

    hidden: Float[Array, "T H"]  # T in whole atoms, at least one row block
    weight: Float[Array, "V H"]
    targets: Int[Array, "Tp"]  # the place of the label among the shard's tiles, -1 for labels of other shards
    row_scale: Float[Array, "Tp"]  # the k of eq. 0 in base 2
    holds_target: Int[Array, "blocks tiles"]
    # The mask is 1 on padding, in the tile with the first padding column and in the tile after it. With vocabulary
    # parts, there are two such masks: of a full part, and of the part in which padding begins.
    mask: Int[Array, "2*tile"]
    num_columns: Any  # how many columns are unpadded: an array or a number; None if a `Span` has it
    num_rows: Any  # how many rows are unmasked: an array or a number; None if a `Span` has it
    floor: Float[Array, "Tp"] | None = None  # in the units of x; None: every column counts


class KLHead(NamedTuple):
    """One head's operands, as the kernels take them."""

    hidden: Float[Array, "T H"]  # T in whole atoms, at least one row block
    weight: Float[Array, "V H"]  # it holds the span's columns from the span's offset on; rows after its last count as 0
    row_scale: Float[Array, "Tp"]  # the k of eq. 0 in base 2


class KLOperands(NamedTuple):
    """The operands of both heads, and the mask of padding columns."""

    heads: tuple[KLHead, KLHead]  # the head of p is first
    mask: Int[Array, "2*tile"]  # see `Prepared`


class Marked(NamedTuple):
    """The per-token operands that `_tokens.prepare` computes for the other kernels."""

    targets: Int[Array, "Tp"]
    row_scale: Float[Array, "Tp"]
    holds_target: Int[Array, "blocks tiles"]  # it may have further columns, which are padding
    floor: Float[Array, "Tp"] | None = None  # in the units of x


def prepare(operands: Operands, call: Call, shape: Geometry) -> Prepared:
    """Pads the per-token operands, and marks both the padding columns and the tiles that hold a target."""
    hidden = pad(operands.hidden, shape.tokens)
    targets = pad(operands.targets, shape.padded_tokens, -1)
    targets = jnp.where(targets < 0, -1, shape.place(targets)) if shape.has_parts else targets
    row_scale = compute_row_scale(operands.inverse_temperature, call, shape)
    tile = jnp.where(targets < 0, -1, targets // shape.tile).reshape(-1, shape.row_block, 1)
    flags = jnp.max((tile == jnp.arange(shape.num_tiles, dtype=jnp.int32)).astype(jnp.int32), axis=1)
    columns = jnp.asarray(call.columns if operands.num_columns is None else operands.num_columns, jnp.int32)
    places = jnp.arange(2 * shape.tile, dtype=jnp.int32)
    mask = jnp.concatenate([(places >= first).astype(jnp.int32) for first in find_first_padding(columns, shape)])
    num_rows = count_rows(operands.num_rows, shape)
    floor = None if operands.floor is None else pad(operands.floor, shape.padded_tokens)
    return Prepared(hidden, operands.weight, targets, row_scale, flags, mask, columns, num_rows, floor)


def find_first_padding(columns: Any, shape: Geometry) -> list[Any]:
    """Returns the place in its tile where padding begins. With vocabulary parts, that of a full part comes first."""
    if not shape.has_parts:
        return [columns % shape.tile]
    return [shape.part_columns % shape.tile, columns % shape.part_columns % shape.tile]


def compute_row_scale(inverse_temperature: Float[Array, "T"] | None, call: Call, shape: Geometry) -> Float[Array, "Tp"]:
    """Computes the k of eq. 0 times log2 e, so that e^((x - m) k) is a power of 2."""
    k = call.logit_softcap or call.logit_scale
    row_scale = jnp.full((shape.padded_tokens,), LOG2E * k, jnp.float32)
    return row_scale if inverse_temperature is None else row_scale * pad(inverse_temperature, shape.padded_tokens)


def count_rows(num_rows: Int[Array, ""] | None, shape: Geometry) -> Int[Array, ""]:
    """Returns the number of unmasked rows."""
    return jnp.int32(shape.tokens) if num_rows is None else num_rows


def pad(x: Array, rows: int, value: Any = 0) -> Array:
    """Pads ``x`` to ``rows`` rows. Returns ``x`` itself if it already has them."""
    missing = rows - x.shape[0]
    if missing == 0:
        return x
    return jnp.pad(x, ((0, missing),) + ((0, 0),) * (x.ndim - 1), constant_values=value)


class RowFactors(NamedTuple):
    """Each token's factors of eq. 4 in base 2: dz = constant·e + slope·u·e with e = 2^u, u = (x - max)·scale.

    At the label, dz is ``target``. Kernels get the factors as one array [4, Tp], or [3, Tp] without a slope.
    """

    max: Float[Array, "T"]
    target: Float[Array, "T"]
    constant: Float[Array, "T"]
    slope: Float[Array, "T"] | None

    @classmethod
    def of(cls, factors: Any) -> RowFactors:
        """Unpacks the array that kernels get."""
        return cls(*factors, *[None] * (4 - len(factors)))

    def compute_dlogits(self, x: Any, row_scale: Any, is_label: Any, is_capped: bool) -> Any:
        """Computes the dz of each row in one of its columns, from that column's x."""
        u = jnp.clip((x - self.max) * row_scale, MASKED, 0.0)
        e = jnp.exp2(u)
        d = self.constant * e
        d = d if self.slope is None else d + self.slope * (u * e)
        return jnp.where(is_label, self.target, d * _logprobs.cap_derivative(x) if is_capped else d)


def convert_to_base_2(rows: RowCoefficients) -> RowFactors:
    """Converts the coefficients of eq. 4 to base 2."""
    slope = None if rows.slope is None else rows.slope * (1.0 / LOG2E)
    return RowFactors(rows.max, rows.target, rows.constant, slope)


def stack_row_factors(rows: RowCoefficients, length: int) -> Float[Array, "factors Tp"]:
    """Converts the coefficients to base 2, stacks them, and pads each with 0 to ``length`` tokens."""
    factors = jnp.stack(jax.tree.leaves(convert_to_base_2(rows)))
    return jnp.pad(factors, ((0, 0), (0, length - factors.shape[1])))


FLOOR = -1e10  # the maximum of a tile that is only padding: finite, and below every raw product
UNWRITTEN: Any = _statistics.NO_COLUMNS._replace(max=FLOOR, min=-FLOOR)


def list_statistics(call: Call) -> list[str]:
    """Returns the fields of `ShardStatistics` that the kernels compute, one number per token each.

    `_mean_logit` computes Σ x, and `_candidates` the logits of candidates.
    """
    return [name for name in call.statistics if name not in _statistics.SEPARATE]


def list_saved_statistics(call: Call) -> list[str]:
    """Returns the fields that gradients need, which `lce_jax.run.kernels` saves for each token."""
    return [name for name in list_statistics(call) if name not in _statistics.NOT_DIFFERENTIATED]


class SavedLayout(NamedTuple):
    """The places of the fields that `lce_jax.run.kernels` saves per token. A label is at 0, a temperature at 1."""

    floor: int
    ids: int  # the place of the first candidate's id
    statistics: int  # the place of the first of `list_saved_statistics`
    x: int  # the place of the first candidate's x
    size: int  # the number of fields


def lay_out_saved(call: Call, has_temperature: bool) -> SavedLayout:
    """Returns the places of the saved fields of a call."""
    floor = 1 + has_temperature
    statistics = floor + call.has_floor + call.num_candidates
    x = statistics + len(list_saved_statistics(call))
    return SavedLayout(floor, floor + call.has_floor, statistics, x, x + call.num_candidates)


def list_results(call: Call) -> list[str]:
    """Returns the names in `RESULTS` of the results that the call has."""
    is_present = {"entropy": call.entropy, "support": call.stats and call.has_floor}
    return [name for i, name in enumerate(RESULTS) if is_present.get(name, i < 3 or call.stats)]


def unstack_statistics(call: Call, parts: Float[Array, "*n fields Tp"]) -> ShardStatistics:
    """Returns the stacked fields as statistics in base 2, [..., T] each, without padding tokens."""
    fields = zip(list_statistics(call), jnp.moveaxis(parts[..., : call.num_tokens], -2, 0), strict=True)
    return _statistics.make_statistics(dict(fields))


def to_nats(stats: ShardStatistics) -> ShardStatistics:
    """Converts statistics from base 2 to the units of eq. 1, [T] each."""
    is_empty, lowest = stats.sumexp == 0.0, stats.min
    return stats._replace(
        max=jnp.where(is_empty, _statistics.MASKED, stats.max),
        min=None if lowest is None else jnp.where(is_empty, -_statistics.MASKED, lowest),
        weighted=None if stats.weighted is None else stats.weighted * (1.0 / LOG2E),
        target=stats.target * (1.0 / LOG2E),
    )


def kl_to_nats(stats: KLStatistics) -> KLStatistics:
    """Converts the statistics of two heads to the units of eqs. 1 and 6, [T] each."""
    max_p, max_q, at_p = (jnp.where(stats.sum_p == 0.0, MASKED, x) for x in stats.references)
    return KLStatistics(max_p, max_q, at_p, stats.sum_p, stats.sum_q, stats.cross * (1.0 / LOG2E))
