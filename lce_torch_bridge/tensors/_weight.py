"""The weight's copy under autocast, and its gradient in Megatron's ``main_grad``.

`autocast`: under ``torch.autocast``, all calls within a context share one copy of the weight in autocast's dtype.
`accumulate_into_main_grad`: with Megatron's gradient-accumulation fusion, dweight is added to ``weight.main_grad`` as
soon as it is computed.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lce_torch_bridge.tensors._device import (
    autocast_dtype,
    check_readable,
    current_graph_task_id,
    is_usable,
    not_compiled,
    will_be_run,
)


@not_compiled('lce_torch_bridge with wgrad="main_grad" writes to weight.main_grad as it runs')
def accumulate_into_main_grad(weight: torch.Tensor) -> torch.Tensor:
    """Returns ``weight`` with a backward that adds the gradient to ``weight.main_grad`` instead of returning it.

    The backward follows Megatron's fused layers: it sets ``grad_added_to_main_grad`` if the weight has that attribute,
    and returns a placeholder for the gradient to autograd. The placeholder's values are zero with ``zero_out_wgrad``
    and arbitrary without it. If a kernel has already added the gradient, the placeholder is an empty sparse tensor:
    zeros without memory.
    """
    main_grad = check_main_grad(weight)
    return weight if main_grad is None else _AccumulateIntoMainGrad.apply(weight, main_grad)


def check_main_grad(weight: torch.Tensor) -> torch.Tensor | None:
    """Checks ``weight.main_grad`` and returns it; None if the weight needs no gradient."""
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
    check_readable("weight.main_grad", main_grad)
    return main_grad


def make_placeholder(weight: torch.Tensor, dweight: torch.Tensor) -> torch.Tensor | None:
    """Returns autograd's placeholder for ``dweight``, after dweight has been added to ``main_grad``.

    The placeholder may overwrite ``dweight``.
    """
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    # A placeholder must have the gradient's shape. Reusing dweight takes no further memory.
    return dweight.zero_() if getattr(weight, "zero_out_wgrad", False) else dweight


def empty_sparse_like(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns a gradient of zeros that uses no memory: a sparse tensor without elements."""
    _silence_warning()
    return torch.zeros(weight.shape, dtype=dtype, device=weight.device, layout=torch.sparse_coo)


@functools.cache
def _silence_warning() -> None:
    """Triggers and hides some torch versions' one-time warning that sparse tensors are not checked."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_coo_tensor(torch.zeros((1, 0), dtype=torch.int64), torch.zeros(0), (1,), check_invariants=False)


def find_main_grad(node: Any, edge: int) -> torch.Tensor | None:
    """Returns the ``main_grad`` to which kernels can add the weight's gradient in place; None if they cannot.

    ``edge`` is the weight's index among the tensors of the Function whose ``ctx`` is ``node``. A kernel that has added
    the gradient returns `empty_sparse_like`, to which `_AccumulateIntoMainGrad` then has nothing to add.
    """
    next_node, _ = node.next_functions[edge]
    if getattr(next_node, "_forward_cls", None) is not _AccumulateIntoMainGrad:
        return None
    can_add = next_node.main_grad.dtype == torch.float32 and is_usable(next_node.main_grad)
    return next_node.main_grad if can_add and is_requested(node, edge) else None


def is_requested(node: Any, edge: int) -> bool:
    """Whether this backward needs the gradient of input ``edge`` of ``node``."""
    next_node, _ = node.next_functions[edge]
    return bool(will_be_run(next_node))


def refuse_partitioned(node: Any, edge: int) -> None:
    """Refuses the gradient of a weight that ZeRO-3 has partitioned since the forward, because it has no memory now.

    ``edge`` is the weight's index among the tensors of the Function whose ``ctx`` is ``node``.

    Raises:
        RuntimeError: the weight is partitioned; the message says what to do.
    """
    next_node, _ = node.next_functions[edge]
    parameter = getattr(next_node, "variable", None)
    if parameter is not None and not parameter.numel():
        check_readable("weight", parameter)


class _AccumulateIntoMainGrad(torch.autograd.Function):
    """The identity, whose backward adds the gradient to ``main_grad``."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, main_grad: torch.Tensor) -> torch.Tensor:
        # save_for_backward is not used, because other micro-batches may change both in place before this backward.
        ctx.weight, ctx.main_grad = weight, main_grad
        return weight.detach()  # shares memory and version, so that autograd still notices changes in place

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dweight: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        if not dweight.is_sparse:  # sparse: a kernel has already added the gradient
            ctx.main_grad.add_(dweight)
        return make_placeholder(ctx.weight, dweight), None


def autocast(weight: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Returns ``weight`` in the dtype of the autocast context; ``weight`` itself outside of a context.

    ``parameter`` is ``weight`` before `accumulate_into_main_grad`. If ``parameter`` is a float32 leaf that requires a
    gradient, the result shares the copy that torch caches for all matrix products of the context. That copy lives until
    the context ends, or until ``torch.clear_autocast_cache``. Each call's gradient is cast back separately, so that
    gradients are summed in float32.
    """
    dtype = find_cast_dtype(weight)
    if dtype is None:
        return weight
    if weight.dtype == dtype or torch.compiler.is_compiling():
        return weight.to(dtype)
    return _Cast.apply(weight, _find_torch_copy(parameter, dtype))


def find_cast_dtype(weight: torch.Tensor) -> torch.dtype | None:
    """Returns the dtype to which autocast casts ``weight``; None outside of a context."""
    return None if weight.is_meta else autocast_dtype(weight.device.type)


def _find_torch_copy(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns torch's cached copy. No public function returns it, so this records the operands of a tiny product."""
    with _OperandRecorder() as recorder:
        torch.mm(parameter.new_empty((0, parameter.shape[0]), dtype=dtype), parameter)
    return parameter.to(dtype) if recorder.second is None else recorder.second.detach()


class _OperandRecorder(TorchDispatchMode):
    """Records the second operand of a matrix product in this context. Under ``torch.func.vmap`` it sees no product."""

    second: torch.Tensor | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func is torch.ops.aten.mm.default:
            self.second = args[1]
        return func(*args, **(kwargs or {}))


class _Cast(torch.autograd.Function):
    """Computes ``weight.to(copy.dtype)`` as ``copy``, which already exists."""

    generate_vmap_rule = True  # so that vmap gets as far as this package's own error

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
