"""Statistics of each token over some columns (eq. 1): the empty ones, unions (eq. 2), and packing into one array.

They are in the units of x (eq. 0) everywhere: over a tile, a shard, a mesh, and from the forward to the backward.
`ShardStatistics` declares the fields; `Call.statistics` says which of them a call has, and how wide they are.
Everything that holds, sends or counts statistics does so through this module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from lce_jax.types._types import Call, ShardStatistics

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Float

MASKED = -1e30  # stands for -inf in a maximum; in float32 it is finite, and so is its difference to any logit


class Sum(NamedTuple):
    """A statistic that is a sum over columns, in eq. 1 and in eq. 2."""

    term: Callable[[Any, Any], Any]  # of a column, from its u and e^u
    moved: Callable[[ShardStatistics, Any, Any], Any]  # a part's sum relative to the union's maximum, from a and d


# Every implementation computes, merges and sends what stands here, if `Call.statistics` says that the call has it.
SUMS = {
    "sumexp": Sum(lambda _, e: e, lambda part, a, _: part.sumexp * a),
    "weighted": Sum(lambda u, e: e * u, lambda part, a, d: (part.weighted + d * part.sumexp) * a),
    "squares": Sum(lambda _, e: e * e, lambda part, a, _: part.squares * a * a),
}
_SUMS = dict.fromkeys((*SUMS, "total", "support"), 0.0)
_UNIONS = dict.fromkeys(_SUMS, jnp.add) | dict.fromkeys(("max", "target", "candidates"), jnp.maximum)
_UNIONS |= {"min": jnp.minimum}  # how eq. 2 joins a field of two parts that are relative to the same maximum
_EXTREMES = {"max": MASKED, "target": -jnp.inf, "min": -MASKED, "candidates": -jnp.inf}
NO_COLUMNS: Any = ShardStatistics(**_SUMS, **_EXTREMES)  # type: ignore[arg-type]

BESIDE = ("total", "candidates")  # the fields that are no results of (1) column by column: (2) adds or picks them
WITHOUT_GRADIENT = ("min", "squares", "support")  # the fields that no gradient is computed from
PER_CANDIDATE = ("candidates",)  # the fields that are [T, K], also for K = 1; the others are [T]


class Normalizer(NamedTuple):
    """What makes probabilities of a token's statistics m and s over some columns: p = s e^((m - max) k) / sumexp."""

    max: Float[Array, "T"]  # of the whole vocabulary, as in `ShardStatistics`
    sumexp: Float[Array, "T"]


class Parts(NamedTuple):
    """A shard's statistics as it sends them to the others, in as many groups of columns as its implementation has.

    Its implementation alone knows their units, and merges those of all shards, stacked in another leading dimension.
    """

    groups: Float[Array, "*N G fields T"]  # of neighbouring columns; T may be padded
    beside: ShardStatistics  # the fields `BESIDE`, of the whole shard


def of_fields(fields: Mapping[str, Any]) -> ShardStatistics:
    """The statistics with these fields; the others are None."""
    return ShardStatistics(**{**dict.fromkeys(ShardStatistics._fields), **fields})


def empty(num_tokens: int, dtype: jnp.dtype, call: Call) -> ShardStatistics:
    """The statistics of no columns: the neutral element of `merge`."""
    fields = {}
    for name, width in call.statistics.items():
        shape = (num_tokens, width) if name in PER_CANDIDATE else (num_tokens,)
        fields[name] = jnp.full(shape, getattr(NO_COLUMNS, name), dtype)
    return of_fields(fields)


def along(per_token: Any, x: Any) -> Any:
    """``per_token`` with as many trailing dimensions of size 1 as ``x`` has more: [T] beside [T] or [T, K]."""
    return per_token.reshape(per_token.shape + (1,) * (x.ndim - per_token.ndim))


def pack(stats: ShardStatistics) -> Float[Array, "F T"]:
    """All numbers of each token in one array: a field ``[T]`` is one row of it, a field ``[T, K]`` is K rows."""
    return jnp.concatenate([x[None] if x.ndim == 1 else x.T for x in jax.tree.leaves(stats)])


def unpack(packed: Float[Array, "*n F T"], widths: Mapping[str, int]) -> ShardStatistics:
    """The inverse of `pack`, also for several shards at once; ``widths`` are `Call.statistics`."""
    fields, row = {}, 0
    for name, width in widths.items():
        rows = packed[..., row : row + width, :]
        fields[name] = jnp.swapaxes(rows, -1, -2) if name in PER_CANDIDATE else rows[..., 0, :]
        row += width
    return of_fields(fields)


def as_parts(stats: ShardStatistics) -> Parts:
    """Those of an implementation that sends one group."""
    beside = of_fields({name: getattr(stats, name) for name in BESIDE})
    return Parts(pack(stats._replace(total=None, candidates=None))[None], beside)


def merge_parts(parts: Parts, call: Call, num_tokens: int, scale: Float[Array, "T"] | float) -> ShardStatistics:
    """`merge` of all shards' `as_parts`, or of what `like` made of them."""
    widths = {name: width for name, width in call.statistics.items() if name not in BESIDE}
    stats = unpack(parts.groups[:, 0, :, :num_tokens], widths)
    return merge(stats._replace(total=parts.beside.total, candidates=parts.beside.candidates), scale)


def merge(parts: ShardStatistics, scale: Float[Array, "T"] | float) -> ShardStatistics:
    """Eq. 2 over the leading axis: fields [N, T] (or [N, T, K]) in, [T] out, summed in the order of the axis.

    ``scale`` is the k of eq. 0.
    """
    m = jnp.max(parts.max, axis=0)
    shift = distance(parts.max, m[None], scale if isinstance(scale, float | int) else scale[None])
    a = jnp.exp(shift)
    # The owner's maximum is found separately: with a third sum over the shifts, XLA's GPU fusion would keep two more
    # arrays of [N, T].
    of_owner = jnp.max(jnp.where(parts.target > -jnp.inf, parts.max, MASKED), axis=0)
    return ShardStatistics(
        max=m,
        **jax.tree.map(lambda x: jnp.sum(x, axis=0), _moved(parts, a, shift)),
        target=jnp.max(parts.target, axis=0) + distance(of_owner, m, scale),
        min=None if parts.min is None else jnp.min(parts.min, axis=0),
        total=None if parts.total is None else jnp.sum(parts.total, axis=0),
        candidates=None if parts.candidates is None else jnp.max(parts.candidates, axis=0),
        support=None if parts.support is None else jnp.sum(parts.support, axis=0),
    )


def distance(x: Array, m: Array, scale: Array | float) -> Array:
    """The u of eq. 1 and the dᵢ of eq. 2, (x - m) k: exactly 0 at the maximum, finite whatever is far below it."""
    return floored((x - m) * scale)


def floored(x: Array) -> Array:
    """``x``, but nothing below `MASKED`. NaN stays NaN: XLA's maximum of two arrays loses it on CPUs."""
    return jnp.where(x < MASKED, MASKED, x)


def union(
    parts: Sequence[ShardStatistics], scale: Float[Array, "T"] | float, exp: Callable[[Array], Array] = jnp.exp
) -> ShardStatistics:
    """Eq. 2 of a few parts, [T] each, added in their order, without an axis over them: what a kernel can compute.

    ``exp`` is `jnp.exp2` of statistics in base 2.
    """
    m = functools.reduce(jnp.maximum, (part.max for part in parts))
    return functools.reduce(_added, (_relative_to(m, part, scale, exp) for part in parts))


def _added(one: ShardStatistics, other: ShardStatistics) -> ShardStatistics:
    """Eq. 2 of two parts relative to the same maximum."""
    pairs = {name: (getattr(one, name), getattr(other, name)) for name in _UNIONS}
    return of_fields({name: None if x is None else _UNIONS[name](x, y) for name, (x, y) in pairs.items()})


class Running(NamedTuple):
    """A union that grows part by part, with the rounding errors of its sums.

    A thousand parts of 1e-6 added to one of 1 are all rounded by the same amount, so their errors would add up.
    """

    stats: ShardStatistics
    lost: tuple[Float[Array, "T"], Float[Array, "T"] | None]  # what rounding has left out of s and of q

    @classmethod
    def start(cls, empty: ShardStatistics) -> Running:
        """The union of no parts."""
        return cls(empty, _sums(empty))

    def add(self, part: ShardStatistics, scale: Float[Array, "T"] | float) -> Running:
        """Eq. 2 of the union and one more part, [T] each."""
        m = jnp.maximum(self.stats.max, part.max)
        old, new = _relative_to(m, self.stats, scale), _relative_to(m, part, scale)
        lost = _relative_to(m, self.stats._replace(sumexp=self.lost[0], weighted=self.lost[1]), scale)
        pairs = [_sums(x) for x in (old, new, lost)]
        (sumexp, weighted), left_out = compensated(*pairs)
        return Running(_added(old, new)._replace(sumexp=sumexp, weighted=weighted), left_out)

    def finish(self) -> ShardStatistics:
        """The statistics of the union."""
        sumexp, weighted = jax.tree.map(jnp.add, _sums(self.stats), self.lost)
        return self.stats._replace(sumexp=sumexp, weighted=weighted)


def _sums(stats: ShardStatistics) -> tuple[Array, Array | None]:
    return stats.sumexp, stats.weighted


def _relative_to(
    m: Array, part: ShardStatistics, scale: Float[Array, "T"] | float, exp: Callable[[Array], Array] = jnp.exp
) -> ShardStatistics:
    """The terms of eq. 2 relative to the union's maximum ``m``; 0 for a part without columns, because its s = q = 0."""
    shift = distance(part.max, m, scale)
    a = exp(shift)
    return part._replace(max=m, target=part.target + shift, **_moved(part, a, shift))


def _moved(part: ShardStatistics, a: Array, d: Array) -> dict[str, Any]:
    """The `SUMS` of a part, or of stacked ones, as eq. 2 adds them."""
    there = {name for name in SUMS if getattr(part, name) is not None}
    return {name: one.moved(part, a, d) if name in there else None for name, one in SUMS.items()}


def compensated[S](sums: S, terms: S, lost: S) -> tuple[S, S]:
    """``sums`` with ``terms`` added, and ``lost`` with what the rounding of that leaves out."""
    left_out = jax.tree.map(lambda a, b, c: c + _rounded_away(a, b), sums, terms, lost)
    return jax.tree.map(jnp.add, sums, terms), left_out


def _rounded_away(a: Array, b: Array) -> Array:
    """What the rounding of a + b leaves out (Knuth, TAOCP 2, 4.2.2)."""
    total = a + b
    of_b = total - a
    return (a - (total - of_b)) + (b - of_b)
