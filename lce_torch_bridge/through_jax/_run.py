"""Programs of JAX on torch's tensors, lent through DLPack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

from lce_torch_bridge.through_jax import _runtime as runtime
from lce_torch_bridge.through_jax._dlpack import to_jax, to_torch_all

type Inputs = Sequence[Any]  # tensors, None, and JAX's arrays where JAX has made them


def run(function: Callable[..., Any], *calls: Inputs, waits: int = 3, lend: bool = True) -> list[list[Any]]:
    """The flat results of a jitted function for each of the ``calls``, whose inputs have the same shapes.

    ``waits`` is the index of an input that the function is certain to use. Without ``lend``, only the first result is
    a tensor: the others are JAX's arrays.
    """
    with runtime.beside(first(calls[0])):
        imported = Imported(waits)
        found = [jax.tree.leaves(function(*imported.of(inputs))) for inputs in calls]
        return [to_torch_all(results) if lend else [*to_torch_all(results[:1]), *results[1:]] for results in found]


def first(inputs: Inputs) -> torch.Tensor:
    """The first tensor, which says where they all are."""
    return next(x for x in inputs if isinstance(x, torch.Tensor))


class Imported:
    """Tensors as JAX's arrays, each imported once. Only one of each call waits for torch's stream."""

    def __init__(self, waits: int) -> None:
        self._waits = waits
        self._known: dict[int, jax.Array] = {}

    def of(self, inputs: Inputs) -> list[jax.Array | None]:
        """Those of a call."""
        return [self._taken(i, x) for i, x in enumerate(inputs)]

    def _taken(self, i: int, x: torch.Tensor | jax.Array | None) -> jax.Array | None:
        if not isinstance(x, torch.Tensor):
            return x
        if id(x) not in self._known:
            self._known[id(x)] = to_jax(x, wait=i == self._waits)
        return self._known[id(x)]
