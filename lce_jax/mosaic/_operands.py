"""The operands as the kernels take them: padded to what TMA reads, in bits, with padding and targets marked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax._types import Case, Operands, RowCoefficients
from lce_jax.mosaic import _config
from lce_jax.mosaic._config import ROW_BLOCK, TILE_N

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

LOG2E = 1.4426950408889634
PADDING = -1e15  # stands for the raw products of padding columns: exp2 of it is 0, its square is finite
FLOOR = -1e10  # below every raw product, above every padding column's


class Prepared(NamedTuple):
    """The operands as the kernels take them."""

    hidden: Float[Array, "T H"]  # T a multiple of 8, at least one row block
    weight: Float[Array, "V H"]
    targets: Int[Array, "Tp"]  # padded to whole row blocks
    scale: Float[Array, "Tp"]  # from raw products (or tanh, with a cap) to logits in bits
    holds_target: Int[Array, "blocks tiles"]
    mask: Int[Array, "512"]  # 1 on padding, for the tile that holds the first padding column and the one behind it
    num_columns: Int[Array, ""]  # live columns the kernels cover
    num_rows: Int[Array, ""]  # live rows


def prepare(operands: Operands, case: Case) -> Prepared:
    """Pads the per-token operands, marks the tiles that hold a target and the columns that are padding."""
    shape = _config.geometry(case)
    options = case.options
    hidden = _pad(operands.hidden, shape.tokens)
    targets = jnp.where(operands.targets < shape.columns, operands.targets, -1)  # the tail's are not the kernels'
    targets = _pad(targets, shape.padded_tokens, -1)
    scale = jnp.full((shape.padded_tokens,), LOG2E * (options.logit_softcap or options.logit_scale), jnp.float32)
    if operands.inverse_temperature is not None:
        scale = scale * _pad(operands.inverse_temperature, shape.padded_tokens)
    rows = jnp.arange(shape.padded_tokens, dtype=jnp.int32)
    flags = jnp.zeros((shape.padded_tokens // ROW_BLOCK, shape.tiles), jnp.int32)
    tile = jnp.where(targets < 0, shape.tiles, targets // TILE_N)
    flags = flags.at[rows // ROW_BLOCK, tile].set(1, mode="drop")
    columns = jnp.int32(shape.columns)
    if operands.num_columns is not None:
        columns = jnp.minimum(jnp.asarray(operands.num_columns, jnp.int32), columns)
    ragged = jnp.arange(2 * TILE_N, dtype=jnp.int32) >= columns % TILE_N
    mask = ragged.astype(jnp.int32)
    num_rows = jnp.int32(shape.tokens) if operands.num_rows is None else operands.num_rows
    return Prepared(hidden, operands.weight, targets, scale, flags, mask, columns, num_rows)


def _pad(x: Array, rows: int, value: Any = 0) -> Array:
    """``x`` with ``rows`` rows; the very array where it has them."""
    missing = rows - x.shape[0]
    if missing == 0:
        return x
    return jnp.pad(x, ((0, missing),) + ((0, 0),) * (x.ndim - 1), constant_values=value)


class Span(NamedTuple):
    """What one launch covers, known when it runs."""

    num_rows: Any  # live rows
    num_columns: Any  # live columns of the shard
    column: Any  # the first one
    num_tiles: Any  # of 256 columns
    depth: Any = 0  # columns that a product contracts
    origin: Any = 0  # the first column's place in the weight, and in dweight, that the kernel is given

    @property
    def first_tile(self) -> Int[Array, ""]:
        """The number of its first tile, in the shard."""
        return lax.div(self.column, jnp.int32(TILE_N))

    def pack(self) -> Int[Array, "fields"]:
        """As a kernel takes it."""
        return jnp.stack([jnp.asarray(field, jnp.int32) for field in self])

    @classmethod
    def unpack(cls, scalars: Any) -> Span:
        """In a kernel."""
        return cls(*(scalars[i] for i in range(len(cls._fields))))


class RowFactors(NamedTuple):
    """Eq. 4 in bits, per row: dz = onehot·target + e·(constant + slope·u), e = 2^u, u = z - shift."""

    shift: Float[Array, "Tp"]
    target: Float[Array, "Tp"]
    constant: Float[Array, "Tp"]
    slope: Float[Array, "Tp"] | None


def row_factors(rows: RowCoefficients, length: int) -> RowFactors:
    """The coefficients in bits, zero from the last token to ``length``."""
    slope = None if rows.slope is None else rows.slope * (1.0 / LOG2E)
    factors = RowFactors(rows.shift * LOG2E, rows.target, rows.constant, slope)
    return jax.tree.map(lambda x: jnp.pad(x, (0, length - x.shape[0])), factors)
