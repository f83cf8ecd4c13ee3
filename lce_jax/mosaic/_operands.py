"""The operands as the kernels take them: padded, scaled to base 2, with padding columns and targets marked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from lce_jax._types import Case, Operands, RowCoefficients
from lce_jax.mosaic._geometry import Geometry

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Float, Int

LOG2E = 1.4426950408889634  # from nats to base 2


class Prepared(NamedTuple):
    """The operands as the kernels take them."""

    hidden: Float[Array, "T H"]  # T in whole atoms, at least one row block
    weight: Float[Array, "V H"]
    targets: Int[Array, "Tp"]  # the place of the label among the shard's tiles, -1 where the shard does not hold it
    scale: Float[Array, "Tp"]  # the k of eq. 0 in base 2
    holds_target: Int[Array, "blocks tiles"]
    # 1 on padding: of the tile with the first padding column, and of the tile after it. With parts first of a whole
    # part, then of the part with the first padding column.
    mask: Int[Array, "2*tile"]
    num_columns: Any  # live columns; an array or a number, None where kernels are not to know
    num_rows: Any  # live rows, likewise
    floor: Float[Array, "Tp"] | None = None  # in the units of x; None: every column counts


class Marked(NamedTuple):
    """What the other kernels are given of each token."""

    targets: Int[Array, "Tp"]
    scale: Float[Array, "Tp"]
    holds_target: Int[Array, "blocks tiles"]  # and columns that are padding
    floor: Float[Array, "Tp"] | None = None  # as in `Prepared`


def prepare(operands: Operands, case: Case, shape: Geometry) -> Prepared:
    """Pads the per-token operands, marks the tiles that hold a target and the columns that are padding."""
    hidden = pad(operands.hidden, shape.tokens)
    targets = pad(operands.targets, shape.padded_tokens, -1)
    targets = jnp.where(targets < 0, -1, shape.place(targets)) if shape.has_parts else targets
    scale = scale_in_base_2(operands.inverse_temperature, case, shape)
    tile = jnp.where(targets < 0, -1, targets // shape.tile).reshape(-1, shape.row_block, 1)
    flags = jnp.max((tile == jnp.arange(shape.num_tiles, dtype=jnp.int32)).astype(jnp.int32), axis=1)
    columns = jnp.asarray(case.vocab_size if operands.num_columns is None else operands.num_columns, jnp.int32)
    places = jnp.arange(2 * shape.tile, dtype=jnp.int32)
    mask = jnp.concatenate([(places >= first).astype(jnp.int32) for first in first_padding(columns, shape)])
    num_rows = num_live_rows(operands.num_rows, shape)
    floor = None if operands.floor is None else pad(operands.floor, shape.padded_tokens)
    return Prepared(hidden, operands.weight, targets, scale, flags, mask, columns, num_rows, floor)


def first_padding(columns: Any, shape: Geometry) -> list[Any]:
    """The place in its tile of the first padding column; with parts, that of a whole part before."""
    if not shape.has_parts:
        return [columns % shape.tile]
    return [shape.part_columns % shape.tile, columns % shape.part_columns % shape.tile]


def scale_in_base_2(inverse_temperature: Float[Array, "T"] | None, case: Case, shape: Geometry) -> Float[Array, "Tp"]:
    """The k of eq. 0 times log2 e, so that e^((x - m) k) is a power of 2."""
    k = case.options.logit_softcap or case.options.logit_scale
    scale = jnp.full((shape.padded_tokens,), LOG2E * k, jnp.float32)
    return scale if inverse_temperature is None else scale * pad(inverse_temperature, shape.padded_tokens)


def num_live_rows(num_rows: Int[Array, ""] | None, shape: Geometry) -> Int[Array, ""]:
    """The rows that count."""
    return jnp.int32(shape.tokens) if num_rows is None else num_rows


def pad(x: Array, rows: int, value: Any = 0) -> Array:
    """``x`` padded to ``rows`` rows; ``x`` itself if it has them."""
    missing = rows - x.shape[0]
    if missing == 0:
        return x
    return jnp.pad(x, ((0, missing),) + ((0, 0),) * (x.ndim - 1), constant_values=value)


class RowFactors(NamedTuple):
    """Eq. 4 in base 2, per row: dz = constant·e + slope·u·e with e = 2^u, u = (x - max)·scale; target at the label.

    Kernels are given them as one array, [4, Tp], or [3, Tp] without a slope.
    """

    max: Float[Array, "T"]
    target: Float[Array, "T"]
    constant: Float[Array, "T"]
    slope: Float[Array, "T"] | None


def in_base_2(rows: RowCoefficients) -> RowFactors:
    """The coefficients of the kernels."""
    slope = None if rows.slope is None else rows.slope * (1.0 / LOG2E)
    return RowFactors(rows.max, rows.target, rows.constant, slope)


def row_factors(rows: RowCoefficients, length: int) -> Float[Array, "factors Tp"]:
    """The coefficients in base 2, zero from the last token to ``length``."""
    factors = jnp.stack(jax.tree.leaves(in_base_2(rows)))
    return jnp.pad(factors, ((0, 0), (0, length - factors.shape[1])))
