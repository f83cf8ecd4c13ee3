"""The head's loss with stored logits, in place of `LMHead.loss`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from lce_jax.flax.nnx import LMHead
    from lce_jax.types._shapes import Array, Float, Int


def loss(head: LMHead, hidden: Float[Array, "B S H"], labels: Int[Array, "B S"], *, z_loss: float) -> Float[Array, ""]:
    """Mean cross entropy, and ``z_loss`` times the mean of lse²."""
    logprobs, _, lse = of_logits(head(hidden), labels)
    return jnp.mean(-logprobs + z_loss * lse**2)


def of_logits(logits: Float[Array, "*b V"], labels: Int[Array, "*b"]) -> tuple[Array, Array, Array]:
    """Log-probability, entropy and lse."""
    lse = jax.nn.logsumexp(logits, axis=-1)
    logprobs = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0] - lse
    return logprobs, lse - jnp.sum(jnp.exp(logits - lse[..., None]) * logits, axis=-1), lse
