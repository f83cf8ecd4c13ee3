"""Large tensors times a number on their device: torch's own kernel for mixed dtypes takes twice as long."""

from __future__ import annotations

import torch

from lce_jax import launch_lists
from lce_torch_bridge.launched_directly import _plan_cache
from lce_torch_bridge.launched_directly._launcher import Launcher
from lce_torch_bridge.tensors import _device
from lce_torch_bridge.tensors._device import name_of


def scale(x: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """``factor [1] · x`` in float32, rounded once; None where no kernel computes that."""
    if not (_device.is_usable(x) and _device.is_usable(factor)):
        return None
    with torch.cuda.device(x.device):
        key = "scale", x.get_device(), x.numel(), x.dtype, dtype
        plan = _plan_cache.plan_of(key, lambda: _plan(x, dtype))
        if isinstance(plan, str):
            return None
        result = x.new_empty(x.shape, dtype=dtype)
        plan.launch(x.get_device(), [result, x, factor])
    return result


def _plan(x: torch.Tensor, dtype: torch.dtype) -> Launcher | str:
    """What launches the kernel, or why there is none."""
    device = _device.device_of(x.device)
    if device is None:
        return str(_device.why_not(x.device))
    reason = _device.why_not(x.device) or launch_lists.refusal_to_scale(x.numel(), device)
    if reason is not None:
        return reason
    return Launcher(launch_lists.scale(x.numel(), name_of(x.dtype), name_of(dtype), device), 0)
