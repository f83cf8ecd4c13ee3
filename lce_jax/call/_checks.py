"""Checks of the arrays that a caller passes. They run before any computation, and errors show the wrong values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh

from lce_jax.types import _jax, messages, scalars, shared_checks
from lce_jax.types._types import Call, Primals, UnsupportedError, is_array

FLOATS = ("bfloat16", "float16", "float32", "float64")


def check_operands(hidden: Any, weight: Any, labels: Any, where: Any, bias: Any, call: Call) -> None:
    """Checks the arrays of a call against each other. Arrays may be tracers or ``ShapeDtypeStruct``."""
    for name, x in (("hidden", hidden), ("weight", weight)):
        check_floats(name, x)
    check_labels(labels)
    if hidden.ndim < 1:
        raise ValueError("hidden must have at least the hidden dimension, got a scalar")
    if weight.ndim != 2:
        raise ValueError(f"weight must have two dimensions ([V, H] or [H, V]), got shape {tuple(weight.shape)}")
    vocab, size = weight.shape[call.vocab_dim], weight.shape[call.hidden_dim]
    if hidden.shape[-1] != size:
        other = "hv" if call.weight_layout == "vh" else "vh"
        hint = messages.hint_at_logits(tuple(hidden.shape), weight.shape, vocab, f'weight_layout="{other}"')
        raise ValueError(
            f"hidden {tuple(hidden.shape)} ends in H = {hidden.shape[-1]}, but weight {tuple(weight.shape)} with "
            f'weight_layout="{call.weight_layout}" has H = {size}{hint}'
        )
    shared_checks.check_labels_shape(labels.shape, hidden.shape[:-1])
    if vocab == 0 or size == 0:
        raise ValueError(f"weight {tuple(weight.shape)} must have at least one vocabulary entry and one hidden unit")
    if where is not None:
        check_where(where, labels.shape)
    if bias is not None:
        _check_bias(bias, weight, call)


def check_floats(name: str, x: Any) -> None:
    """Checks that ``x`` is an array of floats whose sizes are known."""
    check_array(name, x)
    if hasattr(type(x), "__jax_array__") and not isinstance(x, jax.Array):  # for example a parameter of Flax NNX
        raise TypeError(f"{name} must be an array, got {type(x).__name__}, which holds one: pass {name}[...]")
    check_sizes(name, x)
    if jnp.dtype(x.dtype).name not in FLOATS:
        raise TypeError(f"{name} must be one of {', '.join(FLOATS)}, got {x.dtype}")


def check_vocab_size(vocab_size: Any, columns: int) -> int:
    """Checks ``vocab_size`` (None: all columns) and returns it. ``columns`` is the number of columns of all shards."""
    if vocab_size is None:
        return columns
    vocab_size = scalars.integer("vocab_size", vocab_size)
    if not 1 <= vocab_size <= columns:
        raise ValueError(f"vocab_size must lie in [1, {columns}], the columns of weight, got {vocab_size}")
    return vocab_size


def check_split(primals: Primals, lora: Any, call: Call) -> None:
    """Refuses operands that types show as replicated over ``axis_name``. Without ``check_vma``, types show nothing."""
    if not _jax.tracks_varying(call.axis_name):
        return
    axes = [axis for axis in _jax.list_axes(call.axis_name) if lax.axis_size(axis) > 1]
    _, weight, bias, adapter = primals
    operands = [("weight", weight, weight.shape, ", None) for [V, H]")]
    if bias is not None:
        operands.append(("bias", bias, bias.shape, ")"))
    if adapter is not None:  # messages show the shape of the caller's B, which is not padded
        operands.append(("lora's B", adapter, lora[1].shape, ", None)"))
    for name, x, shape, rest in operands:
        replicated = [axis for axis in axes if axis not in _jax.varying_axes(x)]
        if replicated:
            raise ValueError(
                f"axis_name={call.axis_name!r}, but {name} {tuple(shape)} is the same on every shard of "
                f"{', '.join(map(repr, replicated))}: each shard would count all {call.columns} columns. Pass each "
                f"shard its own columns (in_specs=P({call.axis_name!r}{rest}), or leave axis_name out for a full weight"
            )


def check_array(name: str, x: Any, what: str = "an array") -> None:
    """Checks that ``x`` is an array of JAX or NumPy, or a ``ShapeDtypeStruct``. ``what`` says what is expected."""
    if any(kind.__module__.partition(".")[0] == "torch" for kind in type(x).__mro__):
        raise TypeError(
            f"{name} must be {what} of JAX, got torch's {type(x).__name__}: lce_torch_bridge has the same functions "
            "for torch tensors"
        )
    if not is_array(x):
        write = f": pass jnp.asarray({name})" if isinstance(x, list | tuple) else ""
        raise TypeError(f"{name} must be {what}, got {type(x).__name__}{write}")


def check_sizes(name: str, x: Any) -> None:
    """Refuses symbolic sizes (``jax.export.symbolic_shape``), because a program's tiles depend on its sizes."""
    if not all(isinstance(size, int | np.integer) for size in x.shape):
        raise UnsupportedError(
            f"{name} {tuple(x.shape)} has a symbolic size, but tiles depend on sizes. Export one program for each of "
            "a few sizes, {n: jax.export.export(jax.jit(f))(*shapes(n)) for n in (1024, 4096)}, and pad the tokens of "
            "a call up to the next of them with where=False"
        )


def check_mesh(value: Any) -> None:
    """Refuses a value that is not a mesh, such as the name of an axis."""
    if value is not None and not isinstance(value, Mesh | AbstractMesh):
        axis = f", and vocab_axis={value!r} for its axis" if isinstance(value, str) else ""
        raise TypeError(
            f"mesh must be a jax.sharding.Mesh, got {value!r:.80}: write mesh=jax.make_mesh(shape, names){axis}, or "
            "leave mesh out under jax.set_mesh(mesh)"
        )


def check_labels(x: Any, name: str = "labels") -> None:
    """Checks that labels, or other ids, are an array of integers."""
    check_array(name, x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got {x.dtype}: write {name}.astype(int)")


NO_LABELS = "for entropy and lse alone, any ids will do, such as jnp.zeros(hidden.shape[:-1], int)"


def warn_of_labels(labels: Any, where: Any, ignore_index: int | None, call: Call) -> None:
    """Runs `shared_checks.warn_outside` for labels that this process can read without waiting for a device."""
    ids = _read_if_ready(labels)
    if ids is None or not ids.size or call.axis_name is not None:
        return
    vocab_size = check_vocab_size(call.caller_vocab_size, call.columns)
    unmasked = None if where is None else _read_if_ready(where)
    if shared_checks.all_in_vocabulary(ids, vocab_size) or (where is not None and unmasked is None):
        return
    ids = ids.reshape(-1) if unmasked is None else ids[unmasked]
    ids = ids if ignore_index is None else ids[ids != ignore_index]
    shared_checks.warn_outside(ids, vocab_size, is_cross_entropy=call.function == "linear_cross_entropy")


def _read_if_ready(x: Any) -> np.ndarray | None:
    """Returns the values of a NumPy array, or of a JAX array that a CPU has already computed; None for other arrays."""
    if isinstance(x, np.ndarray):
        return x
    if not isinstance(x, jax.Array) or not is_concrete(x) or x.is_deleted():
        return None
    on_cpu = all(device.platform == "cpu" for device in x.devices())
    return np.asarray(jax.device_get(x)) if on_cpu and x.is_ready() else None  # type: ignore[attr-defined]


def count_candidates(x: Any, name: str = "candidates") -> int:
    """Checks the dtype and sizes of ids ``[..., K]``, and returns K."""
    check_labels(x, name)
    check_sizes(name, x)
    return shared_checks.count_candidates(name, x.shape)


def check_where(x: Any, shape: tuple[int, ...], shape_of: str = "labels") -> None:
    """Checks that ``where`` is a bool array of ``shape``, the shape of the argument that ``shape_of`` names."""
    check_array("where", x, "a bool array")
    if x.dtype != jnp.bool_:
        raise TypeError(f"where must be bool, got {x.dtype}: write `where != 0` if that is what it means")
    if tuple(x.shape) != tuple(shape):
        fitting = messages.suggest_broadcasts("where", tuple(x.shape), tuple(shape))
        write = " or ".join(f"jnp.broadcast_to({each}, {tuple(shape)})" for each in fitting)
        hint = f": write {write}" if write else ""
        raise ValueError(f"where {tuple(x.shape)} must have the shape of {shape_of} {tuple(shape)}{hint}")


def check_temperature(value: Any, shape: tuple[int, ...], where: Any = None) -> Any:
    """Checks a temperature: a positive number, or an array that broadcasts. Returns the value, or None for 1.

    Values are checked if they are known. In a traced array, a wrong value affects only its own row.
    """
    if isinstance(value, list | tuple):
        check_array("temperature", value, "a number or an array")
    if not is_array(value) or isinstance(value, np.generic):
        value = scalars.positive("temperature", value)
        return None if value == 1.0 else value
    check_per_token("temperature", value, shape)
    check_known_values(
        "temperature must be positive and finite in float32", value, scalars.is_temperature, shape, where
    )
    return value


def check_floor(value: Any, shape: tuple[int, ...], where: Any = None) -> Any:
    """Checks a floor, and returns it: a number, which may be infinite, or an array that broadcasts.

    A known NaN is refused. In a traced array, a NaN affects only its own row.
    """
    if isinstance(value, list | tuple):
        check_array("logit_floor", value, "a number or an array")
    if not is_array(value) or isinstance(value, np.generic):
        return scalars.bound("logit_floor", value)
    check_per_token("logit_floor", value, shape)
    check_known_values("logit_floor must be a number or infinite", value, lambda x: ~np.isnan(x), shape, where)
    return value


def check_per_token(name: str, value: Any, shape: tuple[int, ...], shape_of: str = "labels") -> None:
    """Checks that an array of floats broadcasts to ``shape``, the shape of the argument that ``shape_of`` names."""
    check_array(name, value)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise TypeError(f"{name} must be floating point, got {value.dtype}")
    try:
        fits = np.broadcast_shapes(value.shape, shape) == tuple(shape)
    except ValueError:
        fits = False
    if not fits:
        fitting = messages.suggest_broadcasts(name, tuple(value.shape), tuple(shape))
        hint = f": write {fitting[0]} for one number per sequence" if fitting else ""
        raise ValueError(f"{name} {tuple(value.shape)} must broadcast to {shape_of} {tuple(shape)}{hint}")


def check_known_values(
    must: str,
    value: Any,
    is_right: Callable[[Any], Any],
    shape: tuple[int, ...],
    where: Any = None,
    advice: str = "leave such rows out with where=",
) -> None:
    """Refuses known values that are wrong in unmasked rows. ``must`` begins the message, and ``advice`` ends it."""
    known = [x for x in (value, where) if x is not None]
    if not all(is_concrete(x) for x in known):
        return
    numbers, *unmasked = jax.device_get(known)
    numbers = np.broadcast_to(numbers.astype(np.float64), shape)
    wrong = ~is_right(numbers) & (unmasked[0] if unmasked else True)
    if wrong.any():
        examples = np.unique(numbers[wrong])
        raise ValueError(
            f"{must}, but is {', '.join(map(str, examples[:3]))}"
            f"{', …' if len(examples) > 3 else ''} in {wrong.sum()} of {wrong.size} rows, the first of them "
            f"{tuple(int(i) for i in np.argwhere(wrong)[0])}: {advice}"
        )


def is_concrete(x: Any) -> bool:
    """Whether this process can read the values of ``x``."""
    if isinstance(x, jax.core.Tracer | jax.ShapeDtypeStruct):
        return False
    return not isinstance(x, jax.Array) or x.is_fully_addressable


def find_axis_size(axis_name: Any, outside: str = "use sharded_linear_logprobs") -> int:
    """Returns the number of shards over ``axis_name``. Refuses a name that no enclosing ``shard_map`` binds.

    ``outside`` is the message's advice for callers outside ``shard_map``.
    """
    try:
        return lax.axis_size(axis_name)
    except NameError:
        bound = tuple(jax.sharding.get_abstract_mesh().manual_axes)
        raise ValueError(
            f"axis_name {axis_name!r} is not bound here (bound: {bound or 'none'}): call inside jax.shard_map over a "
            f"mesh with that axis, or outside it {outside}"
        ) from None


def check_class_weights(class_weights: Any, weight: Any, call: Call, smoothing: float) -> None:
    """Checks the type and shape of class weights. Refuses class weights together with label smoothing."""
    if not is_array(class_weights):
        raise TypeError(f"class_weights must be an array, got {type(class_weights).__name__}")
    if jnp.dtype(class_weights.dtype).name not in FLOATS:
        raise TypeError(f"class_weights must be one of {', '.join(FLOATS)}, got {class_weights.dtype}")
    shared_checks.check_class_weights(class_weights.shape, weight.shape, weight.shape[call.vocab_dim], smoothing)


def _check_bias(bias: Any, weight: Any, call: Call) -> None:
    if not is_array(bias):
        raise TypeError(f"bias must be an array, got {type(bias).__name__}")
    if jnp.dtype(bias.dtype).name not in FLOATS:
        raise TypeError(f"bias must be one of {', '.join(FLOATS)}, got {bias.dtype}")
    if tuple(bias.shape) != (weight.shape[call.vocab_dim],):
        raise ValueError(
            f"bias {tuple(bias.shape)} must have one number per vocabulary column of weight {tuple(weight.shape)}: "
            f"({weight.shape[call.vocab_dim]},), even if a mesh axis splits them"
        )
