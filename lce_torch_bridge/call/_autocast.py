"""The weight under ``torch.autocast``: one copy in autocast's dtype, which all calls of a context share."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def autocast(weight: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """``weight`` in the dtype of the autocast context, or itself outside of one.

    If ``parameter`` (``weight`` before anything was done to its gradient) is a float32 leaf that requires a gradient,
    the copy is the one that torch keeps for all matrix products of the context: until the context ends, or until
    ``torch.clear_autocast_cache``. Each call's gradient is cast back separately, so that their sum is in float32.
    """
    dtype = dtype_of(weight)
    if dtype is None:
        return weight
    if weight.dtype == dtype or torch.compiler.is_compiling():
        return weight.to(dtype)
    return _Cast.apply(weight, _copy(parameter, dtype))


def dtype_of(weight: torch.Tensor) -> torch.dtype | None:
    """What ``weight`` is cast to; None outside of a context."""
    device = weight.device.type
    return None if weight.is_meta or not torch.is_autocast_enabled(device) else torch.get_autocast_dtype(device)


def _copy(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The copy that torch makes for its own products. No function returns it, so this watches a product of 0 rows."""
    with _Watch() as watch:
        torch.mm(parameter.new_empty((0, parameter.shape[0]), dtype=dtype), parameter)
    return parameter.to(dtype) if watch.second is None else watch.second.detach()


class _Watch(TorchDispatchMode):
    """Notes the second operand of the matrix product inside. Under ``torch.func.vmap`` that is another operator."""

    second: torch.Tensor | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func is torch.ops.aten.mm.default:
            self.second = args[1]
        return func(*args, **(kwargs or {}))


class _Cast(torch.autograd.Function):
    """``weight.to(copy.dtype)`` where that copy exists already."""

    generate_vmap_rule = True  # so that vmap reaches our own refusal

    @staticmethod
    def forward(_weight: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        return copy.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
        del output
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, dweight: torch.Tensor) -> tuple[torch.Tensor, None]:
        return dweight.to(ctx.dtype), None
