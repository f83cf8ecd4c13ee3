"""Programs of JAX on torch's tensors, lent through DLPack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

from lce_torch_bridge.through_jax import _runtime as runtime
from lce_torch_bridge.through_jax._dlpack import to_jax, to_torch_all

type Inputs = Sequence[Any]  # tensors, None, and JAX's arrays where JAX has made them

WAITS = 3  # the index of what is per token, after hidden, weight and bias


def run(function: Callable[..., Any], *calls: Inputs, waits: int = WAITS, lend: bool = True) -> list[list[Any]]:
    """The flat results of a jitted function for each of the ``calls``, whose inputs have the same shapes.

    The first input is a tensor, and says where they all are. ``waits`` is the index of one that the function is certain
    to use. Without ``lend``, only the first result is a tensor: the others are JAX's arrays.
    """
    arrays: dict[int, jax.Array] = {}
    with runtime.beside(calls[0][0]):
        found = [jax.tree.leaves(function(*as_arrays(inputs, waits, arrays))) for inputs in calls]
        return [to_torch_all(results) if lend else [*to_torch_all(results[:1]), *results[1:]] for results in found]


def as_arrays(inputs: Inputs, waits: int, known: dict[int, jax.Array]) -> list[jax.Array | None]:
    """Tensors as JAX's arrays, each imported once: ``known`` has the others. One waits for torch's stream."""
    arrays = []
    for i, x in enumerate(inputs):
        if isinstance(x, torch.Tensor):
            if id(x) not in known:
                known[id(x)] = to_jax(x, wait=i == waits)
            x = known[id(x)]
        arrays.append(x)
    return arrays
