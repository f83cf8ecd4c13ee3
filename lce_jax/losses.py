"""Per-token losses for `lce_jax.linear_loss`: functions of one token's results and of further numbers per token.

    total, out = linear_loss(
        losses.dapo, hidden, weight, labels, old_logprob=old, advantage=advantages, clip_high=0.3, where=mask
    )

Each loss takes ``(logprob, entropy, lse)`` of a token, then further per-token arguments, always in the order
``old_logprob``, ``advantage``, ``reference_logprob``. Parameters are passed by name, or set by `functools.partial`.
They are numbers or traced arrays. Each loss returns the loss of the token. Divide the sum by the number of tokens or of
sequences, as your objective requires.

The losses also work on arrays of all tokens, such as the results of `linear_logprobs`. A per-token argument is then a
number, or an array with the same dimensions as the results, where a size of 1 is broadcast: ``[b, 1]`` is one advantage
per sequence. `distillation_loss` takes only arrays of all tokens: the results of
``linear_logprobs(..., candidates=ids)`` and a teacher's log-probabilities of the same ids. `lk_alpha` and `lk_lambda`
take what `linear_kl` returns, and train the draft model of speculative decoding.

A difference of log-probabilities above 80 counts as 80 and has no gradient, so that ratios are finite in float32. Use
``where`` to leave out tokens that are so far off-policy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

from lce_jax.call import _options
from lce_jax.mathematics import _kl
from lce_jax.ops._distillation import distillation_loss
from lce_jax.types import scalars, shared_checks

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, ArrayLike, Float

__all__ = [
    "cispo", "cross_entropy", "dapo", "distillation_loss", "grpo", "lk_alpha", "lk_lambda", "ppo_clip",
    "with_entropy_bonus",
]  # fmt: skip


def __dir__() -> list[str]:
    return [*__all__, "__doc__"]


def cross_entropy(
    logprob: Float[Array, ""],
    entropy: Float[Array, ""] | None,
    lse: Float[Array, ""],
    *,
    z_loss: float | Float[Array, ""] = 0.0,
) -> Float[Array, ""]:
    """``-logprob + z_loss·lse²``.

    Args:
        logprob: ln p(label), nats.
        entropy: not used; give ``entropy=False`` to `lce_jax.linear_loss`.
        lse: ln Σ exp(logits), nats.
        z_loss: weight of ``lse²``, at least 0 (PaLM: 1e-4), which keeps ``lse`` near 0.

    Returns:
        The loss in nats.

    Raises:
        ValueError, TypeError: ``z_loss`` is not a number of at least 0.

    Example:
        >>> from lce_jax import losses
        >>> losses.cross_entropy(-2.0, None, 3.0, z_loss=0.5)
        6.5

    References:
        Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways" (2022), section 5, for the penalty.
    """
    del entropy
    return -logprob + _not_negative("z_loss", z_loss) * lse * lse


def ppo_clip(
    logprob: Float[Array, ""],
    entropy: Float[Array, ""] | None,
    lse: Float[Array, ""],
    old_logprob: Float[Array, ""],
    advantage: Float[Array, ""],
    *,
    clip: float | Float[Array, ""] = 0.2,
) -> Float[Array, ""]:
    """``-min(r·A, clip(r, 1 - ε, 1 + ε)·A)`` with the ratio ``r = exp(logprob - old_logprob)``.

    Args:
        logprob: ln p(label), nats.
        entropy: not used.
        lse: not used.
        old_logprob: the log-probability under the policy that drew the token.
        advantage: A.
        clip: ε, at least 0.

    Returns:
        The loss.

    Raises:
        ValueError, TypeError: ``clip`` is not a number of at least 0.

    Example:
        >>> from lce_jax import losses
        >>> round(float(losses.ppo_clip(-1.0, None, 0.0, -2.0, 1.0)), 3)    # r = e is clipped
        -1.2

    References:
        Schulman et al., "Proximal Policy Optimization Algorithms" (2017), eq. 7.
    """
    clip = _not_negative("clip", clip)
    return dapo(logprob, entropy, lse, old_logprob, advantage, clip_low=clip, clip_high=clip)


def dapo(
    logprob: Float[Array, ""],
    entropy: Float[Array, ""] | None,
    lse: Float[Array, ""],
    old_logprob: Float[Array, ""],
    advantage: Float[Array, ""],
    *,
    clip_low: float | Float[Array, ""] = 0.2,
    clip_high: float | Float[Array, ""] = 0.28,
) -> Float[Array, ""]:
    """`ppo_clip` with a wider range above 1, so that unlikely tokens can become likely.

    Divide the sum by the number of tokens of all sequences, as DAPO does.

    Args:
        logprob: ln p(label), nats.
        entropy: not used.
        lse: not used.
        old_logprob: the log-probability under the policy that drew the token.
        advantage: A.
        clip_low: how far the ratio may fall below 1, at least 0.
        clip_high: how far the ratio may rise above 1, at least 0.

    Returns:
        The loss.

    Raises:
        ValueError, TypeError: ``clip_low`` or ``clip_high`` is not a number of at least 0.

    Example:
        >>> from lce_jax import losses
        >>> round(float(losses.dapo(-1.0, None, 0.0, -2.0, 1.0)), 3)        # r = e is clipped
        -1.28

    References:
        Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale" (2025).
    """
    del entropy, lse
    shared_checks.check_loss_arguments(logprob, old_logprob=old_logprob, advantage=advantage)
    ratio = jnp.exp(_bound(logprob - old_logprob))
    low, high = _not_negative("clip_low", clip_low), _not_negative("clip_high", clip_high)
    return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 1.0 - low, 1.0 + high) * advantage)


def grpo(
    logprob: Float[Array, ""],
    entropy: Float[Array, ""] | None,
    lse: Float[Array, ""],
    old_logprob: Float[Array, ""],
    advantage: Float[Array, ""],
    reference_logprob: Float[Array, ""],
    *,
    clip: float | Float[Array, ""] = 0.2,
    kl: float | Float[Array, ""] = 0.04,
) -> Float[Array, ""]:
    """`ppo_clip` plus ``kl·(e^d - d - 1)`` with ``d = reference_logprob - logprob``.

    The second term is an unbiased estimate of KL(policy ‖ reference), and is never negative (k3).

    Args:
        logprob: ln p(label), nats.
        entropy: not used.
        lse: not used.
        old_logprob: the log-probability under the policy that drew the token.
        advantage: A, normalised within the group of answers to the same prompt.
        reference_logprob: the log-probability under the policy to stay close to.
        clip: ε, at least 0.
        kl: weight of the divergence, at least 0.

    Returns:
        The loss.

    Raises:
        ValueError, TypeError: ``clip`` or ``kl`` is not a number of at least 0.

    Example:
        >>> from lce_jax import losses
        >>> round(float(losses.grpo(-1.0, None, 0.0, -1.0, 1.0, -2.0, kl=1.0)), 3)    # -1 + 1/e
        -0.632

    References:
        Shao et al., "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models" (2024), eqs.
        3 and 4; Schulman, "Approximating KL Divergence" (2020), for k3.
    """
    shared_checks.check_loss_arguments(logprob, reference_logprob=reference_logprob)
    difference = _bound(reference_logprob - logprob)
    divergence = jnp.expm1(difference) - difference
    return ppo_clip(logprob, entropy, lse, old_logprob, advantage, clip=clip) + _not_negative("kl", kl) * divergence


def cispo(
    logprob: Float[Array, ""],
    entropy: Float[Array, ""] | None,
    lse: Float[Array, ""],
    old_logprob: Float[Array, ""],
    advantage: Float[Array, ""],
    *,
    clip_low: float | Float[Array, ""] = 1.0,
    clip_high: float | Float[Array, ""],
) -> Float[Array, ""]:
    """``-w·A·logprob``, where the weight ``w = clip(r, 1 - ε_low, 1 + ε_high)`` has no gradient.

    The ratio is ``r = exp(logprob - old_logprob)``. A token whose ratio is clipped still has a gradient.

    Args:
        logprob: ln p(label), nats.
        entropy: not used.
        lse: not used.
        old_logprob: the log-probability under the policy that drew the token.
        advantage: A.
        clip_low: how far the weight may fall below 1, at least 0. With 1 there is no lower bound, as in the paper.
        clip_high: how far the weight may rise above 1, at least 0. The paper tunes ``clip_high`` and gives no number.

    Returns:
        The loss.

    Raises:
        ValueError, TypeError: ``clip_low`` or ``clip_high`` is not a number of at least 0.

    Example:
        >>> from lce_jax import losses
        >>> round(float(losses.cispo(-1.0, None, 0.0, -2.0, 1.0, clip_high=1.0)), 3)    # w = 2
        2.0

    References:
        MiniMax, "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention" (2025).
    """
    del entropy, lse
    shared_checks.check_loss_arguments(logprob, old_logprob=old_logprob, advantage=advantage)
    low, high = _not_negative("clip_low", clip_low), _not_negative("clip_high", clip_high)
    weight = lax.stop_gradient(jnp.clip(jnp.exp(_bound(logprob - old_logprob)), 1.0 - low, 1.0 + high))
    return -weight * advantage * logprob


def lk_alpha(variation: Float[ArrayLike, "*b"]) -> Float[Array, "*b"]:
    """``-ln α`` with ``α = 1 - variation``, the probability that a target model accepts a token of its draft.

    Speculative decoding accepts a token of the draft's distribution q with probability ``α = Σ min(p, q)``, where p is
    the target's. The gradient is the variation's gradient divided by α, so it does not vanish where α is small.

    Args:
        variation: ``[...]`` ½ Σ |p - q|, which ``linear_kl(..., direction="tv")`` returns if the draft is the student.

    Returns:
        ``[...]`` in nats, at least 0, in the dtype of ``variation``; 0 in rows that `linear_kl` leaves out. Because
        ``variation`` is rounded, an α below 2⁻²⁰ (2⁻⁴⁹ in float64) counts as this number and has no gradient.

    Example:
        >>> from lce_jax import losses
        >>> round(float(losses.lk_alpha(0.5)), 4)        # half of the tokens are accepted
        0.6931

    References:
        Samarin et al., "LK Losses: Direct Acceptance Rate Optimization for Speculative Decoding" (2026). The
        speculators library calls this loss ``nla``. SpecForge's ``--lk-loss-type alpha`` takes -ln of all tokens' mean
        α instead.
    """
    variation = _as_float(variation)
    return -jnp.log1p(-jnp.minimum(variation, 1.0 - 8 * float(jnp.finfo(variation.dtype).eps)))


def lk_lambda(
    kl: Float[ArrayLike, "*b"], variation: Float[ArrayLike, "*b"], *, eta: float | Float[ArrayLike, ""] = 3.0
) -> Float[Array, "*b"]:
    """``λ·kl + (1 - λ)·variation`` with ``λ = exp(-η·α)`` and ``α = 1 - variation``; λ has no gradient.

    The loss is nearly the KL where the target accepts few tokens of the draft, and turns to the probability of a
    rejection as the draft improves.

    Args:
        kl: ``[...]`` KL(target ‖ draft), which ``linear_kl(..., direction="forward")`` returns if the draft is the
            student.
        variation: ``[...]`` ½ Σ |p - q|, which ``linear_kl(..., direction="tv")`` returns for the same models.
        eta: η, at least 0. With 0, the loss is the KL alone. The default is the paper's best value.

    Returns:
        ``[...]``, at least 0; 0 in rows that `linear_kl` leaves out.

    Raises:
        ValueError, TypeError: ``eta`` is not a number of at least 0, or the shapes differ.

    Example:
        >>> from lce_jax import losses
        >>> round(float(losses.lk_lambda(2.0, 0.5)), 4)        # λ = e^-1.5
        0.8347

    References:
        Samarin et al., "LK Losses: Direct Acceptance Rate Optimization for Speculative Decoding" (2026). The
        speculators library calls this loss ``lk_hybrid``. SpecForge's ``--lk-loss-type lambda`` computes one λ from the
        mean α of all tokens, as ``kl_scale·exp(-kl_decay·α)``.
    """
    kl, variation = _as_float(kl), _as_float(variation)
    if kl.shape != variation.shape:
        raise ValueError(f"variation {variation.shape} must have the shape of kl {kl.shape}")
    weight = jnp.exp(-_not_negative("eta", eta) * (1.0 - lax.stop_gradient(variation)))
    return weight * kl + (1.0 - weight) * variation


def with_entropy_bonus(loss_fn: Callable[..., Array], coefficient: float | Float[Array, ""]) -> Callable[..., Array]:
    """``loss_fn`` minus ``coefficient·entropy``, which rewards a policy with a high entropy.

    Args:
        loss_fn: a per-token loss.
        coefficient: weight of the entropy, at least 0.

    Returns:
        A per-token loss with the same arguments as ``loss_fn``.

    Raises:
        ValueError, TypeError: ``coefficient`` is not a number of at least 0. The loss itself raises a ValueError if a
            call has ``entropy=False``.

    Example:
        >>> from lce_jax import losses
        >>> losses.with_entropy_bonus(losses.cross_entropy, 0.5)(-2.0, 3.0, 0.0)
        0.5

    References:
        Williams & Peng, "Function Optimization Using Connectionist Reinforcement Learning Algorithms" (1991); Mnih et
        al., "Asynchronous Methods for Deep Reinforcement Learning" (2016).
    """
    coefficient = _not_negative("coefficient", coefficient)

    @functools.wraps(loss_fn)
    def loss_with_bonus(logprob: Any, entropy: Any, lse: Any, *per_token: Any, **parameters: Any) -> Any:
        if entropy is None:
            raise ValueError(f"an entropy bonus of {coefficient} needs the entropy, but the call has entropy=False")
        return loss_fn(logprob, entropy, lse, *per_token, **parameters) - coefficient * entropy

    return loss_with_bonus


def _bound(difference: Any) -> Any:
    """Bounds a difference of log-probabilities, so its exponential is finite. Above the bound, the gradient is 0."""
    return jnp.minimum(difference, _kl.MOST_DISTANCE)


def _as_float(x: Any) -> Array:
    x = jnp.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _not_negative(name: str, value: Any) -> Any:
    return _options.check_scalar(name, value, scalars.not_negative)
