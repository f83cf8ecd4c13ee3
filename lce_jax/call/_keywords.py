"""What public functions take by keyword. Overloads name ``entropy`` apart, because it decides a result's type."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict

if TYPE_CHECKING:
    from jax.lax import PrecisionLike
    from jax.sharding import AbstractMesh, Mesh

    from lce_jax._shapes import Array, Bool, Float, Int
    from lce_jax.mesh._layout import Axes

type Same = Literal["same"]
type Unset = Literal["unset"]


class CommonOptions(TypedDict, total=False):
    """The keyword options of `LogprobOptions` that decide no type."""

    temperature: float | Float[Array, "..."]
    logit_softcap: float | Float[Array, ""] | None
    logit_scale: float | Float[Array, ""]
    stats: bool
    vocab_size: int | None
    weight_layout: Literal["vh", "hv"]
    axis_name: str | tuple[str, ...] | None
    cache_bytes: int
    precision: PrecisionLike
    implementation: str | tuple[str, ...] | None
    bias: Float[Array, "V"] | None
    candidates: Int[Array, "*b K"] | None
    gradient_threshold: float
    vocab_part_size: int | None
    logit_floor: float | Float[Array, "..."] | None


class LogprobOptions(CommonOptions, total=False):
    """The keyword options that every public function shares; `linear_logprobs` says what each means."""

    entropy: bool


class TeacherOptions(TypedDict, total=False):
    """The keyword options of `linear_kl` that no other function has."""

    beta: float | Float[Array, ""] | None
    teacher_temperature: float | Float[Array, "..."] | Same
    teacher_logit_softcap: float | Float[Array, ""] | Same | Unset | None
    teacher_logit_scale: float | Float[Array, ""] | Same | Unset
    teacher_weight_layout: Literal["vh", "hv"] | Same
    teacher_bias: Float[Array, "V"] | None


class ExplainOptions(LogprobOptions, TeacherOptions, total=False):
    """The keyword options of the functions that `explain` knows."""


class MeshKeywords(TypedDict, total=False):
    """How a ``sharded_`` function names the mesh."""

    mesh: Mesh | AbstractMesh | None
    vocab_axis: Axes
    batch_axes: Axes
    sequence_axis: Axes


class LogprobKeywords(CommonOptions, total=False):
    """Of `linear_logprobs`."""

    where: Bool[Array, "*b"] | None


class LossKeywords(LogprobKeywords, total=False):
    """Of `linear_loss`."""

    chunk_bytes: int | None


class ShardedKeywords(LogprobKeywords, MeshKeywords, total=False):
    """Of `sharded_linear_logprobs`."""


class ShardedLossKeywords(LossKeywords, MeshKeywords, total=False):
    """Of `sharded_linear_loss`."""
