"""What torch's compiler calls in its code for GPUs in place of public functions, which take several times as long.

Each name is private, and where a version of torch lacks it, as one for CPUs does, the public function serves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch


def _current_stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


def _empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


_guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _current_stream)  # its handle
empty: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]  # shape, strides, dtype; on that device
empty = getattr(_guards, "_empty_strided_cuda", _empty)

type Allocated = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


def allocated(shape: Sequence[int], dtype: torch.dtype) -> Allocated:
    """What `empty` is given for a contiguous tensor.

    Example:
        >>> import torch
        >>> from lce_torch_bridge.tensors._torch import allocated
        >>> allocated((5, 3, 2), torch.float32)[:2]
        ((5, 3, 2), (6, 2, 1))
    """
    return tuple(shape), tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape))), dtype
