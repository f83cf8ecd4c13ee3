"""A softmax over the logits of a set of ids."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax import scalars
from lce_jax.call import _checks, _rows

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Float, Int


def masked_logprobs(
    logits: Float[Array, "*b K"], ids: Int[Array, "*b K"], labels: Int[Array, "*b"]
) -> Float[Array, "*b"]:
    """Log-probability of the label in a softmax over a set of ids: what top-k, top-p or min-p sampling left.

    ``logprob = z[label] - ln Σ_{k: ids[k] ≥ 0} exp(z[k])``, with the z of `linear_logits`.

    Args:
        logits: ``[..., K]``, those of `linear_logits` at ``ids``.
        ids: ``[..., K]`` the set of each token, its ids all different; -1 stands for none. An id out of vocabulary
            must be -1 too.
        labels: ``[...]`` integer vocabulary ids, global also when the vocabulary is split.

    Returns:
        ``[...]`` in the dtype of the logits. -inf, without a gradient, where the label is not in the set: sampling
        could not have drawn it. 0, without a gradient, where the set has no id or the label is negative, as in a
        prompt: `linear_logprobs` gives 0 for such a label too.

    Raises:
        ValueError, TypeError: shapes or dtypes that do not fit, with the offending values.

    Example:
        >>> import jax.numpy as jnp
        >>> from lce_jax import masked_logprobs
        >>> ids = jnp.array([[3, 5, -1], [3, 5, 8]])
        >>> out = masked_logprobs(jnp.zeros((2, 3)), ids, jnp.array([5, 6]))
        >>> [round(float(x), 3) for x in out]               # -ln 2, and a label outside the set
        [-0.693, -inf]
    """
    _checks.array("logits", logits)
    _checks.label_array(ids, "ids")
    scalars.num_candidates("ids", ids.shape)
    _checks.label_array(labels)
    scalars.candidate_shape("ids", ids.shape, labels.shape, "labels")
    if tuple(logits.shape) != tuple(ids.shape) or not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ValueError(
            f"logits {tuple(logits.shape)} of {logits.dtype} must be floating point in the shape of ids "
            f"{tuple(ids.shape)}"
        )
    return _masked(_rows.on_device(logits), _rows.int32_labels(ids, "ids"), _rows.int32_labels(labels))


@functools.partial(jax.jit, inline=True)
def _masked(logits: Array, ids: Array, labels: Array) -> Array:
    """Jitted: outside ``jit`` each number in an expression is a transfer."""
    logits = lax.optimization_barrier(logits)  # else a compiler may fuse what makes them with u, which may be above 0
    in_set = ids >= 0
    is_label = in_set & (ids == labels[..., None])
    highest = lax.stop_gradient(jnp.max(jnp.where(in_set, logits, -jnp.inf), axis=-1, keepdims=True))
    highest = jnp.where(highest == -jnp.inf, 0.0, highest)
    u = jnp.where(in_set, logits - highest, 0.0)
    total = jnp.sum(jnp.where(in_set, jnp.exp(u), 0.0), axis=-1)
    found = jnp.any(is_label, axis=-1)
    at_label = jnp.sum(jnp.where(is_label, u, 0.0), axis=-1)
    no_draw = jnp.where((labels < 0) | ~jnp.any(in_set, axis=-1), 0.0, -jnp.inf).astype(logits.dtype)
    return jnp.where(found, at_label - jnp.log(jnp.where(found, total, 1.0)), no_draw)
