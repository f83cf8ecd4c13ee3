"""The mean logit, which label smoothing needs. Without a softcap it is linear in hidden, so it needs no kernel.

    Σ_v x = h · W̄,   W̄ = Σ_v w_v;       dh += uniform W̄,   dw_v += Σ_t uniform_t h_t   (eqs. 0, 4, 5)

It costs one pass over the weight in the forward, and two in the backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

from lce_jax.mathematics import _logprobs
from lce_jax.types._types import Call, Operands

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Bool, Float


def total(operands: Operands, call: Call) -> Float[Array, "T"]:
    """Computes Σ x over the shard's unpadded columns."""
    return jnp.matmul(operands.hidden.astype(jnp.float32), _summed_weight(operands, call), precision="highest")


def add_gradients(
    operands: Operands,
    call: Call,
    uniform: Float[Array, "T"],
    dhidden: Float[Array, "T H"] | None,
    dweight: Float[Array, "V H"] | None,
) -> tuple[Float[Array, "T H"] | None, Float[Array, "V H"] | None]:
    """Adds the mean logit's part to both gradients. dweight is thereby rounded a second time."""
    if dhidden is not None:
        dhidden = dhidden + uniform[:, None] * _summed_weight(operands, call)[None, :]
    if dweight is None:
        return dhidden, None
    row = jnp.matmul(uniform, operands.hidden.astype(jnp.float32), precision="highest")
    part = jnp.broadcast_to(jnp.expand_dims(row, call.vocab_dim), dweight.shape)
    part = _logprobs.zero_padding(part, _unpadded_columns(operands, call), call)
    return dhidden, (dweight.astype(jnp.float32) + part).astype(dweight.dtype)


def _summed_weight(operands: Operands, call: Call) -> Float[Array, "H"]:
    weight = _logprobs.zero_padding(operands.weight, _unpadded_columns(operands, call), call)
    return jnp.sum(weight.astype(jnp.float32), axis=call.vocab_dim)


def _unpadded_columns(operands: Operands, call: Call) -> Bool[Array, "V"] | None:
    return _logprobs.unpadded_columns(0, call.columns, operands.num_columns)
