"""Where kernels are launched: torch's devices as `lce_jax` describes them, and tensors as kernels read them."""

from __future__ import annotations

import functools

import jax
import torch

from lce_jax import launch_lists

ALIGNMENT = 16  # bytes, of what TMA reads


def device_of(device: torch.device) -> launch_lists.Device | None:
    """``device`` as `lce_jax` describes it; None for what is no CUDA device, or is none of this machine's."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return _described(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _described(index: int) -> launch_lists.Device:
    properties = torch.cuda.get_device_properties(index)
    capability = f"{properties.major}.{properties.minor}"
    return launch_lists.Device("gpu", properties.name, capability, properties.multi_processor_count)


def why_not(device: torch.device) -> str | None:
    """Why no kernel is launched on ``device``; None if kernels may be."""
    described = device_of(device)
    if described is None:
        return f"{device} is no CUDA device of this machine"
    if described.compute_capability not in launch_lists.SERVED:
        served = " or ".join(launch_lists.SERVED)
        return f"{described.kind} has compute capability {described.compute_capability}, the kernels need {served}"
    return launch_lists.why_not()


def struct(x: torch.Tensor) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a tensor."""
    return jax.ShapeDtypeStruct(tuple(map(int, x.shape)), name_of(x.dtype))


def name_of(dtype: torch.dtype) -> str:
    """As JAX calls it."""
    return str(dtype).removeprefix("torch.")


def usable(x: torch.Tensor) -> torch.Tensor:
    """``x`` as the kernels read it: contiguous and aligned."""
    return x if is_usable(x) else x.clone(memory_format=torch.contiguous_format)


def is_usable(x: torch.Tensor) -> bool:
    """Whether kernels can read and write ``x`` where it is."""
    return x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0
