"""The list that multiplies an array by a number."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from lce_jax._types import Device
from lce_jax.launch_lists import _launch_list
from lce_jax.launch_lists._launch_list import LaunchList
from lce_jax.launch_lists._recorder import Recorder
from lce_jax.mosaic import _generations
from lce_jax.mosaic.common import _hidden_rows
from lce_jax.mosaic.common._tiles import SCALED


def refusal_to_scale(size: int, device: Device) -> str | None:
    """Why no kernel multiplies so many numbers on a device; None if one does."""
    if _generations.serving(device) is None:
        return f"no kernels for {device.kind}"
    if size % SCALED or size >= 1 << 31:
        return f"{size} numbers must be a multiple of {SCALED}, and less than 2^31"
    return None


def scale(size: int, dtype: str, to: str, device: Device) -> LaunchList:
    """``x [n], factor [1] -> factor · x`` in float32, rounded once."""
    host = Recorder()
    x: Any = host.input((size,), dtype)
    factor: Any = host.input((1,), "float32")
    found: Any = host.launch(_hidden_rows.scale, x, factor, jnp.dtype(to))
    return _launch_list.launch_list(host, [found], device)
