"""Two ways to run a call: kernels launched directly, or JAX with tensors lent through DLPack."""

from __future__ import annotations

import functools
import logging
from typing import Literal

import torch

import lce_jax
from lce_jax import scalars
from lce_torch_bridge.tensors import _device

type Way = Literal["direct", "jax"]

_logger = logging.getLogger("lce_torch_bridge")
_asked: Way | None = None


def launch_with(way: Way | None) -> None:
    """Says how calls are run, from now on and in this process.

    Args:
        way: "direct" launches the kernels for Hopper GPUs on torch's current stream with torch's memory, and JAX starts
            no client on the GPU. A call that cannot be served so raises. "jax" lends the tensors to JAX, which keeps a
            pool of GPU memory of its own (`init`). None, as in the beginning, is "direct" where it can be, else "jax";
            the logger ``lce_torch_bridge`` says once why not. Where the kernels run, each token's results have the same
            bits in both ways.

    Raises:
        ValueError: another value.

    Example:
        >>> import lce_torch_bridge
        >>> lce_torch_bridge.launch_with("jax")
        >>> lce_torch_bridge.launch_with(None)
    """
    global _asked
    if way is not None:
        scalars.one_of("way", way, ("direct", "jax"))
    _asked = way


def asked() -> Way | None:
    """What `launch_with` was given."""
    return _asked


def may_be_direct(x: torch.Tensor) -> bool:
    """Whether a call on the device of ``x`` may be launched directly.

    Raises:
        lce_jax.UnsupportedError: `launch_with` asks for a direct launch, and there is no GPU.
    """
    if _asked == "jax":
        return False
    if _device.on_gpu(x):
        return True
    if _asked == "direct":
        refused(f"{x.device} is no CUDA device")
    return False


def launches_kernels(x: torch.Tensor) -> bool:
    """Whether there are kernels for the device of ``x``, and they may be launched directly."""
    return may_be_direct(x) and _device.why_not(x.device) is None


def refused(reason: str) -> None:
    """JAX is to run a call that might have been launched directly, for that reason.

    Raises:
        lce_jax.UnsupportedError: `launch_with` asks for a direct launch.
    """
    if _asked == "direct":
        raise lce_jax.UnsupportedError(
            f'launch_with("direct"): {reason}; lce_torch_bridge.launch_with(None) lets JAX run such calls'
        )
    _say(reason)


@functools.cache
def _say(reason: str) -> None:
    _logger.info("JAX runs the programs, because they are not launched directly: %s", reason)
