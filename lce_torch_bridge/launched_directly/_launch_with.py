"""The two ways to run a pass: kernels launched directly, or JAX with tensors lent through DLPack.

Each pass, a forward or a backward, begins with one call of `choose_way`, and hands the resulting `Way` down.
"""

from __future__ import annotations

import functools
import logging
from typing import Literal, NamedTuple, NoReturn

import torch

import lce_jax
from lce_jax.types import scalars

_logger = logging.getLogger("lce_torch_bridge")
_requested_way: Literal["direct", "jax"] | None = None


def launch_with(way: Literal["direct", "jax"] | None) -> None:
    """Sets how this process runs calls from now on: with kernels launched directly, or through JAX.

    Args:
        way: "direct" launches the kernels on torch's current stream with torch's memory, and JAX starts no client on
            the GPU. A call that cannot be launched directly raises. "jax" lends the tensors to JAX, which keeps its own
            pool of GPU memory (`init`). None, the default, launches directly if possible and otherwise uses JAX; the
            logger ``lce_torch_bridge`` gives each reason for JAX once. The kernels give each token's results the same
            bits in both ways.

    Raises:
        ValueError: ``way`` is none of these values.

    Example:
        >>> import lce_torch_bridge
        >>> lce_torch_bridge.launch_with("jax")
        >>> lce_torch_bridge.launch_with(None)
    """
    global _requested_way
    if way is not None:
        scalars.check_choice("way", way, ("direct", "jax"))
    _requested_way = way


class Way(NamedTuple):
    """How a pass is run, as `launch_with` and the device of its tensors determine."""

    direct: bool  # whether kernels are launched directly if possible
    required: bool  # whether the call is refused if that is impossible

    def refuse(self, reason: str) -> None:
        """Lets JAX run a call that cannot be launched directly, and logs ``reason``.

        Raises:
            lce_jax.UnsupportedError: `launch_with` was called with "direct".
        """
        if self.required:
            raise lce_jax.UnsupportedError(
                f'launch_with("direct"): {reason}; lce_torch_bridge.launch_with(None) lets JAX run such calls'
            )
        if self.direct:
            _log_reason(reason)


JAX = Way(direct=False, required=False)
DIRECT, ONLY_DIRECT = Way(direct=True, required=False), Way(direct=True, required=True)


def choose_way(x: torch.Tensor) -> Way:
    """Returns how to run a pass over tensors on the device of ``x``.

    Raises:
        lce_jax.UnsupportedError: `launch_with` was called with "direct", and ``x`` is not on a GPU.
    """
    if _requested_way == "jax" or not (_requested_way or is_on_gpu(x)):
        return JAX
    if _requested_way is None:
        return DIRECT
    if x.numel() and not is_on_gpu(x):
        ONLY_DIRECT.refuse(f"{x.device} is no CUDA device")
    return ONLY_DIRECT


def refuse_other_way() -> NoReturn:
    """Refuses a backward through JAX if the forward was launched directly: JAX cannot read its list of active tiles."""
    raise RuntimeError(
        "gradient_threshold: the forward was launched directly, so its backward must be too: "
        "call lce_torch_bridge.launch_with before a forward, not between it and its backward"
    )


def is_on_gpu(x: torch.Tensor) -> bool:
    """Whether ``x`` is in a GPU's memory."""
    return x.is_cuda


def is_jax_requested() -> bool:
    """Whether `launch_with` has been called with "jax"."""
    return _requested_way == "jax"


@functools.cache
def _log_reason(reason: str) -> None:
    _logger.info("JAX runs the programs, because they are not launched directly: %s", reason)
