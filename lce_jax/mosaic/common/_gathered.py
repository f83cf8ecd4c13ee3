"""Candidates' two steps that torch has no operation for, as kernels; elsewhere XLA compiles them.

products   hidden, gathered rows of the weight  ->  a dot product for each candidate, and no copy of the rows
put        values, their places                 ->  an array with them, rounded; some have no place
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax.mosaic._live_tiles import Batch, Sizes, Worklist, place
from lce_jax.mosaic._pallas import pl, plgpu
from lce_jax.mosaic.common._tokens import THREADS, kernel

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Float, Int

VECTOR = 8  # 16-bit numbers of the widest load of a thread
LOADED = 4  # rows of the weight whose loads overlap; their sums take 8 registers of a thread each
OF_BLOCK = 16  # candidates of a token that a block computes: few enough for few tokens to fill the GPU
PUT = 16  # candidates of a block's token whose loads overlap


def products(
    hidden: Float[Array, "T H"], weight: Float[Array, "V H"], columns: Int[Array, "T K"], numbers: Int[Array, "1"]
) -> Float[Array, "T K"]:
    """H · w of each token's columns, in float32; anything at the column -1. ``numbers``: how many rows there are."""
    tokens, most = columns.shape
    groups = -(-most // OF_BLOCK)

    def body(hidden: Any, weight: Any, columns: Any, numbers: Any, output: Any) -> None:
        block = lax.axis_index("block")
        token, group = lax.div(block, groups), lax.rem(block, groups)

        def step(i: Any, _: Any) -> None:
            begin = group * OF_BLOCK + i * LOADED
            which = [jnp.minimum(begin + j, most - 1) for j in range(min(LOADED, most))]  # then the last again
            known = [jnp.maximum(columns[token, k], 0) for k in which]
            for k, product in zip(which, _products(hidden, weight, token, known), strict=True):
                output[token, k] = product

        steps = lax.div(jnp.minimum(most - group * OF_BLOCK, OF_BLOCK) + LOADED - 1, LOADED)
        pl.when(token < numbers[0])(lambda: lax.fori_loop(0, steps, step, None))

    # One axis, because the others of a CUDA grid end at 65535. Blocks that share a row of hidden are neighbours.
    run = kernel(body, [jax.ShapeDtypeStruct(columns.shape, jnp.float32)], "lce_products", {"block": tokens * groups})
    return run(hidden, weight, columns, numbers)[0]


def _products(hidden: Any, weight: Any, token: Any, columns: list[Any]) -> list[Any]:
    """A piece of H after the other.

    H may be no multiple of a piece. The last one then ends where H ends, with zeros in place of what has been counted.
    """
    hidden_size = hidden.shape[1]
    size = next(THREADS * n for n in (VECTOR, 4, 2, 1) if hidden_size >= THREADS * n)
    layout = plgpu.Layout.WG_STRIDED((size,), vec_size=size // THREADS)
    sums: list[Any] = []
    for begin in range(0, hidden_size, size):
        at = min(begin, hidden_size - size)
        load = functools.partial(_piece, pl.ds(at, size), layout)
        of_hidden = load(hidden, token)
        if at < begin:
            number = plgpu.layout_cast(lax.iota(jnp.int32, size), layout)
            of_hidden = jnp.where(number < begin - at, 0.0, of_hidden)
        found = [of_hidden * piece for piece in [load(weight, column) for column in columns]]
        sums = [a + b for a, b in zip(sums, found, strict=True)] if sums else found
    return [jnp.sum(x) for x in sums]


def _piece(columns: Any, layout: Any, ref: Any, row: Any) -> Float[Array, "n"]:
    return plgpu.load(ref.at[row, columns], layout=layout, optimized=False).astype(jnp.float32)


def put(
    x: Float[Array, "n m"],
    columns: Int[Array, "T K"],
    values: Float[Array, "T K"],
    numbers: Int[Array, "3"],
    entries: Int[Array, "T K"] | None = None,
    work: Worklist | None = None,
    sizes: Sizes | None = None,
) -> Float[Array, "n m"]:
    """``x`` with the values at their places, which `lce_jax.mosaic._live_tiles.place` finds."""
    (tokens, most), lists = columns.shape, () if work is None else (entries, work.sums, work.cells)

    def body(x: Any, columns: Any, values: Any, numbers: Any, *refs: Any) -> None:
        del x
        (*lists, output), token = refs, lax.axis_index("token")
        batch = None if sizes is None else Batch.of(sizes, numbers[0], *lists[1:])

        def place_of(k: Any) -> tuple[Any, Any, Any]:
            of_live = (lists[0][token, k], batch, sizes) if lists else ()
            return place(columns[token, k], token, numbers, *of_live)

        def store(row: Any, column: Any, value: Any) -> None:
            output.at[row, column][...] = value  # by all threads: the same number

        def step(i: Any, _: Any) -> None:
            which = [jnp.minimum(i * PUT + j, most - 1) for j in range(min(PUT, most))]  # then the last again
            places = [place_of(k) for k in which]
            found = [values[token, k].astype(output.dtype) for k in which]
            for (is_there, row, column), value in zip(places, found, strict=True):
                pl.when(is_there)(functools.partial(store, row, column, value))

        pl.when(token < numbers[1])(lambda: lax.fori_loop(0, -(-most // PUT), step, None))

    output = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return kernel(body, [output], "lce_put", {"token": tokens}, updated={0: 0})(x, columns, values, numbers, *lists)[0]
