"""What the host code of a pass needs besides kernels: memory, loops, and numbers for the kernels.

JAX gives it while it traces a program (`TRACED`). torch gives it (`lce_torch_bridge.launched_directly`): the same host
code then says which kernel runs on which of its memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax.numpy as jnp
from jax import lax

from lce_jax.mosaic._live_tiles import Batch, place
from lce_jax.types import _jax
from lce_jax.types._types import Call
from lce_jax.xla import _logits

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Int


class Host(Protocol):
    """Where the launches of a pass go."""

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        """Memory that may hold anything."""

    def loop[C](self, firsts: range, body: Callable[[Any, C], C], carry: C) -> C:
        """``body(first, carry)`` for each of ``firsts``, in turn."""

    def numbers(self, *numbers: Any) -> Any:
        """int32 numbers in the GPU's memory, as kernels take them."""

    def prefix(self, x: Any, size: int, dim: int) -> Any:
        """The first ``size`` entries of ``x`` along a dimension, where they lie."""

    def reshape(self, x: Any, shape: Sequence[int]) -> Any:
        """``x`` in another shape, where it lies."""

    def launch[**P, R](self, kernel: Callable[P, R], *operands: P.args, **more: P.kwargs) -> R:
        """``kernel(*operands)``, a function of `lce_jax.mosaic.common` that launches one kernel."""

    def compute[R](self, function: Callable[..., R], *operands: Any) -> R:
        """``function(xp, *operands)``: array code between kernels, over ``jax.numpy`` or a namespace like it."""

    def products(self, hidden: Any, weight: Any, columns: Any, call: Call, num_rows: Any) -> Any:
        """H · w of each token's columns of the vocabulary, [T, K], summed in float32; anything at the column -1."""

    def put(self, x: Any, columns: Any, values: Any, numbers: Any, *of_live_tiles: Any) -> Any:
        """``x`` with the values [T, K] rounded at their places, which differ: `lce_jax.mosaic._live_tiles.place`."""

    def vary_like[T](self, tree: T, like: Any) -> T:
        """``tree`` with the type that a loop's carry needs, where it is to hold what is computed from ``like``."""


class Traced:
    """A program that JAX traces."""

    def empty(self, shape: Sequence[int], dtype: Any) -> Array:
        """Uninitialised."""
        return lax.empty(tuple(shape), dtype)

    def loop[C](self, firsts: range, body: Callable[[Any, C], C], carry: C) -> C:
        """A loop of the program, where there are several."""
        if len(firsts) == 1:
            return body(firsts.start, carry)
        return lax.fori_loop(0, len(firsts), lambda i, carry: body(firsts.start + i * firsts.step, carry), carry)

    def numbers(self, *numbers: Any) -> Int[Array, "n"]:
        """Traced or static."""
        if _are_static(numbers):
            return jnp.asarray(numbers, jnp.int32)
        return jnp.stack([jnp.asarray(number, jnp.int32) for number in numbers])

    def prefix(self, x: Array, size: int, dim: int) -> Array:
        """``x`` itself, or what XLA passes to a kernel as a view."""
        return lax.slice_in_dim(x, 0, size, axis=dim)

    def reshape(self, x: Array, shape: Sequence[int]) -> Array:
        """The same memory."""
        return x.reshape(tuple(shape))

    def launch[**P, R](self, kernel: Callable[P, R], *operands: P.args, **more: P.kwargs) -> R:
        """A kernel of the program."""
        return kernel(*operands, **more)

    def compute[R](self, function: Callable[..., R], *operands: Any) -> R:
        """By XLA."""
        return function(jnp, *operands)

    def products(self, hidden: Array, weight: Array, columns: Array, call: Call, num_rows: Any) -> Array:
        """Rows of the weight are gathered for a chunk of tokens at a time, and XLA stores none."""
        given = hidden, weight, columns, call, jnp.float32, num_rows
        return _logits.compute_products(*given, gathered_bytes=_logits.FUSED_BYTES)

    def put(self, x: Array, columns: Array, values: Array, numbers: Array, *of_live_tiles: Any) -> Array:
        """A scatter. What has no place gets one outside."""
        token, k = jnp.indices(values.shape, jnp.int32)
        if of_live_tiles:
            entries, work, sizes = of_live_tiles
            of_live_tiles = entries, Batch.of(sizes, numbers[0], work.sums, work.cells), sizes
        is_there, row, column = place(columns, token, numbers, *of_live_tiles)
        places = jnp.where(is_there, row, x.shape[0] + token), jnp.where(is_there, column, k)
        return x.at[places].set(values.astype(x.dtype), mode="drop", unique_indices=True)

    def vary_like[T](self, tree: T, like: Any) -> T:
        """Varying over as many manual axes."""
        return _jax.vary_like(tree, like)


TRACED = Traced()


def least(*numbers: Any) -> Any:
    """The smallest of numbers that may be traced; a plain one if none is."""
    return min(numbers) if _are_static(numbers) else functools.reduce(jnp.minimum, numbers)


def greatest(*numbers: Any) -> Any:
    """The largest, likewise."""
    return max(numbers) if _are_static(numbers) else functools.reduce(jnp.maximum, numbers)


def _are_static(numbers: Sequence[Any]) -> bool:
    return all(isinstance(number, int) for number in numbers)
