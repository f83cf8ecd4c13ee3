"""Launches of kernels on torch's current stream, in torch's memory.

The host code of `lce_jax.run.kernels` runs once for all calls of the same shapes and options. During this run, a `Tape`
records its steps: kernels, and functions of torch between them. `Launches` runs the recorded steps for each call.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import torch

from lce_jax.run import kernels
from lce_torch_bridge.tensors import _device
from lce_torch_bridge.tensors._device import Allocation, describe_allocation

ALIGNMENT = 256  # bytes
ALIGNED_NUMBERS = 16  # int32 values that a kernel may load at once
CACHED_BINDINGS = 16  # sets of addresses for which a plan caches its launches; each set takes a few KiB
MOST_PLANS = 4096  # plans of all shapes together; each takes a few KiB

_plans: dict[Any, Any] = {}
_captured: dict[int, torch.Tensor] = {}  # constants that CUDA graphs read, so they must outlive their plan


@dataclasses.dataclass(frozen=True, eq=False)
class Buffer:
    """An array that a step reads or writes, at the beginning of the memory that its slot stands for."""

    slot: int
    shape: tuple[int, ...]  # the shape in the kernels; the caller's tensor may have fewer rows
    dtype: Any  # JAX's

    def __len__(self) -> int:
        """Returns the size of the first dimension."""
        return self.shape[0]

    def view(self, shape: Sequence[int], dtype: Any = None) -> Buffer:
        """Returns a buffer over the same memory with another shape and dtype."""
        return Buffer(self.slot, tuple(shape), jnp.dtype(dtype or self.dtype))


class Step(NamedTuple):
    """A kernel or a function of torch, with its operands and results. A result may be an updated operand."""

    run: kernels.Kernel | Callable[..., Sequence[torch.Tensor]]
    operands: tuple[Buffer, ...]
    results: tuple[Buffer, ...]

    @property
    def slots(self) -> dict[int, None]:
        """The slots of operands and results, in order."""
        return dict.fromkeys(x.slot for x in (*self.operands, *self.results))

    @property
    def created(self) -> set[int]:
        """The slots of results that are not operands."""
        return {x.slot for x in self.results} - {x.slot for x in self.operands}


class Tape:
    """A `Host`, where a pass launches kernels. It records the launches as steps, and allocates no memory."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.inputs: list[Buffer] = []
        self.outputs: list[Buffer] = []
        self.numbers_by_value: dict[tuple[int, ...], Buffer] = {}
        self.memory: list[Allocation] = []  # the allocation of each slot

    def empty(self, shape: Sequence[int], dtype: Any) -> Buffer:
        """Returns a buffer in a new slot."""
        self.memory.append(describe_allocation(shape, getattr(torch, jnp.dtype(dtype).name)))
        return Buffer(len(self.memory) - 1, tuple(shape), jnp.dtype(dtype))

    def input(self, shape: Sequence[int], dtype: Any) -> Buffer:
        """Adds an input, and returns its buffer. Each call passes its tensors in the order of these inputs."""
        self.inputs.append(self.empty(shape, dtype))
        return self.inputs[-1]

    def output(self, x: Buffer, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Makes ``x`` the next result of each call, a tensor of this shape and dtype."""
        self.memory[x.slot] = describe_allocation(shape, dtype)
        self.outputs.append(x)

    def loop[C](self, firsts: range, body: Callable[[Any, C], C], carry: C) -> C:
        """Runs all iterations, so that the tape records each of them."""
        return functools.reduce(lambda carry, first: body(first, carry), firsts, carry)

    def numbers(self, *numbers: Any) -> Buffer:
        """Returns a buffer of constants, which are written to the GPU's memory before the first call on a stream."""
        if numbers not in self.numbers_by_value:
            self.numbers_by_value[numbers] = self.empty((len(numbers),), jnp.int32)
        return self.numbers_by_value[numbers]

    def prefix(self, x: Buffer, size: int, dim: int) -> Buffer:
        """Returns a view of the first ``size`` elements of a dimension."""
        assert dim == 0 or size == x.shape[dim], "columns that are not contiguous"
        return x.view((*x.shape[:dim], size, *x.shape[dim + 1 :]))

    def reshape(self, x: Buffer, shape: Sequence[int]) -> Buffer:
        """Returns a view of ``x`` with another shape."""
        return x.view(shape)

    def order[T](self, tree: T) -> T:
        """Returns ``tree`` unchanged, because the steps run in the order of their recording."""
        return tree

    def vary_like[T](self, tree: T, like: Any) -> T:
        """Returns ``tree`` unchanged, because only JAX has types that vary over a mesh."""
        del like
        return tree

    def launch[**P, R](self, kernel: Callable[P, R], *operands: P.args, **more: P.kwargs) -> R:
        """Adds a kernel as a step, and returns the kernel's results."""
        assert not more
        leaves, tree = jax.tree.flatten(operands)
        buffers = [x for x in leaves if isinstance(x, Buffer)]
        static = [jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, Buffer) else x for x in leaves]
        traced = kernels.traced(kernel, tree, tuple(static))
        inputs, results = tuple(buffers[i] for i in traced.operands), []
        for i, x in enumerate(traced.results):
            results.append(inputs[traced.updated[i]] if i in traced.updated else self.empty(x.shape, x.dtype))
        self.steps.append(Step(traced, inputs, tuple(results)))
        returned: R = jax.tree.unflatten(traced.tree, [results[i] for i in traced.returned])
        return returned

    def compute(self, function: Callable[..., Any], *operands: Any) -> Any:
        """Adds ``function(xp, *operands)`` as a step, where ``xp`` is torch, and returns its results.

        A result that is an operand has been updated in place. All other results are kept until the pass ends.
        """
        leaves, tree = jax.tree.flatten(operands)
        places = [i for i, x in enumerate(leaves) if isinstance(x, Buffer)]

        def call_function(*tensors: torch.Tensor) -> Any:
            arguments = list(leaves)
            for place, x in zip(places, tensors, strict=True):
                arguments[place] = x
            return function(_TorchOnDevice(tensors[0].device), *jax.tree.unflatten(tree, arguments))

        buffers = [leaves[place] for place in places]
        meta_tensors = [torch.empty(x.shape, dtype=getattr(torch, x.dtype.name), device="meta") for x in buffers]
        outputs, out_tree = jax.tree.flatten(call_function(*meta_tensors))
        results = []
        for x in outputs:
            updated = [buffer for buffer, y in zip(buffers, meta_tensors, strict=True) if x is y]
            results.append(updated[0] if updated else self.empty(x.shape, _device.name_dtype(x.dtype)))

        def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
            return [x.contiguous() for x in jax.tree.leaves(call_function(*map(_view_as, tensors, buffers)))]

        return jax.tree.unflatten(out_tree, self.call(run, buffers, *results))

    def products(self, hidden: Buffer, weight: Buffer, columns: Buffer, options: Any, num_rows: int) -> Any:
        """Adds the kernel that computes candidates' products without copying rows of the weight."""
        del options  # the weight is [V, H]
        arguments: Any = hidden, weight, columns, self.numbers(num_rows)
        return self.launch(kernels.products, *arguments)

    def put(self, *operands: Any) -> Any:
        """Adds the kernel that writes values to columns."""
        return self.launch(kernels.put, *operands)

    def call(self, function: Callable[..., Any], operands: Sequence[Buffer], *results: Buffer) -> tuple[Buffer, ...]:
        """Adds a function of tensors as a step, and returns its ``results``: new tensors, or updated operands."""
        self.steps.append(Step(function, tuple(operands), results))
        return results


@functools.cache
class _TorchOnDevice:
    """The module torch, but with a default device for new tensors.

    ``with torch.device(…)`` would cost the host half as much time as an operation itself.
    """

    def __init__(self, device: torch.device) -> None:
        for make in (torch.arange, torch.zeros, torch.ones):
            setattr(self, make.__name__, functools.partial(make, device=device))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class Launches:
    """Runs a tape on the current CUDA device, as groups of kernels and the functions of torch between them."""

    def __init__(self, tape: Tape, device: kernels.Device) -> None:
        steps = find_needed_steps(tape)
        self._inputs, self._outputs = ([x.slot for x in buffers] for buffers in (tape.inputs, tape.outputs))
        self._memory = Memory(tape, steps)
        launched: Any = [step.run for step in steps if isinstance(step.run, kernels.Kernel)]
        binds = dict(zip(launched, kernels.compiled(launched, device, torch.cuda.current_device()), strict=True))
        self._groups: list[tuple[list[int], Any] | Step] = []
        for are_kernels, some in itertools.groupby(steps, lambda step: isinstance(step.run, kernels.Kernel)):
            group = list(some)
            self._groups += [_bind_launches(self._memory, group, binds)] if are_kernels else group
        # For each stream: all constants, in the GPU's memory, and a dict of the constants that functions read, by slot.
        self._numbers: dict[int, tuple[torch.Tensor, dict[int, torch.Tensor]]] = {}

    def run(self, device: int, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the outputs for these inputs."""
        stream, memory, empty = _device.current_stream(device), self._memory, _device.empty
        numbers = None if torch.cuda.is_current_stream_capturing() else self._numbers.get(stream)
        constants, constants_by_slot = self._write_numbers(stream, inputs[0]) if numbers is None else numbers
        workspace = empty((memory.num_bytes,), (1,), torch.uint8)
        tensors = {slot: empty(*allocation) for slot, allocation in memory.separate} | constants_by_slot
        tensors.update(zip(self._inputs, inputs, strict=True))
        for group in self._groups:
            if isinstance(group, Step):
                _run_function(group, tensors, memory.home)
                continue
            slots, bind = group
            addresses = [tensors[slot].data_ptr() for slot in slots]
            for launch in bind(stream, constants.data_ptr(), workspace.data_ptr(), *addresses)[0]:
                launch()
        return [tensors[slot] for slot in self._outputs]

    def _write_numbers(self, stream: int, like: torch.Tensor) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Copies the constants to the device of ``like``, on the stream that reads them, so that nothing waits."""
        if torch.cuda.is_current_stream_capturing():
            if not self._numbers:
                refuse_capture()
            # An earlier call has written the constants. Its stream does not matter: a capture begins after its work is
            # done.
            numbers = next(iter(self._numbers.values()))
            _captured[numbers[0].data_ptr()] = numbers[0]
            return numbers
        values = torch.tensor(self._memory.numbers, dtype=torch.int32, pin_memory=like.is_cuda)
        written = values.to(like.device, non_blocking=True)
        numbers = written, {slot: written[part] for slot, part in self._memory.function_numbers}
        self._numbers[stream] = numbers
        return numbers


def find_needed_steps(tape: Tape) -> list[Step]:
    """Returns the steps that the outputs depend on."""
    slots, steps = {x.slot for x in tape.outputs}, []
    for step in reversed(tape.steps):
        if not slots.isdisjoint(x.slot for x in step.results):
            slots.update(step.slots)
            steps.append(step)
    return steps[::-1]


class Memory:
    """Says where the memory of each slot of a tape lies.

    Slots that only kernels use are in one workspace, because each tensor costs the host time. Two slots of the same
    shape share memory if the last step that uses one comes before the first step that uses the other, as in a loop over
    chunks.
    """

    def __init__(self, tape: Tape, steps: Sequence[Step]) -> None:
        functions = [step for step in steps if not isinstance(step.run, kernels.Kernel)]
        created = {slot for step in functions for slot in step.created}
        fixed = [*created, *(x.slot for x in (*tape.inputs, *tape.outputs, *tape.numbers_by_value.values()))]
        self.home = dict(zip(fixed, fixed, strict=True))  # for each slot, the slot whose memory it uses
        provided = {*created, *(x.slot for x in tape.inputs)}
        separate = {x.slot for x in tape.outputs} - provided
        self._share(tape, steps)
        read = {self.home[slot] for step in functions for slot in step.slots}
        separate |= read - provided - {x.slot for x in tape.numbers_by_value.values()}
        self.separate = [(slot, tape.memory[slot]) for slot in separate]  # each is a tensor
        self.numbers: list[int] = []
        self.places: dict[int, tuple[int, int]] = {}  # (0: constants, 1: workspace; byte offset)
        self.function_numbers: list[tuple[int, slice]] = []  # constants that functions read
        for numbers, x in tape.numbers_by_value.items():
            first = len(self.numbers)
            self.places[x.slot] = 0, 4 * first
            self.function_numbers += [(x.slot, slice(first, first + len(numbers)))] if x.slot in read else []
            self.numbers += [*numbers, *[0] * (-len(numbers) % ALIGNED_NUMBERS)]
        self.num_bytes = 0
        for slot in dict.fromkeys(self.home.values()):
            if slot not in self.places and slot not in separate and slot not in provided:
                shape, _, dtype = tape.memory[slot]
                self.places[slot] = 1, self.num_bytes
                self.num_bytes += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT

    def _share(self, tape: Tape, steps: Sequence[Step]) -> None:
        """Finds each slot's home: the slot itself, or a slot of the same shape that is no longer used."""
        last_use = {slot: i for i, step in enumerate(steps) for slot in step.slots}
        free: dict[Allocation, list[int]] = {}
        fixed = set(self.home)
        for i, step in enumerate(steps):
            for slot in step.slots:
                if slot not in self.home:
                    unused = free.get(tape.memory[slot])
                    self.home[slot] = unused.pop() if unused else slot
            for slot in step.slots:
                if last_use[slot] == i and slot not in fixed:
                    free.setdefault(tape.memory[slot], []).append(self.home[slot])


def _bind_launches(
    memory: Memory, steps: Sequence[Step], binds: dict[Any, kernels.Bind]
) -> tuple[list[int], Callable[..., tuple[list[Callable[[], None]], Any]]]:
    """Returns the slots of tensors that a group of kernels uses, and a function that binds launches to addresses."""
    homes = [[memory.home[x.slot] for x in (*step.operands, *step.results)] for step in steps]
    all_homes = list(itertools.chain(*homes))
    slots = [slot for slot in dict.fromkeys(all_homes) if slot not in memory.places]
    places = memory.places | {slot: (2 + i, 0) for i, slot in enumerate(slots)}
    entries = [places[slot] for slot in all_homes]  # (index into the ``addresses`` of `bind`, byte offset)
    firsts = itertools.accumulate(map(len, homes), initial=0)
    offsets = [(binds[step.run], 8 * first) for step, first in zip(steps, firsts, strict=False)]

    @functools.lru_cache(CACHED_BINDINGS)
    def bind(stream: int, *addresses: int) -> tuple[list[Callable[[], None]], Any]:
        """Returns the launches, and the table of addresses that the launches read.

        ``addresses`` has the addresses of the constants, of the workspace, and of each tensor.
        """
        table = (ctypes.c_uint64 * len(entries))(*[addresses[i] + byte for i, byte in entries])
        start = ctypes.addressof(table)  # nothing writes to the table, so threads may share it
        return [bind_kernel(stream, start + byte) for bind_kernel, byte in offsets], table

    return slots, bind


def _run_function(step: Step, tensors: dict[int, torch.Tensor], home: dict[int, int]) -> None:
    """Runs a step that is a function, and stores its results in ``tensors``, which alone keeps them alive."""
    function: Any = step.run
    results = function(*[tensors[home[x.slot]] for x in step.operands])
    tensors.update((x.slot, y) for x, y in zip(step.results, results, strict=True) if x.slot in step.created)


def _view_as(x: torch.Tensor, buffer: Buffer) -> torch.Tensor:
    """Returns ``x`` in the buffer's dtype and shape; in its own shape if it has fewer rows than the buffer."""
    x = x.view(getattr(torch, buffer.dtype.name))
    return x.view(buffer.shape) if x.numel() == math.prod(buffer.shape) else x


def find_plan[T](key: Any, make: Callable[[], T]) -> T:
    """Returns the plan that ``make()`` made for ``key``. If it is text, it says why kernels cannot run such calls."""
    plan: T | None = _plans.get(key)  # one look-up, because hashing a long key is slow
    if plan is None:
        if torch.cuda.is_current_stream_capturing():
            refuse_capture()
        if len(_plans) >= MOST_PLANS:
            _plans.clear()
        plan = _plans[key] = make()
    return plan


def refuse_capture() -> NoReturn:
    """Refuses to capture a call that has not run before, because its plan must be made outside of the capture."""
    raise RuntimeError(
        "lce_torch_bridge has not run such a call, which a CUDA graph cannot capture for the first time: make the call "
        "once before the capture, with tensors of the same shapes, and its backward"
    )
