"""Two ways to run a program: launched directly, or by JAX with tensors lent through DLPack. The results are the same.

Calls that are lists of kernels are no programs: `launch_with` asks for them, and `_kernels` launches them.

The direct way serves programs with the kernels for Hopper GPUs. Everything else goes through JAX: other dtypes, other
GPUs, the CPU.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import torch

import lce_jax
from lce_jax import scalars
from lce_torch_bridge import _direct, runtime
from lce_torch_bridge.dlpack import to_jax, to_torch_all

type Way = Literal["direct", "jax", "kernels"]

_logger = logging.getLogger("lce_torch_bridge")
_asked: Way | None = None


def launch_with(way: Way | None) -> None:
    """Says how programs are launched, from now on and in this process.

    Args:
        way: "direct" launches kernels on torch's current stream with torch's memory, and JAX starts no client on the
            GPU. A call that cannot be served so raises. "jax" lends the tensors to JAX, which keeps a pool of GPU
            memory of its own (`init`). "kernels" launches a call as a list of kernels, without generated code. Each
            token's results have the same bits in every such call. A bias, candidates, ``mean_logit``,
            ``gradient_threshold`` and a V that is no multiple of 8 go as with None. None, as in the beginning,
            is "direct" where it can be, else "jax"; the logger ``lce_torch_bridge`` says once why not.

    Raises:
        ValueError: another value.

    Example:
        >>> import lce_torch_bridge
        >>> lce_torch_bridge.launch_with("jax")
        >>> lce_torch_bridge.launch_with(None)
    """
    global _asked
    if way is not None:
        scalars.one_of("way", way, ("direct", "jax", "kernels"))
    _asked = way


def asked() -> Way | None:
    """What `launch_with` was given."""
    return _asked


type Inputs = Sequence[Any]  # tensors, None, and JAX's arrays where JAX has made them


def run(function: Callable[..., Any], *calls: Inputs, waits: int = 3, lend: bool = True) -> list[list[Any]]:
    """The flat results of a jitted function for each of the ``calls``, whose inputs have the same shapes.

    ``waits`` is the index of an input that the function is certain to use. Without ``lend``, only the first result is
    a tensor for certain: the others are JAX's arrays if JAX runs the function.

    Raises:
        lce_jax.UnsupportedError: `launch_with` asks for a direct launch, which does not serve the function.
    """
    program = _program(function, calls[0])
    if program is not None:
        return [_direct.run(program, inputs) for inputs in calls]
    with runtime.beside(_first(calls[0])):
        imported = _Imported(waits)
        found = [jax.tree.leaves(function(*imported.of(inputs))) for inputs in calls]
        return [to_torch_all(results) if lend else [*to_torch_all(results[:1]), *results[1:]] for results in found]


def in_place(
    function: Callable[..., Any], inputs: Inputs, updated: Sequence[int], sums: Mapping[int, torch.Tensor]
) -> list[torch.Tensor] | None:
    """The results of a function that may overwrite the inputs with the indices ``updated``; None if JAX is to run it.

    ``sums`` are those of them that are results, by the results' numbers. They are not returned.
    """
    if not all(map(_direct.is_usable, sums.values())):
        return None
    program = _program(function, inputs, updated)
    if program is None:
        return None
    torch.autograd.graph.increment_version([inputs[i] for i in updated])  # as any change in place
    return _direct.run(program, inputs, sums)


def _program(function: Callable[..., Any], inputs: Inputs, updated: Sequence[int] = ()) -> Any:
    """The program that is launched directly; None if JAX is to run it."""
    if any(isinstance(x, jax.Array) for x in inputs):
        return None
    return direct_or_none(_first(inputs), lambda: _direct.program(function, inputs, updated))


def direct_or_none(x: torch.Tensor, program: Callable[[], Any]) -> Any:
    """``program()`` for the GPU of ``x``; None if JAX is to run it, because that says why it is not launched directly.

    Raises:
        lce_jax.UnsupportedError: `launch_with` asks for a direct launch.
    """
    asked = _asked == "direct"
    if _asked == "jax" or not (_direct.on_gpu(x) or asked):
        return None
    found: Any = program() if _direct.on_gpu(x) else f"{x.device} is no CUDA device"
    if not isinstance(found, str):
        return found
    if asked:
        raise lce_jax.UnsupportedError(
            f'launch_with("direct"): {found}; lce_torch_bridge.launch_with(None) lets JAX run such calls'
        )
    _say(found)
    return None


def _first(inputs: Inputs) -> torch.Tensor:
    return next(x for x in inputs if isinstance(x, torch.Tensor))


@functools.cache
def _say(reason: str) -> None:
    _logger.info("JAX runs the programs, because they are not launched directly: %s", reason)


class _Imported:
    """Tensors as JAX's arrays, each imported once. Only one of each call waits for torch's stream."""

    def __init__(self, waits: int) -> None:
        self._waits = waits
        self._known: dict[int, jax.Array] = {}

    def of(self, inputs: Inputs) -> list[jax.Array | None]:
        return [self._taken(i, x) for i, x in enumerate(inputs)]

    def _taken(self, i: int, x: torch.Tensor | jax.Array | None) -> jax.Array | None:
        if not isinstance(x, torch.Tensor):
            return x
        if id(x) not in self._known:
            self._known[id(x)] = to_jax(x, wait=i == self._waits)
        return self._known[id(x)]


class Sum:
    """A sum of dweight in float32, which each program overwrites: torch's memory, or JAX's if JAX runs the programs.

    With ``into``, what the sum is added to: the same memory, if that is float32 and programs are launched directly.
    """

    def __init__(self, weight: torch.Tensor, into: torch.Tensor | None = None) -> None:
        self._into = into
        self._like = torch.empty(weight.shape, dtype=torch.float32, device="meta")
        self._device = weight.device
        self._tensor: torch.Tensor | None = None
        self._array: jax.Array | None = None

    def after(
        self,
        function: Callable[..., Any],
        overwriting: Callable[..., Any],
        inputs: Inputs,
        operand: int,
        place: int,
    ) -> list[torch.Tensor]:
        """What a function returns besides the sum, which is its operand of that index and the result at ``place``.

        ``overwriting`` is the same function for a direct launch: it may overwrite the operands after the sum.
        """
        before, behind = inputs[:operand], inputs[operand:]
        given = (*before, self._like, *behind)
        updated = range(operand, len(given))
        program = None if self._array is not None else _program(overwriting, given, updated)
        if program is not None:
            tensor = self.tensor()
            return _direct.run(program, (*before, tensor, *behind), {place: tensor})
        with runtime.beside(_first(inputs)):
            if self._array is None:
                self._array = jnp.zeros(self._like.shape, jnp.float32)
                if self._tensor is not None and self._tensor is not self._into:
                    self._array, self._tensor = self._array + to_jax(self._tensor), None
            operands = _Imported(waits=3).of(inputs)
            found = function(*operands[:operand], self._array, *operands[operand:])
            self._array = found.pop(place)
            return to_torch_all(found)

    @property
    def is_given(self) -> bool:
        """Whether programs add to the memory that was given."""
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
            self._tensor = self._own()
        return self._tensor

    def _own(self) -> torch.Tensor:
        """Where programs that are launched directly add."""
        into = self._into
        if into is not None and into.dtype == torch.float32 and _direct.is_usable(into):
            torch.autograd.graph.increment_version(into)
            return into
        return torch.zeros_like(self._like, device=self._device)

    def taken(self) -> torch.Tensor:
        """The sum, or what it is added to. Nothing can be added to it afterwards."""
        total = self._tensor
        if self._array is not None:
            (total,) = to_torch_all([self._array])
            self._array = None
        if self._into is None:
            return torch.zeros_like(self._like, device=self._device) if total is None else total
        return self._into if total is None or total is self._into else self._into.add_(total)


@functools.partial(jax.jit, donate_argnums=0)
def _multiplied(x: jax.Array, factor: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``x · factor`` in the memory of ``x``, and the factor."""
    return x * factor, factor
