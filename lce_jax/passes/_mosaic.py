"""A kernel of a list, compiled: no client of JAX's is made on the GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from lce_jax._types import Device
from lce_jax.launch import _jax
from lce_jax.launch._refusal import UnservedError
from lce_jax.passes._recorder import Kernel

type Step = Callable[[int, int], Callable[[], None]]  # (stream, where the addresses are) -> launch()


def compiled(kernels: Sequence[Kernel], device: Device, number: int) -> list[Step]:
    """What makes launches of each kernel on the current CUDA device, whose number is ``number``.

    Raises:
        RuntimeError: Mosaic does not compile one; the reason is in the process's standard error.
    """
    return [_compiled(_module(kernel, device), number) for kernel in kernels]


@functools.cache
def _compiled(module: bytes, number: int) -> Step:
    """It is never unloaded."""
    return _jax.compile_kernel(module, number)


@functools.lru_cache(maxsize=4096)
def _module(kernel: Kernel, device: Device) -> bytes:
    """The kernel as Mosaic compiles it."""
    lowered, _ = _jax.lower(kernel.function, kernel.arrays, device)
    main = next(each for each in lowered.body.operations if each.operation.name == "func.func")
    calls = [each for each in main.regions[0].blocks[0].operations if _is_kernel(each)]
    if len(calls) != 1:
        raise UnservedError(f"{len(calls)} kernels in a function of one")
    return calls[0].attributes["mhlo.backend_config"]["module"].value_bytes


def _is_kernel(operation: Any) -> bool:
    attributes = operation.attributes
    return "call_target_name" in attributes and attributes["call_target_name"].value.startswith("mosaic_gpu")
