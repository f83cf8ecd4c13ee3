"""Whether kernels can add dweight to a sum themselves, and what is done where they cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from lce_torch_bridge._types import Sums
from lce_torch_bridge.tensors import _device


def can_add(sums: Sums) -> bool:
    """Whether kernels can add dweight where it is asked for."""
    if sums.total is not None:
        return bool(sums.total.is_torchs)
    return sums.main_grad is None or _device.is_usable(sums.main_grad)


def add_afterwards(sums: Sums, run: Callable[[Sums], Any]) -> Any:
    """The gradients that ``run`` returns, whose dweight torch adds to ``main_grad``, which no kernel can add to.

    Only gradients over live tiles come here: JAX does not know these tiles. All others it can run.

    Raises:
        RuntimeError: JAX is to run the backward.
    """
    if sums.main_grad is None:
        refuse_another_way()
    apart = torch.zeros_like(sums.main_grad, memory_format=torch.contiguous_format)
    grads = run(sums._replace(main_grad=apart))
    sums.main_grad.add_(apart)
    return grads


def refuse_another_way() -> NoReturn:
    """Refuses a backward by JAX where kernels have saved live tiles, which JAX does not know."""
    raise RuntimeError(
        "gradient_threshold: the forward was launched directly, so its backward must be too: "
        "call lce_torch_bridge.launch_with before a forward, not between it and its backward"
    )
