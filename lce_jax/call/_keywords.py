"""What public functions take by keyword."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict

if TYPE_CHECKING:
    from jax.lax import PrecisionLike

    from lce_jax._shapes import Array, Float, Int

type Same = Literal["same"]
type Unset = Literal["unset"]


class LogprobOptions(TypedDict, total=False):
    """The keyword options that every public function shares; `linear_logprobs` says what each means."""

    temperature: float | Float[Array, "..."]
    logit_softcap: float | Float[Array, ""] | None
    logit_scale: float | Float[Array, ""]
    entropy: bool
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
