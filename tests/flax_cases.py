"""What the tests of both Flax heads share: shapes, options, meshes, and the results from stored logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType

BATCH, SEQUENCE, HIDDEN, VOCAB = 8, 6, 16, 51
ROWS = 56
PADDED = {"pad_to_multiple": 8}  # VOCAB to ROWS

HEADS = {
    "plain": {},
    "padded": PADDED,
    "scale": {"logit_scale": 0.25, **PADDED},
    "softcap": {"logit_softcap": 3.0, **PADDED},
    "bias": {"use_bias": True, "logit_scale": 0.5, **PADDED},
    "bfloat16 products": {"dtype": jnp.bfloat16, **PADDED},
}
MESHES = {  # axis types, sequence_axis
    "auto": (AxisType.Auto, None),
    "explicit": (AxisType.Explicit, None),
    "auto, sequence parallel": (AxisType.Auto, "tensor"),
    "explicit, sequence parallel": (AxisType.Explicit, "tensor"),
}


def data_by_tensor(axis_type=AxisType.Auto):
    return jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(axis_type,) * 2)


def batch():
    """Hidden states and labels."""
    hidden, labels = jax.random.split(jax.random.key(0))
    shape = (BATCH, SEQUENCE)
    return jax.random.normal(hidden, (*shape, HIDDEN)), jax.random.randint(labels, shape, 0, VOCAB)


def candidate_ids():
    """Three ids of each token, one of them none, and their log-probabilities from logits."""
    ids = jax.random.randint(jax.random.key(4), (BATCH, SEQUENCE, 3), 0, VOCAB).at[..., 1].set(-1)

    def from_logits(logits):
        log_p = jax.nn.log_softmax(logits)
        return jnp.where(ids < 0, 0.0, jnp.take_along_axis(log_p, jnp.maximum(ids, 0), axis=-1))

    return ids, from_logits


def assert_topk_of_logits(top, logits):
    """The five largest of the logits, in any order that rounding allows, and their log-probabilities."""
    values, _ = jax.lax.top_k(jax.nn.log_softmax(logits), 5)
    assert_trees_close(top.logprobs, values)
    assert_trees_close(jnp.take_along_axis(jax.nn.log_softmax(logits), top.ids, axis=-1), values)
    assert_trees_close(top.lse, jax.nn.logsumexp(logits, axis=-1))


TEACHER = {"logit_softcap": 5.0, "pad_to_multiple": 4}  # with another hidden size


def teacher_batch():
    """The teacher's hidden states at the tokens of `batch`."""
    return jax.random.normal(jax.random.key(7), (BATCH, SEQUENCE, 2 * HIDDEN))


def kl_of_logits(logits, teachers):
    """The forward KL."""
    log_q, log_p = jax.nn.log_softmax(logits), jax.nn.log_softmax(teachers)
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


def token_batch():
    """Tokens and the label of each, the last of a sequence ignored."""
    _, labels = batch()
    return jnp.roll(labels, 1, axis=1), labels.at[:, -1].set(-100)


def spoiled_padding(key, shape, dtype):
    """Normal rows, and padding that would spoil every sum it entered."""
    return jax.random.normal(key, shape, dtype).at[VOCAB:].set(100.0)


def from_logits(logits, labels):
    """Log-probability, entropy and lse."""
    log_p = jax.nn.log_softmax(logits)
    picked = jnp.take_along_axis(log_p, labels[..., None], axis=-1)[..., 0]
    return picked, -jnp.sum(jnp.exp(log_p) * log_p, axis=-1), jax.nn.logsumexp(logits, axis=-1)


def loss_from_logits(logits, labels):
    """Mean cross entropy over the labels that are not -100."""
    kept = labels != -100
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0))
    return jnp.sum(jnp.where(kept, losses, 0.0)) / jnp.sum(kept)


def optimizer():
    """Adam with an eps well above the rounding of a gradient: dividing by |g| + eps would blow up a tiny one's."""
    return optax.adamw(1e-2, eps=1e-3)


def assert_trees_close(got, expected):
    """Equal but for float32 sums in another order; products of float32 operands are float32 on CPU."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
