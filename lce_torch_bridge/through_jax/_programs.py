"""What the programs of all functions share: how to build and run them on torch's tensors, tags, sums of dweight.

A program is compiled by `build_program` from a step, a Python function ``step(key, *static, *arrays)`` that calls
`lce_jax`.

P is the number of rows of a program. The number of rows that count is an operand, so that one program works for many
numbers of tokens. Passing an array between the libraries takes as much host time as many kernels. So all per-token
values are passed as one int32 array, with floats as their bits, in the layout of `tensors._padding.pack_rows`.
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
    """Compiles ``step`` with its static arguments bound. Returns a function of the arrays.

    The function may reuse the memory of the arrays whose indices are in ``donate``.
    """
    return jax.jit(functools.partial(step, key, *static), donate_argnums=donate)


class ProgramKey(NamedTuple):
    """What programs of all functions depend on, besides shapes and dtypes."""

    call: TorchCall  # `TorchCall.compiled`
    shard: int  # the index of this rank's shard of the vocabulary
    shards: int
    precision: str | None  # of float32 products

    def part(self, rows: int) -> tuple[int, int | None]:
        """Returns the first column's global id, and the true vocabulary size, which is None if nothing is padded."""
        vocab_size = self.call.jax.vocab_size
        return self.shard * rows, vocab_size if vocab_size < self.shards * rows else None


def make_key(call: TorchCall, *weights: torch.Tensor) -> ProgramKey:
    """Returns the key of the programs of a call with one or several heads."""
    shards, rank = _tensor_parallel.size_and_rank(call.group)
    precision = next(filter(None, map(find_precision, weights)), None)
    if not call.jax.vocab_size:  # in a trace of torch.compile
        call = _tensor_parallel.set_vocab_size(call, weights[0])
    return ProgramKey(call.compiled, rank, shards, precision)


def find_precision(weight: torch.Tensor) -> str | None:
    """Returns the ``precision`` of `lce_jax` that makes float32 products as exact as torch's settings require."""
    if weight.dtype != torch.float32:
        return None
    # This has the precision, whichever torch function has set it. torch.get_float32_matmul_precision raises if a newer
    # function has.
    products: Any = torch.backends.cuda.matmul if weight.is_cuda else torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    return "highest" if products.fp32_precision in ("none", "ieee") else None


def unpack_rows(packed: Any, rows: int) -> tuple[Any, Any]:
    """Unpacks the result of `tensors._padding.pack_rows`: returns how many rows count, and ``[K, P]``."""
    return packed[0], packed[1:].reshape(rows, -1).T


def pack_arrays(*arrays: Any) -> Any:
    """Packs arrays ``[P]`` and ``[P, K]`` as rows of one int32 array, floats as their bits."""
    rows = [x[None] if x.ndim == 1 else x.T for x in arrays]
    return jnp.concatenate([lax.bitcast_convert_type(x, jnp.int32) for x in rows])


def logit_options(call: TorchCall) -> tuple[object, ...]:
    """Returns the options that the logits of all rows depend on."""
    return call.jax.vocab_size, call.jax.logit_scale, call.jax.logit_softcap


def make_tags(columns: Any, num_rows: Any, *options: object) -> Any:
    """Returns each row's tag, a hash of its per-token columns, of how many rows count, and of options.

    Columns that are None are left out.
    """
    columns = [x for x in columns if x is not None]
    numbers = num_rows, jnp.int32(_tensor_parallel.compute_checksum(*options))
    return _local.compute_tags([*(jnp.broadcast_to(x, columns[0].shape[:1]) for x in numbers), *columns])


def append_tags(packed: Any, tags: Any) -> Any:
    """Returns ``packed [F, P]`` with the bits of the tags as one more row."""
    return jnp.concatenate([packed, lax.bitcast_convert_type(tags[None], packed.dtype)])


def check_tags(gathered: Any) -> tuple[Any, Any]:
    """Removes the tags that `append_tags` added. Returns the rest, NaN where tags differ, and a mask of equal tags."""
    tags = lax.bitcast_convert_type(gathered[:, -1], jnp.int32)
    agree = (tags == tags[:1]).all(0)
    return jnp.where(agree, gathered[:, :-1], jnp.nan), agree


type Inputs = Sequence[Any]  # tensors, None, and arrays that JAX has made

WAITS = 3  # the index of the per-token numbers, after hidden, weight and bias


def run(function: Callable[..., Any], *calls: Inputs, waits: int = WAITS, lend: bool = True) -> list[list[Any]]:
    """Runs a jitted function on the inputs of each of ``calls``, which have the same shapes. Returns flat results.

    The first input must be a tensor on the device of all inputs. ``waits`` is the index of an input that the function
    certainly uses; its import waits for torch's stream. With ``lend=False`` only the first result is a tensor; the
    others are JAX's arrays.
    """
    arrays: dict[int, jax.Array] = {}
    with runtime.enter_device(calls[0][0]):
        outputs = [jax.tree.leaves(function(*import_tensors(inputs, waits, arrays))) for inputs in calls]
        return [to_torch_all(results) if lend else [*to_torch_all(results[:1]), *results[1:]] for results in outputs]


def import_tensors(inputs: Inputs, waits: int, known: dict[int, jax.Array]) -> list[jax.Array | None]:
    """Returns the inputs, with tensors as JAX's arrays. The import with index ``waits`` waits for torch's stream.

    Each tensor is imported once: ``known`` has the arrays of tensors that are already imported, by ``id``.
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
    """A float32 sum of the dweights of several backward passes.

    The sum is in torch's memory, to which kernels add, or in JAX's memory if JAX runs the programs. At the end it is
    added to ``target``, if there is one. Kernels add directly to ``target`` if it is float32.
    """

    def __init__(self, weight: torch.Tensor, target: torch.Tensor | None = None) -> None:
        self._target = target
        self._shape, self._device = weight.shape, weight.device
        self._tensor: torch.Tensor | None = None
        self._array: jax.Array | None = None

    def add_in_jax(
        self, function: Callable[..., list[jax.Array]], inputs: Inputs, operand: int, place: int
    ) -> list[torch.Tensor]:
        """Runs a jitted function that updates the sum, and returns the function's other results.

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
        """Multiplies the sum so far, in place. Call this only if the sum is not in ``target``."""
        if self._array is not None:
            with runtime.enter_device(factor):
                self._array, used = _multiply(self._array, to_jax(factor))
                to_torch_all([used])  # so that torch's stream waits before it writes to the factor
        elif self._tensor is not None:
            self._tensor.mul_(factor)

    @property
    def is_in_torch(self) -> bool:
        """Whether JAX has not added anything."""
        return self._array is None

    @property
    def is_begun(self) -> bool:
        """Whether the sum already has values, so that kernels must add to it instead of overwriting it."""
        return self._tensor is not None or self._array is not None or self._direct_target is not None

    @property
    def _direct_target(self) -> torch.Tensor | None:
        """``target`` if kernels can add to it, else None."""
        target = self._target
        return target if target is not None and target.dtype == torch.float32 and _device.is_usable(target) else None

    def tensor(self, writes: bool = False) -> torch.Tensor:
        """Returns the tensor to which kernels add. Call this only if JAX has added nothing.

        With ``writes``, the first kernels overwrite the tensor, so it is not zeroed.
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
        """Returns the sum, or ``target`` with the sum added. Afterwards nothing can be added to the sum."""
        total = self._tensor
        if self._array is not None:
            (total,) = to_torch_all([self._array])
            self._array = None
        if self._target is None:
            return self._new() if total is None else total
        return self._target if total is None or total is self._target else self._target.add_(total)


@functools.partial(jax.jit, static_argnums=0, keep_unused=True)
def _make_zeros(shape: tuple[int, ...], _input: jax.Array) -> jax.Array:
    """Returns zeros, written after ``_input`` is ready, because torch's streams may still read the reused memory."""
    return jnp.zeros(shape, jnp.float32)


@functools.partial(jax.jit, donate_argnums=0)
def _multiply(x: jax.Array, factor: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns ``x · factor`` in the memory of ``x``, and the factor."""
    return x * factor, factor
