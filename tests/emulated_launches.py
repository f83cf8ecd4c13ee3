"""Runs kernels of `lce_jax.run.kernels` on the CPU: Pallas interprets them, on the memory at their addresses."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lce_jax.mosaic._pallas import interpreting, plgpu
from lce_jax.run.kernels import Kernel


def compiled(kernels: Sequence[Kernel], *_: Any) -> list[Callable[..., Any]]:
    """Returns what `lce_jax.run.kernels.compiled` returns, for memory of the CPU."""
    return [lambda _, at, kernel=kernel: functools.partial(_launch, kernel, at) for kernel in kernels]


def _launch(kernel: Kernel, at: int) -> None:
    structs = [kernel.arrays[i] for i in kernel.operands]
    addresses = (ctypes.c_uint64 * (len(structs) + len(kernel.results))).from_address(at)
    operands = [memory(address, x).copy() for address, x in zip(addresses, structs, strict=False)]
    arrays = [np.zeros(x.shape, x.dtype) for x in kernel.arrays]
    for place, x in zip(kernel.operands, operands, strict=True):
        arrays[place] = x
    results = jax.tree.leaves(_jitted(kernel)(*arrays))
    for number, x in zip(kernel.returned, results, strict=True):
        memory(addresses[len(structs) + number], kernel.results[number])[...] = np.asarray(x)


@functools.cache
def _jitted(kernel: Kernel) -> Callable[..., Any]:
    jitted = jax.jit(lambda *arrays: kernel.function(*arrays))

    def run(*arrays: Any) -> Any:
        with interpreting(plgpu.InterpretGPUParams()):
            return jitted(*arrays)

    return run


def memory(address: int, struct: Any) -> np.ndarray:
    """Returns the array at an address. If a call has fewer rows than its kernels, the array reads on after them."""
    size = int(np.prod(struct.shape)) * jnp.dtype(struct.dtype).itemsize
    return (
        np.frombuffer((ctypes.c_ubyte * size).from_address(address), np.uint8).view(struct.dtype).reshape(struct.shape)
    )
