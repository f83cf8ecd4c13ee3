"""The loss of the head with stored logits, to compare with `LMHead.loss`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from lce_jax.flax.nnx import LMHead
    from lce_jax.types._shapes import Array, Float, Int


def loss(head: LMHead, hidden: Float[Array, "B S H"], labels: Int[Array, "B S"], *, z_loss: float) -> Float[Array, ""]:
    """Returns the mean cross entropy plus ``z_loss`` times the mean of lse²."""
    logprobs, _, lse = logit_statistics(head(hidden), labels)
    return jnp.mean(-logprobs + z_loss * lse**2)


def logit_statistics(logits: Float[Array, "*b V"], labels: Int[Array, "*b"]) -> tuple[Array, Array, Array]:
    """Returns log-probability, entropy and lse of each token."""
    lse = jax.nn.logsumexp(logits, axis=-1)
    logprobs = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0] - lse
    return logprobs, lse - jnp.sum(jnp.exp(logits - lse[..., None]) * logits, axis=-1), lse
