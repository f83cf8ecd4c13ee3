"""torch as the host of a pass: its memory, its current stream, and Python's own loop.

The host code of `lce_jax.run.kernels` runs once for calls of the same shapes and options. A `Tape` writes down what it
asks for: kernels, and functions of torch between them. `Launches` run that for each call.
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
ALIGNED_NUMBERS = 16  # int32 numbers whose bytes kernels may load at once
CACHED_BINDINGS = 16  # runs of a plan whose launches are kept, each with a few KiB
MOST_PLANS = 4096  # plans of all shapes together; each takes a few KiB

_plans: dict[Any, Any] = {}
_captured: dict[int, torch.Tensor] = {}  # numbers that a CUDA graph reads, which outlive their plan


@dataclasses.dataclass(frozen=True, eq=False)
class Buffer:
    """An array that a step is given, at the beginning of what is in a slot."""

    slot: int
    shape: tuple[int, ...]  # as the kernels see it: the caller's arrays may have fewer rows
    dtype: Any  # JAX's

    def __len__(self) -> int:
        """The size of its first dimension."""
        return self.shape[0]

    def view(self, shape: Sequence[int], dtype: Any = None) -> Buffer:
        """The same memory, seen otherwise."""
        return Buffer(self.slot, tuple(shape), jnp.dtype(dtype or self.dtype))


class Step(NamedTuple):
    """A kernel or a function, and the slots of what it is given and what it returns, which may be the same."""

    run: kernels.Kernel | Callable[..., Sequence[torch.Tensor]]
    operands: tuple[Buffer, ...]
    results: tuple[Buffer, ...]

    @property
    def slots(self) -> dict[int, None]:
        """All of them, in order."""
        return dict.fromkeys(x.slot for x in (*self.operands, *self.results))

    @property
    def made(self) -> set[int]:
        """Those of results that are no operands."""
        return {x.slot for x in self.results} - {x.slot for x in self.operands}


class Tape:
    """A `lce_jax.mosaic._host.Host` that writes down steps. The memory of each is described, and not there."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.inputs: list[Buffer] = []
        self.outputs: list[Buffer] = []
        self.numbers_given: dict[tuple[int, ...], Buffer] = {}
        self.memory: list[Allocation] = []  # of each slot

    def empty(self, shape: Sequence[int], dtype: Any) -> Buffer:
        """Memory of its own."""
        self.memory.append(describe_allocation(shape, getattr(torch, jnp.dtype(dtype).name)))
        return Buffer(len(self.memory) - 1, tuple(shape), jnp.dtype(dtype))

    def input(self, shape: Sequence[int], dtype: Any) -> Buffer:
        """An operand of each call, the next one."""
        self.inputs.append(self.empty(shape, dtype))
        return self.inputs[-1]

    def output(self, x: Buffer, shape: Sequence[int], dtype: torch.dtype) -> None:
        """``x`` is a result of each call, the next one, as a tensor of this shape and dtype."""
        self.memory[x.slot] = describe_allocation(shape, dtype)
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
        static = [jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, Buffer) else x for x in leaves]
        traced = kernels.traced(kernel, tree, tuple(static))
        given, results = tuple(arrays[i] for i in traced.operands), []
        for i, x in enumerate(traced.results):
            results.append(given[traced.updated[i]] if i in traced.updated else self.empty(x.shape, x.dtype))
        self.steps.append(Step(traced, given, tuple(results)))
        found: R = jax.tree.unflatten(traced.tree, [results[i] for i in traced.returned])
        return found

    def compute(self, function: Callable[..., Any], *operands: Any) -> Any:
        """A step that is ``function(xp, *operands)`` over torch. A result that is an operand has been updated in place.

        All others live as long as the pass.
        """
        leaves, tree = jax.tree.flatten(operands)
        places = [i for i, x in enumerate(leaves) if isinstance(x, Buffer)]

        def of_tensors(*tensors: torch.Tensor) -> Any:
            given = list(leaves)
            for place, x in zip(places, tensors, strict=True):
                given[place] = x
            return function(_TorchOnDevice(tensors[0].device), *jax.tree.unflatten(tree, given))

        buffers = [leaves[place] for place in places]
        described = [torch.empty(x.shape, dtype=getattr(torch, x.dtype.name), device="meta") for x in buffers]
        found, out_tree = jax.tree.flatten(of_tensors(*described))
        results = []
        for x in found:
            same = [buffer for buffer, y in zip(buffers, described, strict=True) if x is y]
            results.append(same[0] if same else self.empty(x.shape, _device.name_dtype(x.dtype)))

        def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
            given = map(_view_as, tensors, buffers)
            return [x.contiguous() for x in jax.tree.leaves(of_tensors(*given))]

        return jax.tree.unflatten(out_tree, self.call(run, buffers, *results))

    def products(self, hidden: Buffer, weight: Buffer, columns: Buffer, options: Any, num_rows: int) -> Any:
        """A kernel, which gathers no copy of the rows."""
        del options  # the weight is [V, H]
        given: Any = hidden, weight, columns, self.numbers(num_rows)
        return self.launch(kernels.products, *given)

    def put(self, *operands: Any) -> Any:
        """A kernel."""
        return self.launch(kernels.put, *operands)

    def call(self, function: Callable[..., Any], operands: Sequence[Buffer], *results: Buffer) -> tuple[Buffer, ...]:
        """A step that is a function of tensors. It returns ``results``, its own or what it updated."""
        self.steps.append(Step(function, tuple(operands), results))
        return results


@functools.cache
class _TorchOnDevice:
    """torch, whose new tensors lie on a device. ``with torch.device(…)`` would cost the host half of each operation."""

    def __init__(self, device: torch.device) -> None:
        for make in (torch.arange, torch.zeros, torch.ones):
            setattr(self, make.__name__, functools.partial(make, device=device))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class Launches:
    """A tape, to be run on the current CUDA device: kernels in groups, between which functions of torch may stand."""

    def __init__(self, tape: Tape, device: kernels.Device) -> None:
        steps = find_needed_steps(tape)
        self._inputs, self._outputs = ([x.slot for x in of] for of in (tape.inputs, tape.outputs))
        self._memory = Memory(tape, steps)
        used: Any = [step.run for step in steps if isinstance(step.run, kernels.Kernel)]
        binds = dict(zip(used, kernels.compiled(used, device, torch.cuda.current_device()), strict=True))
        self._groups: list[tuple[list[int], Any] | Step] = []
        for of_kernels, some in itertools.groupby(steps, lambda step: isinstance(step.run, kernels.Kernel)):
            group = list(some)
            self._groups += [_bind_launches(self._memory, group, binds)] if of_kernels else group
        self._numbers: dict[int, tuple[torch.Tensor, dict[int, torch.Tensor]]] = {}  # by stream; those of functions

    def run(self, device: int, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs, given the inputs."""
        stream, memory, empty = _device.current_stream(device), self._memory, _device.empty
        numbers = None if torch.cuda.is_current_stream_capturing() else self._numbers.get(stream)
        written, of_functions = self._written(stream, given[0]) if numbers is None else numbers
        piece = empty((memory.num_bytes,), (1,), torch.uint8)
        tensors = {slot: empty(*of) for slot, of in memory.own} | of_functions
        tensors.update(zip(self._inputs, given, strict=True))
        for group in self._groups:
            if isinstance(group, Step):
                _run_function(group, tensors, memory.home)
                continue
            slots, bound = group
            of_tensors = [tensors[slot].data_ptr() for slot in slots]
            for launch in bound(stream, written.data_ptr(), piece.data_ptr(), *of_tensors)[0]:
                launch()
        return [tensors[slot] for slot in self._outputs]

    def _written(self, stream: int, like: torch.Tensor) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """The numbers, written beside ``like`` on the stream that reads them: nothing waits."""
        if torch.cuda.is_current_stream_capturing():
            if not self._numbers:
                refuse_capture()
            # Written by an earlier call on any stream: a capture begins when all of it is done.
            found = next(iter(self._numbers.values()))
            _captured[found[0].data_ptr()] = found[0]
            return found
        given = torch.tensor(self._memory.numbers, dtype=torch.int32, pin_memory=like.is_cuda)
        written = given.to(like.device, non_blocking=True)
        found = self._numbers[stream] = written, {slot: written[part] for slot, part in self._memory.of_functions}
        return found


def find_needed_steps(tape: Tape) -> list[Step]:
    """The steps that an output needs."""
    slots, found = {x.slot for x in tape.outputs}, []
    for step in reversed(tape.steps):
        if not slots.isdisjoint(x.slot for x in step.results):
            slots.update(step.slots)
            found.append(step)
    return found[::-1]


class Memory:
    """Where the slots of a tape are.

    What kernels alone use lies in one piece, because each piece costs the host time. Arrays of the same shape have the
    same place, if the last step that uses one comes before the first that uses the other: those of chunks.
    """

    def __init__(self, tape: Tape, steps: Sequence[Step]) -> None:
        functions = [step for step in steps if not isinstance(step.run, kernels.Kernel)]
        made = {slot for step in functions for slot in step.made}
        fixed = [*made, *(x.slot for x in (*tape.inputs, *tape.outputs, *tape.numbers_given.values()))]
        self.home = dict(zip(fixed, fixed, strict=True))
        given = {*made, *(x.slot for x in tape.inputs)}
        apart = {x.slot for x in tape.outputs} - given
        self._share(tape, steps)
        read = {self.home[slot] for step in functions for slot in step.slots}
        apart |= read - given - {x.slot for x in tape.numbers_given.values()}
        self.own = [(slot, tape.memory[slot]) for slot in apart]  # with a tensor each
        self.numbers: list[int] = []
        self.places: dict[int, tuple[int, int]] = {}  # 0 and a byte of the numbers, 1 and a byte of the piece
        self.of_functions: list[tuple[int, slice]] = []
        for numbers, x in tape.numbers_given.items():
            first = len(self.numbers)
            self.places[x.slot] = 0, 4 * first
            self.of_functions += [(x.slot, slice(first, first + len(numbers)))] if x.slot in read else []
            self.numbers += [*numbers, *[0] * (-len(numbers) % ALIGNED_NUMBERS)]
        self.num_bytes = 0
        for slot in dict.fromkeys(self.home.values()):
            if slot not in self.places and slot not in apart and slot not in given:
                shape, _, dtype = tape.memory[slot]
                self.places[slot] = 1, self.num_bytes
                self.num_bytes += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT

    def _share(self, tape: Tape, steps: Sequence[Step]) -> None:
        """Gives each slot its own place, or that of one like it which nothing uses any more."""
        last = {slot: i for i, step in enumerate(steps) for slot in step.slots}
        free: dict[Allocation, list[int]] = {}
        fixed = set(self.home)
        for i, step in enumerate(steps):
            for slot in step.slots:
                if slot not in self.home:
                    left = free.get(tape.memory[slot])
                    self.home[slot] = left.pop() if left else slot
            for slot in step.slots:
                if last[slot] == i and slot not in fixed:
                    free.setdefault(tape.memory[slot], []).append(self.home[slot])


def _bind_launches(memory: Memory, steps: Sequence[Step], binds: dict[Any, kernels.Bind]) -> tuple[list[int], Any]:
    """The slots with a tensor that kernels use, and what binds launches to the addresses of all that they use."""
    homes = [[memory.home[x.slot] for x in (*step.operands, *step.results)] for step in steps]
    every = list(itertools.chain(*homes))
    slots = [slot for slot in dict.fromkeys(every) if slot not in memory.places]
    places = memory.places | {slot: (2 + i, 0) for i, slot in enumerate(slots)}
    entries = [places[slot] for slot in every]  # an index into what `bound` is given, and a byte
    firsts = itertools.accumulate(map(len, homes), initial=0)
    told = [(binds[step.run], 8 * first) for step, first in zip(steps, firsts, strict=False)]

    @functools.lru_cache(CACHED_BINDINGS)
    def bound(stream: int, *given: int) -> tuple[list[Callable[[], None]], Any]:
        """The launches, given the addresses of the numbers, of the piece and of the tensors; and what they read."""
        table = (ctypes.c_uint64 * len(entries))(*[given[i] + byte for i, byte in entries])
        start = ctypes.addressof(table)  # nothing writes to it, so threads may share it
        return [bind(stream, start + byte) for bind, byte in told], table

    return slots, bound


def _run_function(step: Step, tensors: dict[int, torch.Tensor], home: dict[int, int]) -> None:
    """Calls a function. No name that outlives it holds a tensor."""
    function: Any = step.run
    found = function(*[tensors[home[x.slot]] for x in step.operands])
    tensors.update((x.slot, y) for x, y in zip(step.results, found, strict=True) if x.slot in step.made)


def _view_as(x: torch.Tensor, buffer: Buffer) -> torch.Tensor:
    """``x`` of this dtype and shape; of another shape where it has fewer rows than kernels see."""
    x = x.view(getattr(torch, buffer.dtype.name))
    return x.view(buffer.shape) if x.numel() == math.prod(buffer.shape) else x


def find_plan[T](key: Any, make: Callable[[], T]) -> T:
    """What ``make()`` is, or was when this key came first. A text says why kernels do not serve such calls."""
    plan: T | None = _plans.get(key)  # a key is long: its hash is taken once
    if plan is None:
        if torch.cuda.is_current_stream_capturing():
            refuse_capture()
        if len(_plans) >= MOST_PLANS:
            _plans.clear()
        plan = _plans[key] = make()
    return plan


def refuse_capture() -> NoReturn:
    """Refuses what is done once for all calls of the same shapes and options."""
    raise RuntimeError(
        "lce_torch_bridge has not run such a call, which a CUDA graph cannot capture for the first time: make the call "
        "once before the capture, with tensors of the same shapes, and its backward"
    )
