"""`lce_jax.linear_kl` as the runner takes it, and one device's part of it: its shard, its collectives, its gradients.

The student's head has gradients, the teacher's has none.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax import mosaic
from lce_jax.call import _checks, _describe, _dispatch, _options
from lce_jax.call._describe import Bound, Rows, Scales
from lce_jax.call._options import Arguments
from lce_jax.mathematics import _kl, _logprobs
from lce_jax.mathematics._kl import Direction, KLStatistics, Mixture, MixtureSums, Pair
from lce_jax.mathematics._statistics import MASKED
from lce_jax.mesh import _collectives
from lce_jax.run import _runner, _shard
from lce_jax.run._runner import ArraySharding, Capability, Program, spread
from lce_jax.types import scalars
from lce_jax.types._types import Call, Primals
from lce_jax.xla import _kl as _kl_tiles
from lce_jax.xla._kl import KLPlan
from lce_jax.xla._walk import Head, HeadTokens, Shard

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Bool, Float, Int


NEUTRAL: dict[str, float | None] = {"logit_scale": 1.0, "logit_softcap": None}  # what changes no logit


@contextlib.contextmanager
def _of_the_teacher() -> Iterator[None]:
    """Errors about the teacher's arguments say so."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(scalars.reword_for_teacher(error)) from None


class KLArguments(NamedTuple):
    """What `linear_kl` is given."""

    heads: Pair[Arguments]
    direction: Direction
    beta: Any  # of a JSD
    implementation: tuple[str, ...] | None  # asked for by name

    @classmethod
    def of(
        cls, arrays: Pair[tuple[Any, Any]], where: Any, direction: Direction, given: Mapping[str, Any]
    ) -> KLArguments:
        """From what the public functions are given."""
        scalars.check_choice("direction", direction, scalars.DIRECTIONS)
        beta = _options.check_beta(given.get("beta"), "direction", direction, scalars.DIRECTIONS[:2])
        student, teacher = _options_of_each(given)
        own = _options.parse_arguments(student, *arrays.student, None, where, function="linear_kl")
        for name, neutral in NEUTRAL.items():
            if isinstance(teacher[name], str) and teacher[name] == "unset":
                if isinstance(student[name], jax.Array) or student[name] != neutral:  # no device is asked for a value
                    raise scalars.student_only_error(name, student[name], neutral)
                teacher[name] = neutral
        with _of_the_teacher():
            teachers = _options.parse_arguments(teacher, *arrays.teacher, None, where, function="linear_kl")
        return cls(Pair(own, teachers), direction, beta, _options.check_option("implementation", given))

    def describe(self) -> Pair[Arguments]:
        """Each model's call with its shapes."""
        student, teacher = _describe.describe_call(self.heads.student), self.heads.teacher
        with _of_the_teacher():
            _checks.check_array("hidden", teacher.hidden)
            if tuple(teacher.hidden.shape[:-1]) != tuple(student.hidden.shape[:-1]):
                raise ValueError(
                    f"hidden {tuple(teacher.hidden.shape)} must have the leading shape of the student's "
                    f"{tuple(student.hidden.shape)}"
                )
            return Pair(student, _describe.describe_call(teacher))

    def of_both(self, student: Call, teacher: Call) -> Call:
        """One call of both, and the implementation that serves it."""
        call = dataclasses.replace(student, teacher=teacher, direction=self.direction, requested=self.implementation)
        return dataclasses.replace(call, implementation=_dispatch.choose(call)[0].NAME)


def check_columns(heads: Pair[Arguments], is_split: bool) -> None:
    """Refuses weights of which one has more columns, unless ``vocab_size`` says which of them count.

    A mesh axis splits both alike, so there they must have as many.
    """
    student, teacher = (head.call.columns for head in heads)
    if student != teacher and (is_split or heads.student.call.caller_vocab_size is None):
        least, most = sorted((student, teacher))
        raise ValueError(
            f"weight has {student} columns of the vocabulary, the teacher's {teacher}: give the tokenizer's size, "
            f"at most {least}, as vocab_size; where a mesh axis splits the vocabulary, pad the smaller weight to "
            f"{most} columns too"
        )


def bind(given: KLArguments) -> Bound:
    """The call, over the mesh of its placement, over the one that the operands name, or of this device."""
    heads = given.describe()
    axis_name = heads.student.call.axis_name
    check_columns(heads, axis_name is not None)
    student = _describe.bind_call(heads.student, heads.teacher[1:3])
    if heads.student.placement is not None:
        check_columns(heads, student.call.mesh.vocab_axes is not None)
    with _of_the_teacher():
        teacher = _describe.bind_call(heads.teacher, heads.student[1:3])
    call = given.of_both(student.call, teacher.call)
    rows, agree = student.rows, _collectives.join_agreement(student.agree, teacher.agree)
    if given.beta is not None:
        weights = _describe.make_mixture_weights(given.beta, rows.labels.shape, call.result_dtype, rows.labels)
        if axis_name is not None:
            weights, also = _collectives.equalize_shards(weights, rows.labels.ndim, axis_name)
            agree = _collectives.join_agreement(agree, _collectives.ignore_masked_rows(also, rows.where))
        rows = rows._replace(weights=weights)
        rows = rows if axis_name is None else _describe.add_tags(rows)
    primals = Pair(student.primals, jax.tree.map(lax.stop_gradient, teacher.primals))
    return Bound(call, primals, Pair(rows, teacher.rows), agree)


def _options_of_each(given: Mapping[str, Any]) -> tuple[Any, Any]:
    """The options of the student's head and of the teacher's, where "same" stands for the student's.

    What was not given of the teacher is "same", but a scale or cap is "unset": it belongs to its model.
    """
    shared: Any = {"entropy": False, "implementation": "xla"}
    shared |= {name: given[name] for name in ("vocab_size", "precision", "axis_name") if name in given}
    names, options = ("temperature", "logit_softcap", "logit_scale", "weight_layout"), _options.OPTIONS
    own = {name: given.get(name, options[name].default) for name in names}
    teachers = {name: given.get(f"teacher_{name}", options[f"teacher_{name}"].default) for name in names}
    teachers = {name: own[name] if isinstance(x, str) and x == "same" else x for name, x in teachers.items()}
    student, teacher = ({**shared, **x} for x in (own, teachers))
    student["cache_bytes"] = given.get("cache_bytes")
    student["bias"], teacher["bias"] = given.get("bias"), given.get("teacher_bias")
    return student, teacher


type Found = tuple[KLStatistics, MixtureSums | None]  # by token
type Kept = tuple[Found, Any]  # from forward to backward: also the implementation's cache
type Rest = tuple[Primals, Pair[Rows]]  # the teacher, and the rows of both


def forward(call: Call, student: Primals, rest: Rest, differentiated: bool) -> tuple[Array, Kept]:
    """The divergence of each token, and what a backward needs. Where XLA splits the operands, no tile is kept."""
    asked, left = differentiated and call.cache_budget > 0, _runner.is_left_to_xla(call, (student, rest))
    keeps = asked and not left
    unused = ("cache_bytes keeps nothing",) if asked and left and call.cache_bytes else ()
    call = call if keeps else call.replace(cache_bytes=0)

    def run(call: Call, student: Primals, rest: Rest) -> tuple[Array, Kept]:
        teacher, rows = rest
        return device_forward(call, Pair(student, teacher), rows, keeps)

    own, others = _heads(call)
    results = ArraySharding.RESULTS, (ArraySharding.TOKENS, ArraySharding.DEVICE)
    program = Program(run, (own, (others, ArraySharding.TOKENS)), results, joins=not keeps, unused=unused)
    return spread(call, program, student, rest)


def backward(call: Call, student: Primals, rest: Rest, kept: Kept, cotangent: Array) -> Primals:
    """The student's gradients."""

    def run(call: Call, student: Primals, rest: Rest, kept: Kept, cotangent: Array) -> Primals:
        teacher, rows = rest
        return device_backward(call, Pair(student, teacher), rows, kept, cotangent)

    own, others = _heads(call)
    operands = own, (others, ArraySharding.TOKENS), (ArraySharding.TOKENS, ArraySharding.DEVICE), ArraySharding.RESULTS
    return spread(call, Program(run, operands, own), student, rest, kept, cotangent)


def _of_no_tokens(call: Call, rest: Rest) -> Array:
    return jnp.zeros(rest[1].student.labels.shape, call.result_dtype)


KL = Capability(forward, backward, _of_no_tokens)


def _heads(call: Call) -> tuple[Any, Any]:
    own, others = (_runner.head(one.vocab_dim) for one in call.heads)
    return own, others


def device_forward(
    call: Call, primals: Pair[Primals], rows: Pair[Rows], keep_cache: bool = False
) -> tuple[Array, Kept]:
    """One device's result, the whole vocabulary's statistics and sums of each row, and the device's cache."""
    shape, axis_name = rows.student.labels.shape, call.axis_name
    part, agree = KLPart.of(call, primals, _describe.flatten_tokens(rows, len(shape))), None
    stats, cache = part.statistics(keep_cache)
    if axis_name is not None:
        with jax.named_scope("lce_merge"):
            parts, every = _collectives.gather_trees((jnp.stack(stats), _given_to(call, primals, part.rows)), axis_name)
            stats = part.merge(parts)
            agree = _shard.agree(call, every, part.rows.student, primals.student.weight)
    stats = stats if agree is None else KLStatistics(*_collectives.set_nan_where_different(agree, (*stats,)))
    sums = None
    if part.is_of_mixture:
        sums = part.mixture_sums(stats)
        if axis_name is not None:
            with jax.named_scope("lce_merge"):
                sums = MixtureSums(*jnp.sum(_collectives.gather_shards(jnp.stack(sums), axis_name), axis=0))
    out = part.finish(stats, sums)
    out = out if agree is None else _collectives.set_nan_where_different(agree, out)
    out, found = jax.tree.map(lambda x: x.reshape(shape), (out, (stats, sums)))
    return out, (found, cache)


def _given_to(call: Call, primals: Pair[Primals], rows: Pair[Rows]) -> _collectives.ShardSummary | None:
    """What the shard says of both heads, flat; None where it need not."""
    start = _shard.first_column(call, primals.student.weight)
    flat = map(_shard.flat_operands, call.heads, primals)
    one, other = (_shard.given_to(*each, start) for each in zip(call.heads, flat, rows, strict=True))
    if one is None or other is None:
        return None
    tags = _collectives.compute_tags([one.tags, other.tags])
    return _collectives.ShardSummary(tags, *map(jnp.concatenate, zip(one[1:], other[1:], strict=True)))


def device_backward(call: Call, primals: Pair[Primals], rows: Pair[Rows], kept: Kept, cotangent: Array) -> Primals:
    """The student's gradients, in the shapes, dtypes and types of its operands."""
    found, cache = kept
    rows, found, cotangent = _describe.flatten_tokens((rows, found, cotangent), rows.student.labels.ndim)
    if call.axis_name is not None and call.token_axes is None:
        cotangent = _collectives.sum_cotangents(cotangent, call.axis_name)
    gradients = KLPart.of(call, primals, rows).gradients(*found, cache, cotangent)
    return _shard.reduced(call, gradients, primals.student)


class KLPart(NamedTuple):
    """One device's part of a call: its columns, and all tokens, flat. Nothing in here is a collective."""

    call: Call
    rows: Pair[Rows]
    scales: Pair[Scales]
    plan: KLPlan
    shard: Shard  # the rows that count first
    order: _describe.Compaction | None  # of these; None: all count

    @classmethod
    def of(cls, call: Call, primals: Pair[Primals], rows: Pair[Rows], first_column: Any = None) -> KLPart:
        """From the arrays of this device; ``first_column`` is its global id, None that of its place in the mesh."""
        scales = Pair(*(_describe.compute_scales(own, call.result_dtype, signs_hidden=False) for own in rows))
        if first_column is None:
            first_column = _shard.first_column(call, primals.student.weight)
        return cls(call, rows, scales, *_shard_of(call, primals, rows, scales, first_column))

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
            out = _kl.divergence(sums, stats, self._mixture(stats, where), where)
        return out if wrong is None else jnp.where(wrong, jnp.nan, out)

    @jax.named_scope("lce_kl_gradients")
    def gradients(
        self, stats: KLStatistics, sums: MixtureSums | None, cache: Any, cotangent: Float[Array, "T"]
    ) -> Primals:
        """The student's part of dhidden and dbias, in the statistics' dtype, and its dweight in the weight's."""
        live, wrong = self.rows.student.where, _wrong_temperature(self.rows)
        counts = live if wrong is None else ~wrong if live is None else live & ~wrong
        factor = _logprobs.compute_row_factor(self.call, self.scales.student.derivative)
        coefficients: Any
        if sums is None:
            coefficients = _kl.coefficients(stats, cotangent, factor, counts)
        else:
            mixture = self._mixture(stats, counts)
            coefficients = _kl.mixture_coefficients(sums, stats, mixture, cotangent, factor, counts)

        of_head = mosaic.kl_gradients if self._has_kernels else _kl_tiles.gradients
        found = of_head(self.plan, self.shard, self._of_counted(coefficients), cache)
        if found.hidden is None:
            return found
        dhidden = self._by_token(found.hidden)
        return found._replace(hidden=dhidden if live is None else jnp.where(live[:, None], dhidden, 0.0))

    @property
    def _row_scales(self) -> tuple[Any, Any]:
        """The k of eq. 0, that of p first."""
        pairs = zip(self.call.heads, self.scales, strict=True)
        each = (_logprobs.compute_row_scale(head, own.inverse_temperature) for head, own in pairs)
        return Pair(*each).ordered(self.plan.student_first)

    def _mixture(self, stats: KLStatistics, live: Bool[Array, "T"] | None) -> Mixture:
        weights = self.rows.student.weights
        assert weights is not None
        return _kl.mixture(stats, self._row_scales[1], weights, live)

    def _of_counted[T](self, by_token: T) -> T:
        """Those of the rows that count, first."""
        order = self.order
        return by_token if order is None else jax.tree.map(lambda x: x[order.source], by_token)

    def _by_token(self, found: Any) -> Any:
        """The same, in the order of the tokens."""
        return found if self.order is None else _describe.expand(self.order, found)

    @property
    def _has_kernels(self) -> bool:
        """Whether kernels serve the call, both passes alike, so that the backward's logits have the forward's bits."""
        return self.call.implementation == mosaic.NAME


def _wrong_temperature(rows: Pair[Rows]) -> Bool[Array, "T"] | None:
    """Rows of which one temperature is wrong: they return NaN and have no gradient."""
    student, teacher = map(_describe.find_invalid_rows, rows)
    return teacher if student is None else student if teacher is None else student | teacher


def _shard_of(
    call: Call, primals: Pair[Primals], rows: Pair[Rows], scales: Pair[Scales], first_column: Any
) -> tuple[KLPlan, Shard, _describe.Compaction | None]:
    """The arrays of this device, with the rows that count first."""
    operands = Pair(*map(_shard.flat_operands, call.heads, primals))
    tokens = Pair(
        *(HeadTokens(x.hidden, own.inverse_temperature, own.raw_scale) for x, own in zip(operands, scales, strict=True))
    )
    order = None if rows.student.where is None else _describe.plan_compaction(rows.student.where)
    num_rows = None if order is None else order.num_rows
    tokens = tokens if order is None else _describe.compact(order, tokens)
    heads = Pair(
        *(
            # What both models rule out with -inf is a difference of two infinities otherwise.
            Head(x.weight, None if x.bias is None else jnp.maximum(x.bias.astype(head.stat_dtype), MASKED))
            for x, head in zip(operands, call.heads, strict=True)
        )
    )
    columns, num_columns = _true_columns(call, primals, first_column)
    return KLPlan(Pair(*call.heads), call.direction, columns), Shard(tokens, heads, None, num_rows, num_columns), order


def _true_columns(call: Call, primals: Pair[Primals], first_column: Any) -> tuple[int, Int[Array, ""] | None]:
    """The columns to walk over, and how many of these are no padding if that is known only to the shard."""
    sizes = (x.weight.shape[head.vocab_dim] for x, head in zip(primals, call.heads, strict=True))
    columns = min(sizes)
    left = call.vocab_size - first_column
    if isinstance(left, int):
        return min(left, columns), None
    return columns, jnp.clip(left, 0, columns) if any(head.padded for head in call.heads) else None
