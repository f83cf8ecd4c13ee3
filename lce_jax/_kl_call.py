"""A call of `lce_jax.linear_kl`: its arguments, checked for each of the two models, and what of it is static."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax import lax

from lce_jax import _call, _checks, _dispatch, _options, scalars
from lce_jax._call import Place, Rows, Spec
from lce_jax._options import CallOptions
from lce_jax._types import Case, Device, Primals
from lce_jax.mathematics._kl import Direction, Pair
from lce_jax.mesh import _collectives
from lce_jax.xla._kl import KLPlan

if TYPE_CHECKING:
    import jax.numpy as jnp

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
