"""The columns that the kernels leave out, through plain XLA.

In the forward these are the tail, fewer than a grain. In the backward also the true columns of a step with padding in
it: there the products would multiply dlogits of 0 by whatever the padding holds, and 0 · NaN is NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax import _math
from lce_jax._types import RowCoefficients, ShardStatistics
from lce_jax.mosaic._call import Call
from lce_jax.mosaic._span import Span

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


@jax.named_scope("remainder")
def tail_statistics(call: Call, scale: Float[Array, "T"] | float) -> ShardStatistics:
    """Eq. 1 of the tail. Its weight is [n, H], because a "hv" weight with a tail is refused."""
    operands, shape, options = call.operands, call.shape, call.case.options
    weight = operands.weight[shape.columns :]
    raw = lax.dot_general(operands.hidden, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    x = _math.unscaled_logits(raw, options)
    live = _math.live_columns(shape.columns, shape.tail, operands.num_columns)
    return _math.tile_statistics(x, scale, operands.targets - shape.columns, live, options)._replace(total=None)


def is_left(call: Call) -> bool:
    """Whether the backward's products may leave out true columns."""
    return bool(call.shape.tail) or call.operands.num_columns is not None


def covered_columns(call: Call, step: int) -> Int[Array, ""] | int:
    """The columns that the products contract: all, or whole steps without padding."""
    columns = call.shape.columns
    if call.operands.num_columns is None:
        return columns
    return jnp.minimum(call.operands.num_columns, columns) // step * step


def empty_dweight(call: Call) -> Float[Array, "V H"]:
    """The memory for dweight: zeros where padding may hold the tail, which nothing then writes.

    The kernels write all columns that they cover, and `add_gradients` the true columns of the tail.
    """
    written = call.operands.num_columns is None or not call.shape.tail
    return (lax.empty if written else jnp.zeros)(call.operands.weight.shape, call.case.dtype)


@jax.named_scope("remainder")
def add_gradients(
    call: Call, rows: RowCoefficients, dhidden: Array, dweight: Array, *, adds: bool, step: int
) -> tuple[Array, Array]:
    """The gradients with the part of the true columns that the products leave out: fewer than a step and a tail.

    If the kernels have added to ``dweight``, only the tail is missing in it. (What they have written is written again:
    they read no weight for it, so no padding.)
    """
    operands, case, shape, options = call.operands, call.case, call.shape, call.case.options
    covered = covered_columns(call, step)
    width = shape.tail
    if operands.num_columns is not None:
        width += step
    column = covered + jnp.arange(width, dtype=jnp.int32)
    live = column < (case.vocab_size if operands.num_columns is None else operands.num_columns)
    weight = jnp.take(operands.weight, column, axis=options.vocab_dim, mode="clip")
    weight = _math.without_padding(weight, live, options)
    raw = _dot(operands.hidden, weight, options.hidden_dim)
    x, scale = _math.unscaled_logits(raw, options), _math.row_scale(options, operands.inverse_temperature)
    candidates = None if operands.candidates is None else operands.candidates - covered
    d = _math.dlogits(x, scale, rows, operands.targets - covered, live, options, candidates).astype(case.dtype)
    dhidden = dhidden + _dot(d, weight, options.vocab_dim)
    if adds:
        if not shape.tail:
            return dhidden, dweight
        part = _dot(jnp.where(column >= shape.columns, d, 0).T, operands.hidden, 0)
        return dhidden, dweight.at[column].add(part, mode="drop", unique_indices=True)
    if not shape.whole_atoms:
        part = _dot(d.T, operands.hidden, 0).astype(case.dtype)
        return dhidden, dweight.at[column].set(part, mode="drop")
    # XLA (0.11.2) cannot compile an update after a kernel's, so the kernel writes these too. The columns after them are
    # zeros, or do not exist.
    d = jnp.pad(d, ((0, shape.tokens - case.num_tokens), (0, -width % shape.tile)))
    span = Span(shape.tokens, case.vocab_size, covered, d.shape[1] // shape.tile, offset=covered).pack()
    return dhidden, call.kernels.write_dweight(dweight, d, call.prepared.hidden, case, span)


def _dot(left: Array, right: Array, right_dim: int) -> Float[Array, "m n"]:
    """A product in fp32; the last dimension of ``left`` is contracted."""
    return lax.dot_general(left, right, (((1,), (right_dim,)), ((), ())), preferred_element_type=jnp.float32)
