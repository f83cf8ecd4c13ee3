"""`lce_jax.linear_kl` as the runner takes it, and one device's part of it: its shard, its collectives, its gradients.

The student's head has gradients, the teacher's has none.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax import _call, _checks, _dispatch, _options, _runner, _shard, mosaic, scalars
from lce_jax._call import Place, Rows, Scales, Spec
from lce_jax._options import CallOptions
from lce_jax._runner import Capability, Kind, Program, spread
from lce_jax._types import Case, Device, Primals
from lce_jax.mathematics import _kl, _logprobs
from lce_jax.mathematics._kl import Direction, KLStatistics, Mixture, MixtureSums, Pair
from lce_jax.mathematics._statistics import MASKED
from lce_jax.mesh import _collectives
from lce_jax.xla import _kl as _kl_tiles
from lce_jax.xla._kl import KLPlan
from lce_jax.xla._walk import Head, Shard, Tokens

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Bool, Float, Int
    from lce_jax.mesh._layout import Layout


@dataclasses.dataclass(frozen=True)
class KLSpec:
    """A call's static part."""

    models: Pair[Spec]
    direction: Direction
    requested: tuple[str, ...] | None = None  # as `Spec.requested`
    mesh: Any = None  # as `Spec.mesh`

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the result."""
        return self.plan(0).dtype

    @property
    def case(self) -> Case:
        """The student's."""
        return self.models.student.case

    @property
    def implementation(self) -> str:
        """The one that serves it, with kernels or without."""
        return _dispatch.choose_kl(self._cases, self.requested)[0]

    def implementation_on(self, device: Device) -> str:
        """The one that would serve the call on ``device``."""
        cases = Pair(*(dataclasses.replace(case, device=device) for case in self._cases))
        return _dispatch.choose_kl(cases, self.requested)[0]

    def with_tokens(self, num_tokens: int) -> KLSpec:
        """The same call with so many tokens."""
        return dataclasses.replace(self, models=Pair(*(model.with_tokens(num_tokens) for model in self.models)))

    def share(self, layout: Layout, num_tokens: int, columns: Sequence[int]) -> KLSpec:
        """The spec of one device's share."""
        of_models = zip(self.models, columns, strict=True)
        models = Pair(*(model.share(layout, num_tokens, [size]) for model, size in of_models))
        return dataclasses.replace(self, models=models, mesh=None)

    def plan(self, columns: int) -> KLPlan:
        """That of a shard with ``columns``."""
        return KLPlan(self._cases, self.direction, columns)

    @property
    def _cases(self) -> Pair[Case]:
        return Pair(*(spec.case for spec in self.models))


NEUTRAL: dict[str, float | None] = {"logit_scale": 1.0, "logit_softcap": None}  # what changes no logit


@contextlib.contextmanager
def _of_the_teacher() -> Iterator[None]:
    """Errors about the teacher's arguments say so."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"the teacher's {error}") from None


class KLArguments(NamedTuple):
    """What `linear_kl` is given, and the validated options of each model."""

    arrays: Pair[tuple[Any, Any]]  # hidden and weight
    where: Any
    options: Pair[CallOptions]
    direction: Direction
    beta: Any  # of a JSD
    implementation: tuple[str, ...] | None  # asked for by name

    @classmethod
    def of(
        cls, arrays: Pair[tuple[Any, Any]], where: Any, direction: Direction, given: Mapping[str, Any]
    ) -> KLArguments:
        """From what the public functions are given."""
        scalars.one_of("direction", direction, scalars.DIRECTIONS)
        beta = _options.teachers_weight(given.get("beta"), "direction", direction, scalars.DIRECTIONS[:2])
        student, teacher = _options_of_each(given)
        own = _options.of_call(student, function="linear_kl")
        for name, neutral in NEUTRAL.items():
            if isinstance(teacher[name], str) and teacher[name] == "unset":
                if isinstance(student[name], jax.Array) or student[name] != neutral:  # no device is asked for a value
                    raise scalars.of_the_student_alone(name, student[name], neutral)
                teacher[name] = neutral
        with _of_the_teacher():
            teachers = _options.of_call(teacher, function="linear_kl")
        named = _options.checked("implementation", given)
        return cls(arrays, where, Pair(own, teachers), direction, beta, named)

    def cases(self) -> Pair[Case]:
        """The case of each model."""
        (hidden, weight), (teacher_hidden, teacher_weight) = self.arrays
        student = _call.case(hidden, weight, None, self.where, self.options.student)
        with _of_the_teacher():
            _checks.array("hidden", teacher_hidden)
            if tuple(teacher_hidden.shape[:-1]) != tuple(hidden.shape[:-1]):
                raise ValueError(
                    f"hidden {tuple(teacher_hidden.shape)} must have the leading shape of the student's "
                    f"{tuple(hidden.shape)}"
                )
            return Pair(student, _call.case(teacher_hidden, teacher_weight, None, self.where, self.options.teacher))

    def check_columns(self, cases: Pair[Case], is_split: bool) -> None:
        """Refuses weights of which one has more columns, unless ``vocab_size`` says which of them count.

        A mesh axis splits both alike, so there they must have as many.
        """
        student, teacher = (case.vocab_size for case in cases)
        if student != teacher and (is_split or self.options.student.vocab_size is None):
            least, most = sorted((student, teacher))
            raise ValueError(
                f"weight has {student} columns of the vocabulary, the teacher's {teacher}: give the tokenizer's size, "
                f"at most {least}, as vocab_size; where a mesh axis splits the vocabulary, pad the smaller weight to "
                f"{most} columns too"
            )


class KLCall(NamedTuple):
    """What `linear_kl` computes: a static part, and the arrays of both models."""

    spec: KLSpec
    primals: Pair[Primals]  # the teacher's have no gradient
    rows: Pair[Rows]
    agree: Any  # as `Call.agree`


def bind(given: KLArguments, place: Place | None = None) -> KLCall:
    """The call, over the mesh at ``place``, over the one that the operands name, or of this device."""
    cases, axis_name = given.cases(), given.options.student.axis_name
    given.check_columns(cases, axis_name is not None)
    (own, teachers), where, (first, second) = given.arrays, given.where, given.options
    student = _call.bind(*own, None, where, first, place, teachers, cases.student)
    if place is not None:
        given.check_columns(cases, student.spec.mesh.vocab_axes is not None)
    with _of_the_teacher():
        teacher = _call.bind(*teachers, None, where, second, place, own, cases.teacher)
    models, mesh = Pair(student.spec, teacher.spec), student.spec.mesh
    spec = KLSpec(models, given.direction, given.implementation, mesh)
    rows, agree = student.rows, _collectives.both(student.agree, teacher.agree)
    if given.beta is not None:
        weights = _call.weights(given.beta, rows.labels.shape, spec.dtype, rows.labels)
        if axis_name is not None:
            weights, also = _collectives.same_on_all_shards(weights, rows.labels.ndim, axis_name)
            agree = _collectives.both(agree, _collectives.where_it_counts(also, rows.where))
        rows = rows._replace(weights=weights)
        rows = rows if axis_name is None else _call.tagged(rows)
    primals = Pair(student.primals, jax.tree.map(lax.stop_gradient, teacher.primals))
    return KLCall(spec, primals, Pair(rows, teacher.rows), agree)


def bind_shard(given: KLArguments) -> KLCall:
    """The call of one shard of a vocabulary, for `lce_jax.local`: who calls it knows the other shards."""
    _options.no_axis_name_of_shard(given.options.student)
    cases = given.cases()
    given.check_columns(cases, is_split=True)
    (hidden, _), _ = given.arrays
    if hidden.ndim != 2:
        raise ValueError(f"hidden {tuple(hidden.shape)} must be flat here: [T, H]")

    def bound(arrays: tuple[Any, Any], options: CallOptions, case: Case) -> tuple[Spec, Primals, Rows]:
        spec = _call.shard_spec(case, options)
        return spec, *_call.operands(spec, *arrays, None, given.where, options)

    student, own, rows = bound(given.arrays.student, given.options.student, cases.student)
    with _of_the_teacher():
        teacher, others, teachers_rows = bound(given.arrays.teacher, given.options.teacher, cases.teacher)
    spec = KLSpec(Pair(student, teacher), given.direction, given.implementation)
    if given.beta is not None:
        rows = rows._replace(weights=_call.weights(given.beta, rows.labels.shape, spec.dtype, rows.labels))
    return KLCall(spec, Pair(own, others), Pair(rows, teachers_rows), None)


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
    student["cache_bytes"] = given.get("cache_bytes", 0)
    student["bias"], teacher["bias"] = given.get("bias"), given.get("teacher_bias")
    return student, teacher


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
            out = _kl.divergence(sums, stats, self._mixture(stats, where), where)
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
            coefficients = _kl.mixture_coefficients(sums, stats, mixture, cotangent, factor, counts)

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
        return _kl.mixture(stats, self._row_scales[1], weights, live)

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
