"""Dispatches torch functions that are called with deferred logits.

`call` looks a function up in `TABLE`. The table's functions in this module add a step to the recipe, and compute
nothing. The functions in `_rows` select rows; those in `_fused_functions` compute results without logits. Every torch
function that is not in the table gets the values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from lce_torch_bridge.deferred import _fused_functions, _rows
from lce_torch_bridge.deferred._recipe import Recipe, Step, make_layout_like
from lce_torch_bridge.deferred._tensor import DeferredLogits, DisableOverride
from lce_torch_bridge.deferred._traced import DEFERRED, Deferred, TracedLogits
from lce_torch_bridge.tensors import _device

T: Any = torch.Tensor
F = torch.nn.functional
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a torch function with at least one deferred argument."""
    x = args[0] if args else kwargs.get("input")
    if func in GETTERS and isinstance(x, DeferredLogits):
        with DisableOverride():
            return func(*args, **kwargs) if x._value is None else func(x._value, *args[1:], **kwargs)
    rest, others = args[1:], kwargs
    if func in COMMUTATIVE and len(args) == 2 and not kwargs and not isinstance(x, DEFERRED):
        x, rest = args[1], args[:1]
    if not args:
        others = {name: each for name, each in kwargs.items() if name != "input"}
    if isinstance(x, DEFERRED) and kwargs.get("out") is None and (function := TABLE.get(func)) and x.is_deferred():
        result = function(x, func, rest, others)
        if result is not NotImplemented:
            return result
    return _call_on_values(func, args, kwargs)


def _call_on_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a torch function on the values of the logits. In-place changes of the values persist."""
    name, first = _name_function(func), args[0] if args else None
    if func is torch.broadcast_tensors and (result := _rows.broadcast_tensors(args)) is not NotImplemented:
        return result
    if func in (torch.autograd.grad, torch.autograd.backward):
        _refuse_gradient_of_logits(args, kwargs)
    if isinstance(first, DeferredLogits) and func in EXPOSES:
        first.expose()
    if isinstance(first, DeferredLogits) and func in HOOKS:
        _check_hook(first, args)
    if isinstance(first, DEFERRED) and func in RESHAPES_IN_PLACE:
        raise NotImplementedError(
            f"{name} cannot reshape deferred logits in place: write it without the _, or call it on logits.compute()"
        )
    writes = isinstance(first, DEFERRED) and (_writes_first_argument(func) or kwargs.get("inplace") is True)
    if writes:
        first.write(name)  # type: ignore[union-attr]
    if isinstance(out := kwargs.get("out"), DEFERRED):
        out.write(name)
    result = func(*_substitute_values(args, name), **_substitute_values(kwargs, name))
    return first if writes and isinstance(result, torch.Tensor) else result


def _name_function(func: Any) -> str:
    if torch.compiler.is_compiling():
        return str(getattr(func, "__name__", ""))
    return torch.overrides.resolve_name(func) or getattr(func, "__name__", repr(func))


def _writes_first_argument(func: Any) -> bool:
    """Whether a function writes to its first argument.

    While torch.compile traces, only functions of torch.Tensor are looked up, because its compiler cannot hash others.
    """
    return func in WRITES or (not torch.compiler.is_compiling() and func in WRITES_ELSEWHERE)


def _refuse_gradient_of_logits(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    inputs = kwargs.get("inputs", args[1] if len(args) > 1 else ())
    inputs = inputs if isinstance(inputs, tuple | list) else (inputs,)
    for x in inputs:
        if isinstance(x, TracedLogits) or (isinstance(x, DeferredLogits) and (x._used or x._value is None)):
            _refuse_gradient()


def _refuse_gradient() -> None:
    raise RuntimeError(
        "this asks for the gradient of deferred logits themselves. Results that were computed without the logits have "
        "no such gradient, because they depend on hidden states alone. Write logits = logits.compute() and compute the "
        "loss from these; call a model that computes its own loss without labels"
    )


def _substitute_values(x: Any, needed_for: str) -> Any:
    """Returns ``x`` with values in place of deferred logits, including those in lists, tuples and dictionaries."""
    if isinstance(x, DEFERRED):
        return x.value(needed_for)
    if isinstance(x, dict):
        return {name: _substitute_values(each, needed_for) for name, each in x.items()}
    if isinstance(x, tuple | list):
        values = [_substitute_values(each, needed_for) for each in x]
        return type(x)(*values) if hasattr(x, "_fields") else type(x)(values)
    return x


# Functions that add a step to the recipe


def _add_step(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: Any, layout: torch.Tensor, **changes: Any) -> Any:
    return x.add_step(Step(func, args, kwargs), layout, **changes)


def _cast(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Adds a cast to another dtype on the same device."""
    recipe, device = x.recipe, x.recipe.source.hidden.device
    if _are_dtypes(args) and not kwargs:
        out = _probe_cast_once(func, args, recipe.dtype, device)
    else:
        out = _probe_cast(func, tuple([_Input if each is x else each for each in args]), recipe.dtype, device, **kwargs)
    if out is _Input or isinstance(out, str):
        return x if out is _Input else out
    if out is None:
        return NotImplemented
    return _add_step(x, func, args, kwargs, make_layout_like(recipe.layout, out), **_keep_statistics(recipe))


class _Input:
    """Stands for the input tensor of a cast, as an argument or as the unchanged result."""


def _are_dtypes(arguments: tuple[Any, ...]) -> bool:
    return all(type(each) is torch.dtype for each in arguments)


def _probe_cast(func: Any, args: tuple[Any, ...], dtype: torch.dtype, device: torch.device, **kwargs: Any) -> Any:
    """Returns a cast's result dtype or ``type()``'s string, `_Input` if it changes nothing, None if it is no cast."""
    probe = torch.empty(0, dtype=dtype, device=device)
    out = func(probe, *(probe if each is _Input else each for each in args), **kwargs)
    if out is probe or isinstance(out, str):
        return _Input if out is probe else out
    is_cast = isinstance(out, torch.Tensor) and out.device == device and out.dtype in (*_FLOATS, torch.float64)
    return out.dtype if is_cast else None


_probe_cast_once = _device.cache_results(_probe_cast)


def _keep_statistics(recipe: Recipe) -> dict[str, Any]:
    """Returns the recipe's fields that stay valid if a step keeps all values: the selection of rows, and statistics."""
    return {"selection": recipe.selection, "results": recipe.results}


def _contiguous(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    layout = x.recipe.layout
    after = func(layout, *args, **kwargs) if args or kwargs else _apply_once(func, layout)
    return x if after is layout else _add_step(x, func, args, kwargs, after, **_keep_statistics(x.recipe))


@_device.cache_results
def _apply_once(func: Any, layout: torch.Tensor) -> Any:
    return func(layout)


def _detach(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return x.add_step(Step(func, args, kwargs), x.recipe.layout, True, **_keep_statistics(x.recipe), grad=False)


def _scale(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Multiplies or divides by one number or by one number per row; or multiplies a softmax by its own logits."""
    if len(args) != 1 or kwargs:
        return NotImplemented
    (by,), recipe, is_division = args, x.recipe, func in DIVISIONS
    if isinstance(by, DEFERRED):
        return NotImplemented if is_division else _multiply_deferred(x, func, by)
    if isinstance(by, torch.Tensor):
        number = _read_number(by)
        if number is None:
            return _scale_rows(x, func, by)
    elif isinstance(by, int | float) and not isinstance(by, bool):
        number = float(by)
    else:
        return NotImplemented
    if not math.isfinite(number) or (is_division and number == 0):
        return NotImplemented
    layout = make_layout_like(recipe.layout)
    if recipe.kind != "logits":
        coefficient = recipe.coefficient / number if is_division else recipe.coefficient * number
        return _add_step(x, func, args, {}, layout, coefficient=coefficient, **_keep_statistics(recipe))
    return _add_step(x, func, args, {}, layout, factors=(*recipe.factors, ("div" if is_division else "mul", number)))


def _scale_in_place(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Multiplies or divides by a number in place, if no other tensor shares the memory of these logits."""
    if isinstance(x, TracedLogits) or not x.is_unshared() or (x.recipe.grad and not torch.is_grad_enabled()):
        return NotImplemented
    if len(args) != 1 or isinstance(args[0], torch.Tensor):
        return NotImplemented
    result = _scale(x, IN_PLACE[func], args, kwargs)
    return result if result is NotImplemented else x.become(result)


def _read_number(by: torch.Tensor) -> float | None:
    """Returns the value of a tensor if it is a scalar on the CPU without a gradient; else None."""
    is_constant = by.ndim == 0 and by.device.type == "cpu" and not by.requires_grad and not by.is_complex()
    return float(by.item()) if is_constant else None


def _accepts_tensor(recipe: Recipe, by: torch.Tensor) -> bool:
    """Whether a step may use tensor ``by``: it is on the logits' device, and has no gradient that would be lost."""
    device = recipe.source.hidden.device
    return by.device == device and (recipe.grad or not (by.requires_grad and torch.is_grad_enabled()))


def _scale_rows(x: Deferred, func: Any, by: torch.Tensor) -> Any:
    """Multiplies or divides each row by its own number, by scaling the hidden states instead of the logits."""
    recipe = x.recipe
    is_linear = recipe.kind == "logits" and not any(name == "tanh" for name, _ in recipe.factors)
    rows = (*recipe.layout.shape[:-1], 1)
    fits = by.ndim <= len(rows) and all(n in (1, m) for n, m in zip(by.shape[::-1], rows[::-1], strict=False))
    if (
        recipe.classes_first
        or not (is_linear and fits)
        or not by.is_floating_point()
        or not _accepts_tensor(recipe, by)
    ):
        return NotImplemented
    if recipe.hidden.dtype == torch.float16:
        return NotImplemented  # hidden states in float16 may overflow where the logits would not
    if recipe.bias is not None and by.numel() != 1:
        return NotImplemented
    dtype = torch.promote_types(recipe.dtype, by.dtype) if by.ndim else recipe.dtype
    hidden = func(recipe.hidden, by).to(recipe.hidden.dtype)
    bias = None if recipe.bias is None else func(recipe.bias, by.reshape(())).to(recipe.bias.dtype)
    layout = make_layout_like(recipe.layout, dtype)
    return _add_step(x, func, (by,), {}, layout, hidden=hidden, bias=bias)


def _multiply_deferred(x: Deferred, func: Any, by: Deferred) -> Any:
    """Multiplies a softmax by its log_softmax or its logits. The sum of such a product gives an entropy."""
    if not by.is_deferred():
        return NotImplemented
    one, other = sorted((x.recipe, by.recipe), key=lambda recipe: recipe.kind != "softmax")
    if one.kind != "softmax" or one.layout.shape != other.layout.shape:
        return NotImplemented
    assert one.logits is not None
    logits = other if other.logits is None else other.logits
    kind = {"log_softmax": "p_log_p", "logits": "p_logits"}.get(other.kind)
    is_recorded_like = one.grad == other.grad or not torch.is_grad_enabled()
    if kind is None or logits.results is not one.logits.results or not is_recorded_like:
        return NotImplemented
    dtype = one.dtype if one.dtype == other.dtype else torch.promote_types(one.dtype, other.dtype)
    layout = make_layout_like(x.recipe.layout, dtype)
    if isinstance(by, DeferredLogits):
        by._used = True
    coefficient = one.coefficient * other.coefficient
    return _add_step(x, func, (by,), {}, layout, kind=kind, coefficient=coefficient, logits=one.logits)


def _negate(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    recipe, layout = x.recipe, make_layout_like(x.recipe.layout)
    if args or kwargs:
        return NotImplemented
    if recipe.kind != "logits":
        return _add_step(x, func, (), {}, layout, coefficient=-recipe.coefficient, **_keep_statistics(recipe))
    return _add_step(x, func, (), {}, layout, factors=(*recipe.factors, ("mul", -1.0)))


def _tanh(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    recipe = x.recipe
    if args or kwargs or recipe.kind != "logits":
        return NotImplemented
    return _add_step(x, func, (), {}, make_layout_like(recipe.layout), factors=(*recipe.factors, ("tanh", 0.0)))


def _add_or_subtract(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Adds or subtracts a bias with one element per column; or subtracts the logits' own lse."""
    recipe, by = x.recipe, args[0] if len(args) == 1 and not kwargs else None
    if recipe.kind != "logits" or not isinstance(by, torch.Tensor) or isinstance(by, DEFERRED):
        return NotImplemented
    results, version = getattr(by, "_lse_of", (None, 0))
    is_lse = results is recipe.results and by._version == version and by.requires_grad == x.requires_grad
    if func in SUBTRACTIONS and is_lse and by.shape[:-1] == recipe.layout.shape[:-1]:
        layout = make_layout_like(recipe.layout, torch.promote_types(recipe.dtype, by.dtype))
        return _add_step(x, func, (by,), {}, layout, kind="log_softmax", logits=recipe)
    columns = recipe.source.weight.shape[0]
    fits = by.shape[-1:] == (columns,) and by.numel() == columns and by.ndim <= x.dim() and by.dtype in _FLOATS
    is_linear = not any(name == "tanh" for name, _ in recipe.factors) and recipe.vocab_size == columns
    if (
        not (fits and is_linear)
        or recipe.classes_first
        or recipe.source.lora is not None
        or not _accepts_tensor(recipe, by)
    ):
        return NotImplemented
    options = recipe.options()
    if options is None or not (scale := options.get("logit_scale", 1.0) / options.get("temperature", 1.0)):
        return NotImplemented
    bias = by.reshape(columns) / (-scale if func in SUBTRACTIONS else scale)
    bias = bias if recipe.bias is None else recipe.bias + bias
    layout = make_layout_like(recipe.layout, torch.promote_types(recipe.dtype, by.dtype))
    return _add_step(x, func, (by,), {}, layout, bias=bias)


def _clamp(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Adds a clamp to the dtype's lowest finite value, which changes only log-probabilities of -inf."""
    least = kwargs.get("min", args[0] if args else None)
    is_alone = len(args) + len(kwargs) == 1 and x.recipe.kind == "log_softmax" and x.recipe.coefficient == 1
    if not is_alone or least != torch.finfo(x.dtype).min:
        return NotImplemented
    return _add_step(x, func, args, kwargs, make_layout_like(x.recipe.layout), **_keep_statistics(x.recipe))


def _register_hook(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Registers a hook that does not read the gradient: a hook of torch.distributed or of torch's FLOP counter."""
    if kwargs or not (_only_listens(args[0]) or _follows_modules(args[0])):
        return NotImplemented
    if _only_listens(args[0]):
        x._hooks.append(args[0])  # type: ignore[union-attr] # a tensor's hooks
    with DisableOverride():
        return func(x, *args)


def _follows_modules(hook: Any) -> bool:
    """Whether a hook only tells torch's FLOP counter which module's backward runs."""
    cells = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
    return any(getattr(each, "__module__", "") == "torch.utils.module_tracker" for each in cells)


def _only_listens(hook: Any) -> bool:
    """Whether a hook belongs to torch.distributed, which only needs to know when a backward begins."""
    return str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith("torch.distributed.")


def _check_hook(x: DeferredLogits, args: tuple[Any, ...]) -> None:
    """Refuses a hook on the gradient of logits if results have already been computed without logits."""
    if len(args) > 1 and _only_listens(args[1]):
        x._hooks.append(args[1])
    elif x._used and x.requires_grad:
        _refuse_gradient()


def _format(x: Deferred, *_: Any) -> str:
    return (
        f"DeferredLogits(shape={tuple(x.shape)}, dtype={x.dtype}, device='{x.device}', {x.recipe.kind}, not computed)"
    )


def _record_stream(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    func(x.recipe.hidden, *args, **kwargs)


def _writes(name: str) -> bool:
    return name.endswith("_") and not name.startswith("_")


def _find_functions(*names: str) -> list[Any]:
    """Returns the functions of torch.Tensor, torch and torch.nn.functional that have these names."""
    return [getattr(owner, name) for name in names for owner in (T, torch, F) if hasattr(owner, name)]


ATTRIBUTES = (
    "shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "layout", "is_cuda", "is_cpu", "is_meta", "is_xpu",
    "is_mps", "is_sparse", "is_quantized", "is_nested", "is_mkldnn", "itemsize", "nbytes", "grad_fn", "_version",
    "names", "output_nr", "retains_grad", "_backward_hooks", "_base",
)  # fmt: skip
METHODS = (
    "size", "dim", "numel", "nelement", "__len__", "is_floating_point", "is_complex", "get_device", "stride",
    "is_contiguous", "element_size", "storage_offset", "ndimension", "is_signed", "is_inference", "__hash__",
    "has_names",
)  # fmt: skip
GETTERS = {getattr(T, name).__get__ for name in ATTRIBUTES if hasattr(T, name)} | {*_find_functions(*METHODS)}
IN_PLACE = {T.mul_: T.mul, T.__imul__: T.mul, T.div_: T.div, T.__itruediv__: T.div}
DIVISIONS = {*_find_functions("div", "divide", "true_divide", "__truediv__")}
SUBTRACTIONS = {*_find_functions("sub", "subtract", "__sub__")}
COMMUTATIVE = {*_find_functions("mul", "multiply", "__mul__", "__rmul__", "add", "__add__", "__radd__")}
_OPERATORS = "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"
WRITES = {*_find_functions("__setitem__", *(f"__i{name}__" for name in _OPERATORS))}
WRITES |= {getattr(T, name) for name in dir(T) if _writes(name)}
WRITES_ELSEWHERE = {getattr(owner, name) for owner in (torch, F) for name in dir(owner) if _writes(name)}
_RESHAPES = "resize", "resize_as", "t", "transpose", "swapaxes", "swapdims", "squeeze", "unsqueeze", "set", "as_strided"
RESHAPES_IN_PLACE = {getattr(T, f"{name}_") for name in _RESHAPES} | {T.data.__set__}
EXPOSES = {
    *_find_functions(
        "data_ptr", "numpy", "__array__", "__dlpack__", "storage", "_typed_storage", "untyped_storage", "share_memory_"
    ),
    T.data.__get__,
    *([T.__cuda_array_interface__.__get__] if hasattr(T, "__cuda_array_interface__") else []),
}
HOOKS = {*_find_functions("register_hook", "retain_grad", "register_post_accumulate_grad_hook")}
TABLE: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_find_functions("to", "float", "half", "bfloat16", "double", "type", "type_as"), _cast),
    **dict.fromkeys(_find_functions("contiguous", "clone"), _contiguous),
    **dict.fromkeys(_find_functions("detach"), _detach),
    **dict.fromkeys((*_find_functions("mul", "multiply", "__mul__", "__rmul__"), *DIVISIONS), _scale),
    **dict.fromkeys(IN_PLACE, _scale_in_place),
    **dict.fromkeys(_find_functions("neg", "negative", "__neg__"), _negate),
    **dict.fromkeys(_find_functions("tanh"), _tanh),
    **dict.fromkeys(_find_functions("clamp", "clamp_min"), _clamp),
    **dict.fromkeys((*_find_functions("add", "__add__", "__radd__"), *SUBTRACTIONS), _add_or_subtract),
    **dict.fromkeys(
        _find_functions(
            "view", "reshape", "expand", "flatten", "unflatten", "squeeze", "unsqueeze", "transpose", "swapaxes",
            "permute", "movedim", "narrow", "select", "index_select", "split", "chunk", "tensor_split", "unbind",
        ),
        _rows.take_rows,
    ),
    T.mT.__get__: _rows.transpose,
    T.__getitem__: _rows.getitem,
    T.__iter__: _rows.iterate,
    T.register_hook: _register_hook,
    T.record_stream: _record_stream,
    T.__repr__: _format,
    **_fused_functions.make_table(_find_functions),
}  # fmt: skip
