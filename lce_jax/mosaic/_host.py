"""What the Python code of a pass needs besides kernels: memory, loops, and numbers for the kernels.

A host is where a pass launches its kernels. There are two. In JAX's (`TRACED`) a pass becomes part of a traced program.
In torch's (`lce_torch_bridge.launched_directly`) it launches kernels on torch's memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax.mosaic import _pallas
from lce_jax.mosaic._threshold_tiles import Batch, place
from lce_jax.types import _jax
from lce_jax.types._types import Call
from lce_jax.xla import _logits

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Int


class Host(Protocol):
    """Where a pass launches its kernels."""

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        """Returns uninitialized memory."""

    def loop[C](self, firsts: range, body: Callable[[Any, C], C], carry: C) -> C:
        """Runs ``carry = body(first, carry)`` for each ``first`` in ``firsts``, and returns the last carry."""

    def numbers(self, *numbers: Any) -> Any:
        """Returns the numbers as an int32 array in the GPU's memory, as kernels take them."""

    def prefix(self, x: Any, size: int, dim: int) -> Any:
        """Returns the first ``size`` entries of ``x`` along a dimension, without a copy."""

    def reshape(self, x: Any, shape: Sequence[int]) -> Any:
        """Returns ``x`` in another shape, without a copy."""

    def launch[**P, R](self, kernel: Callable[P, R], *operands: P.args, **more: P.kwargs) -> R:
        """Calls ``kernel(*operands)``, a function of `lce_jax.mosaic.common` that launches one kernel."""

    def compute[R](self, function: Callable[..., R], *operands: Any) -> R:
        """Calls ``function(xp, *operands)``: array code between kernels, where ``xp`` is ``jax.numpy`` or similar."""

    def products(self, hidden: Any, weight: Any, columns: Any, call: Call, num_rows: Any) -> Any:
        """Computes h · w in each token's ``columns`` [T, K], with sums in float32; arbitrary at the column -1."""

    def put(self, x: Any, columns: Any, values: Any, numbers: Any, *active_tiles: Any) -> Any:
        """Writes the values [T, K], rounded, to distinct places in ``x`` (`lce_jax.mosaic._threshold_tiles.place`)."""

    def order[T](self, tree: T) -> T:
        """Returns ``tree``. All of it is computed before a later step uses or overwrites a part of the result."""

    def vary_like[T](self, tree: T, like: Any) -> T:
        """Returns ``tree`` with the type that a loop's carry needs to hold values computed from ``like``."""


class Traced:
    """The host of a program that JAX traces."""

    def empty(self, shape: Sequence[int], dtype: Any) -> Array:
        """Returns uninitialized memory."""
        return lax.empty(tuple(shape), dtype)

    def loop[C](self, firsts: range, body: Callable[[Any, C], C], carry: C) -> C:
        """Adds a loop to the program, or runs ``body`` directly if there is only one iteration."""
        if len(firsts) == 1:
            return body(firsts.start, carry)
        return lax.fori_loop(0, len(firsts), lambda i, carry: body(firsts.start + i * firsts.step, carry), carry)

    def numbers(self, *numbers: Any) -> Int[Array, "n"]:
        """Returns the numbers, traced or static, as one array."""
        if _are_static(numbers):
            return jnp.asarray(numbers, jnp.int32)
        return jnp.stack([jnp.asarray(number, jnp.int32) for number in numbers])

    def prefix(self, x: Array, size: int, dim: int) -> Array:
        """Returns ``x`` itself, or a slice that XLA passes to a kernel as a view."""
        return lax.slice_in_dim(x, 0, size, axis=dim)

    def reshape(self, x: Array, shape: Sequence[int]) -> Array:
        """Returns ``x`` in another shape, in the same memory."""
        return x.reshape(tuple(shape))

    def launch[**P, R](self, kernel: Callable[P, R], *operands: P.args, **more: P.kwargs) -> R:
        """Adds a kernel to the program. Launches of equal shapes and options share one lowered kernel."""
        assert not more
        leaves, tree = jax.tree.flatten(operands)
        shapes = (jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array) else x for x in leaves)
        launch = _jit_launch(kernel, tree, tuple(shapes), _pallas.read_context())
        return launch(*(x for x in leaves if isinstance(x, jax.Array)))

    def compute[R](self, function: Callable[..., R], *operands: Any) -> R:
        """Lets XLA compile ``function``."""
        return function(jnp, *operands)

    def products(self, hidden: Array, weight: Array, columns: Array, call: Call, num_rows: Any) -> Array:
        """Gathers rows of the weight for a chunk of tokens at a time. XLA does not store these rows."""
        return _logits.compute_products(
            hidden, weight, columns, call, jnp.float32, num_rows, gathered_bytes=_logits.FUSED_BYTES
        )

    def put(self, x: Array, columns: Array, values: Array, numbers: Array, *active_tiles: Any) -> Array:
        """Scatters the values. A value without a place in ``x`` gets an index outside ``x``."""
        token, k = jnp.indices(values.shape, jnp.int32)
        if active_tiles:
            entries, work, sizes = active_tiles
            active_tiles = entries, Batch.of(sizes, numbers[0], work.sums, work.cells), sizes
        is_there, row, column = place(columns, token, numbers, *active_tiles)
        places = jnp.where(is_there, row, x.shape[0] + token), jnp.where(is_there, column, k)
        return x.at[places].set(values.astype(x.dtype), mode="drop", unique_indices=True)

    def order[T](self, tree: T) -> T:
        """Adds a barrier. Without it, XLA would copy what a later kernel overwrites."""
        return lax.optimization_barrier(tree)

    def vary_like[T](self, tree: T, like: Any) -> T:
        """Makes ``tree`` vary over the same manual axes as ``like``."""
        return _jax.vary_like(tree, like)


@functools.lru_cache(maxsize=4096)
def _jit_launch(kernel: Callable[..., Any], tree: Any, leaves: tuple[Any, ...], _: Any) -> Callable[..., Any]:
    """Returns a launch as a jitted function of its arrays, one for each context in which kernels are traced."""

    def launch(*arrays: Any) -> Any:
        return kernel(*fill_operands(tree, leaves, arrays))

    launch.__name__ = kernel.__name__
    return jax.jit(launch)


def fill_operands(tree: Any, leaves: Sequence[Any], arrays: Sequence[Any]) -> Any:
    """Returns the operands with these ``leaves``, of which each ``jax.ShapeDtypeStruct`` is replaced by an array."""
    values = iter(arrays)
    return jax.tree.unflatten(tree, [next(values) if isinstance(x, jax.ShapeDtypeStruct) else x for x in leaves])


TRACED = Traced()


def least(*numbers: Any) -> Any:
    """Returns the smallest of the numbers, which may be traced."""
    return min(numbers) if _are_static(numbers) else functools.reduce(jnp.minimum, numbers)


def greatest(*numbers: Any) -> Any:
    """Returns the largest of the numbers, which may be traced."""
    return max(numbers) if _are_static(numbers) else functools.reduce(jnp.maximum, numbers)


def _are_static(numbers: Sequence[Any]) -> bool:
    return all(isinstance(number, int) for number in numbers)
