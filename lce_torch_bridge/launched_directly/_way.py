"""Two ways to run a pass: kernels launched directly, or JAX with tensors lent through DLPack.

Each pass, a forward or a backward, asks `way_of` once, where it begins. What it calls is given the answer, a `Way`.
"""

from __future__ import annotations

import functools
import logging
from typing import Literal, NamedTuple, NoReturn

import torch

import lce_jax
from lce_jax.types import scalars

_logger = logging.getLogger("lce_torch_bridge")
_asked: Literal["direct", "jax"] | None = None


def launch_with(way: Literal["direct", "jax"] | None) -> None:
    """Says how calls are run, from now on and in this process.

    Args:
        way: "direct" launches the kernels on torch's current stream with torch's memory, and JAX starts
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
        scalars.check_choice("way", way, ("direct", "jax"))
    _asked = way


class Way(NamedTuple):
    """How a pass is run: what `launch_with` says, on the device of its tensors."""

    direct: bool  # its kernels are launched directly if they can be
    must: bool  # and if they cannot be, the call is refused

    def refuse(self, reason: str) -> None:
        """JAX runs what might have been launched directly, for that reason.

        Raises:
            lce_jax.UnsupportedError: `launch_with` asks for a direct launch.
        """
        if self.must:
            raise lce_jax.UnsupportedError(
                f'launch_with("direct"): {reason}; lce_torch_bridge.launch_with(None) lets JAX run such calls'
            )
        if self.direct:
            _say(reason)


JAX = Way(direct=False, must=False)
DIRECT, ONLY_DIRECT = Way(direct=True, must=False), Way(direct=True, must=True)


def way_of(x: torch.Tensor) -> Way:
    """The way of a pass over tensors on the device of ``x``.

    Raises:
        lce_jax.UnsupportedError: `launch_with` asks for a direct launch, and there is no GPU.
    """
    if _asked == "jax" or not (_asked or on_gpu(x)):
        return JAX
    if _asked is None:
        return DIRECT
    if x.numel() and not on_gpu(x):
        ONLY_DIRECT.refuse(f"{x.device} is no CUDA device")
    return ONLY_DIRECT


def refuse_another_way() -> NoReturn:
    """Refuses a backward by JAX where kernels have saved live tiles, which JAX does not know."""
    raise RuntimeError(
        "gradient_threshold: the forward was launched directly, so its backward must be too: "
        "call lce_torch_bridge.launch_with before a forward, not between it and its backward"
    )


def on_gpu(x: torch.Tensor) -> bool:
    """Whether ``x`` is in a GPU's memory."""
    return x.is_cuda


def asks_for_jax() -> bool:
    """Whether `launch_with` does."""
    return _asked == "jax"


@functools.cache
def _say(reason: str) -> None:
    _logger.info("JAX runs the programs, because they are not launched directly: %s", reason)
