"""Host code of `lce_jax.mosaic` that writes down its launches, on memory that is described and not there.

What it asks for, launches too, comes from a `Recorder` in place of JAX (`lce_jax.mosaic._host`). Arithmetic on what is
described fails: nothing may stand between the kernels.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lce_jax.launch_lists._refusal import UnservedError
from lce_jax.mosaic import _pallas


class Symbol(NamedTuple):
    """A number that is known when a list is run."""

    name: str


ALIGNED_NUMBERS = 16  # int32 numbers whose bytes kernels may load at once

ROWS, STRIDE = Symbol("rows"), Symbol("stride")  # how many tokens there are; from one field of a flat array to the next


@dataclasses.dataclass(eq=False)
class Storage:
    """A piece of memory.

    Attributes:
        kind: "input" or "output", which the caller brings, "numbers", or "workspace".
        place: which input or output it is; its first byte in the numbers or the workspace.
        num_bytes: its size.
    """

    kind: str
    place: int
    num_bytes: int


@dataclasses.dataclass(frozen=True, eq=False)
class Buffer:
    """An array that lies at the beginning of a storage."""

    shape: tuple[int, ...]
    dtype: Any
    storage: Storage

    def __len__(self) -> int:
        """The size of its first dimension."""
        return self.shape[0]

    def __getitem__(self, i: Any) -> Buffer:
        """The first entry of one, in the same place."""
        if i != 0 or self.shape[0] != 1:
            raise UnservedError(f"entry {i} of {self.shape}, which would need another address")
        return self.view(self.shape[1:])

    def view(self, shape: Sequence[int], dtype: Any = None) -> Buffer:
        """The same memory, seen otherwise."""
        return Buffer(tuple(shape), jnp.dtype(dtype or self.dtype), self.storage)

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        """Its shape and dtype."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype)


class Launch(NamedTuple):
    """A kernel, and what it is given: operands, then results."""

    kernel: Kernel
    operands: tuple[Buffer, ...]
    results: tuple[Buffer, ...]


class Recorder:
    """A `lce_jax.mosaic._host.Host` that keeps a list."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.inputs: list[Buffer] = []
        self.numbers_given: list[tuple[Any, ...]] = []
        self._known: dict[tuple[Any, ...], Buffer] = {}
        self._num_numbers = 0

    def input(self, shape: Sequence[int], dtype: Any) -> Buffer:
        """An operand of the list, the next one."""
        storage = Storage("input", len(self.inputs), _num_bytes(shape, dtype))
        self.inputs.append(Buffer(tuple(shape), jnp.dtype(dtype), storage))
        return self.inputs[-1]

    def empty(self, shape: Sequence[int], dtype: Any) -> Buffer:
        """Memory of its own."""
        return Buffer(tuple(shape), jnp.dtype(dtype), Storage("workspace", -1, _num_bytes(shape, dtype)))

    def loop[C](self, firsts: range, body: Callable[[Any, C], C], carry: C) -> C:
        """One after the other."""
        return functools.reduce(lambda carry, first: body(first, carry), firsts, carry)

    def numbers(self, *numbers: Any) -> Buffer:
        """Written to the GPU's memory before the list is run."""
        if numbers not in self._known:
            storage = Storage("numbers", 4 * self._num_numbers, 4 * len(numbers))
            self._known[numbers] = Buffer((len(numbers),), jnp.dtype("int32"), storage)
            padding = (0,) * (-len(numbers) % ALIGNED_NUMBERS)
            self.numbers_given.append(numbers + padding)
            self._num_numbers += len(numbers) + len(padding)
        return self._known[numbers]

    def prefix(self, x: Buffer, size: int, dim: int) -> Buffer:
        """Where it lies, if that is where ``x`` lies."""
        if size == x.shape[dim]:
            return x
        if dim:
            raise UnservedError(f"the first {size} columns of {x.shape}, which are not contiguous")
        return x.view((size, *x.shape[1:]))

    def reshape(self, x: Buffer, shape: Sequence[int]) -> Buffer:
        """Where it lies."""
        return x.view(shape)

    def launch[**P, R](self, kernel: Callable[P, R], *operands: P.args, **more: P.kwargs) -> R:
        """Written down."""
        assert not more
        leaves, tree = jax.tree.flatten(operands)
        arrays = [x for x in leaves if isinstance(x, Buffer)]
        static = tuple(x.struct if isinstance(x, Buffer) else x for x in leaves)
        traced = _traced(kernel, tree, static)
        given = tuple(arrays[i] for i in traced.operands)
        results = []
        for i, x in enumerate(traced.results):
            place = given[traced.updated[i]] if i in traced.updated else self.empty(x.shape, x.dtype)
            results.append(place.view(x.shape, x.dtype))
        self.launches.append(Launch(traced, given, tuple(results)))
        found: R = jax.tree.unflatten(traced.tree, [results[i] for i in traced.returned])
        return found

    def vary_like[T](self, tree: T, like: Any) -> T:
        """As it is."""
        del like
        return tree


def _num_bytes(shape: Sequence[int], dtype: Any) -> int:
    return math.prod(shape) * jnp.dtype(dtype).itemsize


@dataclasses.dataclass(frozen=True, eq=False)
class Kernel:
    """One kernel for arrays of certain shapes.

    Attributes:
        name: that of the function in `lce_jax.mosaic.common` which launches it.
        function: what is given the arrays and calls that.
        arrays: their shapes and dtypes.
        operands: which of the arrays the kernel is given, in its order.
        results: the shapes and dtypes of its results.
        updated: a result to the operand in whose place it is.
        returned: which of its results the function returns, in order.
        tree: their structure.
    """

    name: str
    function: Callable[..., Any]
    arrays: tuple[jax.ShapeDtypeStruct, ...]
    operands: tuple[int, ...]
    results: tuple[jax.ShapeDtypeStruct, ...]
    updated: dict[int, int]
    returned: tuple[int, ...]
    tree: Any


@functools.lru_cache(maxsize=4096)
def _traced(launch: Callable[..., Any], tree: Any, static: tuple[Any, ...]) -> Kernel:
    """The kernel that ``launch`` launches, given these static values and arrays of these shapes."""
    places = [i for i, x in enumerate(static) if isinstance(x, jax.ShapeDtypeStruct)]

    def function(*arrays: Any) -> Any:
        leaves = list(static)
        for place, array in zip(places, arrays, strict=True):
            leaves[place] = array
        return launch(*jax.tree.unflatten(tree, leaves))

    name = launch.__name__
    found: list[Any] = []

    def noted(*arrays: Any) -> None:
        with _pallas.noting() as notes:
            out = function(*arrays)
        found.extend((_note(notes, name), list(map(id, arrays)), out))

    arrays = tuple(static[place] for place in places)
    jax.eval_shape(noted, *arrays)
    note, given, out = found
    leaves, out_tree = jax.tree.flatten(out)
    results = list(map(id, note.results))
    try:
        operands, returned = [given.index(id(x)) for x in note.operands], [results.index(id(x)) for x in leaves]
    except ValueError:
        raise UnservedError(f"what stands beside the kernel in {name}") from None
    return Kernel(
        name=name,
        function=function,
        arrays=arrays,
        operands=tuple(operands),
        results=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in note.results),
        updated={result: operand for operand, result in note.updated.items()},
        returned=tuple(returned),
        tree=out_tree,
    )


def _note(notes: list[Any], name: str) -> Any:
    if len(notes) != 1:
        raise UnservedError(f"{len(notes)} kernels in {name}")
    return notes[0]
