"""Direct launches on the CPU: XLA computes what the kernels would, in the memory that a launch writes to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch

from lce_torch_bridge._types import Sums, Tensors, TorchCall
from lce_torch_bridge.launched_directly import _passes, _way
from lce_torch_bridge.launched_directly._way import Way
from lce_torch_bridge.operators import _execute
from lce_torch_bridge.tensors._weight import empty_sparse_like
from lce_torch_bridge.through_jax._programs import DweightSum


@contextlib.contextmanager
def launched_directly() -> Iterator[None]:
    """Inside, all calls are run as if their kernels were launched directly."""
    with (
        mock.patch.object(_way, "on_gpu", return_value=True),
        mock.patch.object(_passes, "forward", forward),
        mock.patch.object(_passes, "gradients", gradients),
    ):
        yield


def forward(x: Tensors, call: TorchCall, keep_cache: bool, _: Way) -> list[Any]:
    return _execute.forward(x, call, keep_cache, _way.JAX)


def gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    saved: torch.Tensor,
    cache: Sequence[torch.Tensor],
    cotangents: dict[str, torch.Tensor],
    wanted: tuple[bool, ...],
    call: TorchCall,
    sums: Sums,
    _: Way,
) -> list[torch.Tensor] | None:
    """dweight is added where a sum is given. A cache that may be overwritten is NaN afterwards."""
    into = sums.main_grad if sums.total is None else sums.total.tensor()
    own = None if into is None else DweightSum(weight)
    x: Any = Tensors(hidden, weight, None, None)  # type: ignore[arg-type]
    found = _execute.gradients(x, [saved, *cache], cotangents, wanted, call, _way.JAX, Sums(own))
    if own is not None and into is not None:
        into.add_(own.taken())
    if sums.owns_cache:
        for x in cache:
            if x.is_floating_point():
                x.fill_(torch.nan)
    return found if sums.main_grad is None else [*found, empty_sparse_like(sums.main_grad, weight.dtype)]
