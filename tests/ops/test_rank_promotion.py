"""Every public function under ``jax_numpy_rank_promotion="raise"``, forward and gradient."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

import lce_jax
from lce_jax import losses
from tests import cases

OPTIONS = [
    cases.case("plain", K=3),
    cases.case(
        "everything", K=3, leading=(4, 6), V=128, vocab_size=113, temperature="sequence", where="nan", bias="float32",
        logit_softcap=4.0, logit_scale=-1.3, weight_layout="hv", labels="foreign",
    ),
]  # fmt: skip


def logprobs_sum(hidden: Any, weight: Any, labels: Any, **options: Any) -> Any:
    out = lce_jax.linear_logprobs(hidden, weight, labels, **options)
    return sum(jnp.sum(x) for x in (*out[:3], out.candidate_logprobs) if x is not None)


def cross_entropy_sum(hidden: Any, weight: Any, labels: Any, *, candidates: Any, **options: Any) -> Any:
    del candidates
    return lce_jax.linear_cross_entropy(hidden, weight, labels, z_loss=0.1, label_smoothing=0.1, **options)


def loss_sum(hidden: Any, weight: Any, labels: Any, *, candidates: Any, **options: Any) -> Any:
    del candidates
    options = {name: x for name, x in options.items() if name != "cache_bytes"}
    loss_fn = losses.with_entropy_bonus(functools.partial(losses.grpo, kl=0.1), 0.1)
    per_token = [jnp.full(labels.shape, x) for x in (-4.0, 1.0, -4.5)]
    return lce_jax.linear_loss(loss_fn, hidden, weight, labels, *per_token, chunk_bytes=3000, **options)[0]


def logits_sum(hidden: Any, weight: Any, labels: Any, *, candidates: Any, **options: Any) -> Any:
    z = lce_jax.linear_logits(hidden, weight, candidates, **options)
    masked = lce_jax.masked_logprobs(z, candidates, labels).logprobs
    return jnp.sum(z) + jnp.sum(jnp.where(jnp.isfinite(masked), masked, 0.0))


def topk_sum(hidden: Any, weight: Any, labels: Any, *, candidates: Any, **options: Any) -> Any:
    del candidates
    top = lce_jax.linear_topk(jax.lax.stop_gradient(hidden), jax.lax.stop_gradient(weight), 5, **options)
    out = lce_jax.linear_logprobs(hidden, weight, labels, candidates=top.ids, **options)
    both = out.candidate_logprobs, top.logprobs, top.ids
    return sum(
        jnp.sum(losses.distillation_loss(*both, divergence=divergence, rest=rest))
        for divergence in ("forward_kl", "reverse_kl", "jsd")
        for rest in ("bin", "drop", "renormalize")
    )


def kl_sum(hidden: Any, weight: Any, labels: Any, *, candidates: Any, bias: Any = None, **options: Any) -> Any:
    del labels, candidates
    own = {**options, "bias": bias, "teacher_bias": bias}
    own |= {"teacher_logit_scale": "same", "teacher_logit_softcap": "same"}
    kl = functools.partial(lce_jax.linear_kl, hidden, weight, hidden + 1.0, weight, **own)
    return sum(jnp.sum(kl(direction=direction)) for direction in ("forward", "reverse", "jsd", "tv"))


FUNCTIONS = [logprobs_sum, cross_entropy_sum, loss_sum, logits_sum, topk_sum, kl_sum]


@pytest.mark.parametrize("test", OPTIONS, ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_no_rank_is_promoted(function: Any, test: cases.TestCase) -> None:
    hidden, weight, labels, options, _ = cases.draw(test)
    with jax.numpy_rank_promotion("raise"):
        run = jax.value_and_grad(lambda *x: function(*x, labels, **options), argnums=(0, 1))
        _, gradients = jax.eval_shape(run, hidden, weight)
    assert [x.shape for x in gradients] == [hidden.shape, weight.shape]


SHARDED: dict[str, Any] = {
    "logprobs": lambda h, w, y, **o: lce_jax.sharded_linear_logprobs(h, w, y, **o).entropy,
    "cross_entropy": lambda h, w, y, **o: lce_jax.sharded_linear_cross_entropy(h, w, y, **o),
    "loss": lambda h, w, y, **o: lce_jax.sharded_linear_loss(losses.cross_entropy, h, w, y, **o)[0],
    "logits": lambda h, w, y, **o: lce_jax.sharded_linear_logits(h, w, y[..., None], **o),
    "kl": lambda h, w, _, **o: lce_jax.sharded_linear_kl(h, w, h + 1.0, w, **o),
    "topk": lambda h, w, _, **o: lce_jax.sharded_linear_topk(*jax.lax.stop_gradient((h, w)), 3, **o).lse * jnp.sum(h),
}


@pytest.mark.parametrize("function", SHARDED)
def test_no_rank_is_promoted_over_a_mesh(function: str) -> None:
    hidden, weight, labels, options, _ = cases.draw(cases.case("mesh", leading=(4, 8), V=128, vocab_size=101))
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    options |= {"mesh": mesh, "vocab_axis": "tensor", "batch_axes": "data", "temperature": jnp.ones((4, 1))}
    with jax.numpy_rank_promotion("raise"):
        run = jax.grad(lambda *x: jnp.sum(SHARDED[function](*x, labels, **options)), argnums=(0, 1))
        gradients = jax.eval_shape(run, hidden, weight)
    assert [x.shape for x in gradients] == [hidden.shape, weight.shape]


@pytest.mark.fast("loss_sum-0.0")
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("threshold", [0.0, 1e-3])
@pytest.mark.parametrize("function", [logprobs_sum, cross_entropy_sum, loss_sum])
def test_no_rank_is_promoted_around_kernels(function: Any, threshold: float) -> None:
    test = cases.case("kernels", leading=(4, 100), H=128, V=1032, dtype="bfloat16", vocab_size=900, K=3, where="some")
    hidden, weight, labels, options, _ = cases.draw(test)
    options |= {"implementation": "mosaic_gpu", "gradient_threshold": threshold, "cache_bytes": 1 << 20}
    options["candidates"] = None if threshold else options["candidates"]
    run = jax.value_and_grad(lambda *x: function(*x, labels, **options), argnums=(0, 1))
    with jax.numpy_rank_promotion("raise"):
        _, gradients = jax.eval_shape(run, hidden, weight)
    assert [x.shape for x in gradients] == [hidden.shape, weight.shape]
