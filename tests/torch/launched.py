"""Direct launches on the CPU: XLA computes what the kernels would, in the memory that a launch writes to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import torch

from lce_torch_bridge import _direct, _launch
from lce_torch_bridge.dlpack import to_jax, to_torch_all


class Program(NamedTuple):
    """A function, and which inputs it may overwrite."""

    function: Callable[..., Any]
    updated: Sequence[int]


@contextlib.contextmanager
def launched_directly() -> Iterator[None]:
    """Inside, all programs are run as if they were launched directly."""

    def program(function: Callable[..., Any], inputs: Any, updated: Sequence[int] = (), **_: Any) -> Program:
        del inputs
        return Program(function, updated)

    with mock.patch.object(_launch, "_program", program), mock.patch.object(_direct, "run", run):
        yield


def run(program: Program, inputs: Sequence[Any], sums: Mapping[int, torch.Tensor] | None = None) -> list[torch.Tensor]:
    """The results that are no ``sums``, which are updated in place. What else may be overwritten is NaN afterwards."""
    sums = sums or {}
    arrays = [None if x is None else jnp.array(to_jax(x.contiguous()), copy=True) for x in inputs]
    found = jax.tree.leaves(program.function(*arrays))
    for place, total in sums.items():
        (computed,) = to_torch_all([found[place]])
        total.copy_(computed)
    for i in program.updated:
        if not any(inputs[i] is total for total in sums.values()) and inputs[i].is_floating_point():
            inputs[i].fill_(torch.nan)
    return to_torch_all([x for i, x in enumerate(found) if i not in sums])
