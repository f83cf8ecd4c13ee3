"""Megatron's gradient-accumulation fusion: dweight goes into ``weight.main_grad`` as soon as it is there."""

from __future__ import annotations

from typing import Any

import torch


@torch.compiler.disable(  # type: ignore[untyped-decorator]
    reason='lce_torch_bridge with wgrad="main_grad" writes to weight.main_grad as it runs'
)
def accumulate_into_main_grad(weight: torch.Tensor) -> torch.Tensor:
    """``weight``, whose gradient will be added to ``weight.main_grad``, not returned.

    Keeps the contract of Megatron's fused layers: ``grad_added_to_main_grad`` is set where it exists, and the gradient
    that autograd is handed in its stead is zero with ``zero_out_wgrad`` and means nothing without.
    """
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return weight
    if hasattr(weight, "__fsdp_param__"):
        raise ValueError('wgrad="main_grad" does not serve Megatron-FSDP, which makes main_grad anew: use "return"')
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        raise ValueError(
            'wgrad="main_grad" needs weight.main_grad, which Megatron\'s DistributedDataParallel makes; without it use '
            'wgrad="return"'
        )
    if main_grad.shape != weight.shape:
        raise ValueError(f"main_grad {tuple(main_grad.shape)} must have the shape of weight {tuple(weight.shape)}")
    return _AccumulateIntoMainGrad.apply(weight, main_grad)


class _AccumulateIntoMainGrad(torch.autograd.Function):
    """The identity, whose gradient is added elsewhere."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, main_grad: torch.Tensor) -> torch.Tensor:
        # Not through save_for_backward: both may change in place before the backward, as other micro-batches add up.
        ctx.weight, ctx.main_grad = weight, main_grad
        return weight.detach()  # the same memory, whose changes autograd still counts

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dweight: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        ctx.main_grad.add_(dweight)
        if not hasattr(ctx.weight, "grad_added_to_main_grad"):
            return None, None
        ctx.weight.grad_added_to_main_grad = True
        # What stands in for the gradient must have its shape; dweight itself costs no further memory.
        return (dweight.zero_() if getattr(ctx.weight, "zero_out_wgrad", False) else dweight), None
