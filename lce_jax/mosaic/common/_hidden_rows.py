"""The steps that move rows of H numbers, as kernels: a tile of the weight copied, a multiple, zeros."""

from __future__ import annotations

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
