"""Shapes, options, meshes and results from stored logits, which the tests of both Flax heads share."""

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
    """Draws hidden states and labels."""
    draws = Draws()
    return draws.normal(BATCH, SEQUENCE, HIDDEN), draws.integers(0, VOCAB, BATCH, SEQUENCE)


DRAWS = Draws(seed=4)
OLD = DRAWS.uniform(-4.0, -3.0, BATCH, SEQUENCE)
ADVANTAGE = jnp.linspace(-1.0, 1.0, BATCH)[:, None]  # of a sequence
IDS = DRAWS.integers(0, VOCAB, BATCH, SEQUENCE, 3).at[..., 1].set(-1)


class Head(NamedTuple):
    """A head of either library: its parameters, and a function that calls a method by its name with parameters."""

    call: Callable[..., Any]
    params: Any


def results(head, hidden, labels, stored=False):
    """Computes gradients, logits and top k of a head in one program, by its methods or from stored logits."""

    def call_methods(params, hidden):
        out = head.call(params, "logprobs", hidden, labels, temperature=0.5, candidates=IDS)
        options = {"ignore_index": 3, "z_loss": 1e-3, "label_smoothing": 0.1}
        loss = head.call(params, "loss", hidden, labels, **options)
        arguments = {"old_logprob": OLD, "advantage": ADVANTAGE, "where": labels != 3}
        policy, _ = head.call(params, "linear_loss", losses.ppo_clip, hidden, labels, **arguments)
        return *out[:3], out.candidate_logprobs, loss, policy

    def use_stored_logits(params, hidden):
        logits = head.call(params, "__call__", hidden)
        log_p = jax.nn.log_softmax(logits / 0.5)
        candidates = jnp.where(IDS < 0, 0.0, jnp.take_along_axis(log_p, jnp.maximum(IDS, 0), axis=-1))
        logprobs, _, lse = compute_from_logits(logits, labels)
        each = -0.9 * logprobs + 0.1 * (lse - jnp.mean(logits, axis=-1)) + 1e-3 * lse**2
        loss = jnp.sum(jnp.where(labels != 3, each, 0.0)) / jnp.sum(labels != 3)
        policy = jnp.sum(losses.ppo_clip(logprobs, None, lse, OLD, ADVANTAGE), where=labels != 3)
        return *compute_from_logits(logits / 0.5, labels), candidates, loss, policy

    def total(params, hidden):
        outputs = (use_stored_logits if stored else call_methods)(params, hidden)
        logprobs, entropy, lse, candidates, loss, policy = outputs
        return jnp.sum(logprobs + 0.3 * entropy + 0.1 * lse) + jnp.sum(candidates) + loss + policy, outputs

    def step(params, hidden):
        logits = head.call(params, "__call__", hidden)
        top = head.call(params, "topk", hidden, 5) if not stored else jax.lax.top_k(jax.nn.log_softmax(logits), 5)[0]
        return jax.grad(total, argnums=(0, 1), has_aux=True)(params, hidden), logits, top

    return jax.jit(step)(head.params, hidden)


def assert_same_results(got, want):
    """Compares the `results` of two heads. The ids of the most likely tokens may differ: rounding may swap them."""
    (gradients, logits, top), (expected, stored, best) = got, want
    assert_trees_close(jax.tree.leaves(gradients), jax.tree.leaves(expected))
    assert_trees_close(logits, stored)
    best = best if isinstance(best, jax.Array) else best.logprobs
    assert_trees_close(top.logprobs, best)
    assert_trees_close(jnp.take_along_axis(jax.nn.log_softmax(logits), top.ids, axis=-1), best)
    assert_trees_close(top.lse, jax.nn.logsumexp(logits, axis=-1))


TEACHER = {"logit_softcap": 5.0, "pad_to_multiple": 4}  # with another hidden size


def teacher_batch():
    """Draws the teacher's hidden states at the tokens of `batch`."""
    return jax.random.normal(jax.random.key(7), (BATCH, SEQUENCE, 2 * HIDDEN))


def kl_of_logits(logits, teachers):
    """Returns the forward KL."""
    log_q, log_p = jax.nn.log_softmax(logits), jax.nn.log_softmax(teachers)
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


def token_batch():
    """Draws tokens and their labels. The last label of each sequence is ignored."""
    _, labels = batch()
    return jnp.roll(labels, 1, axis=1), labels.at[:, -1].set(-100)


def spoiled_padding(key, shape, dtype):
    """Initializes normal rows, and padding so large that it would spoil every sum."""
    return jax.random.normal(key, shape, dtype).at[VOCAB:].set(100.0)


def compute_from_logits(logits, labels):
    """Returns log-probability, entropy and lse."""
    log_p = jax.nn.log_softmax(logits)
    picked = jnp.take_along_axis(log_p, labels[..., None], axis=-1)[..., 0]
    return picked, -jnp.sum(jnp.exp(log_p) * log_p, axis=-1), jax.nn.logsumexp(logits, axis=-1)


def loss_from_logits(logits, labels):
    """Returns the mean cross entropy over the labels that are not -100."""
    counts = labels != -100
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0))
    return jnp.sum(jnp.where(counts, losses, 0.0)) / jnp.sum(counts)


def optimizer():
    """Returns AdamW. Its eps is well above the rounding of a gradient, so a step does not magnify the rounding."""
    return optax.adamw(1e-2, eps=1e-3)


def assert_trees_close(got, expected):
    """Compares trees up to float32 sums in another order. On a CPU, products of float32 operands are float32."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        # Where terms cancel, the rounding of the largest term remains: a few ulp of it.
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=max(2e-6, 4e-7 * np.max(np.abs(b), initial=0.0)))


def refuse_wrong_names(head):
    """Checks that every method refuses a wrong name, and names itself and the right option."""
    hidden, labels = batch()
    arguments = {
        "loss": (hidden, labels), "logprobs": (hidden, labels), "topk": (hidden, 3), "kl": (hidden, head, hidden),
        "linear_loss": (losses.cross_entropy, hidden, labels),
    }  # fmt: skip
    wrong = {"temprature": "temperature", "wher": "where", "loss_mask": "where"}
    for name, positional in arguments.items():
        method = getattr(head, name)
        for option, meant in wrong.items():
            start = rf"LMHead\.{name}: unknown option {option} \(did you mean {meant}\?\); known: "
            with pytest.raises(TypeError, match=start) as error:
                method(*positional, **{option: 1})
            assert not {"bias", "logit_scale", "weight_layout"} & set(str(error.value).split("known: ")[1].split(", "))
        for option in ("bias", "vocab_size", "weight_layout", "precision"):
            with pytest.raises(TypeError, match=rf"LMHead\.{name}: {option} is set where the head is made"):
                method(*positional, **{option: None})
        with pytest.raises(TypeError, match=rf"LMHead\.{name}\(\) missing 1 required positional argument"):
            method(*positional[:-1])
