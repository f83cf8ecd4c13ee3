"""A call of `lce_jax.linear_kl`: its arguments, checked for each of the two models."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh

from lce_jax import scalars
from lce_jax._types import Case, Primals
from lce_jax.call import _arguments, _checks, _options, _rows
from lce_jax.call._kl_spec import KLSpec
from lce_jax.call._options import CallOptions
from lce_jax.call._rows import Rows
from lce_jax.mathematics._kl import Pair
from lce_jax.mesh import _meshes
from lce_jax.mesh._layout import Layout

if TYPE_CHECKING:
    from jax.lax import PrecisionLike

    from lce_jax._shapes import Array, Float

type Same = Literal["same"]
DIRECTIONS = ("forward", "reverse", "jsd")


class KLOptions(TypedDict, total=False):
    """The options of `linear_kl` that `sharded_linear_kl` has too."""

    beta: float | Float[Array, ""] | None
    temperature: float | Float[Array, "..."]
    teacher_temperature: float | Float[Array, "..."] | Same
    logit_softcap: float | Float[Array, ""] | None
    teacher_logit_softcap: float | Float[Array, ""] | Same | None
    logit_scale: float | Float[Array, ""]
    teacher_logit_scale: float | Float[Array, ""] | Same
    vocab_size: int | None
    weight_layout: Literal["vh", "hv"]
    teacher_weight_layout: Literal["vh", "hv"] | Same
    precision: PrecisionLike
    implementation: str | tuple[str, ...] | None
    bias: Float[Array, "V"] | None
    teacher_bias: Float[Array, "V"] | None


@contextlib.contextmanager
def _of_the_teacher() -> Iterator[None]:
    """Errors about the teacher's arguments say so."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"the teacher's {error}") from None


class KLCall(NamedTuple):
    """A call's arguments, validated."""

    arrays: Pair[tuple[Any, Any]]  # hidden and weight
    where: Any
    options: Pair[CallOptions]
    cases: Pair[Case]
    direction: str
    beta: Any  # of a JSD
    implementation: tuple[str, ...] | None  # asked for by name

    @classmethod
    def of(
        cls, arrays: Pair[tuple[Any, Any]], where: Any, direction: str, given: Mapping[str, Any], axis_name: Any
    ) -> KLCall:
        """From what the public functions are given."""
        scalars.one_of("direction", direction, DIRECTIONS)
        beta = _options.teachers_weight(given.get("beta"), "direction", direction, DIRECTIONS[:2])
        (hidden, weight), (teacher_hidden, teacher_weight) = arrays
        own, teachers = _options_of_each(given)
        own["axis_name"] = teachers["axis_name"] = axis_name
        student = _options.of_call(own).named("linear_kl")
        _checks.array("hidden", hidden)
        tokens = jax.ShapeDtypeStruct(tuple(hidden.shape[:-1]), jnp.int32)
        case = _arguments.case(hidden, weight, tokens, where, student)
        with _of_the_teacher():
            teacher = _options.of_call(teachers).named("linear_kl")
            _checks.array("hidden", teacher_hidden)
            if tuple(teacher_hidden.shape[:-1]) != tokens.shape:
                raise ValueError(
                    f"hidden {tuple(teacher_hidden.shape)} must have the leading shape of the student's "
                    f"{tuple(hidden.shape)}"
                )
            teacher_case = _arguments.case(teacher_hidden, teacher_weight, tokens, where, teacher)
        named = _options.implementation_names(given.get("implementation"))
        call = cls(arrays, where, Pair(student, teacher), Pair(case, teacher_case), direction, beta, named)
        if given.get("vocab_size") is None or axis_name is not None:
            call.check_equal_columns()
        return call

    def check_equal_columns(self) -> None:
        """Refuses weights of which one has more columns."""
        student, teacher = (case.vocab_size for case in self.cases)
        if student != teacher:
            least, most = sorted((student, teacher))
            raise ValueError(
                f"weight has {student} columns of the vocabulary, the teacher's {teacher}: give the tokenizer's size, "
                f"at most {least}, as vocab_size; where a mesh axis splits the vocabulary, pad the smaller weight to "
                f"{most} columns too"
            )

    def spec(self, layout: Layout | None) -> KLSpec:
        """The static part, or that of one device's share over ``layout``."""
        shards = 1 if layout is not None else _checks.axis_size(self.options.student.axis_name)
        pairs = zip(self.cases, self.options, strict=True)
        models = Pair(*(_arguments.spec(c, own, c.vocab_size * shards, layout) for c, own in pairs))
        return KLSpec(models, self.direction != "forward", self.implementation)

    def operands(self, spec: KLSpec) -> tuple[Pair[Primals], Pair[Rows]]:
        """The arrays of both models. The teacher's have no gradient."""
        labels = _rows.no_labels(tuple(self.arrays.student[0].shape[:-1]))
        first, second = zip(spec.models, self.arrays, self.options, strict=True)
        student, rows = _arguments.operands(first[0], *first[1], labels, self.where, first[2])
        with _of_the_teacher():
            teacher, teachers_rows = _arguments.operands(second[0], *second[1], labels, self.where, second[2])
        if self.beta is not None:
            rows = rows._replace(weights=_rows.weights(self.beta, rows.labels.shape, spec.dtype))
        return Pair(student, jax.tree.map(lax.stop_gradient, teacher)), Pair(rows, teachers_rows)

    def same_on_all_shards(self, primals: Pair[Primals], rows: Pair[Rows]) -> Pair[tuple[Rows, Any]]:
        """Inside ``shard_map``: the rows typed as equal on every shard, and where they really are."""
        axis_name, columns = self.options.student.axis_name, self.cases.student.vocab_size
        student = _arguments.same_on_all_shards(primals.student, rows.student, axis_name, columns)
        with _of_the_teacher():
            return Pair(student, _arguments.same_on_all_shards(primals.teacher, rows.teacher, axis_name, columns))

    def mesh(self, primals: Pair[Primals], rows: Pair[Rows]) -> AbstractMesh | None:
        """The mesh that may split the operands; None on one device and inside ``shard_map``."""
        mesh = _meshes.mesh_of((primals, rows), "linear_kl")
        return mesh if self.options.student.axis_name is None else None


def _options_of_each(given: Mapping[str, Any]) -> tuple[Any, Any]:
    """The options of the student's head and of the teacher's, where "same" stands for the student's."""
    shared: Any = {"entropy": False, "implementation": "xla"}
    shared |= {name: given[name] for name in ("vocab_size", "precision") if name in given}
    defaults = {"temperature": 1.0, "logit_softcap": None, "logit_scale": 1.0, "weight_layout": "vh"}
    own = {name: given.get(name, default) for name, default in defaults.items()}
    teachers = {name: given.get(f"teacher_{name}", "same") for name in defaults}
    teachers = {name: own[name] if isinstance(x, str) and x == "same" else x for name, x in teachers.items()}
    student, teacher = ({**shared, **x} for x in (own, teachers))
    student["bias"], teacher["bias"] = given.get("bias"), given.get("teacher_bias")
    return student, teacher
