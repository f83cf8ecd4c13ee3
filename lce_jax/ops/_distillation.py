"""The divergence of a student from a teacher over a few candidates per token, for `lce_jax.losses`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax.call import _checks, _describe, _options
from lce_jax.mathematics._kl import Pair, log_ratio, log_ratios
from lce_jax.types import scalars, shared_checks

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, ArrayLike, Bool, Float, Int


def distillation_loss(
    candidate_logprobs: Float[ArrayLike, "*b K"],
    teacher_logprobs: Float[ArrayLike, "*b K"],
    ids: Int[ArrayLike, "*b K"],
    *,
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl",
    beta: float | Float[ArrayLike, ""] | None = None,
    rest: Literal["bin", "drop", "renormalize"] = "bin",
    where: Bool[ArrayLike, "*b"] | None = None,
) -> Float[Array, "*b"]:
    """Divergence of the student from its teacher at each token, over the teacher's candidates.

    Let p be the teacher's probabilities and q the student's, over the candidates and what ``rest`` adds to them:

    - ``"forward_kl"``: ``KL(p ‖ q) = Σ p (ln p - ln q)``, which spreads the student over everything that the teacher
      finds likely;
    - ``"reverse_kl"``: ``KL(q ‖ p) = Σ q (ln q - ln p)``, which keeps the student away from what the teacher finds
      unlikely;
    - ``"jsd"``: ``β KL(p ‖ m) + (1 - β) KL(q ‖ m)`` with ``m = β p + (1 - β) q``, the generalised Jensen-Shannon
      divergence.

    Both models' log-probabilities are those over the whole vocabulary, at the same temperature τ. Multiply the result
    by τ² to keep the size of the gradients (Hinton et al.). `lce_jax.linear_kl` computes the divergence over the whole
    vocabulary.

    Args:
        candidate_logprobs: ``[..., K]`` ln q of the candidates, in nats. ``linear_logprobs(..., candidates=ids)``
            returns a field with this name.
        teacher_logprobs: ``[..., K]`` ln p of the same ids, in nats. It has no gradient. -inf means p = 0, which makes
            a reverse KL infinite.
        ids: ``[..., K]`` the candidates. The ids of a token must differ from each other; -1 stands for no candidate,
            whose log-probabilities are not read. Replace ids outside the vocabulary by -1.
        divergence: "forward_kl", "reverse_kl" or "jsd".
        beta: the teacher's weight β in (0, 1) in "jsd": a number, or an array of shape (), which may be traced. As β
            approaches 0, the gradient approaches β times that of the forward KL; as β approaches 1, it approaches 1 - β
            times that of the reverse KL. The result is exact to rounding near both ends. For β near 1, give a Python
            number, because a float32 array has few digits of 1 - β. β has no gradient. None: 0.5.
        rest: what happens to the probability outside the candidates. "bin": in each model, it forms one more candidate.
            So the result is a divergence of two distributions: at least 0, and at most the divergence over the whole
            vocabulary. "drop": the sums cover the candidates alone. Then a KL may be negative, and nothing ties the
            student's mass on the candidates to the teacher's. "renormalize": p and q are divided by their sums over the
            candidates.
        where: ``[...]`` bool, the rows that count. The others are exactly 0 in outputs and gradients, whatever they
            hold. None: every row counts.

    Returns:
        ``[...]`` in nats, float32 (float64 if one of the two inputs is). A row without candidates returns 0. A row
        returns NaN if its candidates have a total probability above 1.01 under one of the models: then ids repeat, or
        the numbers are not log-probabilities. "renormalize" accepts any logits and has no such row.

    Raises:
        ValueError, TypeError: shapes, dtypes or options do not fit; the message has the values.

    Numerics:
        Everything is float32. The rest ``1 - Σ q`` is ``-expm1`` of the largest log-probability, minus the other
        masses, so nothing cancels if one candidate has nearly all mass. Log-probabilities in float32 determine the rest
        to 1e-7. So a rest below 2⁻²⁰ counts as 2⁻²⁰ in a logarithm, and then has no gradient.

    Example:
        >>> import jax.numpy as jnp
        >>> from lce_jax import losses
        >>> ids, teacher = jnp.array([[3, 5, -1]]), jnp.log(jnp.array([[0.6, 0.3, 1.0]]))
        >>> student = jnp.log(jnp.array([[0.5, 0.25, 1.0]]))
        >>> loss = losses.distillation_loss(student, teacher, ids)        # 0.9 ln 1.2 + 0.1 ln(0.1 / 0.25)
        >>> round(float(loss[0]), 4)
        0.0725

    References:
        Hinton et al., "Distilling the Knowledge in a Neural Network" (2015); Gu et al., "MiniLLM: Knowledge
        Distillation of Large Language Models" (2024), for the reverse KL; Agarwal et al., "On-Policy Distillation of
        Language Models: Learning from Self-Generated Mistakes" (2024), eq. 1, for the generalised JSD. Frameworks:
        "drop" is verl's ``forward_kl_topk``, which also clips log-probabilities at ln 1e-8 and losses at 0; "bin"
        is its proposed ``forward_kl_topk_tail`` (pull request 7855), the tail bin of SDFT (arXiv:2601.19897) and
        ``loss_add_tail`` of TRL's server distillation; "renormalize" is NeMo RL with ``zero_outside_topk=False``. TRL
        and Liger Kernel write ``beta=0`` for the forward and ``beta=1`` for the reverse KL.
    """
    _checks.check_labels(ids, "ids")
    shared_checks.count_candidates("ids", ids.shape)
    for name, x in (("candidate_logprobs", candidate_logprobs), ("teacher_logprobs", teacher_logprobs)):
        _checks.check_array(name, x)
        if tuple(x.shape) != tuple(ids.shape) or not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(
                f"{name} {tuple(x.shape)} of {x.dtype} must be floating point in the shape of ids {tuple(ids.shape)}"
            )
    if where is not None:
        _checks.check_where(where, ids.shape[:-1], "ids before K")
    scalars.check_choice("divergence", divergence, scalars.DIVERGENCES)
    scalars.check_choice("rest", rest, scalars.RESTS)
    beta = _options.check_beta(beta, "divergence", divergence, scalars.DIVERGENCES[:2])
    dtype = jnp.promote_types(jnp.promote_types(candidate_logprobs.dtype, teacher_logprobs.dtype), jnp.float32)
    weights = None if beta is None else _describe.make_mixture_weights(beta, (), dtype)
    arrays = jnp.asarray(candidate_logprobs), jnp.asarray(teacher_logprobs), _describe.cast_labels(ids, "ids")
    return _divergence(divergence, rest, *arrays, None if where is None else jnp.asarray(where), weights)


class _Bins(NamedTuple):
    """A distribution over the candidates, and over the rest if the rest is a bin."""

    mass: Float[Array, "*b k"]  # 0 where there is no candidate
    log: Float[Array, "*b k"]  # ln of the mass; 0 where there is no candidate


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _divergence(
    divergence: str, rest: str, student: Array, teacher: Array, ids: Array, where: Array | None, weights: Any
) -> Array:
    """Computes the divergence. Outside ``jit``, each number in an expression would be transferred to the device."""
    dtype = jnp.promote_types(jnp.promote_types(student.dtype, teacher.dtype), jnp.float32)
    is_candidate = ids >= 0 if where is None else (ids >= 0) & where[..., None]
    q, p = (_bins(x.astype(dtype), is_candidate, rest) for x in (student, lax.stop_gradient(teacher)))
    if divergence == "forward_kl":
        return _kl(p, q.log)
    if divergence == "reverse_kl":
        return _kl(q, p.log)
    return _jsd(q, p, weights)


@jax.custom_jvp
def _jsd(q: _Bins, p: _Bins, weights: Pair[Array]) -> Float[Array, "*b"]:
    """Returns Σ β p ln(p / m) + (1 - β) q ln(q / m)."""
    log_ratio_q, log_ratio_p = log_ratios(p.log - q.log, weights)
    terms = weights.teacher * _times_mass(p, log_ratio_p) + weights.student * _times_mass(q, log_ratio_q)
    return jnp.sum(terms, axis=-1)


@_jsd.defjvp
def _jsd_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    """Returns the value and its derivative along the tangent of q.

    The derivatives of the logarithms cancel. The remaining term is exact however near to 0 or 1 the weights are.
    """
    q, p, weights = primals
    log_ratio_q = log_ratio(p.log - q.log, weights)
    slope = jnp.where(q.mass > 0.0, weights.student * log_ratio_q, 0.0)
    return _jsd(*primals), jnp.sum(slope * tangents[0].mass, axis=-1)


def _kl(p: _Bins, log_q: Float[Array, "*b k"]) -> Float[Array, "*b"]:
    """Returns Σ p (ln p - ln q)."""
    has_mass = p.mass > 0.0
    return jnp.sum(_times_mass(p, jnp.where(has_mass, p.log, 0.0) - jnp.where(has_mass, log_q, 0.0)), axis=-1)


def _times_mass(p: _Bins, x: Float[Array, "*b k"]) -> Float[Array, "*b k"]:
    """Returns p · x, and 0 where p is 0, because 0 ln 0 is 0."""
    return p.mass * jnp.where(p.mass > 0.0, x, 0.0)


def _bins(logprobs: Float[Array, "*b K"], is_candidate: Bool[Array, "*b K"], rest: str) -> _Bins:
    """Returns the distribution over the candidates, with the rest treated as ``rest`` says."""
    log = jnp.where(is_candidate, logprobs, 0.0)
    if rest == "renormalize":
        log = jnp.where(is_candidate, log - _logsumexp(log, is_candidate), 0.0)
        return _Bins(jnp.where(is_candidate, jnp.exp(log), 0.0), log)
    mass = jnp.where(is_candidate, jnp.exp(log), 0.0)
    outside = _rest(log, mass, is_candidate)
    log = jnp.where(outside < 1.0 - scalars.MOST_MASS, jnp.nan, log)
    if rest == "drop":
        return _Bins(mass, log)
    floor = 8 * jnp.finfo(log.dtype).eps
    bins = _Bins(jnp.maximum(outside, 0.0), jnp.log(jnp.maximum(outside, floor)))
    return _Bins(*(jnp.concatenate(pair, axis=-1) for pair in zip((mass, log), bins, strict=True)))


def _rest(
    log: Float[Array, "*b K"], mass: Float[Array, "*b K"], is_candidate: Bool[Array, "*b K"]
) -> Float[Array, "*b 1"]:
    """Returns 1 - Σ mass. The largest mass is subtracted by ``expm1``, which is exact where 1 - exp(x) rounds to 0."""
    largest = jnp.argmax(mass, axis=-1, keepdims=True)
    columns = lax.broadcasted_iota(largest.dtype, mass.shape, mass.ndim - 1)
    terms = jnp.where(is_candidate & (columns == largest), jnp.expm1(log), mass)
    total = jnp.sum(terms, axis=-1, keepdims=True)
    return jnp.where(jnp.any(is_candidate, axis=-1, keepdims=True), -total, 1.0)


def _logsumexp(log: Float[Array, "*b K"], is_candidate: Bool[Array, "*b K"]) -> Float[Array, "*b 1"]:
    """Returns ln Σ exp over the candidates; 0 in a row without candidates."""
    highest = lax.stop_gradient(jnp.max(jnp.where(is_candidate, log, -jnp.inf), axis=-1, keepdims=True))
    highest = jnp.where(highest == -jnp.inf, 0.0, highest)
    total = jnp.sum(jnp.where(is_candidate, jnp.exp(log - highest), 0.0), axis=-1, keepdims=True)
    return highest + jnp.log(jnp.where(total == 0.0, 1.0, total))
