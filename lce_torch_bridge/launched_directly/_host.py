"""torch as the host of a pass: its memory, its current stream, and Python's own loop.

The host code of `lce_jax.kernels` runs once for calls of the same shapes and options. A `Tape` writes down what it asks
for: kernels, and functions of torch between them. A `Plan` runs that for each call: results get memory where they are
computed, and lose it after the last step that reads them. torch gives memory back in the stream's order.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch

from lce_jax import kernels
from lce_torch_bridge.tensors import _device
from lce_torch_bridge.tensors._device import Allocated, allocated

ALIGNMENT = 256  # bytes
ALIGNED_NUMBERS = 16  # int32 numbers whose bytes kernels may load at once
SMALL = 1 << 22  # bytes of a piece of memory that is not allocated alone, which costs the host time
GATHERED_BYTES = 32 << 20  # of rows of the weight: less than an H100's second cache holds
MOST = 4096  # plans of all shapes together; each takes a few KiB

_plans: dict[Any, Any] = {}
_captured: dict[int, torch.Tensor] = {}  # numbers that a CUDA graph reads, which outlive their plan


@dataclasses.dataclass(frozen=True, eq=False)
class Buffer:
    """An array that a step is given, at the beginning of what is in a slot."""

    slot: int
    struct: jax.ShapeDtypeStruct

    @property
    def shape(self) -> tuple[int, ...]:
        """As the kernels see it: the caller's arrays may have fewer rows."""
        return self.struct.shape

    @property
    def dtype(self) -> Any:
        """JAX's."""
        return self.struct.dtype

    def __len__(self) -> int:
        """The size of its first dimension."""
        return self.shape[0]

    def view(self, shape: Sequence[int], dtype: Any = None) -> Buffer:
        """The same memory, seen otherwise."""
        return Buffer(self.slot, jax.ShapeDtypeStruct(tuple(shape), dtype or self.dtype))


class Step(NamedTuple):
    """A kernel or a function, and the slots of what it is given and what it returns, which may be the same."""

    run: kernels.Kernel | Callable[..., Sequence[torch.Tensor]]
    operands: tuple[Buffer, ...]
    results: tuple[Buffer, ...]

    @property
    def slots(self) -> dict[int, None]:
        """All of them, in order."""
        return dict.fromkeys(x.slot for x in (*self.operands, *self.results))


class Tape:
    """A `lce_jax.mosaic._host.Host` that writes down steps. The memory of each is described, and not there."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.inputs: list[Buffer] = []
        self.outputs: list[Buffer] = []
        self.numbers_given: dict[tuple[int, ...], Buffer] = {}
        self.memory: list[Allocated] = []  # of each slot

    def empty(self, shape: Sequence[int], dtype: Any) -> Buffer:
        """Memory of its own."""
        struct = jax.ShapeDtypeStruct(tuple(shape), dtype)
        self.memory.append(allocated(struct.shape, getattr(torch, struct.dtype.name)))
        return Buffer(len(self.memory) - 1, struct)

    def input(self, shape: Sequence[int], dtype: Any) -> Buffer:
        """An operand of each call, the next one."""
        self.inputs.append(self.empty(shape, dtype))
        return self.inputs[-1]

    def output(self, x: Buffer, shape: Sequence[int], dtype: torch.dtype) -> None:
        """``x`` is a result of each call, the next one, as a tensor of this shape and dtype."""
        self.memory[x.slot] = allocated(shape, dtype)
        self.outputs.append(x)

    def loop[C](self, firsts: range, body: Callable[[Any, C], C], carry: C) -> C:
        """One after the other."""
        return functools.reduce(lambda carry, first: body(first, carry), firsts, carry)

    def numbers(self, *numbers: Any) -> Buffer:
        """Written to the GPU's memory before the first call on a stream."""
        if numbers not in self.numbers_given:
            self.numbers_given[numbers] = self.empty((len(numbers),), jnp.int32)
        return self.numbers_given[numbers]

    def prefix(self, x: Buffer, size: int, dim: int) -> Buffer:
        """Where it lies, if that is where ``x`` lies."""
        assert dim == 0 or size == x.shape[dim], "columns that are not contiguous"
        return x.view((*x.shape[:dim], size, *x.shape[dim + 1 :]))

    def reshape(self, x: Buffer, shape: Sequence[int]) -> Buffer:
        """Where it lies."""
        return x.view(shape)

    def vary_like[T](self, tree: T, like: Any) -> T:
        """As it is."""
        del like
        return tree

    def launch[**P, R](self, kernel: Callable[P, R], *operands: P.args, **more: P.kwargs) -> R:
        """A step that is a kernel."""
        assert not more
        leaves, tree = jax.tree.flatten(operands)
        arrays = [x for x in leaves if isinstance(x, Buffer)]
        traced = kernels.traced(kernel, tree, tuple(x.struct if isinstance(x, Buffer) else x for x in leaves))
        given, results = tuple(arrays[i] for i in traced.operands), []
        for i, x in enumerate(traced.results):
            results.append(given[traced.updated[i]] if i in traced.updated else self.empty(x.shape, x.dtype))
        self.steps.append(Step(traced, given, tuple(results)))
        found: R = jax.tree.unflatten(traced.tree, [results[i] for i in traced.returned])
        return found

    def compute(self, function: Callable[..., Any], *operands: Any) -> Any:
        """A step that is ``function(torch, *operands)``. A result that is an operand has been updated in place."""
        leaves, tree = jax.tree.flatten(operands)
        places = [i for i, x in enumerate(leaves) if isinstance(x, Buffer)]

        def of_tensors(*tensors: torch.Tensor) -> Any:
            given = list(leaves)
            for place, x in zip(places, tensors, strict=True):
                given[place] = x
            return function(torch, *jax.tree.unflatten(tree, given))

        buffers = [leaves[place] for place in places]
        described = [torch.empty(x.shape, dtype=getattr(torch, x.dtype.name), device="meta") for x in buffers]
        with torch.device("meta"):
            found, out_tree = jax.tree.flatten(of_tensors(*described))
        results = []
        for x in found:
            same = [buffer for buffer, y in zip(buffers, described, strict=True) if x is y]
            results.append(same[0] if same else self.empty(x.shape, _device.name_of(x.dtype)))

        def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
            with torch.device(tensors[0].device):
                given = map(_as, tensors, buffers)
                return [x.contiguous() for x in jax.tree.leaves(of_tensors(*given))]

        return jax.tree.unflatten(out_tree, self.call(run, buffers, *results))

    def products(self, hidden: Buffer, weight: Buffer, columns: Buffer, *_: Any) -> Buffer:
        """By a matrix product for each token."""
        return self.call(_products, [hidden, weight, columns], self.empty(columns.shape, jnp.float32))[0]

    def call(self, function: Callable[..., Any], operands: Sequence[Buffer], *results: Buffer) -> tuple[Buffer, ...]:
        """A step that is a function of tensors. It returns ``results``, its own or what it updated."""
        self.steps.append(Step(function, tuple(operands), results))
        return results


class Numbers(NamedTuple):
    """Where the numbers of a tape are, and slot by slot; anything of other slots."""

    written: torch.Tensor
    addresses: list[int]
    tensors: list[Any]


class Plan:
    """Runs a tape on the current CUDA device."""

    def __init__(self, tape: Tape, device: kernels.Device) -> None:
        self._tape = tape
        self._inputs, self._outputs = ([x.slot for x in of] for of in (tape.inputs, tape.outputs))
        steps, self._steps = needed(tape), []
        used = [step.run for step in steps if isinstance(step.run, kernels.Kernel)]
        launches = iter(kernels.compiled(used, device, torch.cuda.current_device()))
        last = {slot: i for i, step in enumerate(steps) for slot in step.slots}
        there = {x.slot for x in (*tape.inputs, *tape.numbers_given.values())}
        kept = {*there, *self._outputs}
        self._small, self._small_bytes = _in_one_piece(steps, tape.memory, kept)
        for slots in (there, kept):
            slots.update(slot for slot, _ in self._small)
        for i, step in enumerate(steps):
            operands, results = ([x.slot for x in of] for of in (step.operands, step.results))
            if isinstance(step.run, kernels.Kernel):
                run: Any = next(launches)
                operands = [*operands, *results]
                how: Any = ctypes.c_uint64 * len(operands), operator.itemgetter(*operands)
            else:
                run, how = step.run, (None, operands)
            new = [(slot, tape.memory[slot]) for slot in dict.fromkeys(operands) if slot not in there]
            there.update(step.slots)
            dropped = [slot for slot in step.slots if last[slot] == i and slot not in kept]
            self._steps.append((new, run, *how, results, dropped))
        self._numbers: dict[int, Numbers] = {}  # by stream

    def run(self, device: int, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs, given the inputs."""
        stream = _device.current_stream(device)
        numbers = None if torch.cuda.is_current_stream_capturing() else self._numbers.get(stream)
        _, *of_slots = self._written(stream, given[0]) if numbers is None else numbers
        addresses, tensors = map(list, of_slots)
        for slot, x in zip(self._inputs, given, strict=True):
            tensors[slot], addresses[slot] = x, x.data_ptr()
        handle, empty = ctypes.c_void_p(stream), _device.empty
        piece = empty((self._small_bytes,), (1,), torch.uint8)
        start = piece.data_ptr()
        for slot, place in self._small:
            addresses[slot] = start + place
        for new, run, table, operands, results, dropped in self._steps:
            for slot, memory in new:
                tensors[slot] = empty(*memory)  # and no other name holds it when it is dropped
                addresses[slot] = tensors[slot].data_ptr()
            if table is not None:  # a kernel
                run(handle, table(*operands(addresses)))
            else:
                self._call(run, operands, results, addresses, tensors)
            for slot in dropped:
                tensors[slot] = None
        return [tensors[slot] for slot in self._outputs]

    def _call(
        self, run: Any, operands: list[int], results: list[int], addresses: list[int], tensors: list[Any]
    ) -> None:
        """A function's step. No name that outlives it holds a tensor."""
        for slot, x in zip(results, run(*[tensors[slot] for slot in operands]), strict=True):
            if slot not in operands:  # else it has been updated in place
                tensors[slot], addresses[slot] = x, x.data_ptr()

    def _written(self, stream: int, like: torch.Tensor) -> Numbers:
        """Those of the plan, written on the stream that reads them."""
        if torch.cuda.is_current_stream_capturing():
            refuse_capture(not self._numbers)
            # Written by an earlier call on any stream: a capture begins when all of it is done.
            found = next(iter(self._numbers.values()))
            _captured[found.written.data_ptr()] = found.written
            return found
        flat: list[int] = []
        addresses = [0] * len(self._tape.memory)
        for numbers, x in self._tape.numbers_given.items():
            addresses[x.slot] = 4 * len(flat)
            flat += [*numbers, *[0] * (-len(numbers) % ALIGNED_NUMBERS)]
        given = torch.tensor(flat, dtype=torch.int32, pin_memory=like.is_cuda)
        written = given.to(like.device, non_blocking=True)
        tensors: list[Any] = [None] * len(addresses)
        for numbers, x in self._tape.numbers_given.items():
            tensors[x.slot] = written[addresses[x.slot] // 4 :][: len(numbers)]
        addresses = [written.data_ptr() + first for first in addresses]
        found = self._numbers[stream] = Numbers(written, addresses, tensors)
        return found


def needed(tape: Tape) -> list[Step]:
    """The steps that an output needs."""
    slots, found = {x.slot for x in tape.outputs}, []
    for step in reversed(tape.steps):
        if not slots.isdisjoint(x.slot for x in step.results):
            slots.update(step.slots)
            found.append(step)
    return found[::-1]


def _in_one_piece(
    steps: Sequence[Step], memory: Sequence[Allocated], kept: set[int]
) -> tuple[list[tuple[int, int]], int]:
    """The slots that need no memory of their own, and where each lies in one piece; and the bytes of that.

    They are small, and kernels alone read them: no two have the same place.
    """
    of_functions = {slot for step in steps if not isinstance(step.run, kernels.Kernel) for slot in step.slots}
    found, total = [], 0
    for slot in dict.fromkeys(slot for step in steps for slot in step.slots):
        shape, _, dtype = memory[slot]
        size = -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        if size <= SMALL and slot not in kept and slot not in of_functions:
            found.append((slot, total))
            total += size
    return found, total


def _products(hidden: torch.Tensor, weight: torch.Tensor, columns: torch.Tensor) -> list[torch.Tensor]:
    """Rows of the weight are gathered for some tokens at a time."""
    found = torch.empty(columns.shape, dtype=torch.float32, device=weight.device)
    size = max(1, GATHERED_BYTES // (columns.shape[1] * weight.shape[1] * weight.element_size()))
    for begin in range(0, len(columns), size):
        at = columns[begin : begin + size].clamp(0)
        rows = weight.index_select(0, at.flatten()).view(*at.shape, -1)
        own = hidden[begin:][: len(at), :, None]
        on_gpu = weight.is_cuda
        raw = torch.bmm(rows, own, out_dtype=torch.float32) if on_gpu else torch.bmm(rows.float(), own.float())
        found[begin : begin + size] = raw[..., 0]
    return [found]


def _as(x: torch.Tensor, buffer: Buffer) -> torch.Tensor:
    """``x`` of this dtype and shape; of another shape where it has fewer rows than kernels see."""
    x = x.view(getattr(torch, buffer.dtype.name))
    return x.view(buffer.shape) if x.numel() == buffer.struct.size else x


def plan_of[T](key: Any, make: Callable[[], T]) -> T:
    """What ``make()`` is, or was when this key came first. A text says why kernels do not serve such calls."""
    plan: T | None = _plans.get(key)  # a key is long: its hash is taken once
    if plan is None:
        refuse_capture(torch.cuda.is_current_stream_capturing())
        if len(_plans) >= MOST:
            _plans.clear()
        plan = _plans[key] = make()
    return plan


def refuse_capture(is_new: bool) -> None:
    """Refuses what is done once for all calls of the same shapes and options."""
    if is_new:
        raise RuntimeError(
            "lce_torch_bridge has not run such a call, which a CUDA graph cannot capture for the first time: make the "
            "call once before the capture, with tensors of the same shapes, and its backward"
        )
