"""Losses computed from the results of `lce_torch_bridge`'s functions, in plain PyTorch: `lce_jax.losses` for tensors.

    total, out = linear_loss(
        losses.grpo, hidden, weight, labels, old_logprob=old, advantage=advantages, reference_logprob=reference
    )
    top = linear_topk(teacher_hidden, teacher_weight, 64)
    out = linear_logprobs(hidden, weight, labels, candidates=top.ids)
    loss = losses.distillation_loss(out.candidate_logprobs, top.logprobs, top.ids).mean()

All functions return the loss of each token. `distillation_loss` takes candidates, and `lk_alpha` and `lk_lambda` take
results of `linear_kl`. The others take ``(logprob, entropy, lse)``, tensors of one shape; then per-token tensors in the
order ``old_logprob``, ``advantage``, ``reference_logprob``; then numbers as keyword arguments. They also take a model's
results directly: ``losses.dapo(*out[:3], old_logprob=old, advantage=advantages)``. Divide the sum by the number of
tokens or of sequences, as your objective requires.

Differences of log-probabilities are clamped to at most 80, so that ratios are finite in float32. Beyond 80 they have no
gradient: use ``where`` to leave out tokens that are so far off-policy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch

from lce_jax import losses as jax_losses
from lce_jax.types import scalars, shared_checks
from lce_torch_bridge.call import _checks

__all__ = [
    "cispo", "cross_entropy", "dapo", "distillation_loss", "grpo", "lk_alpha", "lk_lambda", "ppo_clip",
    "with_entropy_bonus",
]  # fmt: skip


def __dir__() -> list[str]:
    return [*__all__, "__doc__"]


MOST_DISTANCE = 80.0  # between log-probabilities, before the exponential: e^80 is finite in float32


def cross_entropy(
    logprob: torch.Tensor, entropy: torch.Tensor | None, lse: torch.Tensor, *, z_loss: float = 0.0
) -> torch.Tensor:
    """Returns ``-logprob + z_loss·lse²``.

    Args:
        logprob: ln p(label), nats.
        entropy: not used; give ``entropy=False`` to `lce_torch_bridge.linear_loss`.
        lse: ln Σ exp(logits), nats.
        z_loss: weight of ``lse²``, at least 0, which keeps ``lse`` near 0.

    Example:
        >>> import torch
        >>> from lce_torch_bridge import losses
        >>> losses.cross_entropy(torch.tensor(-2.0), None, torch.tensor(3.0), z_loss=0.5).item()
        6.5
    """
    del entropy
    return -logprob + scalars.not_negative("z_loss", z_loss) * lse * lse


def ppo_clip(
    logprob: torch.Tensor,
    entropy: torch.Tensor | None,
    lse: torch.Tensor,
    old_logprob: torch.Tensor,
    advantage: torch.Tensor,
    *,
    clip: float = 0.2,
) -> torch.Tensor:
    """Returns ``-min(r·A, clip(r, 1 - ε, 1 + ε)·A)`` with the ratio ``r = exp(logprob - old_logprob)``.

    Args:
        logprob: ln p(label), nats.
        entropy: not used.
        lse: not used.
        old_logprob: the token's log-probability under the policy that drew it, nats.
        advantage: A.
        clip: ε, at least 0.

    Example:
        >>> import torch
        >>> from lce_torch_bridge import losses
        >>> round(losses.ppo_clip(*torch.tensor([-1.0, 0.0, 0.0, -2.0, 1.0])).item(), 3)    # r = e is clipped
        -1.2
    """
    clip = scalars.not_negative("clip", clip)
    return dapo(logprob, entropy, lse, old_logprob, advantage, clip_low=clip, clip_high=clip)


def dapo(
    logprob: torch.Tensor,
    entropy: torch.Tensor | None,
    lse: torch.Tensor,
    old_logprob: torch.Tensor,
    advantage: torch.Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
) -> torch.Tensor:
    """Returns `ppo_clip` with a clipping range that is wider above 1, so that unlikely tokens can become likely.

    Divide the sum by the number of tokens of all sequences.

    Args:
        logprob: ln p(label), nats.
        entropy: not used.
        lse: not used.
        old_logprob: the token's log-probability under the policy that drew it, nats.
        advantage: A.
        clip_low: how far the ratio may fall below 1, at least 0.
        clip_high: how far the ratio may rise above 1, at least 0.

    Example:
        >>> import torch
        >>> from lce_torch_bridge import losses
        >>> round(losses.dapo(*torch.tensor([-1.0, 0.0, 0.0, -2.0, 1.0])).item(), 3)    # r = e is clipped
        -1.28
    """
    del entropy, lse
    shared_checks.check_loss_arguments(logprob, old_logprob=old_logprob, advantage=advantage)
    ratio = _compute_ratio(logprob, old_logprob)
    return -torch.minimum(ratio * advantage, _clip_ratio(ratio, clip_low, clip_high) * advantage)


def grpo(
    logprob: torch.Tensor,
    entropy: torch.Tensor | None,
    lse: torch.Tensor,
    old_logprob: torch.Tensor,
    advantage: torch.Tensor,
    reference_logprob: torch.Tensor,
    *,
    clip: float = 0.2,
    kl: float = 0.04,
) -> torch.Tensor:
    """Returns `ppo_clip` plus ``kl·(e^d - d - 1)`` with ``d = reference_logprob - logprob``.

    The second term estimates KL(policy ‖ reference) without bias, and is never negative (k3).

    Args:
        logprob: ln p(label), nats.
        entropy: not used.
        lse: not used.
        old_logprob: the token's log-probability under the policy that drew it, nats.
        advantage: A, normalised within the token's group of answers.
        reference_logprob: the token's log-probability under the policy to stay close to, nats.
        clip: ε, at least 0.
        kl: weight of the divergence, at least 0.

    Example:
        >>> import torch
        >>> from lce_torch_bridge import losses
        >>> round(losses.grpo(*torch.tensor([-1.0, 0.0, 0.0, -1.0, 1.0, -2.0]), kl=1.0).item(), 3)    # -1 + 1/e
        -0.632
    """
    shared_checks.check_loss_arguments(logprob, reference_logprob=reference_logprob)
    kl, difference = scalars.not_negative("kl", kl), (reference_logprob - logprob).clamp(max=MOST_DISTANCE)
    clipped = ppo_clip(logprob, entropy, lse, old_logprob, advantage, clip=clip)
    return clipped + kl * (difference.expm1() - difference)


def cispo(
    logprob: torch.Tensor,
    entropy: torch.Tensor | None,
    lse: torch.Tensor,
    old_logprob: torch.Tensor,
    advantage: torch.Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float,
) -> torch.Tensor:
    """Returns ``-w·A·logprob``, where the weight ``w = clip(r, 1 - ε_low, 1 + ε_high)`` of the ratio has no gradient.

    Because of that, a token whose ratio is clipped still has a gradient.

    Args:
        logprob: ln p(label), nats.
        entropy: not used.
        lse: not used.
        old_logprob: the token's log-probability under the policy that drew it, nats.
        advantage: A.
        clip_low: how far the weight may fall below 1, at least 0; 1 leaves it free, as the paper does.
        clip_high: how far the weight may rise above 1, at least 0. The paper tunes ``clip_high`` and gives no number.

    Example:
        >>> import torch
        >>> from lce_torch_bridge import losses
        >>> losses.cispo(*torch.tensor([-1.0, 0.0, 0.0, -2.0, 1.0]), clip_high=1.0).item()    # w = 2
        2.0
    """
    del entropy, lse
    shared_checks.check_loss_arguments(logprob, old_logprob=old_logprob, advantage=advantage)
    return -_clip_ratio(_compute_ratio(logprob, old_logprob), clip_low, clip_high).detach() * advantage * logprob


def lk_alpha(variation: torch.Tensor) -> torch.Tensor:
    """Returns ``-ln α`` with ``α = 1 - variation``, the probability that a target model accepts a token of its draft.

    Speculative decoding accepts a token of the draft's distribution q with probability ``α = Σ min(p, q)``, where p is
    the target's. The gradient is the variation's gradient divided by α, so it does not vanish where α is small.

    Args:
        variation: ``[...]`` ½ Σ |p - q|, which ``linear_kl(..., direction="tv")`` returns with the draft as student.

    Returns:
        ``[...]`` in nats, at least 0, in the dtype of ``variation``; 0 in rows that `linear_kl` leaves out. An α below
        2⁻²⁰ counts as 2⁻²⁰ (2⁻⁴⁹ in float64), because ``variation`` is rounded, and then has no gradient.

    Example:
        >>> import torch
        >>> from lce_torch_bridge import losses
        >>> round(losses.lk_alpha(torch.tensor(0.5)).item(), 4)        # half of the tokens are accepted
        0.6931
    """
    variation = _to_float("variation", variation)
    return -(-variation.clamp(max=1.0 - 8 * torch.finfo(variation.dtype).eps)).log1p()


def lk_lambda(kl: torch.Tensor, variation: torch.Tensor, *, eta: float = 3.0) -> torch.Tensor:
    """Returns ``λ·kl + (1 - λ)·variation`` with ``λ = exp(-η·α)`` and ``α = 1 - variation``; λ has no gradient.

    The loss is nearly the KL where the target accepts few tokens of the draft, and turns to the probability of a
    rejection as the draft improves.

    Args:
        kl: ``[...]`` KL(target ‖ draft), which ``linear_kl(..., direction="forward")`` returns with the draft as
            student.
        variation: ``[...]`` ½ Σ |p - q|, which ``linear_kl(..., direction="tv")`` returns for the same models.
        eta: η, at least 0. 0 is the KL alone. The default is the paper's best value.

    Returns:
        ``[...]``, at least 0; 0 in rows that `linear_kl` leaves out.

    Raises:
        ValueError, TypeError: ``eta`` is not a number of at least 0, or the shapes differ.

    Example:
        >>> import torch
        >>> from lce_torch_bridge import losses
        >>> round(losses.lk_lambda(torch.tensor(2.0), torch.tensor(0.5)).item(), 4)        # λ = e^-1.5
        0.8347
    """
    kl, variation = _to_float("kl", kl), _to_float("variation", variation)
    if kl.shape != variation.shape:
        raise ValueError(f"variation {tuple(variation.shape)} must have the shape of kl {tuple(kl.shape)}")
    weight = (-scalars.not_negative("eta", eta) * (1.0 - variation.detach())).exp()
    return weight * kl + (1.0 - weight) * variation


def _to_float(name: str, x: torch.Tensor) -> torch.Tensor:
    _checks.tensor(name, x)
    return x.to(torch.promote_types(x.dtype, torch.float32))


def with_entropy_bonus(loss_fn: Callable[..., torch.Tensor], coefficient: float) -> Callable[..., torch.Tensor]:
    """Returns a loss that is ``loss_fn`` minus ``coefficient·entropy``, which rewards an undecided policy.

    Args:
        loss_fn: a per-token loss.
        coefficient: weight of the entropy, at least 0.

    Example:
        >>> import torch
        >>> from lce_torch_bridge import losses
        >>> losses.with_entropy_bonus(losses.cross_entropy, 0.5)(*torch.tensor([-2.0, 3.0, 0.0])).item()
        0.5
    """
    add_bonus: Any = jax_losses.with_entropy_bonus  # works on tensors too
    loss: Callable[..., torch.Tensor] = add_bonus(loss_fn, scalars.not_negative("coefficient", coefficient))
    return loss


def _compute_ratio(logprob: torch.Tensor, old_logprob: torch.Tensor) -> torch.Tensor:
    """Returns the ratio of probabilities, always finite, so that 0 times it is 0. Clamping stops gradients."""
    return (logprob - old_logprob).clamp(max=MOST_DISTANCE).exp()


def _clip_ratio(ratio: torch.Tensor, low: float, high: float) -> torch.Tensor:
    low, high = scalars.not_negative("clip_low", low), scalars.not_negative("clip_high", high)
    return ratio.clamp(1.0 - low, 1.0 + high)


def distillation_loss(
    candidate_logprobs: torch.Tensor,
    teacher_logprobs: torch.Tensor,
    ids: torch.Tensor,
    *,
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl",
    beta: float | None = None,
    rest: Literal["bin", "drop", "renormalize"] = "bin",
    where: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the divergence of the student from its teacher at each token, over the teacher's candidates.

    With the teacher's probabilities p and the student's q, over the candidates and what ``rest`` adds to them:

    - ``"forward_kl"``: ``KL(p ‖ q) = Σ p (ln p - ln q)`` gives the student probability wherever the teacher has it;
    - ``"reverse_kl"``: ``KL(q ‖ p) = Σ q (ln q - ln p)`` takes probability from the student wherever the teacher has
      none;
    - ``"jsd"``: ``β KL(p ‖ m) + (1 - β) KL(q ‖ m)`` with ``m = β p + (1 - β) q``, the generalised Jensen-Shannon
      divergence.

    The log-probabilities of both models are under their full vocabularies, at one temperature τ. Multiply by τ² to keep
    the size of the gradients (Hinton et al.).

    Args:
        candidate_logprobs: ``[..., K]`` ln q of the candidates, in nats. ``linear_logprobs(..., candidates=ids)``
            returns a field with this name.
        teacher_logprobs: ``[..., K]`` ln p of the same ids, in nats. It has no gradient. -inf means p = 0, which makes
            a reverse KL infinite.
        ids: ``[..., K]`` the candidates. The ids of a token must differ from each other; -1 stands for no candidate,
            whose log-probabilities are not read. Replace ids outside the vocabulary by -1.
        divergence: "forward_kl", "reverse_kl" or "jsd".
        beta: for "jsd", the teacher's weight β in (0, 1). As β approaches 0, the gradient approaches β times the
            gradient of the forward KL; as β approaches 1, it approaches 1 - β times the gradient of the reverse KL. The
            gradient is exact to rounding for β close to 0 or 1 too. None: 0.5.
        rest: what happens to the probability outside the candidates. "bin": in each model, it forms one more candidate.
            So the result is a divergence of two distributions: at least 0, and at most the divergence over the whole
            vocabulary. "drop": the sums cover the candidates alone. Then a KL may be negative, and nothing ties the
            student's mass on the candidates to the teacher's. "renormalize": p and q are divided by their sums over the
            candidates.
        where: ``[...]`` bool, the rows that count. The others are exactly 0 in outputs and gradients, whatever they
            hold. None: every row counts.

    Returns:
        ``[...]`` in nats, float32 (float64 if one of the two is). 0 in a row without candidates. NaN in a row whose
        candidates have a total probability of more than 1.01 in student or teacher: its ids repeat, or its numbers are
        no log-probabilities. "renormalize" accepts any logits and never returns NaN for this reason.

    Raises:
        ValueError, TypeError: shapes, dtypes or options do not fit; the message has their values.

    Numerics:
        Everything is float32. The rest ``1 - Σ q`` is computed without cancellation when one candidate has nearly all
        probability: as ``-expm1`` of its log-probability minus the other candidates' probabilities. Log-probabilities
        in float32 determine the rest only to 1e-7. So in a logarithm a rest below 2⁻²⁰ counts as 2⁻²⁰, and has no
        gradient.

    Example:
        >>> import torch
        >>> from lce_torch_bridge import losses
        >>> ids, teacher = torch.tensor([[3, 5, -1]]), torch.tensor([[0.6, 0.3, 1.0]]).log()
        >>> student = torch.tensor([[0.5, 0.25, 1.0]]).log()
        >>> loss = losses.distillation_loss(student, teacher, ids)        # 0.9 ln 1.2 + 0.1 ln(0.1 / 0.25)
        >>> round(loss.item(), 4)
        0.0725
    """
    _checks.integers("ids", ids)
    shared_checks.count_candidates("ids", ids.shape)
    for name, x in (("candidate_logprobs", candidate_logprobs), ("teacher_logprobs", teacher_logprobs)):
        _checks.tensor(name, x)
        if x.shape != ids.shape or not x.is_floating_point():
            raise ValueError(
                f"{name} {tuple(x.shape)} of {x.dtype} must be floating point in the shape of ids {tuple(ids.shape)}"
            )
        _checks.same_device(ids, **{name: x})
    is_candidate = ids.long() >= 0  # torch compares only some of the unsigned types
    if where is not None:
        is_candidate = is_candidate & _check_where(where, ids)[..., None]
    scalars.check_choice("divergence", divergence, scalars.DIVERGENCES)
    scalars.check_choice("rest", rest, scalars.RESTS)
    beta = scalars.check_beta(beta, "divergence", divergence, scalars.DIVERGENCES[:2])
    dtype = torch.promote_types(torch.promote_types(candidate_logprobs.dtype, teacher_logprobs.dtype), torch.float32)
    q, p = (_make_bins(x.to(dtype), is_candidate, rest) for x in (candidate_logprobs, teacher_logprobs.detach()))
    if beta is not None:
        return _JSD.apply(*q, *p, beta)
    return _compute_kl(p, q.log) if divergence == "forward_kl" else _compute_kl(q, p.log)


def _check_where(where: Any, ids: torch.Tensor) -> torch.Tensor:
    _checks.tensor("where", where)
    if where.dtype != torch.bool:
        raise TypeError(f"where must be bool, got {where.dtype}")
    if where.shape != ids.shape[:-1]:
        raise ValueError(f"where {tuple(where.shape)} must have the shape of ids before K {tuple(ids.shape[:-1])}")
    _checks.same_device(ids, where=where)
    return where


class _TorchBins(NamedTuple):
    """A distribution over the candidates, and over the rest if it is a bin."""

    mass: torch.Tensor  # [..., k]; 0 where there is no candidate
    log: torch.Tensor  # [..., k], the logarithm of the mass; 0 where there is no candidate


def _make_bins(logprobs: torch.Tensor, is_candidate: torch.Tensor, rest: str) -> _TorchBins:
    log = logprobs.where(is_candidate, 0.0)
    if rest == "renormalize":
        masked = log.masked_fill(~is_candidate, -torch.inf).where(is_candidate.any(-1, keepdim=True), 0.0)
        total = masked.logsumexp(-1, keepdim=True)
        log = (log - total.masked_fill(total == -torch.inf, 0.0)).where(is_candidate, 0.0)
        return _TorchBins(log.exp().where(is_candidate, 0.0), log)
    mass = log.exp().where(is_candidate, 0.0)
    outside = _compute_rest(log, mass, is_candidate)
    log = log.masked_fill(outside < 1.0 - scalars.MOST_MASS, torch.nan)
    if rest == "drop":
        return _TorchBins(mass, log)
    floor = 8 * torch.finfo(log.dtype).eps
    bins = outside.clamp(min=0.0), outside.clamp(min=floor).log()
    return _TorchBins(torch.cat([mass, bins[0]], -1), torch.cat([log, bins[1]], -1))


def _compute_rest(log: torch.Tensor, mass: torch.Tensor, is_candidate: torch.Tensor) -> torch.Tensor:
    """Returns 1 - Σ mass. ``expm1`` subtracts the largest mass from 1, because 1 - exp(x) could round to 0."""
    largest = torch.zeros_like(is_candidate).scatter(-1, mass.argmax(-1, keepdim=True), value=True)
    terms = log.expm1().where(is_candidate & largest, mass)
    return (-terms.sum(-1, keepdim=True)).where(is_candidate.any(-1, keepdim=True), 1.0)


def _compute_kl(p: _TorchBins, log_q: torch.Tensor) -> torch.Tensor:
    """Returns Σ p (ln p - ln q)."""
    is_positive = p.mass > 0.0
    return _weight_by_mass(p.mass, p.log.where(is_positive, 0.0) - log_q.where(is_positive, 0.0)).sum(-1)


def _weight_by_mass(mass: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Returns mass · x, and 0 wherever the mass is 0, so that 0 ln 0 is 0."""
    return mass * x.where(mass > 0.0, 0.0)


class _JSD(torch.autograd.Function):
    """Computes Σ β p ln(p / m) + (1 - β) q ln(q / m).

    In the gradient the derivatives of the logarithms cancel. What remains is exact for β close to 0 or 1 too.
    """

    @staticmethod
    def forward(
        q_mass: torch.Tensor, q_log: torch.Tensor, p_mass: torch.Tensor, p_log: torch.Tensor, beta: float
    ) -> torch.Tensor:
        d = p_log - q_log
        q_log_ratio, p_log_ratio = _compute_log_ratio(d, 1.0 - beta, beta), _compute_log_ratio(-d, beta, 1.0 - beta)
        kl_p, kl_q = _weight_by_mass(p_mass, p_log_ratio), _weight_by_mass(q_mass, q_log_ratio)
        return (beta * kl_p + (1.0 - beta) * kl_q).sum(-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004 torch names it
        *tensors, ctx.beta = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_mass, q_log, _, p_log = ctx.saved_tensors
        slope = (1.0 - ctx.beta) * _compute_log_ratio(p_log - q_log, 1.0 - ctx.beta, ctx.beta)
        return cotangents[0][..., None] * slope.where(q_mass > 0.0, 0.0), None, None, None, None


def _compute_log_ratio(d: torch.Tensor, weight: float, other: float) -> torch.Tensor:
    """Returns -ln(weight + other e^d), where weight + other = 1.

    With x = other (e^d - 1), the result is computed as -ln(1 + x), and for x < -1/2 directly from the sum.
    """
    e = d.clamp(max=MOST_DISTANCE).exp()
    x = other * d.sign() * -(-d.abs()).expm1() * e.clamp(min=1.0)
    small = x < -0.5
    log = (1.0 / (weight + other * e) - 1.0).where(small, x).log1p()
    return log.where(small, -log) - (d - MOST_DISTANCE).clamp(min=0.0)
