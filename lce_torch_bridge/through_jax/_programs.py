"""What the programs of all functions share: their builder, their key, their run on torch's tensors, sums of dweight.

A step of a function is plain code over `lce_jax`: ``step(key, *static, *arrays)``. `program` compiles it.

P is the number of rows of a program. How many of them count is an operand, so that one program serves many counts of
tokens. Each array that crosses between the libraries costs the host as much time as many kernels. So everything per
token crosses as one int32 array, floats by their bits, as `tensors._padding.with_count` packs it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch
from jax import lax

from lce_jax.run import _local
from lce_torch_bridge._types import TorchCall
from lce_torch_bridge.tensors import _device, _tensor_parallel
from lce_torch_bridge.through_jax import _runtime as runtime
from lce_torch_bridge.through_jax._runtime import to_jax, to_torch_all


@functools.cache
def program(step: Callable[..., Any], key: ProgramKey, *static: Any, donate: tuple[int, ...] = ()) -> Any:
    """``step`` for one static part, compiled: a function of its arrays. Those of the places in ``donate`` may go."""
    return jax.jit(functools.partial(step, key, *static), donate_argnums=donate)


class ProgramKey(NamedTuple):
    """The static part of a program, whatever its function."""

    call: TorchCall  # without what programs do not depend on
    shard: int  # of the vocabulary: this rank's
    shards: int
    precision: str | None  # of float32 products

    def part(self, rows: int) -> tuple[int, int | None]:
        """The global id of the first of the shard's columns; the true vocabulary, if the shards have columns beyond."""
        vocab_size = self.call.jax.vocab_size
        return self.shard * rows, vocab_size if vocab_size < self.shards * rows else None


def key_of(call: TorchCall, *weights: torch.Tensor) -> ProgramKey:
    """The key of a call's programs, over one head or several."""
    shards, rank = _tensor_parallel.size_and_rank(call.group)
    precision = next(filter(None, map(precision_of, weights)), None)
    if not call.jax.vocab_size:  # where torch.compile traces
        call = _tensor_parallel.with_vocabulary(call, weights[0])
    return ProgramKey(call.compiled, rank, shards, precision)


def precision_of(weight: torch.Tensor) -> str | None:
    """The option of `lce_jax`: float32 products are as exact as torch's settings ask."""
    if weight.dtype != torch.float32:
        return None
    # This tells what was set by any of torch's functions; torch.get_float32_matmul_precision raises after newer ones.
    products: Any = torch.backends.cuda.matmul if weight.is_cuda else torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    return "highest" if products.fp32_precision in ("none", "ieee") else None


def counted(packed: Any, rows: int) -> tuple[Any, Any]:
    """What `tensors._padding.with_count` packed: how many rows count, and ``[K, P]``."""
    return packed[0], packed[1:].reshape(rows, -1).T


def as_rows(*columns: Any) -> Any:
    """Arrays ``[P]`` and ``[P, K]`` as rows of one int32 array, floats by their bits."""
    rows = [x[None] if x.ndim == 1 else x.T for x in columns]
    return jnp.concatenate([lax.bitcast_convert_type(x, jnp.int32) for x in rows])


def logit_options(call: TorchCall) -> tuple[object, ...]:
    """What the logits of all rows depend on."""
    return call.jax.vocab_size, call.jax.logit_scale, call.jax.logit_softcap


def tags_of(columns: Any, num_rows: Any, *of_call: object) -> Any:
    """`lce_jax.run._local.compute_tags` of what tokens come with, of how many count, and of the rest of the call.

    Columns that are None are left out.
    """
    columns = [x for x in columns if x is not None]
    numbers = num_rows, jnp.int32(_tensor_parallel.number_of(*of_call))
    return _local.compute_tags([*(jnp.broadcast_to(x, columns[0].shape[:1]) for x in numbers), *columns])


def with_tags(packed: Any, tags: Any) -> Any:
    """``packed [F, P]``, and a row with the tags, by their bits."""
    return jnp.concatenate([packed, lax.bitcast_convert_type(tags[None], packed.dtype)])


def of_equal_tags(gathered: Any) -> tuple[Any, Any]:
    """What `with_tags` made of all shards, without the tags, and in which rows these are equal; NaN in the others."""
    tags = lax.bitcast_convert_type(gathered[:, -1], jnp.int32)
    agree = (tags == tags[:1]).all(0)
    return jnp.where(agree, gathered[:, :-1], jnp.nan), agree


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


class DweightSum:
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

    @property
    def is_begun(self) -> bool:
        """Whether there is something that kernels must add to."""
        return self._tensor is not None or self._array is not None or self._given is not None

    @property
    def _given(self) -> torch.Tensor | None:
        """What was given, if kernels add there."""
        into = self._into
        return into if into is not None and into.dtype == torch.float32 and _device.is_usable(into) else None

    def tensor(self, writes: bool = False) -> torch.Tensor:
        """Where kernels add, if JAX has added nothing. With ``writes`` they fill what has not begun."""
        if self._tensor is None and self._given is not None:
            torch.autograd.graph.increment_version(self._given)
            self._tensor = self._given
        if self._tensor is None:
            self._tensor = self._new(torch.empty if writes else torch.zeros)
        return self._tensor

    def _new(self, make: Callable[..., torch.Tensor] = torch.zeros) -> torch.Tensor:
        return make(self._shape, dtype=torch.float32, device=self._device)

    def taken(self) -> torch.Tensor:
        """The sum, or what it is added to. Nothing can be added to it afterwards."""
        total = self._tensor
        if self._array is not None:
            (total,) = to_torch_all([self._array])
            self._array = None
        if self._into is None:
            return self._new() if total is None else total
        return self._into if total is None or total is self._into else self._into.add_(total)


@functools.partial(jax.jit, static_argnums=0, keep_unused=True)
def _zeros(shape: tuple[int, ...], _after: jax.Array) -> jax.Array:
    """Zeros, written once the array is there: their memory may be some that torch has dropped and has yet to read."""
    return jnp.zeros(shape, jnp.float32)


@functools.partial(jax.jit, donate_argnums=0)
def _multiplied(x: jax.Array, factor: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``x · factor`` in the memory of ``x``, and the factor."""
    return x * factor, factor
