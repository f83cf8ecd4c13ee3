"""Where kernels add dweight to a sum, and what is added by torch where they cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lce_torch_bridge import _launch_with
from lce_torch_bridge.tensors import _device


def added_apart(hidden: torch.Tensor, sums: Any, run: Callable[[Any], Any]) -> Any:
    """The gradients over live tiles, which JAX does not know, where no kernel can add to ``main_grad``.

    Raises:
        RuntimeError: JAX is to run the backward.
    """
    if sums.main_grad is None or not _launch_with.may_be_direct(hidden):
        raise RuntimeError(
            "gradient_threshold: the forward was launched directly, so its backward must be too: "
            "call lce_torch_bridge.launch_with before a forward, not between it and its backward"
        )
    apart = torch.zeros_like(sums.main_grad, memory_format=torch.contiguous_format)
    grads = run(sums._replace(main_grad=apart))
    sums.main_grad.add_(apart)
    return grads


def can_add(sums: Any) -> bool:
    """Whether kernels can add dweight where it is asked for."""
    if sums.total is not None:
        return sums.total.is_torchs
    return sums.main_grad is None or _device.is_usable(sums.main_grad)
