"""What all operators with a derivative share: when a call is recorded, and which derivatives are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from lce_torch_bridge.operators._registered import NAME, library, refuse_vmap


def is_differentiated(*operands: torch.Tensor | None) -> bool:
    """Whether a call is recorded for a backward. Otherwise torch 2.11 does not trace a Function, but an operator."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in operands)


def without_forward_mode(function: type[torch.autograd.Function]) -> Any:
    """``function`` for calls outside of ``torch.compile``, which takes no Function that has a ``jvp``: it refuses."""

    class Uncompiled(function):  # type: ignore[valid-type, misc]
        @staticmethod
        def jvp(*_: Any) -> Any:
            refuse_forward_mode()

    return Uncompiled


def gradients_function(run: Callable[..., list[torch.Tensor]]) -> Any:
    """An operator of gradients as a Function, whose own derivative is refused.

    For `torch.func`, which ignores ``register_autograd``.
    """

    class Gradients(torch.autograd.Function):
        @staticmethod
        def forward(*inputs: Any) -> tuple[torch.Tensor, ...]:
            return tuple(run(*inputs))

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
            """Keeps nothing."""

        @staticmethod
        def backward(ctx: Any, *_: Any) -> Any:
            refuse_second_derivative(ctx)

        @staticmethod
        def vmap(*_: Any) -> Any:
            refuse_vmap()

    return Gradients


def refuse_forward_mode() -> NoReturn:
    """Refuses the derivative along tangents."""
    raise NotImplementedError(
        "lce_torch_bridge has no forward-mode derivatives (torch.func.jvp, jacfwd, linearize, forward_ad): use reverse "
        "mode, torch.func.vjp or torch.autograd.grad"
    )


def refuse_second_derivative(ctx: Any, *_: Any) -> None:
    """Refuses the derivative of a gradient."""
    del ctx
    raise NotImplementedError(
        "lce_torch_bridge computes first derivatives only, and this is a derivative of a gradient (create_graph=True): "
        "differentiate plain PyTorch code that stores the logits instead"
    )


def refuse_derivatives_of(name: str) -> None:
    """Refuses the derivative of an operator of gradients, and the older vmap, of is_grads_batched=True."""
    torch.library.register_autograd(f"{NAME}::{name}", refuse_second_derivative)
    library.impl(name, refuse_vmap, "Batched")
