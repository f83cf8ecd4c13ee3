"""The programs of ``examples/`` that need only JAX, each compared with stored logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from examples import distillation, flax_linen_sft, flax_nnx_sft, lora_head, sampler_mismatch, token_accuracy
from examples.demo import text
from lce_jax import linear_logprobs

pytestmark = pytest.mark.site
NEAR = 1e-6  # relative: float32 sums in another order, after some steps of training


def stored_loss(logits: jax.Array, labels: jax.Array, mask: jax.Array) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.sum(losses * mask) / jnp.sum(mask)


def test_nnx_trains_as_with_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    got = flax_nnx_sft.main(5)

    def loss_of(model, tokens, mask):
        return stored_loss(model.head(model(tokens[:, :-1])), tokens[:, 1:], mask[:, 1:])

    monkeypatch.setattr(flax_nnx_sft, "loss_of", loss_of)
    monkeypatch.setattr(flax_nnx_sft, "step", nnx.jit(flax_nnx_sft.step.__wrapped__))
    assert got == pytest.approx(flax_nnx_sft.main(5), rel=NEAR)
    assert got[-1] < got[0]


def test_linen_trains_as_with_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    got = flax_linen_sft.main(5)

    def call(self, tokens, mask):
        return stored_loss(self.head(self.trunk(self.embed(tokens[:, :-1]))), tokens[:, 1:], mask[:, 1:])

    monkeypatch.setattr(flax_linen_sft, "Model", type("Model", (flax_linen_sft.Model,), {"__call__": call}))
    assert got == pytest.approx(flax_linen_sft.main(5), rel=NEAR)
    assert got[-1] < got[0]


def test_the_adapter_trains() -> None:
    losses = lora_head.main(5)
    assert losses[-1] < losses[0]


def test_a_small_update_survives_bfloat16() -> None:
    """The example says that adding s·B·A to the weight would lose a small update."""
    keys, dtype = jax.random.split(jax.random.key(0), 5), jnp.bfloat16
    hidden, weight = jax.random.normal(keys[0], (64, 64), dtype), jax.random.normal(keys[1], (512, 64), dtype)
    a, b = jax.random.normal(keys[2], (4, 64), dtype) / 100, jax.random.normal(keys[3], (512, 4), dtype) / 100
    labels = jax.random.randint(keys[4], (64,), 0, 512)

    @jax.jit
    def change(hidden, weight, like, lora=None):
        return linear_logprobs(hidden, weight, labels, lora=lora).logprobs - linear_logprobs(*like, labels).logprobs

    wide = hidden.astype(jnp.float32), weight.astype(jnp.float32)
    exact, adapter = (change(*operands, operands, (a, b, 2.0)) for operands in (wide, (hidden, weight)))
    added = change(hidden, (weight + 2.0 * (b @ a)).astype(jnp.bfloat16), (hidden, weight))
    far, near = (jnp.linalg.norm(x - exact) / jnp.linalg.norm(exact) for x in (added, adapter))
    assert near < 0.05
    assert far > 0.5


def test_token_accuracy_agrees_with_the_largest_logit() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    hidden, weight = jax.random.normal(keys[0], (2, 30, 8)), jax.random.normal(keys[1], (40, 8))
    logits = hidden @ weight.T
    best = jnp.argmax(logits, -1)
    labels = jnp.where(jax.random.bernoulli(keys[2], 0.5, best.shape), best, 3).at[:, :5].set(-100)
    counts = labels != -100
    logp = jax.nn.log_softmax(logits)
    nll = -jnp.sum(jnp.take_along_axis(logp, labels[..., None], -1)[..., 0] * counts) / counts.sum()
    results = token_accuracy.evaluate(hidden, weight, labels)
    assert results["accuracy"] == pytest.approx(float(((best == labels) & counts).sum() / counts.sum()))
    assert results["perplexity"] == pytest.approx(float(jnp.exp(nll)), rel=1e-5)
    assert 0 < token_accuracy.main()["accuracy"] < 1


def test_what_differs_between_trainer_and_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same options give no gap; what is left out gives the gap that the page describes."""
    gaps: list[jax.Array] = []
    compare = sampler_mismatch.compare

    def keep(trainer: jax.Array, sampler: jax.Array) -> dict[str, float]:
        gaps.append(trainer - sampler)
        return compare(trainer, sampler)

    monkeypatch.setattr(sampler_mismatch, "compare", keep)
    found = sampler_mismatch.measure()
    same, *others = (dict(zip(found, gaps, strict=True))[name] for name in found)
    assert jnp.quantile(jnp.abs(same), 0.99) < 1e-5
    assert jnp.abs(same).max() < 1e-3  # where one id more than the sampler's lies above the floor
    assert all(jnp.median(jnp.abs(gap)) > 1e-3 for gap in others)
    rounded, head, padded, top_p, temperature = others
    for noise in (rounded, head):
        assert abs(noise.mean()) < 0.1 * noise.std()
    assert padded.max() < 0
    assert jnp.all((top_p > jnp.log(sampler_mismatch.TOP_P) - 1e-4) & (top_p < 0))  # at least that much is kept
    assert temperature.min() < -0.5 < 0.5 < temperature.max()
    for gap, numbers in zip(gaps, found.values(), strict=True):
        assert numbers["k3"] == pytest.approx(float(jnp.mean(jnp.exp(gap) - 1 - gap)), rel=1e-2, abs=1e-8)


def test_distillation_agrees_with_stored_logits() -> None:
    student, teacher = distillation.Model(600, 16, seed=1), distillation.Model(600, 24, seed=0)
    tokens = jax.random.randint(jax.random.key(0), (3, 9), 0, 600)
    teacher.embed.embedding[...] *= 4  # an untrained teacher is nearly uniform

    def total(from_topk, from_both_heads):
        return from_topk + 0.7 * from_both_heads, (from_topk, from_both_heads)

    def fused(*operands):
        return total(distillation.from_topk(*operands), distillation.from_both_heads(*operands))

    def stored(student, tokens, teacher):
        log_q, log_p = (jax.nn.log_softmax(x.head(x(tokens[:, :-1]))) for x in (student, teacher))
        top, ids = jax.lax.top_k(log_p, distillation.K)
        student_top = jnp.take_along_axis(log_q, ids, -1)
        rest_p, rest_q = (1 - jnp.exp(x).sum(-1) for x in (top, student_top))
        binned = jnp.sum(jnp.exp(top) * (top - student_top), -1) + rest_p * (jnp.log(rest_p) - jnp.log(rest_q))
        at_labels = jnp.take_along_axis(log_q, tokens[:, 1:, None], -1)[..., 0]
        return total(jnp.mean(binned - at_labels) / 2, jnp.sum(jnp.exp(log_p) * (log_p - log_q), -1).mean())

    got, want = (nnx.jit(nnx.value_and_grad(f, has_aux=True))(student, tokens, teacher) for f in (fused, stored))
    assert [float(x) for x in got[0][1]] == pytest.approx([float(x) for x in want[0][1]], rel=2e-6)
    for x, y in zip(jax.tree.leaves(got[1]), jax.tree.leaves(want[1]), strict=True):
        assert jnp.linalg.norm(x - y) <= 5e-6 * jnp.linalg.norm(y)


def test_distillation_brings_the_student_to_its_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    """It trains on every sixteenth file of the demo's text, with a tenth of the steps."""
    every = text.read_standard_library()[::16]
    monkeypatch.setattr(text, "read_standard_library", lambda: every)
    kl = {name: kl for name, (_, kl) in distillation.main(vocab_size=400, steps=10).items()}
    assert kl["student, from_both_heads"] < kl["student, from_labels"] < kl["student, untrained"]
    assert kl["student, from_topk"] < kl["student, untrained"]
