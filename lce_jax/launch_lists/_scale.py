"""The list that multiplies an array by a number."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from lce_jax._types import Device
from lce_jax.launch_lists import _launch_list
from lce_jax.launch_lists._launch_list import LaunchList
from lce_jax.launch_lists._recorder import RecordedKernels, Recorder
from lce_jax.mosaic import _generations


def refusal_to_scale(size: int, device: Device) -> str | None:
    """Why no kernel multiplies so many numbers on a device; None if one does."""
    kernels = _generations.serving(device)
    if kernels is None:
        return f"no kernels for {device.kind}"
    if size % kernels.scaled_numbers or size >= 1 << 31:
        return f"{size} numbers must be a multiple of {kernels.scaled_numbers}, and less than 2^31"
    return None


def scale(size: int, dtype: str, to: str, device: Device) -> LaunchList:
    """``x [n], factor [1] -> factor · x`` in float32, rounded once."""
    host = Recorder()
    given = host.input((size,), dtype), host.input((1,), "float32")
    kernels: Any = RecordedKernels(_generations.serving(device), host)
    return _launch_list.launch_list(host, [kernels.scale(*given, jnp.dtype(to))], device)
