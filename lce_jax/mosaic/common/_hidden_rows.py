"""The steps that move rows of H numbers, as kernels: dhidden from its sums, a tile of the weight copied, a multiple."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax._types import Case
from lce_jax.mosaic._pallas import pl, plgpu
from lce_jax.mosaic.common._threads import THREADS
from lce_jax.mosaic.common._tiles import SCALED, TILE_N, TILING
from lce_jax.mosaic.common._tokens import kernel

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Float, Int

COPIED = 512  # numbers that a block copies at a time
SUMMED_ROWS = 4  # rows that a block adds up, or copies


def total(case: Case, sums: Float[Array, "splits Tp Hp"], dtype: Any, numbers: Int[Array, "1"]) -> Float[Array, "R H"]:
    """dhidden: the splits added up in their order, rounded once. ``numbers``: how many rows there are."""
    width, grid = _pieces(case)
    output = jax.ShapeDtypeStruct((case.num_tokens, case.hidden_size), dtype)

    def body(sums: Any, numbers: Any, dhidden: Any) -> None:
        columns = _columns(case, width)
        first, last = lax.axis_index("rows") * SUMMED_ROWS, numbers[0] - 1

        def rows() -> None:
            for i in range(SUMMED_ROWS):
                row = jnp.minimum(first + i, last)  # after the last one, that one again
                x = functools.reduce(jnp.add, (sums[split, row, columns] for split in range(sums.shape[0])))
                dhidden.at[row, columns][...] = x.astype(dtype)

        pl.when(first <= last)(rows)

    return kernel(body, [output], "lce_total", grid)(sums, numbers)[0]


def _pieces(case: Case) -> tuple[int, dict[str, int]]:
    """The columns that a block takes at a time, and the grid. Its last axis is the one that may exceed 65,535."""
    width = next(width for width in (COPIED, THREADS) if case.hidden_size >= width)
    return width, {"part": -(-case.hidden_size // width), "rows": case.num_tokens // SUMMED_ROWS}


def _columns(case: Case, width: int) -> Any:
    """Those of a block. The last part ends with the last column: it takes some of the part before it too."""
    return pl.ds(jnp.minimum(lax.axis_index("part") * width, case.hidden_size - width), width)


def rows(case: Case, hidden: Float[Array, "R H"], numbers: Int[Array, "1"]) -> Float[Array, "R H"]:
    """The rows that there are, in the weight's dtype, then rows of zeros as far as any kernel looks beyond the last.

    ``numbers``: how many there are.
    """
    width, grid = _pieces(case)
    output = jax.ShapeDtypeStruct(hidden.shape, case.dtype)
    seen = TILING.row_block * TILING.most_clustered

    def body(hidden: Any, numbers: Any, copied: Any) -> None:
        columns = _columns(case, width)
        first, count = lax.axis_index("rows") * SUMMED_ROWS, numbers[0]

        def copy(row: Any) -> None:
            copied.at[row, columns][...] = hidden[row, columns].astype(case.dtype)

        def pad(row: Any) -> None:
            copied.at[row, columns][...] = jnp.zeros((width,), case.dtype)

        for row in [first + i for i in range(SUMMED_ROWS)]:
            pl.when(row < count)(functools.partial(copy, row))
            pl.when((row >= count) & (row < count + seen))(functools.partial(pad, row))

    return kernel(body, [output], "lce_rows", grid)(hidden, numbers)[0]


def copy(case: Case, weight: Float[Array, "atoms n"], numbers: Int[Array, "2"]) -> Float[Array, "tile_atoms n"]:
    """A tile of the weight's rows, of both in whole atoms: [V / 8, 8 H]. ``numbers``: its first atom, its true rows.

    The rows after these are zero.
    """
    atom_size = TILING.atom * case.hidden_size
    output = jax.ShapeDtypeStruct((TILE_N // TILING.atom, atom_size), weight.dtype)
    layout = plgpu.Layout.WG_STRIDED((COPIED,), vec_size=COPIED // THREADS)

    def body(weight: Any, numbers: Any, copied: Any) -> None:
        atom, first = lax.axis_index("atom"), lax.axis_index("part") * COPIED
        columns = pl.ds(pl.multiple_of(first, COPIED), COPIED)
        source = jnp.minimum(numbers[0] + atom, weight.shape[0] - 1)
        there = (numbers[1] - atom * TILING.atom) * case.hidden_size - first
        number = plgpu.layout_cast(lax.iota(jnp.int32, COPIED), layout)
        values = plgpu.load(weight.at[source, columns], layout=layout, optimized=False)
        copied.at[atom, columns][...] = jnp.where(number < there, values, jnp.zeros((), values.dtype))

    return kernel(body, [output], "lce_copy", {"atom": output.shape[0], "part": atom_size // COPIED})(weight, numbers)[
        0
    ]


def scale(x: Float[Array, "n"], factor: Float[Array, "1"], dtype: Any) -> Float[Array, "n"]:
    """``factor · x`` in float32, rounded once. n is a multiple of `SCALED`."""
    layout = plgpu.Layout.WG_STRIDED((COPIED,), vec_size=COPIED // THREADS)

    def body(x: Any, factor: Any, scaled: Any) -> None:
        k = plgpu.layout_cast(jnp.full((COPIED,), factor[0], jnp.float32), layout)
        for i in range(SCALED // COPIED):
            first = lax.axis_index("part") * SCALED + i * COPIED
            numbers = pl.ds(pl.multiple_of(first, COPIED), COPIED)
            values = plgpu.load(x.at[numbers], layout=layout, optimized=False)
            scaled.at[numbers][...] = (k * values.astype(jnp.float32)).astype(dtype)

    output = jax.ShapeDtypeStruct(x.shape, dtype)
    return kernel(body, [output], "lce_scale", {"part": x.shape[0] // SCALED})(x, factor)[0]


def zeros(shape: tuple[int, int, int], numbers: Int[Array, "1"]) -> Float[Array, "splits Tp Hp"]:
    """The first rows of an array, so many as ``numbers`` says, in float32; the others are left unwritten."""
    output, width = jax.ShapeDtypeStruct(shape, jnp.float32), 2 * THREADS
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=width // THREADS)

    def body(numbers: Any, output: Any) -> None:
        split, row = lax.axis_index("split"), lax.axis_index("row")

        def clear() -> None:
            for column in range(0, shape[2], width):
                value = plgpu.layout_cast(jnp.zeros((width,), jnp.float32), layout)
                output.at[split, row, pl.ds(column, width)][...] = value

        pl.when(row < numbers[0])(clear)

    return kernel(body, [output], "lce_zeros", {"split": shape[0], "row": shape[1]})(numbers)[0]
