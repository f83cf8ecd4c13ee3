"""`lce_jax.losses` against their formulas, written out by hand, and their derivatives."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lce_jax import linear_kl, linear_loss, losses
from tests import cases, kl_cases

OLD, REFERENCE = -1.5, -1.1
LOGPROBS = [-3.0, -1.6, -1.5, -1.4, -0.2]  # ratios from 0.22 to 3.7
ADVANTAGES = [-2.0, 0.5]


def clipped(r: float, low: float, high: float) -> float:
    return min(max(r, 1 - low), 1 + high)


@pytest.mark.parametrize("logprob", LOGPROBS)
@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_formulas(logprob: float, advantage: float) -> None:
    r = float(np.exp(logprob - OLD))
    ppo = max(-r * advantage, -clipped(r, 0.1, 0.1) * advantage)
    assert losses.ppo_clip(logprob, None, 0.0, OLD, advantage, clip=0.1) == pytest.approx(ppo, rel=1e-6)
    dapo = max(-r * advantage, -clipped(r, 0.2, 0.28) * advantage)
    assert losses.dapo(logprob, None, 0.0, OLD, advantage) == pytest.approx(dapo, rel=1e-6)
    kl = float(np.exp(REFERENCE - logprob)) - (REFERENCE - logprob) - 1
    grpo = losses.grpo(logprob, None, 0.0, OLD, advantage, REFERENCE, clip=0.1, kl=0.3)
    assert grpo == pytest.approx(ppo + 0.3 * kl, rel=1e-6)
    cispo = losses.cispo(logprob, None, 0.0, OLD, advantage, clip_low=0.3, clip_high=0.5)
    assert cispo == pytest.approx(-clipped(r, 0.3, 0.5) * advantage * logprob, rel=1e-6)


@pytest.mark.parametrize("logprob", LOGPROBS)
@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_derivatives(logprob: float, advantage: float) -> None:
    """PPO stops where the ratio has left the range in the advantage's direction; CISPO never does."""
    r = float(np.exp(logprob - OLD))
    beyond = (r > 1.2 and advantage > 0) or (r < 0.8 and advantage < 0)
    got = jax.grad(losses.ppo_clip)(logprob, None, 0.0, OLD, advantage)
    assert got == pytest.approx(0.0 if beyond else -r * advantage, rel=1e-5)
    got = jax.grad(functools.partial(losses.cispo, clip_high=0.5))(logprob, None, 0.0, OLD, advantage)
    assert got == pytest.approx(-min(r, 1.5) * advantage, rel=1e-5)
    got = jax.grad(functools.partial(losses.grpo, kl=0.3))(logprob, None, 0.0, logprob, advantage, REFERENCE)
    assert got == pytest.approx(-advantage + 0.3 * (1 - np.exp(REFERENCE - logprob)), rel=1e-5, abs=1e-6)


def test_cross_entropy_and_entropy_bonus() -> None:
    assert losses.cross_entropy(-2.0, None, 3.0) == 2.0
    bonus = losses.with_entropy_bonus(functools.partial(losses.cross_entropy, z_loss=0.1), 0.25)
    assert bonus(-2.0, 4.0, 3.0) == pytest.approx(2.0 + 0.9 - 1.0)


@pytest.mark.parametrize("variation", [0.0, 1e-6, 0.4, 0.9, 1 - 2**-19])
def test_losses_of_draft_models(variation: float) -> None:
    """λ has no gradient; a variation of 1e-6 is not lost beside 1."""
    (alpha, slope), kl = jax.value_and_grad(losses.lk_alpha)(variation), 0.7
    assert (alpha, slope) == pytest.approx((-np.log1p(-variation), 1 / (1 - variation)), rel=1e-6)
    (mix, slopes), weight = jax.value_and_grad(losses.lk_lambda, (0, 1))(kl, variation), np.exp(variation * 3 - 3)
    assert mix == pytest.approx(weight * kl + (1 - weight) * variation, rel=1e-6)
    assert slopes == pytest.approx((weight, 1 - weight), rel=1e-6, abs=1e-7)
    assert losses.lk_lambda(kl, variation, eta=0.0) == pytest.approx(kl)


def test_a_draft_whose_tokens_are_all_rejected() -> None:
    """The loss is finite and has no gradient, as the docstring says; NaN is kept."""
    values, slopes = jax.vmap(jax.value_and_grad(losses.lk_alpha))(jnp.array([1.0, 1 - 2**-22, 1 - 2**-19, jnp.nan]))
    np.testing.assert_allclose(values[:3], np.log(2.0) * np.array([20, 20, 19]), rtol=1e-6)
    np.testing.assert_array_equal(slopes[:3], [0, 0, 2**19])
    assert np.isnan(values[3])


def test_one_step_along_lk_alpha_raises_acceptance() -> None:
    """Through `linear_kl`, whose masked rows are 0."""
    drawn = kl_cases.draw(kl_cases.call("draft", leading=(8,), where=True))
    hidden, weight = drawn.student

    def variation(weight: Any) -> Any:
        return linear_kl(hidden, weight, *drawn.teacher, direction="tv", **drawn.options)

    loss, slope = jax.value_and_grad(lambda w: losses.lk_alpha(variation(w)).sum())(weight)
    assert loss > losses.lk_alpha(variation(weight - 1e-3 * slope)).sum()
    assert not losses.lk_alpha(variation(weight))[~drawn.options["where"]].any()


NAMES = "old_logprob", "advantage", "reference_logprob"


def test_in_linear_loss() -> None:
    """Arguments by name, in any order, and in the one order of all losses; parameters by name or beforehand."""
    hidden, weight, labels, *_ = cases.draw(cases.case("x", leading=(30,)))
    functions: list[tuple[Any, dict[str, Any], int]] = [
        (losses.cross_entropy, {"z_loss": 1e-2}, 0), (losses.ppo_clip, {}, 2),
        (losses.dapo, {"clip_high": jnp.float32(0.3)}, 2), (losses.grpo, {"kl": 0.5}, 3),
        (losses.cispo, {"clip_high": 0.5}, 2), (losses.with_entropy_bonus(losses.ppo_clip, 0.01), {"clip": 0.1}, 2),
    ]  # fmt: skip
    own = {name: jnp.linspace(-6.0 + i, -3.0 + i, 30) for i, name in enumerate(NAMES)}

    def evaluate(loss_fn: Any, parameters: Any, count: int, by_name: bool, hidden: Any) -> Any:
        if by_name:
            named = {name: own[name] for name in reversed(NAMES[:count])}
            return linear_loss(loss_fn, hidden, weight, labels, **named, **parameters)
        function = functools.partial(loss_fn, **parameters)
        return linear_loss(function, hidden, weight, labels, *[own[name] for name in NAMES[:count]])

    runs = [
        [jax.value_and_grad(functools.partial(evaluate, *each, by_name), has_aux=True) for by_name in (True, False)]
        for each in functions
    ]

    @jax.jit
    def run_all(hidden: Any) -> Any:
        found = [[run(hidden) for run in both] for both in runs]
        results = found[0][0][0][1][:3]
        wanted = [
            jnp.sum(loss_fn(*results, *[own[name] for name in NAMES[:count]], **parameters))
            for loss_fn, parameters, count in functions
        ]
        return found, wanted

    for both, want in zip(*run_all(hidden), strict=True):
        for (total, _), grad in both:
            assert float(total) == pytest.approx(float(want), rel=1e-5)
            assert np.isfinite(grad).all()


@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("difference", [-1e4, -99.0, 79.0, 99.0, 1e4, np.inf])
@pytest.mark.parametrize(
    ("loss_fn", "num_old"),
    [(losses.ppo_clip, 1), (losses.dapo, 1), (losses.grpo, 2), (functools.partial(losses.grpo, kl=0.0), 2),
     (functools.partial(losses.cispo, clip_high=0.5), 1)],
)  # fmt: skip
def test_far_off_policy(loss_fn: Any, num_old: int, difference: float, advantage: float) -> None:
    """Values and gradients are finite, and 0 where the advantage is, also where a ratio overflows float32."""
    old = [jnp.float32(-2.0 - difference), jnp.float32(-2.0 - max(-1e4, min(difference, 1e4)))][:num_old]
    own = dict(zip(("old_logprob", "reference_logprob"), old, strict=False), advantage=advantage)
    value, slope = jax.value_and_grad(lambda logprob: loss_fn(logprob, None, 0.0, **own))(jnp.float32(-2.0))
    assert np.isfinite(value)
    assert np.isfinite(slope)
    if num_old == 1 and advantage == 0:
        assert (value, slope) == (0.0, 0.0)
    if num_old == 1 and advantage > 0 and difference > 0:  # clipped
        assert value <= 3.0


def test_a_divergence_of_nearly_equal_policies_is_exact() -> None:
    """Down to the square of their difference, not that of float32's rounding of 1."""
    for difference in (1e-2, 1e-3, 1e-4):
        own = losses.grpo(0.0, None, 0.0, 0.0, 0.0, difference, kl=1.0)
        assert own == pytest.approx(np.expm1(difference) - difference, rel=2e-3)


def test_a_penalty_of_0_on_any_lse_is_0() -> None:
    assert losses.cross_entropy(jnp.float32(-1.0), None, jnp.float32(1e30)) == 1.0


def test_parameters_may_be_traced() -> None:
    def total(clip: Any) -> Any:
        return losses.ppo_clip(-1.0, None, 0.0, -2.0, 1.0, clip=clip)

    assert jax.jit(jax.grad(total))(0.3) == -1.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: losses.cross_entropy(0.0, None, 0.0, z_loss=-1.0), "z_loss .*negative, got -1"),
        (lambda: losses.ppo_clip(0.0, None, 0.0, 0.0, 0.0, clip=-0.5), "clip .*negative, got -0.5"),
        (lambda: losses.grpo(0.0, None, 0.0, 0.0, 0.0, 0.0, kl=-0.5), "kl .*negative, got -0.5"),
        (lambda: losses.lk_lambda(0.0, 0.0, eta=-1.0), "eta .*negative, got -1"),
        (lambda: losses.lk_lambda(jnp.ones((2, 3)), jnp.ones(2)), r"variation \(2,\) must .* kl \(2, 3\)"),
        (lambda: losses.with_entropy_bonus(losses.dapo, "1"), "coefficient must be .*'1'"),
        (
            lambda: losses.ppo_clip(0.0, None, 0.0, 0.0, 0.0, clip=jnp.float32(-0.5)),
            "clip must not be negative, got -0.5",
        ),
        (lambda: losses.ppo_clip(0.0, None, 0.0, 0.0, 0.0, clip=jnp.ones(2)), r"clip must be a number .* \(2,\)"),
        (lambda: losses.grpo(0.0, None, 0.0, 0.0, 0.0, 0.0, kl=jnp.array(True)), "kl must be a real number.* bool"),
        (lambda: losses.with_entropy_bonus(losses.cross_entropy, 0.1)(0.0, None, 0.0), "0.1 needs the entropy"),
    ],
)
def test_errors(call: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call()


@pytest.mark.parametrize(
    ("loss", "name"),
    [(losses.ppo_clip, "old_logprob"), (losses.dapo, "advantage"), (losses.grpo, "reference_logprob"),
     (functools.partial(losses.cispo, clip_high=0.5), "advantage")],
)  # fmt: skip
def test_whole_arrays(loss: Any, name: str) -> None:
    """[b, 1] is one number per sequence. [b] would go along the sequence, and is refused."""
    logprob, of_each = jnp.linspace(-2.0, -1.0, 9).reshape(3, 3), jnp.linspace(-1.5, -1.0, 3)
    own = {
        x: -1.5 for x in ("old_logprob", "advantage", "reference_logprob") if x in inspect.signature(loss).parameters
    }
    got = loss(logprob, None, logprob, **own | {name: of_each[:, None]})
    for row, found, number in zip(logprob, got, of_each, strict=True):
        np.testing.assert_allclose(found, loss(row, None, row, **own | {name: number}), rtol=1e-6)
    with pytest.raises(ValueError, match=rf"{name} \(3,\) must have the dim.* logprob \(3, 3\), .*: \[b, 1\] for one"):
        loss(logprob, None, logprob, **own | {name: of_each})
