"""`lce_jax.linear_kl` as the runner takes it, and one device's part of it: its shard, its collectives, its gradients.

The student's head has gradients, the teacher's has none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from lce_jax import _call, _runner, _shard, mosaic
from lce_jax._call import Rows, Scales
from lce_jax._kl_call import KLSpec
from lce_jax._runner import Capability, Kind, Program, spread
from lce_jax._types import Primals
from lce_jax.mathematics import _kl, _kl_mixture, _logprobs
from lce_jax.mathematics._kl import KLStatistics, Pair
from lce_jax.mathematics._kl_mixture import Mixture, MixtureSums
from lce_jax.mathematics._statistics import MASKED
from lce_jax.mesh import _collectives
from lce_jax.xla import _kl as _kl_tiles
from lce_jax.xla._kl import KLPlan
from lce_jax.xla._walk import Head, Shard, Tokens

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Bool, Float, Int


type Found = tuple[KLStatistics, MixtureSums | None]  # by token
type Kept = tuple[Found, Any]  # from forward to backward: also the implementation's cache
type Rest = tuple[Primals, Pair[Rows]]  # the teacher, and the rows of both


def forward(spec: KLSpec, student: Primals, rest: Rest, differentiated: bool) -> tuple[Array, Kept]:
    """The divergence of each token, and what a backward needs. Where XLA splits the operands, no tile is kept."""
    asked = differentiated and spec.case.options.cache_bytes > 0
    keeps = asked and not _runner.is_left_to_xla(spec, (student, rest))
    unused = ("cache_bytes keeps nothing",) if asked and not keeps else ()

    def run(spec: KLSpec, student: Primals, rest: Rest) -> tuple[Array, Kept]:
        teacher, rows = rest
        return device_forward(spec, Pair(student, teacher), rows, keeps)

    own, others = _heads(spec)
    results = Kind.RESULTS, (Kind.TOKENS, Kind.DEVICE)
    program = Program(run, (own, (others, Kind.TOKENS)), results, joins=not keeps, unused=unused)
    return spread(spec, program, student, rest)


def backward(spec: KLSpec, student: Primals, rest: Rest, kept: Kept, cotangent: Array) -> Primals:
    """The student's gradients."""

    def run(spec: KLSpec, student: Primals, rest: Rest, kept: Kept, cotangent: Array) -> Primals:
        teacher, rows = rest
        return device_backward(spec, Pair(student, teacher), rows, kept, cotangent)

    own, others = _heads(spec)
    operands = own, (others, Kind.TOKENS), (Kind.TOKENS, Kind.DEVICE), Kind.RESULTS
    return spread(spec, Program(run, operands, own), student, rest, kept, cotangent)


def _of_no_tokens(spec: KLSpec, rest: Rest) -> Array:
    return jnp.zeros(rest[1].student.labels.shape, spec.dtype)


KL = Capability(forward, backward, _of_no_tokens)


def _heads(spec: KLSpec) -> tuple[Any, Any]:
    own, others = (_runner.head(model.case.options.vocab_dim) for model in spec.models)
    return own, others


def device_forward(
    spec: KLSpec, primals: Pair[Primals], rows: Pair[Rows], keep_cache: bool = False
) -> tuple[Array, Kept]:
    """One device's result, the whole vocabulary's statistics and sums of each row, and the device's cache."""
    shape, axis_name = rows.student.labels.shape, spec.models.student.axis_name
    part, agree = Part.of(spec, primals, _call.flattened(rows, len(shape))), None
    stats, cache = part.statistics(keep_cache)
    if axis_name is not None:
        with jax.named_scope("lce_merge"):
            parts, every = _collectives.stacked((jnp.stack(stats), _given_to(spec, primals, part.rows)), axis_name)
            stats = part.merge(parts)
            agree = _shard.agree(spec.models.student, every, part.rows.student, primals.student.weight)
    stats = stats if agree is None else KLStatistics(*_collectives.nan_where_different(agree, (*stats,)))
    sums = None
    if part.is_of_mixture:
        sums = part.mixture_sums(stats)
        if axis_name is not None:
            with jax.named_scope("lce_merge"):
                sums = MixtureSums(*jnp.sum(_collectives.from_all_shards(jnp.stack(sums), axis_name), axis=0))
    out = part.finish(stats, sums)
    out = out if agree is None else _collectives.nan_where_different(agree, out)
    out, found = jax.tree.map(lambda x: x.reshape(shape), (out, (stats, sums)))
    return out, (found, cache)


def _given_to(spec: KLSpec, primals: Pair[Primals], rows: Pair[Rows]) -> _collectives.Given | None:
    """What the shard says of both heads, flat; None where it need not."""
    start = _shard.first_column(spec.models.student, primals.student.weight)
    flat = map(_shard.flat_operands, spec.models, primals)
    one, other = (_shard.given_to(*each, start) for each in zip(spec.models, flat, rows, strict=True))
    if one is None or other is None:
        return None
    tags = _collectives.tags([one.tags, other.tags])
    return _collectives.Given(tags, *map(jnp.concatenate, zip(one[1:], other[1:], strict=True)))


def device_backward(spec: KLSpec, primals: Pair[Primals], rows: Pair[Rows], kept: Kept, cotangent: Array) -> Primals:
    """The student's gradients, in the shapes, dtypes and types of its operands."""
    own = spec.models.student
    found, cache = kept
    rows, found, cotangent = _call.flattened((rows, found, cotangent), rows.student.labels.ndim)
    if own.axis_name is not None and own.token_axes is None:
        cotangent = _collectives.total_cotangent(cotangent, own.axis_name)
    gradients = Part.of(spec, primals, rows).gradients(*found, cache, cotangent)
    return _shard.reduced(own, gradients, primals.student)


class Part(NamedTuple):
    """One device's part of a call: its columns, and all tokens, flat. Nothing in here is a collective."""

    spec: KLSpec
    rows: Pair[Rows]
    scales: Pair[Scales]
    plan: KLPlan
    shard: Shard  # the rows that count first
    order: _call.Compaction | None  # of these; None: all count

    @classmethod
    def of(cls, spec: KLSpec, primals: Pair[Primals], rows: Pair[Rows], first_column: Any = None) -> Part:
        """From the arrays of this device; ``first_column`` is its global id, None that of its place in the mesh."""
        scales = Pair(*(_call.scales(own, spec.dtype, signs_hidden=False) for own in rows))
        if first_column is None:
            first_column = _shard.first_column(spec.models.student, primals.student.weight)
        return cls(spec, rows, scales, *_shard_of(spec, primals, rows, scales, first_column))

    @property
    def is_of_mixture(self) -> bool:
        """Whether the divergence needs `mixture_sums`."""
        return self.rows.student.weights is not None

    @jax.named_scope("lce_kl_statistics")
    def statistics(self, keep_cache: bool) -> tuple[KLStatistics, Any]:
        """Of these columns, [T] each, and the cache."""
        statistics = mosaic.kl_statistics if self._has_kernels else _kl_tiles.statistics
        stats, cache = statistics(self.plan, self.shard, keep_cache)
        return self._by_token(stats), cache

    def merge(self, parts: Float[Array, "N 6 T"]) -> KLStatistics:
        """The whole vocabulary's statistics, from those of all its parts in their order."""
        return _kl.merge(KLStatistics(*(parts[:, i] for i in range(parts.shape[1]))), self._row_scales)

    @jax.named_scope("lce_kl_mixture")
    def mixture_sums(self, stats: KLStatistics) -> MixtureSums:
        """Eq. 9 over these columns, from the whole vocabulary's statistics."""
        mixture = self._of_counted(self._mixture(stats, self.rows.student.where))
        mixture_sums = mosaic.kl_mixture_sums if self._has_kernels else _kl_tiles.mixture_sums
        return self._by_token(mixture_sums(self.plan, self.shard, mixture))

    def finish(self, stats: KLStatistics, sums: MixtureSums | None) -> Float[Array, "T"]:
        """The divergence, from statistics and sums over the whole vocabulary."""
        where, wrong = self.rows.student.where, _wrong_temperature(self.rows)
        if sums is None:
            out = _kl.finish(stats, self._row_scales[1], where)
        else:
            out = _kl_mixture.divergence(sums, stats, self._mixture(stats, where), where)
        return out if wrong is None else jnp.where(wrong, jnp.nan, out)

    @jax.named_scope("lce_kl_gradients")
    def gradients(
        self, stats: KLStatistics, sums: MixtureSums | None, cache: Any, cotangent: Float[Array, "T"]
    ) -> Primals:
        """The student's part of dhidden and dbias, in the statistics' dtype, and its dweight in the weight's."""
        live, wrong = self.rows.student.where, _wrong_temperature(self.rows)
        counts = live if wrong is None else ~wrong if live is None else live & ~wrong
        factor = _logprobs.row_factor(self.spec.case.options, self.scales.student.derivative)
        coefficients: Any
        if sums is None:
            coefficients = _kl.coefficients(stats, cotangent, factor, counts)
        else:
            mixture = self._mixture(stats, counts)
            coefficients = _kl_mixture.coefficients(sums, stats, mixture, cotangent, factor, counts)

        of_head = mosaic.kl_gradients if self._has_kernels else _kl_tiles.gradients
        found = of_head(self.plan, self.shard, self._of_counted(coefficients), cache)
        dhidden = self._by_token(found.hidden)
        return found._replace(hidden=dhidden if live is None else jnp.where(live[:, None], dhidden, 0.0))

    @property
    def _row_scales(self) -> tuple[Any, Any]:
        """The k of eq. 0, that of p first."""
        pairs = zip(self.spec.models, self.scales, strict=True)
        each = (_logprobs.row_scale(model.case.options, own.logits) for model, own in pairs)
        return Pair(*each).ordered(self.plan.student_first)

    def _mixture(self, stats: KLStatistics, live: Bool[Array, "T"] | None) -> Mixture:
        weights = self.rows.student.weights
        assert weights is not None
        return _kl_mixture.mixture(stats, self._row_scales[1], weights, live)

    def _of_counted[T](self, by_token: T) -> T:
        """Those of the rows that count, first."""
        order = self.order
        return by_token if order is None else jax.tree.map(lambda x: x[order.source], by_token)

    def _by_token(self, found: Any) -> Any:
        """The same, in the order of the tokens."""
        return found if self.order is None else _call.expand(self.order, found)

    @property
    def _has_kernels(self) -> bool:
        """Whether kernels serve the call, both passes alike, so that the backward's logits have the forward's bits."""
        return self.spec.implementation == mosaic.NAME


def _wrong_temperature(rows: Pair[Rows]) -> Bool[Array, "T"] | None:
    """Rows of which one temperature is wrong: they return NaN and have no gradient."""
    student, teacher = map(_call.wrong_rows, rows)
    return teacher if student is None else student if teacher is None else student | teacher


def _shard_of(
    spec: KLSpec, primals: Pair[Primals], rows: Pair[Rows], scales: Pair[Scales], first_column: Any
) -> tuple[KLPlan, Shard, _call.Compaction | None]:
    """The arrays of this device, with the rows that count first."""
    operands = Pair(*map(_shard.flat_operands, spec.models, primals))
    tokens = Pair(*(Tokens(x.hidden, own.logits, own.raw) for x, own in zip(operands, scales, strict=True)))
    order = None if rows.student.where is None else _call.compaction(rows.student.where)
    num_rows = None if order is None else order.num_rows
    tokens = tokens if order is None else _call.compact(order, tokens)
    heads = Pair(
        *(
            # What both models rule out with -inf is a difference of two infinities otherwise.
            Head(x.weight, None if x.bias is None else jnp.maximum(x.bias.astype(model.case.stat_dtype), MASKED))
            for x, model in zip(operands, spec.models, strict=True)
        )
    )
    columns, num_columns = _true_columns(spec, primals, first_column)
    return spec.plan(columns), Shard(tokens, heads, None, num_rows, num_columns), order


def _true_columns(spec: KLSpec, primals: Pair[Primals], first_column: Any) -> tuple[int, Int[Array, ""] | None]:
    """The columns to walk over, and how many of these are no padding if that is known only to the shard."""
    sizes = (x.weight.shape[model.case.options.vocab_dim] for x, model in zip(primals, spec.models, strict=True))
    columns, student = min(sizes), spec.models.student
    left = student.vocab_size - first_column
    if isinstance(left, int):
        return min(left, columns), None
    return columns, jnp.clip(left, 0, columns) if any(model.padded for model in spec.models) else None
