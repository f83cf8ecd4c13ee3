"""Validation at the public door, once: what is wrong, with the values, before anything is computed."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lce_jax import _compat, _dispatch, scalars
from lce_jax._shard import Rows, is_temperature
from lce_jax._types import CallOptions, Case, LogprobOptions, Options, is_array

if TYPE_CHECKING:
    from jaxtyping import Array, Int

FLOATS = ("bfloat16", "float16", "float32", "float64")


def options(given: LogprobOptions, mean_logit: bool = False) -> CallOptions:
    """The options of a call, validated as far as they can be without its shapes."""
    static = {field.name for field in dataclasses.fields(Options)}
    fixed: dict[str, Any] = {name: value for name, value in given.items() if name in static}
    scale, softcap = (fixed.get(name, default) for name, default in (("logit_scale", 1.0), ("logit_softcap", None)))
    scale = number_or_scalar("logit_scale", scale, scalars.number)
    softcap = None if softcap is None else number_or_scalar("logit_softcap", softcap, scalars.positive)
    traced = is_array(scale) or is_array(softcap)
    if traced:
        fixed |= {"logit_scale": 1.0, "logit_softcap": None if softcap is None else 1.0}
    checked = static_options(**fixed)
    bias = given.get("bias")
    return CallOptions(
        static=dataclasses.replace(checked, mean_logit=mean_logit, traced_scale=traced, has_bias=bias is not None),
        temperature=given.get("temperature", 1.0),
        logit_scale=scale if traced else None,
        logit_softcap=softcap if traced else None,
        bias=bias,
        vocab_size=given.get("vocab_size"),
        axis_name=_axis_name(given.get("axis_name")),
        implementation=_implementation_names(given.get("implementation")),
    )


def check_names(function: Callable[..., Any], given: Mapping[str, Any], without: Sequence[str] = ()) -> None:
    """Every name in the ``**options`` that ``function`` was given must be one, of those that are not its own."""
    unknown = [name for name in given if name not in LogprobOptions.__annotations__]
    if not unknown:
        return
    own = [name for name, kind in inspect.signature(function).parameters.items() if kind.kind is kind.KEYWORD_ONLY]
    known = [*own, *(name for name in LogprobOptions.__annotations__ if name not in without)]
    close = difflib.get_close_matches(unknown[0], known, 1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise TypeError(f"{function.__name__}: unknown option {', '.join(unknown)}{hint}; known: {', '.join(known)}")


def loss_options(given: LogprobOptions) -> LogprobOptions:
    """The options of a loss, which has neither entropy nor extremes to return."""
    for name in ("entropy", "stats"):
        if scalars.flag(name, given.get(name, False)):
            raise ValueError(
                f"{name}=True, but a loss has no such output: linear_logprobs (or sharded_linear_logprobs) returns it "
                "beside the log-probabilities, of which the loss is the mean"
            )
    return {**given, "entropy": False}


def loss(reduction: Any, label_smoothing: Any, z_loss: Any, normalizer: Any = None) -> tuple[float, Any, Any]:
    """What a loss adds to the options, validated: the smoothing, the weight of lse² and the mean's divisor."""
    scalars.one_of("reduction", reduction, ("mean", "sum", "none"))
    if normalizer is not None:
        if reduction != "mean":
            raise ValueError(
                f'normalizer={normalizer!r} is the divisor of reduction="mean", reduction is {reduction!r}'
            )
        normalizer = number_or_scalar("normalizer", normalizer, scalars.positive)
    z_loss = number_or_scalar("z_loss", z_loss, scalars.not_negative)
    return scalars.fraction("label_smoothing", label_smoothing), z_loss, normalizer


def no_axis_name(given: CallOptions) -> None:
    """Outside ``shard_map`` the axis has another name."""
    if given.axis_name is not None:
        raise ValueError(f"axis_name={given.axis_name!r} is for callers inside shard_map; here the axis is vocab_axis")


def static_options(
    *,
    logit_scale: Any = 1.0,
    logit_softcap: Any = None,
    entropy: Any = True,
    stats: Any = False,
    weight_layout: Any = "vh",
    cache_bytes: Any = 0,
    precision: Any = None,
) -> Options:
    """The static options, validated."""
    if weight_layout not in ("vh", "hv"):
        raise ValueError(f'weight_layout must be "vh" ([V, H]) or "hv" ([H, V]), got {weight_layout!r}')
    if logit_softcap is not None:
        logit_softcap = scalars.positive("logit_softcap", logit_softcap)
    return Options(
        logit_scale=scalars.number("logit_scale", logit_scale),
        logit_softcap=logit_softcap,
        entropy=scalars.flag("entropy", entropy),
        stats=scalars.flag("stats", stats),
        weight_layout=weight_layout,
        cache_bytes=scalars.num_bytes("cache_bytes", cache_bytes),
        precision=_precision(precision),
    )


def case(hidden: Any, weight: Any, labels: Any, where: Any, call_options: CallOptions) -> Case:
    """A call's shapes and dtypes, validated against each other. Arrays, tracers and ShapeDtypeStructs alike."""
    opts = call_options.static
    _check_floats(hidden, weight)
    check_labels(labels)
    _check_shapes(hidden, weight, labels, opts)
    if where is not None:
        check_where(where, labels.shape)
    if call_options.bias is not None:
        _check_bias(call_options.bias, weight, opts)
    vocab, size = weight.shape[opts.vocab_dim], weight.shape[opts.hidden_dim]
    device = _dispatch.current_device(weight)
    dtype, given = (jnp.dtype(jax.dtypes.canonicalize_dtype(x.dtype)) for x in (weight, hidden))
    return Case(
        num_tokens=math.prod(labels.shape),
        hidden_size=size,
        vocab_size=vocab,
        dtype=dtype,
        options=opts,
        given_dtype=None if given == dtype else given,
        partial_rows=where is not None,
        device=device,
    )


def vocabulary(vocab_size: Any, columns: int) -> int:
    """The true vocabulary: ``vocab_size``, against the columns of all shards, or all of them."""
    if vocab_size is None:
        return columns
    vocab_size = scalars.integer("vocab_size", vocab_size)
    if not 1 <= vocab_size <= columns:
        raise ValueError(f"vocab_size must lie in [1, {columns}], the columns of weight, got {vocab_size}")
    return vocab_size


def rows(
    labels: Any, where: Any, value: Any, vocab_size: int, dtype: Any, scale: Any = None, softcap: Any = None
) -> Rows:
    """The per-token operands; labels outside [0, vocab_size) become -1."""
    factors = (temperature(value, labels.shape, where), scale, softcap)
    arrays = tuple(None if factor is None else on_device(factor) for factor in factors)
    where = None if where is None else jnp.asarray(where)
    return _rows(int32_labels(labels), where, arrays, vocab_size, dtype)


@functools.partial(jax.jit, static_argnums=(3, 4), inline=True)
def _rows(labels: Array, where: Array | None, factors: Any, vocab_size: int, dtype: Any) -> Rows:
    """Jitted: outside ``jit`` each number in an expression is a transfer, which ``jax.transfer_guard`` may forbid."""
    labels = jnp.where((labels >= 0) & (labels < vocab_size), labels, -1)
    return Rows(labels, where, *(None if x is None else _per_token(x, labels.shape, dtype) for x in factors))


def per_token(value: Any, shape: tuple[int, ...], dtype: Any) -> Array:
    """A number or an array that broadcasts, as an operand of the labels' shape without a gradient."""
    return _per_token(on_device(value), shape, dtype)


@functools.partial(jax.jit, static_argnums=(1, 2), inline=True)
def _per_token(value: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    return jnp.broadcast_to(lax.stop_gradient(value).astype(dtype), shape)


def on_device(value: Any) -> Array:
    """A number as an array, put there explicitly; arrays as they are."""
    return value if isinstance(value, jax.Array) else jax.device_put(np.asarray(value))


def num_rows(value: Any, num_tokens: int) -> Int[Array, ""]:
    """A number of rows in [0, num_tokens]; a traced one is clipped to it."""
    if scalars.is_integer(value):
        if not 0 <= value <= num_tokens:
            raise ValueError(f"num_rows must lie in [0, {num_tokens}], the rows of labels, got {value}")
    elif not is_array(value) or value.shape != () or not jnp.issubdtype(value.dtype, jnp.integer):
        raise TypeError(f"num_rows must be an integer or an integer array of shape (), got {value!r}")
    return jnp.clip(jnp.asarray(value, jnp.int32), 0, num_tokens)


def int32_labels(labels: Any) -> Array:
    """Labels of any integer type as int32; what does not fit is clamped, still out of every vocabulary.

    NumPy's 64-bit labels are clamped before JAX sees them, which would wrap them (2³² + 3 is not 3).
    """
    check_labels(labels)
    if isinstance(labels, np.ndarray | np.generic):
        return jnp.asarray(_clamped(labels, np))
    return _int32(jnp.asarray(labels))


@functools.partial(jax.jit, inline=True)
def _int32(labels: Array) -> Array:
    return _clamped(labels, jnp)


def _clamped(labels: Any, numpy: Any) -> Any:
    info, int32 = jnp.iinfo(labels.dtype), np.iinfo(np.int32)
    if info.min < int32.min or info.max > int32.max:
        labels = numpy.clip(labels, max(info.min, int32.min), int32.max)
    return labels.astype(np.int32)


def check_split(weight: Any, axis_name: Any, case: Case) -> None:
    """Inside ``shard_map``, the weight's type must say that each shard of ``axis_name`` has columns of its own."""
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not _compat.tracks_varying(axis_name):
        return
    whole = [name for name in names if name not in _compat.varying_axes(weight) and lax.axis_size(name) > 1]
    if whole:
        raise ValueError(
            f"axis_name={axis_name!r}, but weight {tuple(weight.shape)} is the same on every shard of "
            f"{', '.join(map(repr, whole))}: each of them would count all {case.vocab_size} columns. Pass each shard "
            f"its own columns (in_specs=P({names[0]!r}, None) for [V, H]), or leave axis_name out for a whole weight"
        )


def check_array(name: str, x: Any, what: str = "an array") -> None:
    """``x`` must be an array of JAX or NumPy, or the shape of one."""
    if any(kind.__module__.partition(".")[0] == "torch" for kind in type(x).__mro__):
        raise TypeError(
            f"{name} must be {what} of JAX, got torch's {type(x).__name__}: lce_torch_bridge has the same functions "
            "for torch tensors"
        )
    if not is_array(x):
        raise TypeError(f"{name} must be {what}, got {type(x).__name__}")


def check_labels(labels: Any) -> None:
    """Labels must be an array of integers."""
    check_array("labels", labels)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"labels must be integers (vocabulary ids), got {labels.dtype}")


def check_where(where: Any, shape: tuple[int, ...]) -> None:
    """``where`` must be a bool array of the labels' shape."""
    check_array("where", where, "a bool array")
    if where.dtype != jnp.bool_:
        raise TypeError(f"where must be bool, got {where.dtype}: write `where != 0` if that is what it means")
    if tuple(where.shape) != tuple(shape):
        raise ValueError(f"where {tuple(where.shape)} must have the shape of labels {tuple(shape)}")


def temperature(value: Any, shape: tuple[int, ...], where: Any = None) -> Any:
    """A temperature as given, or None where it is the number 1: a positive number, or an array that broadcasts.

    What it holds is looked at where it is known; `_shard` keeps the damage of a traced one in its rows.
    """
    if not is_array(value) or isinstance(value, np.generic):
        value = scalars.positive("temperature", value)
        return None if value == 1.0 else value
    check_array("temperature", value)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise TypeError(f"temperature must be floating point, got {value.dtype}")
    try:
        fits = np.broadcast_shapes(value.shape, shape) == tuple(shape)
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"temperature {tuple(value.shape)} must broadcast to labels {tuple(shape)}")
    _check_positive(value, shape, where)
    return value


def _check_positive(value: Any, shape: tuple[int, ...], where: Any) -> None:
    known = [x for x in (value, where) if x is not None]
    if not all(_is_concrete(x) for x in known):
        return
    given, *live = jax.device_get(known)
    given = np.broadcast_to(given.astype(np.float64), shape)
    wrong = ~is_temperature(given) & (live[0] if live else True)
    if wrong.any():
        found = np.unique(given[wrong])
        raise ValueError(
            f"temperature must be positive and finite in float32, but is {', '.join(map(str, found[:3]))}"
            f"{', …' if len(found) > 3 else ''} in {wrong.sum()} of {wrong.size} rows, the first of them "
            f"{tuple(int(i) for i in np.argwhere(wrong)[0])}: leave such rows out with where="
        )


def _is_concrete(x: Any) -> bool:
    if isinstance(x, jax.core.Tracer | jax.ShapeDtypeStruct):
        return False
    return not isinstance(x, jax.Array) or x.is_fully_addressable


def axis_size(axis_name: Any) -> int:
    """The number of shards over ``axis_name``, which must be bound by an enclosing ``shard_map``."""
    if axis_name is None:
        return 1
    try:
        return lax.axis_size(axis_name)
    except NameError:
        bound = tuple(jax.sharding.get_abstract_mesh().manual_axes)
        raise ValueError(
            f"axis_name {axis_name!r} is not bound here (bound: {bound or 'none'}): call inside jax.shard_map over a "
            "mesh with that axis, or use sharded_linear_logprobs outside it"
        ) from None


def number_or_scalar(name: str, value: Any, check: Callable[[str, Any], float]) -> Any:
    """A number that passes ``check``, or a real array of shape (), traced or not, whose value nobody looks at."""
    if not is_array(value) or isinstance(value, np.generic):
        return check(name, value)
    check_array(name, value)
    if not (jnp.issubdtype(value.dtype, jnp.floating) or jnp.issubdtype(value.dtype, jnp.integer)):
        raise TypeError(f"{name} must be a real number, got an array of {value.dtype}")
    if value.shape != ():
        raise ValueError(f"{name} must be a number or an array of shape (), got shape {tuple(value.shape)}")
    return value


def _check_floats(hidden: Any, weight: Any) -> None:
    for name, x in (("hidden", hidden), ("weight", weight)):
        check_array(name, x)
        if jnp.dtype(x.dtype).name not in FLOATS:
            raise TypeError(f"{name} must be one of {', '.join(FLOATS)}, got {x.dtype}")


def _check_shapes(hidden: Any, weight: Any, labels: Any, opts: Options) -> None:
    if hidden.ndim < 1:
        raise ValueError("hidden must have at least the hidden dimension, got a scalar")
    if weight.ndim != 2:
        raise ValueError(f"weight must have two dimensions ([V, H] or [H, V]), got shape {tuple(weight.shape)}")
    vocab, size = weight.shape[opts.vocab_dim], weight.shape[opts.hidden_dim]
    if hidden.shape[-1] != size:
        other = "hv" if opts.weight_layout == "vh" else "vh"
        hint = f' (it fits weight_layout="{other}")' if hidden.shape[-1] == vocab else ""
        raise ValueError(
            f"hidden {tuple(hidden.shape)} ends in H = {hidden.shape[-1]}, but weight {tuple(weight.shape)} with "
            f'weight_layout="{opts.weight_layout}" has H = {size}{hint}'
        )
    if tuple(labels.shape) != tuple(hidden.shape[:-1]):
        raise ValueError(f"labels {tuple(labels.shape)} must have hidden's leading shape {tuple(hidden.shape[:-1])}")
    if vocab == 0 or size == 0:
        raise ValueError(f"weight {tuple(weight.shape)} must have at least one vocabulary entry and one hidden unit")


def _check_bias(bias: Any, weight: Any, opts: Options) -> None:
    if not is_array(bias):
        raise TypeError(f"bias must be an array, got {type(bias).__name__}")
    if jnp.dtype(bias.dtype).name not in FLOATS:
        raise TypeError(f"bias must be one of {', '.join(FLOATS)}, got {bias.dtype}")
    if tuple(bias.shape) != (weight.shape[opts.vocab_dim],):
        raise ValueError(
            f"bias {tuple(bias.shape)} must have one number per vocabulary column of weight {tuple(weight.shape)}: "
            f"({weight.shape[opts.vocab_dim]},), also where a mesh axis splits them"
        )


def _axis_name(axis_name: Any) -> Any:
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if axis_name is None or (names and all(isinstance(name, str) for name in names)):
        return axis_name
    raise TypeError(f"axis_name must be None, a mesh axis's name or a tuple of them, got {axis_name!r}")


def _implementation_names(implementation: Any) -> tuple[str, ...] | None:
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


def _precision(precision: Any) -> Any:
    if precision is None:
        return None
    one = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    try:
        jax.eval_shape(lambda a, b: lax.dot(a, b, precision=precision), one, one)
        hash(precision)
    except Exception as error:
        raise ValueError(f"precision {precision!r} is not a jax.lax.PrecisionLike: {error}") from error
    return precision
