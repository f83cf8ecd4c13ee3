"""The forward and the backward of `lce_jax.linear_kl`, and the part of a call that one device computes.

Gradients flow to the student's head and not to the teacher's.
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
from lce_jax.run._partitioning import ArraySharding, Program, head_sharding
from lce_jax.run._runner import Capability, run_program
from lce_jax.types import messages, scalars
from lce_jax.types._types import Call, Primals
from lce_jax.xla import _kl as _kl_tiles
from lce_jax.xla._kl import KLPlan
from lce_jax.xla._walk import Head, HeadTokens, Shard

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Bool, Float, Int


NEUTRAL: dict[str, float | None] = {"logit_scale": 1.0, "logit_softcap": None}  # the values that change no logit


@contextlib.contextmanager
def _name_teacher() -> Iterator[None]:
    """Makes errors inside this context name the teacher's arguments."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(messages.reword_for_teacher(error)) from None


class KLArguments(NamedTuple):
    """The parsed arguments of `linear_kl`."""

    heads: Pair[Arguments]
    direction: Direction
    beta: Any  # the teacher's weight in a mixture
    implementation: tuple[str, ...] | None  # the names that the caller allows; None: all

    @classmethod
    def of(
        cls, arrays: Pair[tuple[Any, Any]], where: Any, direction: Direction, options: Mapping[str, Any]
    ) -> KLArguments:
        """Parses the arguments of the public functions."""
        scalars.check_choice("direction", direction, scalars.DIRECTIONS)
        beta = _options.check_beta(options.get("beta"), "direction", direction, scalars.DIRECTIONS[:2])
        student, teacher = _split_options(options)
        students = _options.parse_arguments(student, *arrays.student, None, where, function="linear_kl")
        for name, neutral in NEUTRAL.items():
            if isinstance(teacher[name], str) and teacher[name] == "unset":
                # An array is refused whatever its value, because reading it would wait for the device.
                if isinstance(student[name], jax.Array) or student[name] != neutral:
                    raise messages.student_only_error(name, student[name], neutral)
                teacher[name] = neutral
        with _name_teacher():
            teachers = _options.parse_arguments(teacher, *arrays.teacher, None, where, function="linear_kl")
        return cls(Pair(students, teachers), direction, beta, _options.check_option("implementation", options))

    def describe(self) -> Pair[Arguments]:
        """Returns the arguments of each model, with shapes and dtypes in their calls."""
        student, teacher = _describe.describe_call(self.heads.student), self.heads.teacher
        with _name_teacher():
            _checks.check_array("hidden", teacher.hidden)
            if tuple(teacher.hidden.shape[:-1]) != tuple(student.hidden.shape[:-1]):
                raise ValueError(
                    f"hidden {tuple(teacher.hidden.shape)} must have the leading shape of the student's "
                    f"{tuple(student.hidden.shape)}"
                )
            return Pair(student, _describe.describe_call(teacher))

    def combine_calls(self, student: Call, teacher: Call) -> Call:
        """Returns one call of both models, with the implementation that serves it."""
        call = dataclasses.replace(student, teacher=teacher, direction=self.direction, requested=self.implementation)
        return dataclasses.replace(call, implementation=_dispatch.choose(call)[0].NAME)


def check_columns(heads: Pair[Arguments], is_split: bool) -> None:
    """Refuses weights with different numbers of columns, unless ``vocab_size`` says how many columns count.

    If a mesh axis splits the vocabulary, both weights must have equally many columns.
    """
    student, teacher = (head.call.columns for head in heads)
    if student != teacher and (is_split or heads.student.call.caller_vocab_size is None):
        least, most = sorted((student, teacher))
        raise ValueError(
            f"weight has {student} columns of the vocabulary, the teacher's {teacher}: pass the tokenizer's size, "
            f"at most {least}, as vocab_size; if a mesh axis splits the vocabulary, pad the smaller weight to "
            f"{most} columns too"
        )


def bind(arguments: KLArguments) -> Bound:
    """Binds a call to the mesh of its placement, to the mesh that its operands name, or to this device."""
    heads = arguments.describe()
    axis_name = heads.student.call.axis_name
    check_columns(heads, axis_name is not None)
    student = _describe.bind_call(heads.student, heads.teacher[1:3])
    if heads.student.placement is not None:
        check_columns(heads, student.call.mesh.vocab_axes is not None)
    with _name_teacher():
        teacher = _describe.bind_call(heads.teacher, heads.student[1:3])
    call = arguments.combine_calls(student.call, teacher.call)
    rows, agree = student.rows, _collectives.join_agreement(student.agree, teacher.agree)
    if arguments.beta is not None:
        weights = _describe.make_mixture_weights(arguments.beta, rows.labels.shape, call.result_dtype, rows.labels)
        if axis_name is not None:
            weights, same_weights = _collectives.equalize_shards(weights, rows.labels.ndim, axis_name)
            agree = _collectives.join_agreement(agree, _collectives.ignore_masked_rows(same_weights, rows.where))
        rows = rows._replace(weights=weights)
        rows = rows if axis_name is None else _describe.add_tags(rows)
    primals = Pair(student.primals, jax.tree.map(lax.stop_gradient, teacher.primals))
    return Bound(call, primals, Pair(rows, teacher.rows), agree)


def _split_options(options: Mapping[str, Any]) -> tuple[Any, Any]:
    """Returns the options of the student's head and of the teacher's.

    The teacher's default "same" stands for the student's value. But the default of the teacher's scale and cap is
    "unset", because these belong to one model.
    """
    shared: Any = {"entropy": False, "implementation": "xla"}
    shared |= {name: options[name] for name in ("vocab_size", "precision", "axis_name") if name in options}
    names, table = ("temperature", "logit_softcap", "logit_scale", "weight_layout"), _options.OPTIONS
    students = {name: options.get(name, table[name].default) for name in names}
    teachers = {name: options.get(f"teacher_{name}", table[f"teacher_{name}"].default) for name in names}
    teachers = {name: students[name] if isinstance(x, str) and x == "same" else x for name, x in teachers.items()}
    student, teacher = ({**shared, **x} for x in (students, teachers))
    student["cache_bytes"] = options.get("cache_bytes")
    student["bias"], teacher["bias"] = options.get("bias"), options.get("teacher_bias")
    return student, teacher


type Statistics = tuple[KLStatistics, MixtureSums | None]  # per token
type Saved = tuple[Statistics, Any]  # for the backward: the statistics, and the implementation's cache
type Rest = tuple[Primals, Pair[Rows]]  # the teacher, and the rows of both models


def forward(call: Call, student: Primals, rest: Rest, differentiated: bool) -> tuple[Array, Saved]:
    """Returns each token's divergence, and what the backward needs. Where XLA partitions, no tile is cached."""
    wants_cache, partitioned = (
        differentiated and call.cache_budget > 0,
        _runner.is_partitioned_by_xla(call, (student, rest)),
    )
    caches = wants_cache and not partitioned
    unused = ("cache_bytes keeps nothing",) if wants_cache and partitioned and call.cache_bytes else ()
    call = call if caches else call.replace(cache_bytes=0)

    def run(call: Call, student: Primals, rest: Rest) -> tuple[Array, Saved]:
        teacher, rows = rest
        return device_forward(call, Pair(student, teacher), rows, caches)

    student_sharding, teacher_sharding = _head_shardings(call)
    results = ArraySharding.RESULTS, (ArraySharding.TOKENS, ArraySharding.DEVICE)
    program = Program(
        run, (student_sharding, (teacher_sharding, ArraySharding.TOKENS)), results, joins=not caches, unused=unused
    )
    return run_program(call, program, student, rest)


def backward(call: Call, student: Primals, rest: Rest, saved: Saved, cotangent: Array) -> Primals:
    """Returns the student's gradients."""

    def run(call: Call, student: Primals, rest: Rest, saved: Saved, cotangent: Array) -> Primals:
        teacher, rows = rest
        return device_backward(call, Pair(student, teacher), rows, saved, cotangent)

    student_sharding, teacher_sharding = _head_shardings(call)
    operands = (
        student_sharding,
        (teacher_sharding, ArraySharding.TOKENS),
        (ArraySharding.TOKENS, ArraySharding.DEVICE),
        ArraySharding.RESULTS,
    )
    return run_program(call, Program(run, operands, student_sharding), student, rest, saved, cotangent)


def _make_empty_results(call: Call, rest: Rest) -> Array:
    return jnp.zeros(rest[1].student.labels.shape, call.result_dtype)


KL = Capability(forward, backward, _make_empty_results)


def _head_shardings(call: Call) -> tuple[Any, Any]:
    student, teacher = (head_sharding(head.vocab_dim) for head in call.heads)
    return student, teacher


def device_forward(
    call: Call, primals: Pair[Primals], rows: Pair[Rows], keep_cache: bool = False
) -> tuple[Array, Saved]:
    """Returns the divergences, the statistics of the whole vocabulary, and this device's cache."""
    shape, axis_name = rows.student.labels.shape, call.axis_name
    part, agree = KLPart.of(call, primals, _describe.flatten_tokens(rows, len(shape))), None
    stats, cache = part.statistics(keep_cache)
    if axis_name is not None:
        with jax.named_scope("lce_merge"):
            parts, summaries = _collectives.gather_trees(
                (jnp.stack(stats), _summarize_operands(call, primals, part.rows)), axis_name
            )
            stats = part.merge(parts)
            agree = _shard.find_agreeing_rows(call, summaries, part.rows.student, primals.student.weight)
    stats = stats if agree is None else KLStatistics(*_collectives.set_nan_where_different(agree, (*stats,)))
    sums = None
    if part.has_mixture:
        sums = part.mixture_sums(stats)
        if axis_name is not None:
            with jax.named_scope("lce_merge"):
                sums = MixtureSums.merge(_collectives.gather_shards(jnp.stack(sums), axis_name))
    out = part.finish(stats, sums)
    out = out if agree is None else _collectives.set_nan_where_different(agree, out)
    out, saved = jax.tree.map(lambda x: x.reshape(shape), (out, (stats, sums)))
    return out, (saved, cache)


def _summarize_operands(call: Call, primals: Pair[Primals], rows: Pair[Rows]) -> _collectives.ShardSummary | None:
    """Returns a summary of both heads' operands, which the shards compare; None if there is nothing to compare."""
    start = _shard.find_first_column(call, primals.student.weight)
    flat = map(_shard.flatten_operands, call.heads, primals)
    one, other = (_shard.summarize_operands(*each, start) for each in zip(call.heads, flat, rows, strict=True))
    if one is None or other is None:
        return None
    tags = _collectives.compute_tags([one.tags, other.tags])
    return _collectives.ShardSummary(tags, *map(jnp.concatenate, zip(one[1:], other[1:], strict=True)))


def device_backward(call: Call, primals: Pair[Primals], rows: Pair[Rows], saved: Saved, cotangent: Array) -> Primals:
    """Returns the student's gradients, in the shapes, dtypes and types of its operands."""
    stats, cache = saved
    rows, stats, cotangent = _describe.flatten_tokens((rows, stats, cotangent), rows.student.labels.ndim)
    if call.axis_name is not None and call.token_axes is None:
        cotangent = _collectives.sum_cotangents(cotangent, call.axis_name)
    gradients = KLPart.of(call, primals, rows).gradients(*stats, cache, cotangent)
    return _shard.reduce_gradients(call, gradients, primals.student)


class KLPart(NamedTuple):
    """One device's part of a call: its columns, and all tokens, flat. No method runs a collective."""

    call: Call
    rows: Pair[Rows]
    scales: Pair[Scales]
    plan: KLPlan
    shard: Shard  # unmasked rows first
    order: _describe.Compaction | None  # of the unmasked rows; None: no row is masked

    @classmethod
    def of(cls, call: Call, primals: Pair[Primals], rows: Pair[Rows], first_column: Any = None) -> KLPart:
        """Makes the part of this device. If ``first_column`` is None, it follows from the mesh position."""
        scales = Pair(*(_describe.compute_scales(x, call.result_dtype, signs_hidden=False) for x in rows))
        if first_column is None:
            first_column = _shard.find_first_column(call, primals.student.weight)
        return cls(call, rows, scales, *_make_shard(call, primals, rows, scales, first_column))

    @property
    def has_mixture(self) -> bool:
        """Whether the divergence needs `mixture_sums`."""
        return self.plan.contrast is not None

    @jax.named_scope("lce_kl_statistics")
    def statistics(self, keep_cache: bool) -> tuple[KLStatistics, Any]:
        """Returns the statistics of these columns, [T] each, and the cache."""
        statistics = mosaic.kl_statistics if self._has_kernels else _kl_tiles.statistics
        stats, cache = statistics(self.plan, self.shard, keep_cache)
        return self._restore_order(stats), cache

    def merge(self, parts: Float[Array, "N 6 T"]) -> KLStatistics:
        """Merges the statistics of all parts of the vocabulary, in their order."""
        return _kl.merge(KLStatistics(*(parts[:, i] for i in range(parts.shape[1]))), self._row_scales)

    @jax.named_scope("lce_kl_mixture")
    def mixture_sums(self, stats: KLStatistics) -> MixtureSums:
        """Computes eq. 9 or 11 over these columns, from the statistics of the whole vocabulary."""
        mixture = self._take_unmasked_rows(self._mixture(stats, self.rows.student.where))
        mixture_sums = mosaic.kl_mixture_sums if self._has_kernels else _kl_tiles.mixture_sums
        return self._restore_order(mixture_sums(self.plan, self.shard, mixture))

    def finish(self, stats: KLStatistics, sums: MixtureSums | None) -> Float[Array, "T"]:
        """Computes the divergence from the statistics and sums of the whole vocabulary."""
        where, wrong = self.rows.student.where, _find_wrong_rows(self.rows)
        if sums is None:
            out = _kl.finish(stats, self._row_scales[1], where)
        else:
            out = _kl.divergence(sums, stats, self._mixture(stats, where), where, self._contrast)
        return out if wrong is None else jnp.where(wrong, jnp.nan, out)

    @jax.named_scope("lce_kl_gradients")
    def gradients(
        self, stats: KLStatistics, sums: MixtureSums | None, cache: Any, cotangent: Float[Array, "T"]
    ) -> Primals:
        """Returns this shard's part of the student's dhidden, its dbias, and its dweight.

        dweight is in the weight's dtype, and the others are in the statistics' dtype.
        """
        unmasked, wrong = self.rows.student.where, _find_wrong_rows(self.rows)
        counts = unmasked if wrong is None else ~wrong if unmasked is None else unmasked & ~wrong
        factor = _logprobs.compute_row_factor(self.call, self.scales.student.derivative)
        coefficients: Any
        if sums is None:
            coefficients = _kl.coefficients(stats, cotangent, factor, counts)
        else:
            mixture = self._mixture(stats, counts)
            coefficients = _kl.mixture_coefficients(sums, stats, mixture, cotangent, factor, counts)

        compute = mosaic.kl_gradients if self._has_kernels else _kl_tiles.gradients
        gradients = compute(self.plan, self.shard, self._take_unmasked_rows(coefficients), cache)
        if gradients.hidden is None:
            return gradients
        dhidden = self._restore_order(gradients.hidden)
        return gradients._replace(hidden=dhidden if unmasked is None else jnp.where(unmasked[:, None], dhidden, 0.0))

    @property
    def _row_scales(self) -> tuple[Any, Any]:
        """The factor k of eq. 0 for each model. The model of p comes first."""
        pairs = zip(self.call.heads, self.scales, strict=True)
        each = (_logprobs.compute_row_scale(head, x.inverse_temperature) for head, x in pairs)
        return Pair(*each).ordered(self.plan.student_first)

    def _mixture(self, stats: KLStatistics, unmasked: Bool[Array, "T"] | None) -> Mixture:
        weights = self.rows.student.weights
        assert weights is not None
        return _kl.mixture(stats, self._row_scales[1], weights, unmasked, self._contrast.slope)

    @property
    def _contrast(self) -> _kl.Contrast:
        assert self.plan.contrast is not None
        return self.plan.contrast

    def _take_unmasked_rows[T](self, by_token: T) -> T:
        """Takes the unmasked rows of per-token arrays."""
        order = self.order
        return by_token if order is None else jax.tree.map(lambda x: x[order.source], by_token)

    def _restore_order(self, results: Any) -> Any:
        """Puts the results of the unmasked rows in the order of the tokens."""
        return results if self.order is None else _describe.expand(self.order, results)

    @property
    def _has_kernels(self) -> bool:
        """Whether kernels serve the call. They serve both passes or neither, because these must compute equal bits."""
        return self.call.implementation == mosaic.NAME


def _find_wrong_rows(rows: Pair[Rows]) -> Bool[Array, "T"] | None:
    """Returns the rows in which a temperature is wrong. Their results are NaN, and they have no gradient."""
    student, teacher = map(_describe.find_invalid_rows, rows)
    return teacher if student is None else student if teacher is None else student | teacher


def _make_shard(
    call: Call, primals: Pair[Primals], rows: Pair[Rows], scales: Pair[Scales], first_column: Any
) -> tuple[KLPlan, Shard, _describe.Compaction | None]:
    """Returns the plan, this device's arrays with the unmasked rows first, and the order of these rows."""
    operands = Pair(*map(_shard.flatten_operands, call.heads, primals))
    tokens = Pair(
        *(HeadTokens(x.hidden, y.inverse_temperature, y.raw_scale) for x, y in zip(operands, scales, strict=True))
    )
    order = None if rows.student.where is None else _describe.plan_compaction(rows.student.where)
    num_rows = None if order is None else order.num_rows
    tokens = tokens if order is None else _describe.compact(order, tokens)
    heads = Pair(
        *(
            # Without the bound, a column that both models rule out with -inf would give a difference of infinities.
            Head(x.weight, None if x.bias is None else jnp.maximum(x.bias.astype(head.stat_dtype), MASKED))
            for x, head in zip(operands, call.heads, strict=True)
        )
    )
    columns, num_columns = _count_columns(call, primals, first_column)
    return KLPlan(Pair(*call.heads), call.direction, columns), Shard(tokens, heads, None, num_rows, num_columns), order


def _count_columns(call: Call, primals: Pair[Primals], first_column: Any) -> tuple[int, Int[Array, ""] | None]:
    """Returns how many columns to compute; and how many of these are not padding, if only the device knows that."""
    sizes = (x.weight.shape[head.vocab_dim] for x, head in zip(primals, call.heads, strict=True))
    columns = min(sizes)
    rest = call.vocab_size - first_column
    if isinstance(rest, int):
        return min(rest, columns), None
    return columns, jnp.clip(rest, 0, columns) if any(head.padded for head in call.heads) else None
