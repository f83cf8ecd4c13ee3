"""Programs of JAX on torch's tensors, lent through DLPack, and a sum of dweight over several of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from lce_torch_bridge.tensors import _device
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


class Sum:
    """A sum of dweight in float32 over several backward passes.

    It lies in torch's memory, to which kernels add, or in JAX's if JAX runs the programs. With ``into``, what the sum
    is added to: the same memory, if that is float32 and kernels add.
    """

    def __init__(self, weight: torch.Tensor, into: torch.Tensor | None = None) -> None:
        self._into = into
        self._shape, self._device = weight.shape, weight.device
        self._tensor: torch.Tensor | None = None
        self._array: jax.Array | None = None

    def after(
        self, function: Callable[..., list[jax.Array]], inputs: Inputs, operand: int, place: int
    ) -> list[torch.Tensor]:
        """What JAX's function returns besides the sum, its operand of that index and the result at ``place``."""
        with runtime.beside(inputs[0]):
            operands = as_arrays(inputs, waits=WAITS, known={})
            if self._array is None:
                self._array = _zeros(self._shape, operands[WAITS])
                if self._tensor is not None and self._tensor is not self._into:
                    self._array, self._tensor = self._array + to_jax(self._tensor), None
            found = function(*operands[:operand], self._array, *operands[operand:])
            self._array = found.pop(place)
            return to_torch_all(found)

    @property
    def is_given(self) -> bool:
        """Whether kernels add to the memory that was given."""
        return self._tensor is not None and self._tensor is self._into

    def mul_(self, factor: torch.Tensor) -> None:
        """Multiplies what has been added so far, in its memory; not what was given."""
        if self._array is not None:
            with runtime.beside(factor):
                self._array, used = _multiplied(self._array, to_jax(factor))
                to_torch_all([used])  # afterwards torch may write to the factor's memory
        elif self._tensor is not None:
            self._tensor.mul_(factor)

    @property
    def is_torchs(self) -> bool:
        """Whether JAX has added nothing."""
        return self._array is None

    def tensor(self) -> torch.Tensor:
        """Where kernels add, if JAX has added nothing."""
        if self._tensor is None:
            into = self._into
            if into is not None and into.dtype == torch.float32 and _device.is_usable(into):
                torch.autograd.graph.increment_version(into)
                self._tensor = into
            else:
                self._tensor = self._zeros()
        return self._tensor

    def _zeros(self) -> torch.Tensor:
        return torch.zeros(self._shape, dtype=torch.float32, device=self._device)

    def taken(self) -> torch.Tensor:
        """The sum, or what it is added to. Nothing can be added to it afterwards."""
        total = self._tensor
        if self._array is not None:
            (total,) = to_torch_all([self._array])
            self._array = None
        if self._into is None:
            return self._zeros() if total is None else total
        return self._into if total is None or total is self._into else self._into.add_(total)


@functools.partial(jax.jit, static_argnums=0, keep_unused=True)
def _zeros(shape: tuple[int, ...], _after: jax.Array) -> jax.Array:
    """Zeros, written once the array is there: their memory may be some that torch has dropped and has yet to read."""
    return jnp.zeros(shape, jnp.float32)


@functools.partial(jax.jit, donate_argnums=0)
def _multiplied(x: jax.Array, factor: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``x · factor`` in the memory of ``x``, and the factor."""
    return x * factor, factor
