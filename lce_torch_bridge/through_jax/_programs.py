"""What the programs of all functions share: how they are built and run on torch's tensors, tags, and sums of dweight.

A step of a function is plain code over `lce_jax`: ``step(key, *static, *arrays)``. `build_program` compiles it.

P is the number of rows of a program. The number of rows that count is an operand, so that one program serves many
numbers of tokens. Each array that passes between the libraries costs the host as much time as many kernels. So all
per-token numbers pass as one int32 array, floats by their bits, in the layout of `tensors._padding.pack_rows`.
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
from lce_torch_bridge.through_jax._dlpack import to_jax, to_torch_all


@functools.cache
def build_program(step: Callable[..., Any], key: ProgramKey, *static: Any, donate: tuple[int, ...] = ()) -> Any:
    """Returns ``step`` for one static part, compiled: a function of its arrays.

    It may reuse the memory of the arrays whose indices are in ``donate``.
    """
    return jax.jit(functools.partial(step, key, *static), donate_argnums=donate)


class ProgramKey(NamedTuple):
    """The static part of a program of any function."""

    call: TorchCall  # without what programs do not depend on
    shard: int  # the index of this rank's shard of the vocabulary
    shards: int
    precision: str | None  # of float32 products

    def part(self, rows: int) -> tuple[int, int | None]:
        """Returns the global id of the shard's first column; and the true vocabulary, if columns lie beyond it."""
        vocab_size = self.call.jax.vocab_size
        return self.shard * rows, vocab_size if vocab_size < self.shards * rows else None


def make_key(call: TorchCall, *weights: torch.Tensor) -> ProgramKey:
    """Returns the key of a call's programs, over one head or several."""
    shards, rank = _tensor_parallel.size_and_rank(call.group)
    precision = next(filter(None, map(find_precision, weights)), None)
    if not call.jax.vocab_size:  # in a trace of torch.compile
        call = _tensor_parallel.set_vocab_size(call, weights[0])
    return ProgramKey(call.compiled, rank, shards, precision)


def find_precision(weight: torch.Tensor) -> str | None:
    """Returns the ``precision`` of `lce_jax` with which float32 products are as exact as torch's settings ask."""
    if weight.dtype != torch.float32:
        return None
    # This knows what any of torch's functions has set. torch.get_float32_matmul_precision raises after newer ones.
    products: Any = torch.backends.cuda.matmul if weight.is_cuda else torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    return "highest" if products.fp32_precision in ("none", "ieee") else None


def unpack_rows(packed: Any, rows: int) -> tuple[Any, Any]:
    """Returns what `tensors._padding.pack_rows` packed: how many rows count, and ``[K, P]``."""
    return packed[0], packed[1:].reshape(rows, -1).T


def pack_arrays(*arrays: Any) -> Any:
    """Returns arrays ``[P]`` and ``[P, K]`` as rows of one int32 array, floats by their bits."""
    rows = [x[None] if x.ndim == 1 else x.T for x in arrays]
    return jnp.concatenate([lax.bitcast_convert_type(x, jnp.int32) for x in rows])


def logit_options(call: TorchCall) -> tuple[object, ...]:
    """Returns the options on which the logits of all rows depend."""
    return call.jax.vocab_size, call.jax.logit_scale, call.jax.logit_softcap


def make_tags(columns: Any, num_rows: Any, *options: object) -> Any:
    """Returns `lce_jax.run._local.compute_tags` of per-token columns, of how many rows count, and of options.

    Columns that are None are left out.
    """
    columns = [x for x in columns if x is not None]
    numbers = num_rows, jnp.int32(_tensor_parallel.compute_checksum(*options))
    return _local.compute_tags([*(jnp.broadcast_to(x, columns[0].shape[:1]) for x in numbers), *columns])


def append_tags(packed: Any, tags: Any) -> Any:
    """Returns ``packed [F, P]`` with the tags as one more row, by their bits."""
    return jnp.concatenate([packed, lax.bitcast_convert_type(tags[None], packed.dtype)])


def check_tags(gathered: Any) -> tuple[Any, Any]:
    """Takes the tags off the shards' `append_tags`. Returns the rest, NaN where tags differ, and where they agree."""
    tags = lax.bitcast_convert_type(gathered[:, -1], jnp.int32)
    agree = (tags == tags[:1]).all(0)
    return jnp.where(agree, gathered[:, :-1], jnp.nan), agree


type Inputs = Sequence[Any]  # tensors, None, and arrays that JAX has made

WAITS = 3  # the index of the per-token numbers, after hidden, weight and bias


def run(function: Callable[..., Any], *calls: Inputs, waits: int = WAITS, lend: bool = True) -> list[list[Any]]:
    """Runs a jitted function for the inputs of each of ``calls``, all of the same shapes. Returns the flat results.

    The first input is a tensor on the device of all of them. ``waits`` is the index of an input that the function
    certainly uses. With ``lend=False`` only the first result is a tensor; the others are JAX's arrays.
    """
    arrays: dict[int, jax.Array] = {}
    with runtime.enter_device(calls[0][0]):
        outputs = [jax.tree.leaves(function(*import_tensors(inputs, waits, arrays))) for inputs in calls]
        return [to_torch_all(results) if lend else [*to_torch_all(results[:1]), *results[1:]] for results in outputs]


def import_tensors(inputs: Inputs, waits: int, known: dict[int, jax.Array]) -> list[jax.Array | None]:
    """Returns tensors as JAX's arrays. The input of index ``waits`` waits for torch's stream.

    Each tensor is imported once: ``known`` has those that are imported already.
    """
    arrays = []
    for i, x in enumerate(inputs):
        if isinstance(x, torch.Tensor):
            if id(x) not in known:
                known[id(x)] = to_jax(x, wait=i == waits)
            x = known[id(x)]
        arrays.append(x)
    return arrays


class DweightSum:
    """A float32 sum of dweight over several backward passes.

    It is in torch's memory, to which kernels add, or in JAX's memory if JAX runs the programs. The sum is added to
    ``target`` at the end, if there is one. Kernels add to a float32 ``target`` directly.
    """

    def __init__(self, weight: torch.Tensor, target: torch.Tensor | None = None) -> None:
        self._target = target
        self._shape, self._device = weight.shape, weight.device
        self._tensor: torch.Tensor | None = None
        self._array: jax.Array | None = None

    def add_in_jax(
        self, function: Callable[..., list[jax.Array]], inputs: Inputs, operand: int, place: int
    ) -> list[torch.Tensor]:
        """Runs a function of JAX that updates the sum. Returns its other results.

        ``operand`` is the index of the sum among the function's operands, ``place`` its index among the results.
        """
        with runtime.enter_device(inputs[0]):
            operands = import_tensors(inputs, waits=WAITS, known={})
            if self._array is None:
                self._array = _make_zeros(self._shape, operands[WAITS])
                if self._tensor is not None and self._tensor is not self._target:
                    self._array, self._tensor = self._array + to_jax(self._tensor), None
            results = function(*operands[:operand], self._array, *operands[operand:])
            self._array = results.pop(place)
            return to_torch_all(results)

    @property
    def is_in_target(self) -> bool:
        """Whether kernels add to the memory of ``target``."""
        return self._tensor is not None and self._tensor is self._target

    def mul_(self, factor: torch.Tensor) -> None:
        """Multiplies what has been added so far, in its memory. Not for a sum that is in ``target``."""
        if self._array is not None:
            with runtime.enter_device(factor):
                self._array, used = _multiply(self._array, to_jax(factor))
                to_torch_all([used])  # afterwards torch may write to the factor's memory
        elif self._tensor is not None:
            self._tensor.mul_(factor)

    @property
    def is_in_torch(self) -> bool:
        """Whether JAX has added nothing."""
        return self._array is None

    @property
    def is_begun(self) -> bool:
        """Whether kernels must add to numbers that exist, instead of writing them."""
        return self._tensor is not None or self._array is not None or self._direct_target is not None

    @property
    def _direct_target(self) -> torch.Tensor | None:
        """``target``, if kernels can add to it."""
        target = self._target
        return target if target is not None and target.dtype == torch.float32 and _device.is_usable(target) else None

    def tensor(self, writes: bool = False) -> torch.Tensor:
        """Returns the tensor to which kernels add, if JAX has added nothing.

        With ``writes``, kernels overwrite the tensor of a sum that has not begun.
        """
        if self._tensor is None and self._direct_target is not None:
            torch.autograd.graph.increment_version(self._direct_target)
            self._tensor = self._direct_target
        if self._tensor is None:
            self._tensor = self._new(torch.empty if writes else torch.zeros)
        return self._tensor

    def _new(self, make: Callable[..., torch.Tensor] = torch.zeros) -> torch.Tensor:
        return make(self._shape, dtype=torch.float32, device=self._device)

    def finish(self) -> torch.Tensor:
        """Returns the sum, or ``target`` with the sum added. Nothing can be added afterwards."""
        total = self._tensor
        if self._array is not None:
            (total,) = to_torch_all([self._array])
            self._array = None
        if self._target is None:
            return self._new() if total is None else total
        return self._target if total is None or total is self._target else self._target.add_(total)


@functools.partial(jax.jit, static_argnums=0, keep_unused=True)
def _make_zeros(shape: tuple[int, ...], _input: jax.Array) -> jax.Array:
    """Returns zeros, written after ``_input`` is ready: their memory may be some that torch's streams still read."""
    return jnp.zeros(shape, jnp.float32)


@functools.partial(jax.jit, donate_argnums=0)
def _multiply(x: jax.Array, factor: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns ``x · factor`` in the memory of ``x``, and the factor."""
    return x * factor, factor
