"""What is done to the weight before its products, and to its gradient.

Under ``torch.autocast``: one copy in autocast's dtype, which all calls of a context share. With Megatron's
gradient-accumulation fusion: dweight is added to ``weight.main_grad`` as soon as it is computed.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lce_torch_bridge.tensors._device import (
    autocast_dtype,
    current_graph_task_id,
    is_usable,
    not_compiled,
    readable,
    will_be_run,
)


@not_compiled('lce_torch_bridge with wgrad="main_grad" writes to weight.main_grad as it runs')
def accumulate_into_main_grad(weight: torch.Tensor) -> torch.Tensor:
    """``weight``, whose gradient will be added to ``weight.main_grad``, not returned.

    Follows Megatron's fused layers: ``grad_added_to_main_grad`` is set if it exists, and autograd gets a placeholder
    for the gradient, which is zero with ``zero_out_wgrad`` and arbitrary without. Where a kernel has added the
    gradient, the placeholder is sparse and empty: zeros without memory.
    """
    main_grad = main_grad_of(weight)
    return weight if main_grad is None else _AccumulateIntoMainGrad.apply(weight, main_grad)


def main_grad_of(weight: torch.Tensor) -> torch.Tensor | None:
    """Where the weight's gradient is to be added; None if it has none."""
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return None
    if hasattr(weight, "__fsdp_param__"):
        raise ValueError('wgrad="main_grad" does not serve Megatron-FSDP, which makes main_grad anew: use "return"')
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None and current_graph_task_id() != -1 and not isinstance(weight, torch.nn.Parameter):
        raise ValueError(
            'wgrad="main_grad" needs weight.main_grad, and this weight is a copy without it: in the backward an '
            "activation checkpoint with use_reentrant=True calls its function with copies of its arguments. Leave "
            "weight out of the arguments of the checkpoint, so that the function reads it from its module, or give "
            'use_reentrant=False or wgrad="return"'
        )
    if main_grad is None:
        raise ValueError(
            'wgrad="main_grad" needs weight.main_grad, which Megatron\'s DistributedDataParallel makes; without it use '
            'wgrad="return"'
        )
    if main_grad.shape != weight.shape:
        raise ValueError(f"main_grad {tuple(main_grad.shape)} must have the shape of weight {tuple(weight.shape)}")
    if main_grad.device != weight.device:
        raise ValueError(f"main_grad is on {main_grad.device}, weight on {weight.device}")
    readable("weight.main_grad", main_grad)
    return main_grad


def placeholder(weight: torch.Tensor, dweight: torch.Tensor) -> torch.Tensor | None:
    """What autograd gets in place of ``dweight``, which has been added and may be overwritten."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    # It must have the gradient's shape. dweight itself costs no further memory.
    return dweight.zero_() if getattr(weight, "zero_out_wgrad", False) else dweight


def empty_sparse_like(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A gradient of zeros without any memory: sparse, and empty."""
    _settle_the_warning()
    return torch.zeros(weight.shape, dtype=dtype, device=weight.device, layout=torch.sparse_coo)


@functools.cache
def _settle_the_warning() -> None:
    """Some versions of torch warn once that sparse tensors are not checked. An empty one cannot be wrong."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_coo_tensor(torch.zeros((1, 0), dtype=torch.int64), torch.zeros(0), (1,), check_invariants=False)


def sum_at(node: Any, edge: int) -> torch.Tensor | None:
    """The sum to which kernels may add the weight's gradient where it lies, as float32 numbers; None if there is none.

    ``edge`` is the weight's place among the tensors of the Function whose ``ctx`` is ``node``. Its gradient goes to
    `_AccumulateIntoMainGrad` then, to which `empty_sparse_like` is left to add.
    """
    after, _ = node.next_functions[edge]
    if getattr(after, "_forward_cls", None) is not _AccumulateIntoMainGrad:
        return None
    can_add = after.main_grad.dtype == torch.float32 and is_usable(after.main_grad)
    return after.main_grad if can_add and is_asked_for(node, edge) else None


def is_asked_for(node: Any, edge: int) -> bool:
    """Whether this backward goes on to that edge of ``node``: not if no input that is asked for comes after it."""
    after, _ = node.next_functions[edge]
    return bool(will_be_run(after))


def refuse_partitioned(node: Any, edge: int) -> None:
    """Refuses the gradient of a weight of which ZeRO-3 has left nothing since the forward: torch cannot add to that.

    ``edge`` is the weight's place among the tensors of the Function whose ``ctx`` is ``node``.

    Raises:
        RuntimeError: as `readable`.
    """
    after, _ = node.next_functions[edge]
    parameter = getattr(after, "variable", None)
    if parameter is not None and not parameter.numel():
        readable("weight", parameter)


class _AccumulateIntoMainGrad(torch.autograd.Function):
    """The identity, whose backward adds the gradient to ``main_grad``."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, main_grad: torch.Tensor) -> torch.Tensor:
        # Not through save_for_backward: other micro-batches may change both in place before this backward.
        ctx.weight, ctx.main_grad = weight, main_grad
        return weight.detach()  # the same memory; autograd still counts changes in place

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dweight: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        if not dweight.is_sparse:  # otherwise it has been added
            ctx.main_grad.add_(dweight)
        return placeholder(ctx.weight, dweight), None


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
    return None if weight.is_meta else autocast_dtype(weight.device.type)


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
        refuse_partitioned(ctx, 0)
        return dweight.to(ctx.dtype), None
