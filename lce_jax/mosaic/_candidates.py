"""Candidates, beside the kernels: logits from gathered rows of the weight, gradients in each chunk's dlogits.

No kernel knows them. In the forward they cost T·K dot products. In the backward a chunk of dlogits gets the one-hot
terms after its kernel and before the two products that read it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from lce_jax import _chosen, _repeats
from lce_jax.mosaic._call import Call

if TYPE_CHECKING:
    from jaxtyping import Array, Float


@jax.named_scope("candidates")
def unscaled(call: Call) -> Float[Array, "T K"] | None:
    """The x of the candidates that this shard owns, -inf at the others."""
    return None if call.operands.candidates is None else _chosen.unscaled_candidates(call.operands, call.case)


@jax.named_scope("candidates")
def add_terms(
    call: Call, terms: Float[Array, "T K"] | None, dlogits: Float[Array, "Tp columns"], column: Any, stop: Any
) -> Float[Array, "Tp columns"]:
    """A chunk's ``dlogits``, of columns from ``column`` on, with the terms of the candidates before column ``stop``.

    They are added in float32 and rounded once more, to the chunk's dtype. No two of them have the same place, so no
    order of additions matters.
    """
    candidates = call.operands.candidates
    if candidates is None or terms is None:
        return dlogits
    places = _repeats.unique_places(candidates, column, stop, dlogits.shape[1])
    before = dlogits.at[places].get(mode="fill", fill_value=0).astype(jnp.float32)
    after = (before + terms).astype(dlogits.dtype)
    return dlogits.at[places].set(after, mode="drop", unique_indices=True)
