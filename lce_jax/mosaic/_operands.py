"""The operands as the kernels take them: padded, scaled to base 2, with padding columns and targets marked.

How a call is cut into tiles: padded tokens, row blocks, vocabulary tiles, what is left over.

The part of the vocabulary that one launch covers, as the scalars that a kernel is given.

The forward kernels' output: eq. 1 of each vocabulary tile, in base 2, as an array [tiles, fields, tokens].
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from lce_jax.mathematics import _logprobs, _statistics
from lce_jax.mathematics._statistics import MASKED
from lce_jax.types._types import RESULTS, Call, Operands, RowCoefficients, ShardStatistics

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Float, Int


class Tiling(NamedTuple):
    """The tile sizes of a generation."""

    row_block: int  # tokens of a tile of logits
    tile: int  # vocabulary columns of a tile of logits
    atom: int  # rows of an array: a copy into shared memory moves whole atoms
    most_clustered: int  # row blocks that may share an operand; per-token vectors are padded to whole groups of them


@dataclasses.dataclass(frozen=True)
class Geometry:
    """The shapes of a call as the kernels see them."""

    row_block: int  # tokens of a tile of logits
    tile: int  # vocabulary columns of a tile of logits
    atom: int  # rows that a copy into shared memory moves at least
    tokens: int  # T, padded to whole atoms and to one row block
    padded_tokens: int  # the length of per-token vectors: whole groups of row blocks
    row_blocks: int
    num_tiles: int  # of the vocabulary; the last one of a part may be ragged
    whole_atoms: bool  # V is a multiple of the atom, so kernels read and write part of the weight where it lies
    part_columns: int  # of a part of the vocabulary, whose tiles begin at its first column; V if it has one part
    part_tiles: int

    @property
    def has_parts(self) -> bool:
        """Whether the vocabulary has several parts, of which the last may be smaller."""
        return self.part_tiles < self.num_tiles

    @property
    def overhang(self) -> int:
        """The columns by which the tiles of a part reach beyond it."""
        return self.part_tiles * self.tile - self.part_columns

    def column(self, tile: Any) -> Any:
        """The first column of a tile."""
        return tile * self.tile - (tile // self.part_tiles * self.overhang if self.has_parts else 0)

    def place(self, column: Any) -> Any:
        """Where a column lies in the row of all tiles: its tile, times the tile's size, and its place in the tile."""
        return column + (column // self.part_columns * self.overhang if self.has_parts else 0)

    def tiles_of(self, columns: int) -> int:
        """The tiles that hold the first so many columns."""
        parts, rest = divmod(columns, self.part_columns)
        return parts * self.part_tiles + -(-rest // self.tile)


def geometry(call: Call, tiling: Tiling) -> Geometry:
    """The shapes of ``call``."""
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
    """What one launch covers. The numbers are known at run time, so one compiled kernel serves every chunk."""

    num_rows: Any  # live rows
    num_columns: Any  # live columns of the shard
    column: Any  # the first one: the number of its tile in the shard, times the tile's columns
    num_tiles: Any  # of the vocabulary
    depth: Any = 0  # columns that a product contracts
    offset: Any = 0  # where its first column lies in the weight and in dweight that the kernel is given
    slot: Any = 0  # of its first tile in the array of partial statistics
    adds: Any = 0  # 1: the product is added to dhidden's sums, which it otherwise overwrites
    adds_dweight: Any = 0  # 1: likewise to a sum of dweight in fp32

    @classmethod
    def unpack(cls, scalars: Any) -> Span:
        """In a kernel."""
        return cls(*(scalars[i] for i in range(len(cls._fields))))


LOG2E = 1.4426950408889634  # from nats to base 2


class Prepared(NamedTuple):
    """The operands as the kernels take them."""

    hidden: Float[Array, "T H"]  # T in whole atoms, at least one row block
    weight: Float[Array, "V H"]
    targets: Int[Array, "Tp"]  # the place of the label among the shard's tiles, -1 where the shard does not hold it
    row_scale: Float[Array, "Tp"]  # the k of eq. 0 in base 2
    holds_target: Int[Array, "blocks tiles"]
    # 1 on padding: of the tile with the first padding column, and of the tile after it. With parts first of a whole
    # part, then of the part with the first padding column.
    mask: Int[Array, "2*tile"]
    num_columns: Any  # live columns; an array or a number, None where kernels are not to know
    num_rows: Any  # live rows, likewise
    floor: Float[Array, "Tp"] | None = None  # in the units of x; None: every column counts


class KLHead(NamedTuple):
    """One head's operands, as the kernels take them."""

    hidden: Float[Array, "T H"]  # as in `Prepared`
    weight: Float[Array, "V H"]  # holds a span's part at its offset; zeros are read after its last row
    row_scale: Float[Array, "Tp"]  # the k of eq. 0 in base 2


class KLOperands(NamedTuple):
    """Both heads, that of p first, and the columns that are padding."""

    heads: tuple[KLHead, KLHead]
    mask: Int[Array, "2*tile"]  # as in `Prepared`


class Marked(NamedTuple):
    """What the other kernels are given of each token."""

    targets: Int[Array, "Tp"]
    row_scale: Float[Array, "Tp"]
    holds_target: Int[Array, "blocks tiles"]  # and columns that are padding
    floor: Float[Array, "Tp"] | None = None  # as in `Prepared`


def prepare(operands: Operands, call: Call, shape: Geometry) -> Prepared:
    """Pads the per-token operands, marks the tiles that hold a target and the columns that are padding."""
    hidden = pad(operands.hidden, shape.tokens)
    targets = pad(operands.targets, shape.padded_tokens, -1)
    targets = jnp.where(targets < 0, -1, shape.place(targets)) if shape.has_parts else targets
    row_scale = compute_row_scale(operands.inverse_temperature, call, shape)
    tile = jnp.where(targets < 0, -1, targets // shape.tile).reshape(-1, shape.row_block, 1)
    flags = jnp.max((tile == jnp.arange(shape.num_tiles, dtype=jnp.int32)).astype(jnp.int32), axis=1)
    columns = jnp.asarray(call.columns if operands.num_columns is None else operands.num_columns, jnp.int32)
    places = jnp.arange(2 * shape.tile, dtype=jnp.int32)
    mask = jnp.concatenate([(places >= first).astype(jnp.int32) for first in first_padding(columns, shape)])
    num_rows = num_live_rows(operands.num_rows, shape)
    floor = None if operands.floor is None else pad(operands.floor, shape.padded_tokens)
    return Prepared(hidden, operands.weight, targets, row_scale, flags, mask, columns, num_rows, floor)


def first_padding(columns: Any, shape: Geometry) -> list[Any]:
    """The place in its tile of the first padding column; with parts, that of a whole part before."""
    if not shape.has_parts:
        return [columns % shape.tile]
    return [shape.part_columns % shape.tile, columns % shape.part_columns % shape.tile]


def compute_row_scale(inverse_temperature: Float[Array, "T"] | None, call: Call, shape: Geometry) -> Float[Array, "Tp"]:
    """The k of eq. 0 times log2 e, so that e^((x - m) k) is a power of 2."""
    k = call.logit_softcap or call.logit_scale
    row_scale = jnp.full((shape.padded_tokens,), LOG2E * k, jnp.float32)
    return row_scale if inverse_temperature is None else row_scale * pad(inverse_temperature, shape.padded_tokens)


def num_live_rows(num_rows: Int[Array, ""] | None, shape: Geometry) -> Int[Array, ""]:
    """The rows that count."""
    return jnp.int32(shape.tokens) if num_rows is None else num_rows


def pad(x: Array, rows: int, value: Any = 0) -> Array:
    """``x`` padded to ``rows`` rows; ``x`` itself if it has them."""
    missing = rows - x.shape[0]
    if missing == 0:
        return x
    return jnp.pad(x, ((0, missing),) + ((0, 0),) * (x.ndim - 1), constant_values=value)


class RowFactors(NamedTuple):
    """Eq. 4 in base 2, per row: dz = constant·e + slope·u·e with e = 2^u, u = (x - max)·scale; target at the label.

    Kernels are given them as one array, [4, Tp], or [3, Tp] without a slope.
    """

    max: Float[Array, "T"]
    target: Float[Array, "T"]
    constant: Float[Array, "T"]
    slope: Float[Array, "T"] | None

    @classmethod
    def of(cls, factors: Any) -> RowFactors:
        """From what kernels are given, field by field."""
        return cls(*factors, *[None] * (4 - len(factors)))

    def at(self, x: Any, row_scale: Any, is_label: Any, is_capped: bool) -> Any:
        """The dz of each row at one of its columns, given its x."""
        u = jnp.clip((x - self.max) * row_scale, MASKED, 0.0)
        e = jnp.exp2(u)
        d = self.constant * e
        d = d if self.slope is None else d + self.slope * (u * e)
        return jnp.where(is_label, self.target, d * _logprobs.cap_derivative(x) if is_capped else d)


def in_base_2(rows: RowCoefficients) -> RowFactors:
    """The coefficients of the kernels."""
    slope = None if rows.slope is None else rows.slope * (1.0 / LOG2E)
    return RowFactors(rows.max, rows.target, rows.constant, slope)


def row_factors(rows: RowCoefficients, length: int) -> Float[Array, "factors Tp"]:
    """The coefficients in base 2, zero from the last token to ``length``."""
    factors = jnp.stack(jax.tree.leaves(in_base_2(rows)))
    return jnp.pad(factors, ((0, 0), (0, length - factors.shape[1])))


FLOOR = -1e10  # a tile's maximum where all its columns are padding: below every raw product, and finite
UNWRITTEN: Any = _statistics.NO_COLUMNS._replace(max=FLOOR, min=-FLOOR)


def statistic_names(call: Call) -> list[str]:
    """The fields of `ShardStatistics` that the kernels compute, one number per token each.

    Σ z (`_mean`) and the logits of candidates (`_candidates`) are computed beside them.
    """
    return [name for name in call.statistics if name not in _statistics.SEPARATE]


def kept_statistics(call: Call) -> list[str]:
    """Those of them that gradients have, which `lce_jax.run.kernels` saves of each token."""
    return [name for name in statistic_names(call) if name not in _statistics.NOT_DIFFERENTIATED]


class SavedLayout(NamedTuple):
    """Where `lce_jax.run.kernels` keeps what of each token: 0 is the label, 1 the temperature, if there is one."""

    floor: int
    ids: int  # that of the first candidate
    statistics: int  # the first of `kept_statistics`
    x: int  # that of the first candidate
    size: int  # how many there are


def lay_out_saved(call: Call, has_temperature: bool) -> SavedLayout:
    """Those of a call."""
    floor = 1 + has_temperature
    statistics = floor + call.has_floor + call.num_candidates
    x = statistics + len(kept_statistics(call))
    return SavedLayout(floor, floor + call.has_floor, statistics, x, x + call.num_candidates)


def result_statistics(call: Call) -> list[str]:
    """Those of `RESULTS` that the call has."""
    there = {"entropy": call.entropy, "support": call.stats and call.has_floor}
    return [name for i, name in enumerate(RESULTS) if there.get(name, i < 3 or call.stats)]


def statistics_shape(call: Call, shape: Geometry, num_tiles: int, more_fields: int = 0) -> tuple[int, int, int]:
    """(tiles, fields, tokens)."""
    return num_tiles, len(statistic_names(call)) + more_fields, shape.padded_tokens


def unstacked_statistics(call: Call, parts: Float[Array, "*n fields Tp"]) -> ShardStatistics:
    """The fields of the call's own tokens, in base 2, [..., T] each."""
    fields = zip(statistic_names(call), jnp.moveaxis(parts[..., : call.num_tokens], -2, 0), strict=True)
    return _statistics.make_statistics(dict(fields))


def to_nats(stats: ShardStatistics) -> ShardStatistics:
    """Statistics as eq. 1 has them, [T] each."""
    none, lowest = stats.sumexp == 0.0, stats.min
    return stats._replace(
        max=jnp.where(none, _statistics.MASKED, stats.max),
        min=None if lowest is None else jnp.where(none, -_statistics.MASKED, lowest),
        weighted=None if stats.weighted is None else stats.weighted * (1.0 / LOG2E),
        target=stats.target * (1.0 / LOG2E),
    )
