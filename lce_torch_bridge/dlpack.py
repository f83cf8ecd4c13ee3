"""Tensors to JAX arrays and back through DLPack: the same memory, in stream order, without waiting for a GPU.

Three rules, each of them paid for:

* Import afresh for every call and keep no JAX array that aliases torch's memory: torch may free, move or refill it.
* Export at least one output of every program that read torch's memory. The export orders torch's stream behind the
  program; without it a write in place right after the call overwrites what the program still reads.
* Do not donate an imported buffer: it is torch's.

Memory that JAX exported is in the order of the stream it was exported on; used on another one, a gradient must be
copied there first, for ``record_stream`` does not reach JAX's allocator.
"""

from __future__ import annotations

import jax
import torch

CPU_ALIGNMENT = 64  # bytes; XLA copies a less aligned CPU buffer without a word
GPU_ALIGNMENT = 16  # bytes; a less aligned GPU buffer imports and then fails when the program runs
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.bool)


def to_jax(x: torch.Tensor) -> jax.Array:
    """``x`` as a JAX array over the same memory, or over a copy where XLA could not use it as it lies.

    Raises:
        TypeError: for dtypes that JAX would convert: int64 wraps modulo 2³², float64 loses half its digits.

    Example:
        >>> import torch
        >>> from lce_torch_bridge.dlpack import to_jax
        >>> to_jax(torch.arange(3, dtype=torch.int32)).tolist()
        [0, 1, 2]
    """
    if x.dtype not in DTYPES:
        raise TypeError(f"{x.dtype} does not pass to JAX unchanged; known: {', '.join(map(str, DTYPES))}")
    x = x.detach().contiguous()
    if x.data_ptr() % (GPU_ALIGNMENT if x.is_cuda else CPU_ALIGNMENT):
        x = x.clone()
    return jax.dlpack.from_dlpack(x)


def to_torch(x: jax.Array) -> torch.Tensor:
    """``x`` as a tensor over the same memory, ready in torch's current stream; JAX frees it when torch drops it."""
    return torch.utils.dlpack.from_dlpack(x)
