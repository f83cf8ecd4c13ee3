"""The options of a call and of a loss: what functions take by keyword, validated as far as possible without shapes."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lce_jax import _checks, _dispatch, scalars
from lce_jax._types import Options, is_array

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


@dataclasses.dataclass(frozen=True)
class CallOptions:
    """`LogprobOptions`, validated: the static ones, for every implementation, and those that the call itself uses."""

    static: Options
    temperature: Any
    logit_scale: Any  # this and the next: None unless one of them is an array; else `static` has both
    logit_softcap: Any
    bias: Any
    candidates: Any
    logit_floor: Any
    vocab_size: int | None
    axis_name: Any
    implementation: tuple[str, ...] | None


def of_call(given: LogprobOptions, mean_logit: bool = False, function: str = "linear_logprobs") -> CallOptions:
    """The options of a call of ``function``."""
    softcap, layout = given.get("logit_softcap"), given.get("weight_layout", "vh")
    bias, candidates, floor = given.get("bias"), given.get("candidates"), given.get("logit_floor")
    precision = given.get("precision")
    scale = number_or_scalar("logit_scale", given.get("logit_scale", 1.0), scalars.number)
    softcap = None if softcap is None else number_or_scalar("logit_softcap", softcap, scalars.positive)
    traced = is_array(scale) or is_array(softcap)
    if layout not in ("vh", "hv"):
        raise ValueError(f'weight_layout must be "vh" ([V, H]) or "hv" ([H, V]), got {layout!r}')
    cache_bytes = scalars.num_bytes("cache_bytes", given.get("cache_bytes", 0))
    gradient_threshold = scalars.fraction("gradient_threshold", given.get("gradient_threshold", 0.0))
    static = Options(
        logit_scale=1.0 if traced else scale,
        logit_softcap=1.0 if traced and softcap is not None else softcap,
        entropy=scalars.flag("entropy", given.get("entropy", True)),
        stats=scalars.flag("stats", given.get("stats", False)),
        weight_layout=layout,
        cache_bytes=cache_bytes,
        precision=None if precision is None else checked_precision(precision),
        mean_logit=mean_logit,
        has_bias=bias is not None,
        num_candidates=0 if candidates is None else _checks.num_candidates(candidates),
        traced_scale=traced,
        gradient_threshold=gradient_threshold,
        vocab_part_size=scalars.part_size(given.get("vocab_part_size"), cache_bytes, gradient_threshold),
        has_floor=floor is not None,
        function=function,
    )
    if floor is not None:
        scalars.alone_with_floor(static.num_candidates, mean_logit)
    return CallOptions(
        static=static,
        temperature=given.get("temperature", 1.0),
        logit_scale=scale if traced else None,
        logit_softcap=softcap if traced else None,
        bias=bias,
        candidates=candidates,
        logit_floor=floor,
        vocab_size=given.get("vocab_size"),
        axis_name=_axis_name(given.get("axis_name")),
        implementation=implementation_names(given.get("implementation")),
    )


def check_names(
    function: Callable[..., Any],
    given: Mapping[str, Any],
    without: Sequence[str] = (),
    known_names: Iterable[str] = tuple(LogprobOptions.__annotations__),
) -> None:
    """Refuses names in ``**options`` that ``function`` does not know; the message lists those that it does."""
    unknown = [name for name in given if name not in known_names]
    if not unknown:
        return
    own = [name for name, kind in inspect.signature(function).parameters.items() if kind.kind is kind.KEYWORD_ONLY]
    known = [*own, *(name for name in known_names if name not in without)]
    close = difflib.get_close_matches(unknown[0], known, 1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise TypeError(f"{function.__name__}: unknown option {', '.join(unknown)}{hint}; known: {', '.join(known)}")


NOT_OF_TOPK = ("entropy", "stats", "cache_bytes", "candidates", "gradient_threshold", "vocab_part_size", "logit_floor")


def of_ids(given: LogprobOptions, hidden: Any, ids: Any) -> CallOptions:
    """The options of `linear_logits`, whose ids are a call's candidates."""
    _checks.array("hidden", hidden)
    _checks.num_candidates(ids, "ids")
    scalars.candidate_shape("ids", ids.shape, hidden.shape[:-1], "hidden before H")
    return of_call({**given, "candidates": ids}, function="linear_logits")


def of_topk(given: LogprobOptions, k: Any) -> CallOptions:
    """The options of `linear_topk`."""
    options, k = of_call({**given, "entropy": False}, function="linear_topk"), scalars.num_largest(k)
    return dataclasses.replace(options, static=dataclasses.replace(options.static, top_k=k))


def refuse(function: str, given: Mapping[str, Any], names: Sequence[str]) -> None:
    """Refuses options of other functions, which ``function`` does not have."""
    if wrong := [name for name in given if name in names]:
        raise TypeError(f"{function} has no option {', '.join(wrong)}")


def loss_call(given: LogprobOptions) -> LogprobOptions:
    """The options of a loss, which returns neither entropy nor extremes nor candidates."""
    wanted = [f"{name}=True" for name in ("entropy", "stats") if scalars.flag(name, given.get(name, False))]
    wanted += ["candidates"] if given.get("candidates") is not None else []
    if wanted:
        raise ValueError(
            f"{wanted[0]}, but a loss has no such output: linear_logprobs (or sharded_linear_logprobs) returns it with "
            "the log-probabilities"
        )
    return {**given, "entropy": False}


def of_loss(reduction: Any, label_smoothing: Any, z_loss: Any, normalizer: Any = None) -> tuple[float, Any, Any]:
    """What a loss adds to the options, validated: the smoothing, the weight of lse² and the mean's divisor."""
    scalars.one_of("reduction", reduction, ("mean", "sum", "none"))
    if normalizer is not None:
        if reduction != "mean":
            raise ValueError(
                f'normalizer={normalizer!r} is the divisor of reduction="mean", reduction is {reduction!r}'
            )
        normalizer = number_or_scalar("normalizer", normalizer, scalars.positive, scalars.not_negative)
    z_loss = number_or_scalar("z_loss", z_loss, scalars.not_negative)
    return scalars.fraction("label_smoothing", label_smoothing), z_loss, normalizer


def no_axis_name(given: CallOptions) -> None:
    """Refuses ``axis_name`` outside ``shard_map``, where ``vocab_axis`` names the axis."""
    if given.axis_name is not None:
        raise ValueError(f"axis_name={given.axis_name!r} is for callers inside shard_map; here the axis is vocab_axis")


def number_or_scalar(
    name: str, value: Any, check: Callable[[str, Any], Any], of_array: Callable[[str, Any], Any] | None = None
) -> Any:
    """A number that passes ``check``, or a real array of shape (), as given, which passes ``of_array`` if it is known.

    To read its value waits for the device. Only calls outside ``jit`` pay for that, as for a temperature that is an
    array.
    """
    if not is_array(value) or isinstance(value, np.generic):
        return check(name, value)
    _checks.array(name, value)
    if not (jnp.issubdtype(value.dtype, jnp.floating) or jnp.issubdtype(value.dtype, jnp.integer)):
        raise TypeError(f"{name} must be a real number, got an array of {value.dtype}")
    if value.shape != ():
        raise ValueError(f"{name} must be a number or an array of shape (), got shape {tuple(value.shape)}")
    if _checks.is_concrete(value):
        (of_array or check)(name, jax.device_get(value).item())
    return value


def teachers_weight(beta: Any, argument: str, chosen: str, ends: tuple[str, str]) -> Any:
    """As `scalars.weight_of_jsd`, of an array too."""
    if chosen != "jsd" or beta is None:
        return scalars.weight_of_jsd(beta, argument, chosen, ends)
    return number_or_scalar("beta", beta, lambda _, value: scalars.weight_of_jsd(value, argument, chosen, ends))


def _axis_name(axis_name: Any) -> Any:
    if axis_name is None or isinstance(axis_name, str):
        return axis_name
    if isinstance(axis_name, tuple) and axis_name and all(isinstance(name, str) for name in axis_name):
        return axis_name
    raise TypeError(f"axis_name must be None, a mesh axis's name or a tuple of them, got {axis_name!r}")


def implementation_names(implementation: Any) -> tuple[str, ...] | None:
    """The names of ``implementation=``, checked; None leaves the choice to the device."""
    if implementation is None:
        return None
    names = (implementation,) if isinstance(implementation, str) else implementation
    known = ", ".join(f'"{name}"' for name in _dispatch.IMPLEMENTATIONS)
    if not isinstance(names, tuple) or not names:
        raise TypeError(f"implementation must be None, a name or a tuple of names ({known}), got {implementation!r}")
    for name in names:
        if name not in _dispatch.IMPLEMENTATIONS:
            raise ValueError(f"unknown implementation {name!r}; known: {known}")
    return names


def checked_precision(precision: Any) -> Any:
    """What `jax.lax` takes as the precision of a product, not None."""
    one = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    try:
        jax.eval_shape(lambda a, b: lax.dot(a, b, precision=precision), one, one)
        hash(precision)
    except Exception as error:
        raise ValueError(f"precision {precision!r} is not a jax.lax.PrecisionLike: {error}") from error
    return precision
