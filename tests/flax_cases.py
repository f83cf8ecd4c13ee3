"""What the tests of both Flax heads share: shapes, options, meshes, and the results from stored logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

from lce_jax import losses
from tests.draws import Draws

BATCH, SEQUENCE, HIDDEN, VOCAB = 8, 6, 16, 51
ROWS = 56
PADDED = {"pad_to_multiple": 8}  # VOCAB to ROWS

HEADS = {
    "plain": {},
    "bias, scale, softcap": {"use_bias": True, "logit_scale": 0.5, "logit_softcap": 3.0, **PADDED},
    "scale": {"logit_scale": 0.25, **PADDED},
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
    draws = Draws()
    return draws.normal(BATCH, SEQUENCE, HIDDEN), draws.integers(0, VOCAB, BATCH, SEQUENCE)


DRAWS = Draws(seed=4)
OLD = DRAWS.uniform(-4.0, -3.0, BATCH, SEQUENCE)
ADVANTAGE = jnp.linspace(-1.0, 1.0, BATCH)[:, None]  # of a sequence
IDS = DRAWS.integers(0, VOCAB, BATCH, SEQUENCE, 3).at[..., 1].set(-1)


class Head(NamedTuple):
    """A head of either library: a method by its name, as a function of the parameters too."""

    call: Callable[..., Any]
    params: Any


def results(head, hidden, labels, stored=False):
    """In one program its logits, what its methods return and the gradients, or what stored logits have for them."""

    def of_methods(params, hidden):
        out = head.call(params, "logprobs", hidden, labels, temperature=0.5, candidates=IDS)
        options = {"ignore_index": 3, "z_loss": 1e-3, "label_smoothing": 0.1}
        loss = head.call(params, "loss", hidden, labels, **options)
        own = {"old_logprob": OLD, "advantage": ADVANTAGE, "where": labels != 3}
        policy, _ = head.call(params, "linear_loss", losses.ppo_clip, hidden, labels, **own)
        return *out[:3], out.candidate_logprobs, loss, policy

    def of_logits(params, hidden):
        logits = head.call(params, "__call__", hidden)
        log_p = jax.nn.log_softmax(logits / 0.5)
        candidates = jnp.where(IDS < 0, 0.0, jnp.take_along_axis(log_p, jnp.maximum(IDS, 0), axis=-1))
        logprobs, _, lse = from_logits(logits, labels)
        each = -0.9 * logprobs + 0.1 * (lse - jnp.mean(logits, axis=-1)) + 1e-3 * lse**2
        loss = jnp.sum(jnp.where(labels != 3, each, 0.0)) / jnp.sum(labels != 3)
        policy = jnp.sum(losses.ppo_clip(logprobs, None, lse, OLD, ADVANTAGE), where=labels != 3)
        return *from_logits(logits / 0.5, labels), candidates, loss, policy

    def total(params, hidden):
        found = (of_logits if stored else of_methods)(params, hidden)
        logprobs, entropy, lse, candidates, loss, policy = found
        return jnp.sum(logprobs + 0.3 * entropy + 0.1 * lse) + jnp.sum(candidates) + loss + policy, found

    def step(params, hidden):
        logits = head.call(params, "__call__", hidden)
        top = head.call(params, "topk", hidden, 5) if not stored else jax.lax.top_k(jax.nn.log_softmax(logits), 5)[0]
        return jax.grad(total, argnums=(0, 1), has_aux=True)(params, hidden), logits, top

    return jax.jit(step)(head.params, hidden)


def assert_same_results(got, want):
    """Of two heads: everything but the ids of the most likely tokens, which rounding may swap."""
    (gradients, logits, top), (expected, stored, best) = got, want
    assert_trees_close(jax.tree.leaves(gradients), jax.tree.leaves(expected))
    assert_trees_close(logits, stored)
    best = best if isinstance(best, jax.Array) else best.logprobs
    assert_trees_close(top.logprobs, best)
    assert_trees_close(jnp.take_along_axis(jax.nn.log_softmax(logits), top.ids, axis=-1), best)
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
        # Where terms cancel, what is left of their rounding is that of the largest: a few ulp.
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=max(2e-6, 4e-7 * np.max(np.abs(b), initial=0.0)))


def refuse_wrong_names(head):
    """Each call names its method, and the option that is meant."""
    hidden, labels = batch()
    arguments = {
        "loss": (hidden, labels), "logprobs": (hidden, labels), "topk": (hidden, 3), "kl": (hidden, head, hidden),
        "linear_loss": (losses.cross_entropy, hidden, labels),
    }  # fmt: skip
    wrong = {"temprature": "temperature", "wher": "where", "loss_mask": "where"}
    for name, given in arguments.items():
        method = getattr(head, name)
        for option, meant in wrong.items():
            start = rf"LMHead\.{name}: unknown option {option} \(did you mean {meant}\?\); known: "
            with pytest.raises(TypeError, match=start) as error:
                method(*given, **{option: 1})
            assert not {"bias", "logit_scale", "weight_layout"} & set(str(error.value).split("known: ")[1].split(", "))
        for option in ("bias", "vocab_size", "weight_layout", "precision"):
            with pytest.raises(TypeError, match=rf"LMHead\.{name}: {option} is set where the head is made"):
                method(*given, **{option: None})
        with pytest.raises(TypeError, match=rf"LMHead\.{name}\(\) missing 1 required positional argument"):
            method(*given[:-1])
