"""Each token's statistics over some columns (eq. 1), and functions that start, merge (eq. 2) and pack them.

Statistics are in the units of x (eq. 0) everywhere: over a tile, a shard or a mesh, and between forward and backward.
`ShardStatistics` declares the fields. `Call.statistics` lists the fields that a call computes, with their widths. All
code that stores, sends or counts statistics uses this module.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from lce_jax.types._types import Call, ShardStatistics

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Float

MASKED = -1e30  # stands for -inf in a maximum; this value and its difference to any logit are finite in float32


class Sum(NamedTuple):
    """A statistic that is a sum over columns (eq. 1), and how to merge it (eq. 2)."""

    term: Callable[[Any, Any], Any]  # the summand of one column, from its u and e^u
    moved: Callable[[ShardStatistics, Any, Any], Any]  # (part, a, d) -> its sum relative to the union's maximum


# Every implementation computes, merges and sends the sums that `Call.statistics` lists.
SUMS = {
    "sumexp": Sum(lambda _, e: e, lambda part, a, _: part.sumexp * a),
    "weighted": Sum(lambda u, e: e * u, lambda part, a, d: (part.weighted + d * part.sumexp) * a),
    "squares": Sum(lambda _, e: e * e, lambda part, a, _: part.squares * a * a),
}
_SUMS = dict.fromkeys((*SUMS, "total", "support"), 0.0)
_UNIONS = dict.fromkeys(_SUMS, jnp.add) | dict.fromkeys(("max", "target", "candidates"), jnp.maximum)
_UNIONS |= {"min": jnp.minimum}  # for each field, the operation that joins two parts with the same maximum (eq. 2)
_EXTREMES = {"max": MASKED, "target": -jnp.inf, "min": -MASKED, "candidates": -jnp.inf}
NO_COLUMNS: Any = ShardStatistics(**_SUMS, **_EXTREMES)  # type: ignore[arg-type]

SEPARATE = ("total", "candidates")  # the fields of `Parts.separate`: one value per shard, not per group of columns
NOT_DIFFERENTIATED = ("min", "squares", "support")  # the fields that no gradient depends on
PER_CANDIDATE = ("candidates",)  # the fields that are [T, K], even for K = 1; the others are [T]


class Normalizer(NamedTuple):
    """Turns a token's m and s over some columns into the probability of these columns: s e^((m - max) k) / sumexp."""

    max: Float[Array, "T"]  # the m of the whole vocabulary
    sumexp: Float[Array, "T"]  # the s of the whole vocabulary


class Parts(NamedTuple):
    """A shard's statistics, in the form that is sent to the other shards.

    The implementation chooses the units and the number of groups of columns. It also merges the parts of all shards,
    which are stacked along a leading dimension.
    """

    groups: Float[Array, "*N G fields T"]  # G groups of neighbouring columns; T may be padded
    separate: ShardStatistics  # the fields in `SEPARATE`, over all columns of the shard


def make_statistics(fields: Mapping[str, Any]) -> ShardStatistics:
    """Returns statistics with these fields; the other fields are None."""
    return ShardStatistics(**{**dict.fromkeys(ShardStatistics._fields), **fields})


def empty_statistics(num_tokens: int, dtype: jnp.dtype, call: Call) -> ShardStatistics:
    """Returns the statistics of zero columns, the neutral element of `merge`."""
    fields = {}
    for name, width in call.statistics.items():
        shape = (num_tokens, width) if name in PER_CANDIDATE else (num_tokens,)
        fields[name] = jnp.full(shape, getattr(NO_COLUMNS, name), dtype)
    return make_statistics(fields)


def expand_like(per_token: Any, x: Any) -> Any:
    """Adds trailing dimensions of size 1 to ``per_token``, so that it broadcasts with ``x``, [T] or [T, K]."""
    return per_token.reshape(per_token.shape + (1,) * (x.ndim - per_token.ndim))


def pack(stats: ShardStatistics) -> Float[Array, "F T"]:
    """Packs all fields into one array: a field ``[T]`` becomes one row, and a field ``[T, K]`` becomes K rows."""
    return jnp.concatenate([x[None] if x.ndim == 1 else x.T for x in jax.tree.leaves(stats)])


def unpack(packed: Float[Array, "*n F T"], widths: Mapping[str, int]) -> ShardStatistics:
    """Inverts `pack`, for one shard or several stacked shards. ``widths`` come from `Call.statistics`."""
    fields, row = {}, 0
    for name, width in widths.items():
        rows = packed[..., row : row + width, :]
        fields[name] = jnp.swapaxes(rows, -1, -2) if name in PER_CANDIDATE else rows[..., 0, :]
        row += width
    return make_statistics(fields)


def make_parts(stats: ShardStatistics) -> Parts:
    """Converts statistics to parts, for an implementation that sends a single group of columns."""
    separate = make_statistics({name: getattr(stats, name) for name in SEPARATE})
    return Parts(pack(stats._replace(total=None, candidates=None))[None], separate)


def merge_parts(parts: Parts, call: Call, num_tokens: int, scale: Float[Array, "T"] | float) -> ShardStatistics:
    """Merges the parts that `make_parts` returned on all shards, stacked along the first dimension."""
    widths = {name: width for name, width in call.statistics.items() if name not in SEPARATE}
    stats = unpack(parts.groups[:, 0, :, :num_tokens], widths)
    return merge(stats._replace(total=parts.separate.total, candidates=parts.separate.candidates), scale)


def sum_in_order(parts: Float[Array, "N ..."]) -> Float[Array, "..."]:
    """Sums over the first dimension, one part after the other.

    XLA may add the parts of ``jnp.sum`` in another order. On a GPU it measures several, so two processes can choose
    differently, and their sums then differ in the last bit.
    """
    return functools.reduce(operator.add, [parts[i] for i in range(parts.shape[0])])


def merge(parts: ShardStatistics, scale: Float[Array, "T"] | float) -> ShardStatistics:
    """Merges stacked statistics by eq. 2: fields [N, T] or [N, T, K] become [T] or [T, K], summed in the order of N.

    ``scale`` is the k of eq. 0.
    """
    m = jnp.max(parts.max, axis=0)
    shift = distance(parts.max, m[None], scale if isinstance(scale, float | int) else scale[None])
    a = jnp.exp(shift)
    # The maximum of the part that holds the target is computed separately, because with a third sum over the shifts
    # XLA's GPU fusion would store two more arrays of [N, T].
    owner_max = jnp.max(jnp.where(parts.target > -jnp.inf, parts.max, MASKED), axis=0)
    return ShardStatistics(
        max=m,
        **jax.tree.map(sum_in_order, _move_sums(parts, a, shift)),
        target=jnp.max(parts.target, axis=0) + distance(owner_max, m, scale),
        min=None if parts.min is None else jnp.min(parts.min, axis=0),
        total=None if parts.total is None else sum_in_order(parts.total),
        candidates=None if parts.candidates is None else jnp.max(parts.candidates, axis=0),
        support=None if parts.support is None else sum_in_order(parts.support),
    )


def distance(x: Array, m: Array, scale: Array | float) -> Array:
    """Returns (x - m) k, the u of eq. 1 and the dᵢ of eq. 2: exactly 0 at the maximum, and finite far below it."""
    return clip_to_finite((x - m) * scale)


def clip_to_finite(x: Array) -> Array:
    """Clips ``x`` from below at `MASKED`. NaN stays NaN, unlike in XLA's maximum of two arrays on CPUs."""
    return jnp.where(x < MASKED, MASKED, x)


def union(
    parts: Sequence[ShardStatistics], scale: Float[Array, "T"] | float, exp: Callable[[Array], Array] = jnp.exp
) -> ShardStatistics:
    """Merges a few statistics, [T] each, by eq. 2 in their order. Kernels use it, because it stacks no arrays.

    ``exp`` is `jnp.exp2` for statistics in base 2.
    """
    m = functools.reduce(jnp.maximum, (part.max for part in parts))
    return functools.reduce(_add, (_change_maximum(m, part, scale, exp) for part in parts))


def _add(one: ShardStatistics, other: ShardStatistics) -> ShardStatistics:
    """Merges two parts that are relative to the same maximum (eq. 2)."""
    pairs = {name: (getattr(one, name), getattr(other, name)) for name in _UNIONS}
    return make_statistics({name: None if x is None else _UNIONS[name](x, y) for name, (x, y) in pairs.items()})


class Running(NamedTuple):
    """A union that grows part by part. It accumulates rounding errors of its sums separately, and adds them at the end.

    Otherwise errors could add up: if a thousand parts of 1e-6 are added to one of 1, each rounding has the same error.
    """

    stats: ShardStatistics
    lost: tuple[Float[Array, "T"], Float[Array, "T"] | None]  # the accumulated rounding errors of s and of q

    @classmethod
    def start(cls, empty: ShardStatistics) -> Running:
        """Returns the union of no parts."""
        return cls(empty, _sums(empty))

    def add(self, part: ShardStatistics, scale: Float[Array, "T"] | float) -> Running:
        """Merges one more part, [T], into the union (eq. 2)."""
        m = jnp.maximum(self.stats.max, part.max)
        old, new = _change_maximum(m, self.stats, scale), _change_maximum(m, part, scale)
        lost = _change_maximum(m, self.stats._replace(sumexp=self.lost[0], weighted=self.lost[1]), scale)
        pairs = [_sums(x) for x in (old, new, lost)]
        (sumexp, weighted), errors = add_compensated(*pairs)
        return Running(_add(old, new)._replace(sumexp=sumexp, weighted=weighted), errors)

    def finish(self) -> ShardStatistics:
        """Returns the statistics of the union, with the rounding errors added."""
        sumexp, weighted = jax.tree.map(jnp.add, _sums(self.stats), self.lost)
        return self.stats._replace(sumexp=sumexp, weighted=weighted)


def _sums(stats: ShardStatistics) -> tuple[Array, Array | None]:
    return stats.sumexp, stats.weighted


def _change_maximum(
    m: Array, part: ShardStatistics, scale: Float[Array, "T"] | float, exp: Callable[[Array], Array] = jnp.exp
) -> ShardStatistics:
    """Makes a part relative to the union's maximum ``m`` (eq. 2). The sums of a part without columns stay 0."""
    shift = distance(part.max, m, scale)
    a = exp(shift)
    return part._replace(max=m, target=part.target + shift, **_move_sums(part, a, shift))


def _move_sums(part: ShardStatistics, a: Array, d: Array) -> dict[str, Any]:
    """Returns the `SUMS` of a part, or of stacked parts, relative to the union's maximum (eq. 2)."""
    present = {name for name in SUMS if getattr(part, name) is not None}
    return {name: one.moved(part, a, d) if name in present else None for name, one in SUMS.items()}


def add_compensated[S](sums: S, terms: S, lost: S) -> tuple[S, S]:
    """Adds ``terms`` to ``sums``, and the rounding errors of these additions to ``lost``. Returns both."""
    errors = jax.tree.map(lambda a, b, c: c + _rounding_error(a, b), sums, terms, lost)
    return jax.tree.map(jnp.add, sums, terms), errors


def _rounding_error(a: Array, b: Array) -> Array:
    """Returns the part of a + b that rounding removes (Knuth, TAOCP 2, 4.2.2)."""
    total = a + b
    b_in_total = total - a
    return (a - (total - b_in_total)) + (b - b_in_total)
