"""torch's functions of deferred logits: what is written down, and what needs the values.

`_served` has what is computed without logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from lce_torch_bridge.deferred import _rows, _served
from lce_torch_bridge.deferred._recipe import Recipe, Step, laid_out_alike
from lce_torch_bridge.deferred._tensor import DeferredLogits, _plain
from lce_torch_bridge.deferred._traced import DEFERRED, Deferred, TracedLogits
from lce_torch_bridge.tensors import _device

T: Any = torch.Tensor
F = torch.nn.functional
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``func(*args, **kwargs)``, of which at least one is deferred."""
    x = args[0] if args else kwargs.get("input")
    if func in GETTERS and isinstance(x, DeferredLogits):
        with _plain():
            return func(*args, **kwargs) if x._value is None else func(x._value, *args[1:], **kwargs)
    rest, others = args[1:], kwargs
    if func in COMMUTES and len(args) == 2 and not kwargs and not isinstance(x, DEFERRED):
        x, rest = args[1], args[:1]
    if not args:
        others = {name: each for name, each in kwargs.items() if name != "input"}
    if isinstance(x, DEFERRED) and kwargs.get("out") is None and (known := TABLE.get(func)) and x.is_deferred():
        found = known(x, func, rest, others)
        if found is not NotImplemented:
            return found
    return _of_values(func, args, kwargs)


def _of_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of the values. What is written in place stays written."""
    name, first = _name(func), args[0] if args else None
    if func is torch.broadcast_tensors and (found := _rows.broadcast_tensors(args)) is not NotImplemented:
        return found
    if func in (torch.autograd.grad, torch.autograd.backward):
        _refuse_gradient_of_logits(args, kwargs)
    if isinstance(first, DeferredLogits) and func in EXPOSES:
        first.expose()
    if isinstance(first, DeferredLogits) and func in HOOKS:
        _hook_values(first, args)
    if isinstance(first, DEFERRED) and func in RESHAPES_IN_PLACE:
        raise NotImplementedError(f"{name} of deferred logits: write it without the _, or call it on logits.compute()")
    writes = isinstance(first, DEFERRED) and (_is_written_by(func) or kwargs.get("inplace") is True)
    if writes:
        first.write(name)  # type: ignore[union-attr]
    if isinstance(out := kwargs.get("out"), DEFERRED):
        out.write(name)
    found = func(*_values(args, name), **_values(kwargs, name))
    return first if writes and isinstance(found, torch.Tensor) else found


def _name(func: Any) -> str:
    if torch.compiler.is_compiling():
        return str(getattr(func, "__name__", ""))
    return torch.overrides.resolve_name(func) or getattr(func, "__name__", repr(func))


def _is_written_by(func: Any) -> bool:
    """Whether it writes into its first argument. torch's compiler has no hash of functions outside of its classes."""
    return func in WRITES or (not torch.compiler.is_compiling() and func in WRITES_ELSEWHERE)


def _refuse_gradient_of_logits(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    inputs = kwargs.get("inputs", args[1] if len(args) > 1 else ())
    inputs = inputs if isinstance(inputs, tuple | list) else (inputs,)
    for x in inputs:
        if isinstance(x, TracedLogits) or (isinstance(x, DeferredLogits) and (x._used or x._value is None)):
            _refuse_gradient()


def _refuse_gradient() -> None:
    raise RuntimeError(
        "this asks for the gradient of deferred logits themselves: what was made of them without their values has "
        "none, because it is computed from hidden states. Write logits = logits.compute() and make the loss from "
        "these: a model that computes it itself is called without labels"
    )


def _values(x: Any, needed_for: str) -> Any:
    """``x`` with values in place of deferred logits, in nested lists, tuples and dictionaries too."""
    if isinstance(x, DEFERRED):
        return x.value(needed_for)
    if isinstance(x, dict):
        return {name: _values(each, needed_for) for name, each in x.items()}
    if isinstance(x, tuple | list):
        found = [_values(each, needed_for) for each in x]
        return type(x)(*found) if hasattr(x, "_fields") else type(x)(found)
    return x


# What is written down


def _then(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: Any, layout: torch.Tensor, **changes: Any) -> Any:
    return x.then(Step(func, args, kwargs), layout, **changes)


def _cast(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Another dtype on the same device."""
    recipe, device = x.recipe, x.recipe.source.hidden.device
    if _are_dtypes(args) and not kwargs:
        out = _probe_cast_once(func, args, recipe.dtype, device)
    else:
        out = _probe_cast(
            func, tuple([_Itself if each is x else each for each in args]), recipe.dtype, device, **kwargs
        )
    if out is _Itself or isinstance(out, str):
        return x if out is _Itself else out
    if out is None:
        return NotImplemented
    return _then(x, func, args, kwargs, laid_out_alike(recipe.layout, out), **_same(recipe))


class _Itself:
    """Stands for the tensor that a function takes, or returns as it is."""


def _are_dtypes(given: tuple[Any, ...]) -> bool:
    return all(type(each) is torch.dtype for each in given)


def _probe_cast(func: Any, args: tuple[Any, ...], dtype: torch.dtype, device: torch.device, **kwargs: Any) -> Any:
    """The dtype that it makes, or the name of one, or `_Itself`; None where it is not a cast that is written down."""
    probe = torch.empty(0, dtype=dtype, device=device)
    out = func(probe, *(probe if each is _Itself else each for each in args), **kwargs)
    if out is probe or isinstance(out, str):
        return _Itself if out is probe else out
    fits = isinstance(out, torch.Tensor) and out.device == device and out.dtype in (*_FLOATS, torch.float64)
    return out.dtype if fits else None


_probe_cast_once = _device.once(_probe_cast)


def _same(recipe: Recipe) -> dict[str, Any]:
    """What a step leaves that changes no value: rows and results of another tensor with the same rows."""
    return {"rows_of": recipe.rows_of, "results": recipe.results}


def _contiguous(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    layout = x.recipe.layout
    found = func(layout, *args, **kwargs) if args or kwargs else _apply_once(func, layout)
    return x if found is layout else _then(x, func, args, kwargs, found, **_same(x.recipe))


@_device.once
def _apply_once(func: Any, layout: torch.Tensor) -> Any:
    return func(layout)


def _detach(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return x.then(Step(func, args, kwargs), x.recipe.layout, True, **_same(x.recipe), grad=False)


def _scale(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Times or over a number, or a tensor of one number or one for each row; a softmax times what it is of."""
    if len(args) != 1 or kwargs:
        return NotImplemented
    (by,), recipe, over = args, x.recipe, func in OVER
    if isinstance(by, DEFERRED):
        return NotImplemented if over else _product(x, func, by)
    if isinstance(by, torch.Tensor):
        number = _number(by)
        if number is None:
            return _scale_rows(x, func, by)
    elif isinstance(by, int | float) and not isinstance(by, bool):
        number = float(by)
    else:
        return NotImplemented
    if not math.isfinite(number) or (over and number == 0):
        return NotImplemented
    layout = laid_out_alike(recipe.layout)
    if recipe.kind != "logits":
        coefficient = recipe.coefficient / number if over else recipe.coefficient * number
        return _then(x, func, args, {}, layout, coefficient=coefficient, **_same(recipe))
    return _then(x, func, args, {}, layout, factors=(*recipe.factors, ("div" if over else "mul", number)))


def _scale_in_place(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Times or over a number, in the memory of logits that no other tensor reads."""
    if isinstance(x, TracedLogits) or not x.is_alone() or (x.recipe.grad and not torch.is_grad_enabled()):
        return NotImplemented
    if len(args) != 1 or isinstance(args[0], torch.Tensor):
        return NotImplemented
    found = _scale(x, IN_PLACE[func], args, kwargs)
    return found if found is NotImplemented else x.become(found)


def _number(by: torch.Tensor) -> float | None:
    """The value of a tensor of one number that has no gradient, where reading it waits for nothing."""
    plain = by.ndim == 0 and by.device.type == "cpu" and not by.requires_grad and not by.is_complex()
    return float(by.item()) if plain else None


def _may_take(recipe: Recipe, by: torch.Tensor) -> bool:
    """Whether a step may take a tensor: it is there, and has no gradient where the logits have none."""
    device = recipe.source.hidden.device
    return by.device == device and (recipe.grad or not (by.requires_grad and torch.is_grad_enabled()))


def _scale_rows(x: Deferred, func: Any, by: torch.Tensor) -> Any:
    """Hidden states are scaled in place of their logits."""
    recipe = x.recipe
    linear = recipe.kind == "logits" and not any(name == "tanh" for name, _ in recipe.factors)
    rows = (*recipe.layout.shape[:-1], 1)
    fits = by.ndim <= len(rows) and all(n in (1, m) for n, m in zip(by.shape[::-1], rows[::-1], strict=False))
    if recipe.classes_first or not (linear and fits) or not by.is_floating_point() or not _may_take(recipe, by):
        return NotImplemented
    if recipe.hidden.dtype == torch.float16:
        return NotImplemented  # it overflows where its logits would not
    if recipe.bias is not None and by.numel() != 1:
        return NotImplemented
    dtype = torch.promote_types(recipe.dtype, by.dtype) if by.ndim else recipe.dtype
    hidden = func(recipe.hidden, by).to(recipe.hidden.dtype)
    bias = None if recipe.bias is None else func(recipe.bias, by.reshape(())).to(recipe.bias.dtype)
    layout = laid_out_alike(recipe.layout, dtype)
    return _then(x, func, (by,), {}, layout, hidden=hidden, bias=bias)


def _product(x: Deferred, func: Any, by: Deferred) -> Any:
    """P · log p and p · z, whose sums are entropies."""
    if not by.is_deferred():
        return NotImplemented
    one, other = sorted((x.recipe, by.recipe), key=lambda recipe: recipe.kind != "softmax")
    if one.kind != "softmax" or one.layout.shape != other.layout.shape:
        return NotImplemented
    assert one.logits is not None
    of = other if other.logits is None else other.logits
    kind = {"log_softmax": "p_log_p", "logits": "p_logits"}.get(other.kind)
    is_recorded_alike = one.grad == other.grad or not torch.is_grad_enabled()
    if kind is None or of.results is not one.logits.results or not is_recorded_alike:
        return NotImplemented
    dtype = one.dtype if one.dtype == other.dtype else torch.promote_types(one.dtype, other.dtype)
    layout = laid_out_alike(x.recipe.layout, dtype)
    if isinstance(by, DeferredLogits):
        by._used = True
    coefficient = one.coefficient * other.coefficient
    return _then(x, func, (by,), {}, layout, kind=kind, coefficient=coefficient, logits=one.logits)


def _negate(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    recipe, layout = x.recipe, laid_out_alike(x.recipe.layout)
    if args or kwargs:
        return NotImplemented
    if recipe.kind != "logits":
        return _then(x, func, (), {}, layout, coefficient=-recipe.coefficient, **_same(recipe))
    return _then(x, func, (), {}, layout, factors=(*recipe.factors, ("mul", -1.0)))


def _tanh(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    recipe = x.recipe
    if args or kwargs or recipe.kind != "logits":
        return NotImplemented
    return _then(x, func, (), {}, laid_out_alike(recipe.layout), factors=(*recipe.factors, ("tanh", 0.0)))


def _shift(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Plus or minus one number for each column, a bias; minus their own lse."""
    recipe, by = x.recipe, args[0] if len(args) == 1 and not kwargs else None
    if recipe.kind != "logits" or not isinstance(by, torch.Tensor) or isinstance(by, DEFERRED):
        return NotImplemented
    results, version = getattr(by, "_lse_of", (None, 0))
    is_own_lse = results is recipe.results and by._version == version and by.requires_grad == x.requires_grad
    if func in LESS and is_own_lse and by.shape[:-1] == recipe.layout.shape[:-1]:
        layout = laid_out_alike(recipe.layout, torch.promote_types(recipe.dtype, by.dtype))
        return _then(x, func, (by,), {}, layout, kind="log_softmax", logits=recipe)
    columns = recipe.source.weight.shape[0]
    fits = by.shape[-1:] == (columns,) and by.numel() == columns and by.ndim <= x.dim() and by.dtype in _FLOATS
    linear = not any(name == "tanh" for name, _ in recipe.factors) and recipe.vocab_size == columns
    if not (fits and linear) or recipe.classes_first or recipe.source.lora is not None or not _may_take(recipe, by):
        return NotImplemented
    options = recipe.options()
    if options is None or not (scale := options.get("logit_scale", 1.0) / options.get("temperature", 1.0)):
        return NotImplemented
    bias = by.reshape(columns) / (-scale if func in LESS else scale)
    bias = bias if recipe.bias is None else recipe.bias + bias
    layout = laid_out_alike(recipe.layout, torch.promote_types(recipe.dtype, by.dtype))
    return _then(x, func, (by,), {}, layout, bias=bias)


def _clamp(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """From below, by the least number of the dtype, which changes log-probabilities of zero alone."""
    least = kwargs.get("min", args[0] if args else None)
    is_alone = len(args) + len(kwargs) == 1 and x.recipe.kind == "log_softmax" and x.recipe.coefficient == 1
    if not is_alone or least != torch.finfo(x.dtype).min:
        return NotImplemented
    return _then(x, func, args, kwargs, laid_out_alike(x.recipe.layout), **_same(x.recipe))


def _hook(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch.distributed asks when a backward begins, and does not look at the gradient."""
    if kwargs or not (_only_listens(args[0]) or _follows_modules(args[0])):
        return NotImplemented
    if _only_listens(args[0]):
        x._hooks.append(args[0])  # type: ignore[union-attr] # a tensor's
    with _plain():
        return func(x, *args)


def _follows_modules(hook: Any) -> bool:
    """Whether it tells torch's counter of FLOPs which module's backward runs, and is nothing to the gradient."""
    cells = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
    return any(getattr(each, "__module__", "") == "torch.utils.module_tracker" for each in cells)


def _only_listens(hook: Any) -> bool:
    return str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith("torch.distributed.")


def _hook_values(x: DeferredLogits, args: tuple[Any, ...]) -> None:
    """Refuses a hook for the gradient of logits where results of them have been computed without it."""
    if len(args) > 1 and _only_listens(args[1]):
        x._hooks.append(args[1])
    elif x._used and x.requires_grad:
        _refuse_gradient()


def _show(x: Deferred, *_: Any) -> str:
    return (
        f"DeferredLogits(shape={tuple(x.shape)}, dtype={x.dtype}, device='{x.device}', {x.recipe.kind}, not computed)"
    )


def _record_stream(x: Deferred, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    func(x.recipe.hidden, *args, **kwargs)


def _writes(name: str) -> bool:
    return name.endswith("_") and not name.startswith("_")


def _functions(*names: str) -> list[Any]:
    """Those of torch.Tensor, torch and torch.nn.functional that have these names."""
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
GETTERS = {getattr(T, name).__get__ for name in ATTRIBUTES if hasattr(T, name)} | {*_functions(*METHODS)}
IN_PLACE = {T.mul_: T.mul, T.__imul__: T.mul, T.div_: T.div, T.__itruediv__: T.div}
OVER = {*_functions("div", "divide", "true_divide", "__truediv__")}
LESS = {*_functions("sub", "subtract", "__sub__")}
COMMUTES = {*_functions("mul", "multiply", "__mul__", "__rmul__", "add", "__add__", "__radd__")}
_OPERATORS = "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"
WRITES = {*_functions("__setitem__", *(f"__i{name}__" for name in _OPERATORS))}
WRITES |= {getattr(T, name) for name in dir(T) if _writes(name)}
WRITES_ELSEWHERE = {getattr(owner, name) for owner in (torch, F) for name in dir(owner) if _writes(name)}
_RESHAPES = "resize", "resize_as", "t", "transpose", "swapaxes", "swapdims", "squeeze", "unsqueeze", "set", "as_strided"
RESHAPES_IN_PLACE = {getattr(T, f"{name}_") for name in _RESHAPES} | {T.data.__set__}
EXPOSES = {
    *_functions(
        "data_ptr", "numpy", "__array__", "__dlpack__", "storage", "_typed_storage", "untyped_storage", "share_memory_"
    ),
    T.data.__get__,
    *([T.__cuda_array_interface__.__get__] if hasattr(T, "__cuda_array_interface__") else []),
}
HOOKS = {*_functions("register_hook", "retain_grad", "register_post_accumulate_grad_hook")}
TABLE: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_functions("to", "float", "half", "bfloat16", "double", "type", "type_as"), _cast),
    **dict.fromkeys(_functions("contiguous", "clone"), _contiguous),
    **dict.fromkeys(_functions("detach"), _detach),
    **dict.fromkeys((*_functions("mul", "multiply", "__mul__", "__rmul__"), *OVER), _scale),
    **dict.fromkeys(IN_PLACE, _scale_in_place),
    **dict.fromkeys(_functions("neg", "negative", "__neg__"), _negate),
    **dict.fromkeys(_functions("tanh"), _tanh),
    **dict.fromkeys(_functions("clamp", "clamp_min"), _clamp),
    **dict.fromkeys((*_functions("add", "__add__", "__radd__"), *LESS), _shift),
    **dict.fromkeys(
        _functions(
            "view", "reshape", "expand", "flatten", "unflatten", "squeeze", "unsqueeze", "transpose", "swapaxes",
            "permute", "movedim", "narrow", "select", "index_select", "split", "chunk", "tensor_split", "unbind",
        ),
        _rows.take_rows,
    ),
    T.mT.__get__: _rows.transpose,
    T.__getitem__: _rows.getitem,
    T.__iter__: _rows.iterate,
    T.register_hook: _hook,
    T.record_stream: _record_stream,
    T.__repr__: _show,
    **_served.table(_functions),
}  # fmt: skip
