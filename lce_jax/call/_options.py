"""The options that functions take by keyword: one table, and the checks that need no shapes.

The table `OPTIONS` has each option's default, its check, and the functions that do not have the option. The table
decides which options a function accepts, and which options its messages list.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lce_jax.call import _checks, _dispatch
from lce_jax.mesh._layout import layout_of_names
from lce_jax.types import messages, scalars, shared_checks
from lce_jax.types._types import Call, is_array

if TYPE_CHECKING:
    from jax.lax import PrecisionLike
    from jax.sharding import AbstractMesh, Mesh

    from lce_jax.mesh._layout import Axes, Layout
    from lce_jax.types._shapes import ArrayLike, Float, Int


type Lora = tuple[Float[ArrayLike, "r H"], Float[ArrayLike, "V r"], float | Float[ArrayLike, ""]]
type Same = Literal["same"]
type Unset = Literal["unset"]


# Type checkers read these classes, because they cannot read the table below. A test compares the two. The option
# classes of Flax's heads inherit from these.


class CallOptions(TypedDict, total=False):
    """The options of every function. The docstring of `linear_logprobs` says what each option means."""

    temperature: float | Float[ArrayLike, "..."]
    axis_name: str | tuple[str, ...] | None
    implementation: str | tuple[str, ...] | None


class GradientOptions(CallOptions, total=False):
    """`CallOptions`, and the options that only differentiable functions have."""

    cache_bytes: int | None
    gradient_threshold: float
    vocab_part_size: int | None
    logit_floor: float | Float[ArrayLike, "..."] | None


class OptionsWithoutEntropy(GradientOptions, total=False):
    """`GradientOptions`, and the options of heads and results: all options of `linear_logprobs` except ``entropy``."""

    logit_softcap: float | Float[ArrayLike, ""] | None
    logit_scale: float | Float[ArrayLike, ""]
    vocab_size: int | None
    weight_layout: Literal["vh", "hv"]
    precision: PrecisionLike
    bias: Float[ArrayLike, "V"] | None
    lora: Lora | None
    stats: bool
    candidates: Int[ArrayLike, "*b K"] | None


class LogprobOptions(OptionsWithoutEntropy, total=False):
    """All options of `linear_logprobs`."""

    entropy: bool


class KLOptions(LogprobOptions, total=False):
    """`LogprobOptions`, and the options that only `linear_kl` has."""

    beta: float | Float[ArrayLike, ""] | None
    teacher_temperature: float | Float[ArrayLike, "..."] | Same
    teacher_logit_softcap: float | Float[ArrayLike, ""] | Same | Unset | None
    teacher_logit_scale: float | Float[ArrayLike, ""] | Same | Unset
    teacher_weight_layout: Literal["vh", "hv"] | Same
    teacher_bias: Float[ArrayLike, "V"] | None


def check_scalar(
    name: str, value: Any, check: Callable[[str, Any], Any], check_array: Callable[[str, Any], Any] | None = None
) -> Any:
    """Checks a number, or a real array of shape (), and returns it.

    ``check`` checks numbers. If the value of an array is known, ``check_array`` (default: ``check``) checks this value.
    It is known only outside ``jit``, where the check waits for the device.
    """
    if not is_array(value) or isinstance(value, np.generic):
        return check(name, value)
    _checks.check_array(name, value)
    if not (jnp.issubdtype(value.dtype, jnp.floating) or jnp.issubdtype(value.dtype, jnp.integer)):
        raise TypeError(f"{name} must be a real number, got an array of {value.dtype}")
    if value.shape != ():
        raise ValueError(f"{name} must be a number or an array of shape (), got shape {tuple(value.shape)}")
    if _checks.is_concrete(value):
        (check_array or check)(name, jax.device_get(value).item())
    return value


def _check_layout(name: str, value: Any) -> str:
    if value not in ("vh", "hv"):
        raise ValueError(f'{name} must be "vh" ([V, H]) or "hv" ([H, V]), got {value!r}')
    return value


def _check_axes(name: str, value: Any) -> Any:
    names = value if isinstance(value, tuple) else (value,)
    if isinstance(value, MeshPlacement):
        return value
    if not names or not all(isinstance(axis, str) for axis in names):
        raise TypeError(f"{name} must be None, a mesh axis's name or a tuple of them, got {value!r}")
    return value


def _check_precision(name: str, value: Any) -> Any:
    """Checks a precision, which is not None, by tracing a `jax.lax` product with it."""
    one = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    try:
        jax.eval_shape(lambda a, b: lax.dot(a, b, precision=value), one, one)
        hash(value)
    except Exception as error:
        raise ValueError(f"{name} {value!r} is not a jax.lax.PrecisionLike: {error}") from error
    return value


def _check_implementations(name: str, value: Any) -> tuple[str, ...]:
    """Returns the names of the implementations to try, in order."""
    names = (value,) if isinstance(value, str) else value
    known = ", ".join(f'"{one}"' for one in _dispatch.IMPLEMENTATIONS)
    if not isinstance(names, tuple) or not names:
        raise TypeError(f"{name} must be None, a name or a tuple of names ({known}), got {value!r}")
    for one in names:
        if one not in _dispatch.IMPLEMENTATIONS:
            raise ValueError(f"unknown implementation {one!r}; known: {known}")
    return names


def _check_ids(name: str, value: Any) -> Any:
    _checks.count_candidates(value, name)
    return value


def _check_lora(name: str, value: Any) -> Any:
    """Checks an adapter's two factors and its scale. `_describe` compares their shapes with hidden and weight."""
    if not isinstance(value, tuple | list) or len(value) != 3:
        raise TypeError(f"{name} must be a tuple (A [r, H], B [V, r], scale), got {value!r:.80}")
    a, b, scale = value
    _checks.check_floats(f"{name}'s A", a)
    _checks.check_floats(f"{name}'s B", b)
    if a.ndim != 2 or b.ndim != 2 or not 0 < a.shape[0] == b.shape[1]:
        raise ValueError(f"{name}'s A {tuple(a.shape)} and B {tuple(b.shape)} must be [r, H] and [V, r]")
    return a, b, check_scalar(f"{name}'s scale", scale, scalars.number)


def _check_later(name: str, value: Any) -> Any:
    """Returns the value unchecked, because its check needs the shapes of the call."""
    del name
    return value


@dataclasses.dataclass(frozen=True)
class Option:
    """A keyword option."""

    default: Any
    check: Callable[[str, Any], Any] = _check_later  # (name, value) -> checked value; the default is not checked
    excluded: tuple[str, ...] = ()  # the functions that do not have the option


WITH_LABELS = ("linear_logprobs", "linear_cross_entropy", "linear_loss")
_FEW = ("linear_topk", "linear_logits")  # they have no gradient that is computed over the whole vocabulary
_LOSSES = ("linear_cross_entropy",)
_ALL_BUT_KL = (*WITH_LABELS, *_FEW)

OPTIONS: dict[str, Option] = {
    "temperature": Option(1.0),
    "logit_softcap": Option(None, lambda name, x: check_scalar(name, x, scalars.positive)),
    "logit_scale": Option(1.0, lambda name, x: check_scalar(name, x, scalars.number)),
    "entropy": Option(True, scalars.flag, (*_FEW, *_LOSSES, "linear_kl")),
    "stats": Option(False, scalars.flag, (*_FEW, *_LOSSES, "linear_kl")),
    "vocab_size": Option(None),
    "weight_layout": Option("vh", _check_layout),
    "axis_name": Option(None, _check_axes),
    "cache_bytes": Option(None, scalars.num_bytes, (*_FEW, "linear_loss")),
    "precision": Option(None, _check_precision),
    "implementation": Option(None, _check_implementations),
    "bias": Option(None),
    "candidates": Option(None, _check_ids, (*_FEW, *_LOSSES, "linear_loss", "linear_kl")),
    "gradient_threshold": Option(0.0, scalars.fraction, (*_FEW, "linear_kl")),
    "vocab_part_size": Option(None, _check_later, (*_FEW, "linear_loss", "linear_kl")),
    "logit_floor": Option(None, _check_later, (*_FEW, "linear_kl")),
    "lora": Option(None, _check_lora, (*_FEW, "linear_kl")),
    "beta": Option(None, _check_later, _ALL_BUT_KL),
    "teacher_temperature": Option("same", _check_later, _ALL_BUT_KL),
    "teacher_logit_softcap": Option("unset", _check_later, _ALL_BUT_KL),
    "teacher_logit_scale": Option("unset", _check_later, _ALL_BUT_KL),
    "teacher_weight_layout": Option("same", _check_later, _ALL_BUT_KL),
    "teacher_bias": Option(None, _check_later, _ALL_BUT_KL),
}


@functools.cache
def list_options(function: str) -> tuple[str, ...]:
    """Returns the options that a function has. Functions over a mesh do not have ``axis_name``."""
    base = function.removeprefix("sharded_")
    names = [name for name, option in OPTIONS.items() if base not in option.excluded]
    return tuple(name for name in names if name != "axis_name" or base == function)


def check_names(
    function: Callable[..., Any], options: Mapping[str, Any], loss_fn: Callable[..., Any] | None = None
) -> None:
    """Refuses names in ``**options`` that ``function`` does not have. The message lists those that the function has."""
    if options.keys() <= set(list_options(function.__name__)):
        return
    name, keywords = function.__name__, list_keywords(function)
    if isinstance(options.get("axis_name"), MeshPlacement):
        name, keywords = f"sharded_{name}", (*MeshPlacement._fields, *(x for x in keywords if x != "axis_name"))
    if unknown := [option for option in options if option not in OPTIONS]:
        raise messages.unknown_options_error(name, unknown, keywords, loss_fn)
    refuse_options(name, options)


@functools.cache
def list_keywords(function: Callable[..., Any]) -> tuple[str, ...]:
    """Returns a function's keyword-only arguments: its own parameters, then its options."""
    known = list_options(function.__name__)
    parameters = inspect.signature(function).parameters.items()
    others = (name for name, kind in parameters if kind.kind is kind.KEYWORD_ONLY and name not in known)
    return (*others, *known)


# Options that these functions do not have. Other code refuses them, with special messages.
SPECIAL_MESSAGES = {
    "linear_cross_entropy": ("entropy", "stats", "candidates"),
    "linear_loss": ("cache_bytes", "candidates", "vocab_part_size"),
}


def refuse_options(function: str, options: Mapping[str, Any]) -> None:
    """Refuses options that only other functions have."""
    base = function.removeprefix("sharded_")
    known = *list_options(base), *SPECIAL_MESSAGES.get(base, ())
    if wrong := [name for name in options if name not in known]:
        raise TypeError(f"{function} has no option {', '.join(wrong)}")


class MeshPlacement(NamedTuple):
    """The names of the mesh axes that split the operands. A ``sharded_`` function passes them on as ``axis_name``."""

    mesh: Mesh | AbstractMesh | None = None
    vocab_axis: Axes = None
    batch_axes: Axes = None
    sequence_axis: Axes = None

    @property
    def names_axes(self) -> bool:
        """Whether the placement names a mesh or an axis."""
        return self.mesh is not None or bool(self.vocab_axis or self.batch_axes or self.sequence_axis)

    def find_layout(self, arguments: Arguments) -> Layout:
        """Returns the layout of checked operands that these names describe."""
        _checks.check_mesh(self.mesh)
        return layout_of_names(arguments.hidden, arguments.weight, arguments.call.vocab_dim, **self._asdict())


class Arguments(NamedTuple):
    """A caller's arguments, after the checks of options. Static options are in ``call``, which may lack shapes."""

    call: Call
    hidden: Any
    weight: Any
    labels: Any  # None for a function without labels
    where: Any
    temperature: Any
    logit_scale: Any  # None, like the softcap, if both are numbers; then ``call`` has them
    logit_softcap: Any
    bias: Any
    candidates: Any
    logit_floor: Any
    lora: Any
    ignore_index: Any  # None after `lce_jax.call._describe.describe_call` has masked the rows with this label
    placement: MeshPlacement | None  # None: one device, ``axis_name``, or the operands' mesh


def check_option(name: str, options: Mapping[str, Any]) -> Any:
    """Returns the value of an option, checked unless it is the default."""
    option = OPTIONS[name]
    value = options.get(name, option.default)
    is_default = type(value) is type(option.default) and value == option.default
    return value if is_default else option.check(name, value)


def parse_arguments(
    options: Mapping[str, Any],
    hidden: Any = None,
    weight: Any = None,
    labels: Any = None,
    where: Any = None,
    ignore_index: Any = None,
    mean_logit: bool = False,
    function: str = "linear_logprobs",
    top_k: Any = None,
) -> Arguments:
    """Checks the options of ``function`` (`linear_topk` if ``top_k`` is set). Returns them with the call's arrays."""
    options = options if top_k is None else {**options, "entropy": False}
    function = function if top_k is None else "linear_topk"
    if function in WITH_LABELS:
        shared_checks.require_labels(labels, _checks.NO_LABELS)
    checked = {name: check_option(name, options) for name in list_options("linear_logprobs")}
    scale, softcap, candidates = checked["logit_scale"], checked["logit_softcap"], checked["candidates"]
    traced = is_array(scale) or is_array(softcap)
    placement = checked["axis_name"] if isinstance(checked["axis_name"], MeshPlacement) else None
    static = {name: checked[name] for name in ("entropy", "stats", "weight_layout", "precision")}
    backward_options = {name: checked[name] for name in ("cache_bytes", "gradient_threshold")}
    part_size = checked["vocab_part_size"]
    call = Call(
        logit_scale=1.0 if traced else scale,
        logit_softcap=1.0 if traced and softcap is not None else softcap,
        mean_logit=mean_logit,
        has_bias=checked["bias"] is not None,
        num_candidates=0 if candidates is None else candidates.shape[-1],
        traced_scale=traced,
        vocab_part_size=None if part_size is None else scalars.check_part_size(part_size, **backward_options),
        has_floor=checked["logit_floor"] is not None,
        rank=0 if checked["lora"] is None else scalars.padded_rank(checked["lora"][0].shape[0]),
        top_k=0 if top_k is None else scalars.check_k(top_k),
        function=function,
        requested=checked["implementation"],
        caller_vocab_size=checked["vocab_size"],
        axis_name=checked["axis_name"] if placement is None else None,
        **static,
        **backward_options,
    )
    if call.rank and call.has_bias:
        raise ValueError(
            "lora and bias together: a head has only one of them. Give the bias, and as weight the merged weight, "
            "weight + scale * B @ A"
        )
    if call.has_floor:
        shared_checks.check_floor_options(call.num_candidates, mean_logit)
    factors: tuple[Any, Any] = (scale, softcap) if traced else (None, None)
    ignored = None if ignore_index is None else scalars.integer("ignore_index", ignore_index)
    others = checked["bias"], checked["candidates"], checked["logit_floor"], checked["lora"], ignored, placement
    return Arguments(call, hidden, weight, labels, where, checked["temperature"], *factors, *others)


def parse_arguments_with_ids(options: Mapping[str, Any], hidden: Any, weight: Any, ids: Any, where: Any) -> Arguments:
    """Parses the arguments of `linear_logits`. The ids become candidates. The default implementation is "xla"."""
    _checks.check_array("hidden", hidden)
    _checks.count_candidates(ids, "ids")
    shared_checks.check_candidate_shape("ids", ids.shape, hidden.shape[:-1], "hidden before H")
    chosen = {"implementation": "xla"} if options.get("implementation") is None else {}
    return parse_arguments(
        {**options, "candidates": ids, **chosen}, hidden, weight, None, where, function="linear_logits"
    )


def check_loss_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a loss. Refuses options that request results which a loss does not return."""
    refused = [f"{name}=True" for name in ("entropy", "stats") if scalars.flag(name, options.get(name, False))]
    refused += ["candidates"] if options.get("candidates") is not None else []
    if refused:
        raise ValueError(
            f"{refused[0]}, but a loss has no such output: linear_logprobs (or sharded_linear_logprobs) returns it "
            "with the log-probabilities"
        )
    return {**options, "entropy": False}


def check_loss(reduction: Any, label_smoothing: Any, z_loss: Any, normalizer: Any = None) -> tuple[float, Any, Any]:
    """Checks the arguments of a loss. Returns label smoothing, the weight of lse², and the mean's divisor."""
    scalars.check_choice("reduction", reduction, ("mean", "sum", "none"))
    if normalizer is not None:
        if reduction != "mean":
            raise ValueError(
                f'normalizer={normalizer!r} is the divisor of reduction="mean", but reduction is {reduction!r}'
            )
        normalizer = check_scalar("normalizer", normalizer, scalars.positive, scalars.not_negative)
    z_loss = check_scalar("z_loss", z_loss, scalars.not_negative)
    return scalars.smoothing(label_smoothing), z_loss, normalizer


def refuse_axis_name(axis_name: Any) -> None:
    """Refuses ``axis_name`` in a function over a mesh, where ``vocab_axis`` names the axis."""
    if axis_name is not None:
        raise ValueError(f"axis_name={axis_name!r} is for callers inside shard_map; here the axis is vocab_axis")


def check_beta(beta: Any, argument: str, chosen: str, ends: tuple[str, str]) -> Any:
    """Runs `scalars.check_beta` for a number or an array."""
    if chosen != "jsd" or beta is None:
        return scalars.check_beta(beta, argument, chosen, ends)
    return check_scalar("beta", beta, lambda _, value: scalars.check_beta(value, argument, chosen, ends))
