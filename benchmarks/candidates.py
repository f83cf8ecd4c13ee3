"""Candidates that JAX computes: the bare product, this package, and the stored logits that it replaces."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks import problem as right
from benchmarks.measure import Fields, Run, compile_jax
from benchmarks.problem import MOST_LIKELY, TOPK_NAME, Objective, Problem, Results
from lce_jax import LogprobOutput, explain, linear_logprobs, linear_loss, linear_topk
from lce_jax.call import _dispatch

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array

GEMM, FORWARD, TOPK, BOTH = "gemm", "forward", "top-k", "forward+backward"  # what a row can time
DIRECTIONS = (GEMM, FORWARD, TOPK, BOTH)
UNLIMITED = 1 << 62  # bytes of cache

type LogprobFunction = Callable[[Array, Array, Array], tuple[Array, Array | None]]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One row of the table, not yet compiled.

    Attributes:
        key: identifies the row, the same on every device and in all directions ("ours", "materialised").
        label: the row's name for people.
        direction: "gemm", "forward", "top-k" or "forward+backward".
        compile: compiles the candidate for the problem.
        results: returns its outputs by name, as JAX arrays, for the check against the reference.
        objective: the scalar that forward+backward differentiates.
        logits_rounded: whether the candidate rounds the logits to the operands' dtype.
        gradient_slack: how much more its gradients may differ from the reference, relative by norm.
    """

    key: str
    label: str
    direction: str
    compile: Callable[[], Run]
    results: Callable[[Any], Results] = dict
    objective: Objective = "logprob+entropy"
    logits_rounded: bool = False
    gradient_slack: float = 0.0

    @property
    def name(self) -> str:
        """The name of its row in the file."""
        return f"{self.label}, {self.direction}"


def judge(candidates: Iterable[Candidate], problem: Problem) -> Callable[[str, Any], tuple[str | None, Fields]]:
    """Returns the ``judge`` of `measure.rows`: it compares results with the reference of the candidate's objective."""
    by_name = {one.name: one for one in candidates}
    references: dict[Objective, Mapping[str, Array]] = {}

    def compare(name: str, outputs: Any) -> tuple[str | None, Fields]:
        one = by_name[name]
        if one.objective not in references:
            references[one.objective] = right.reference(problem, *right.cotangents(problem, one.objective))
        reference = problem, references[one.objective], one.logits_rounded, one.gradient_slack
        verdict = right.verdict(one.results(outputs), *reference)
        fields = {"key": one.key, "label": one.label, "direction": one.direction, "objective": one.objective}
        return verdict.reason, fields | {"errors": verdict.errors}

    return compare


def jax_candidates(problem: Problem, implementation: str | None, threshold: float = 0.0) -> list[Candidate]:
    """Returns the bare product, this package (also with a cache if it can use one), its loop in XLA, and stored logits.

    With a ``threshold`` there are also rows of this package with that ``gradient_threshold``.
    """
    requested = implementation or tuple(_dispatch.IMPLEMENTATIONS)

    def plan(cache_bytes: int = 0) -> Any:
        return explain(*problem[:3], cache_bytes=cache_bytes, implementation=requested)

    def ours(cache_bytes: int = 0, name: str | tuple[str, ...] = requested) -> LogprobFunction:
        return _ours(linear_logprobs, cache_bytes=cache_bytes, implementation=name)

    chosen = plan().implementation
    name = f"lce_jax ({chosen})"
    rows = [_gemm(problem), forward(problem, "ours", name, ours()), both(problem, "ours", name, ours())]
    full = plan(UNLIMITED).kept_bytes - plan().kept_bytes  # the largest cache; 0 if the backward always recomputes
    for part, cache_bytes in (("half", full // 2), ("full", full)):
        if plan(cache_bytes).kept_bytes > plan().kept_bytes:
            rows.append(both(problem, f"ours {part} cache", f"{name}, {part} cache", ours(cache_bytes)))
    if full:
        rows.append(linear_loss_candidate(problem, name, requested))
    if threshold:
        rows += _threshold_candidates(problem, name, threshold, requested)
    if chosen != "xla":
        rows += [way(problem, "chunked", "lce_jax (xla)", ours(name="xla")) for way in (forward, both)]
    label = f"XLA, stored {problem.hidden.dtype.name} logits"
    rows += [way(problem, "materialised", label, materialised, True) for way in (forward, both)]
    rows.append(both(problem, "materialised by hand", f"{label}, gradient by hand", materialised_by_hand, True))
    return rows + _topk(problem)


def _ours(call: Callable[..., LogprobOutput], **options: Any) -> LogprobFunction:
    def logprobs(hidden: Array, weight: Array, labels: Array) -> tuple[Array, Array | None]:
        out = call(hidden, weight, labels, **options)
        return out.logprobs, out.entropy

    return logprobs


def linear_loss_candidate(problem: Problem, label: str, implementation: str | tuple[str, ...]) -> Candidate:
    """Returns `linear_loss`, which computes the same gradients in the forward, one chunk of tokens at a time."""

    def token_loss(logprob: Array, entropy: Array, lse: Array, a: Array, b: Array) -> Array:
        del lse
        return a * logprob + b * entropy

    def forward_backward(hidden: Array, weight: Array, labels: Array, a: Array, b: Array) -> dict[str, Any]:
        def loss(hidden: Array, weight: Array) -> tuple[Array, LogprobOutput]:
            return linear_loss(token_loss, hidden, weight, labels, a, b, implementation=implementation)

        (_, out), (dhidden, dweight) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(hidden, weight)
        return {"logprobs": out.logprobs, "entropy": out.entropy, "dhidden": dhidden, "dweight": dweight}

    compiled = functools.partial(compile_jax, forward_backward, *problem)
    return Candidate("ours in forward", f"{label}, linear_loss", BOTH, compiled)


def _threshold_candidates(
    problem: Problem, name: str, threshold: float, requested: str | tuple[str, ...]
) -> list[Candidate]:
    """Returns the rows with a ``gradient_threshold``: with entropy, and without it, as in Cut Cross-Entropy.

    At 2^-12 the threshold changes dhidden by 0.9 % without entropy. If the objective has an entropy of the same weight
    as the logprobs, the change is 6.6 %, because p |ln p| of many small probabilities adds up. (An entropy bonus
    usually has a weight of 0.01.)
    """
    function = functools.partial(_ours, linear_logprobs, gradient_threshold=threshold, implementation=requested)
    label = f"{name}, gradient_threshold {threshold:.2g}"
    row = dataclasses.replace(both(problem, "ours threshold", label, function()), gradient_slack=2.0**-3)
    without = both(problem, "ours threshold without entropy", f"{label}, no entropy", function(entropy=False))
    return [row, dataclasses.replace(without, objective="logprob", gradient_slack=2.0**-6)]


def materialised(hidden: Array, weight: Array, labels: Array) -> tuple[Array, Array]:
    """Log-probability and entropy as one writes them without this package.

    Half-precision operands have half-precision logits here. With float32 logits, autodiff would run both products of
    the backward on upcast copies in TF32, which is twice as slow. Sums and softmax are float32 in any case.
    """
    z = product(hidden, weight).astype(jnp.float32)
    lse = jax.nn.logsumexp(z, axis=-1)
    p = jnp.exp(z - lse[:, None])
    entropy = lse - jnp.sum(p * z, axis=-1)
    return jnp.take_along_axis(z, labels[:, None], axis=-1)[:, 0] - lse, entropy


@jax.custom_vjp
def materialised_by_hand(hidden: Array, weight: Array, labels: Array) -> tuple[Array, Array]:
    """The best version that stores logits. Autodiff keeps several [T, V] arrays; this keeps only the logits."""
    return _stored_logits_forward(hidden, weight, labels)[0]


def _stored_logits_forward(hidden: Array, weight: Array, labels: Array) -> tuple[tuple[Array, Array], Any]:
    raw = product(hidden, weight)
    z = raw.astype(jnp.float32)
    lse = jax.nn.logsumexp(z, axis=-1)
    entropy = lse - jnp.sum(jnp.exp(z - lse[:, None]) * z, axis=-1)
    logprob = jnp.take_along_axis(z, labels[:, None], axis=-1)[:, 0] - lse
    return (logprob, entropy), (hidden, weight, labels, raw, lse, entropy)


def _stored_logits_backward(residuals: Any, cotangents: Any) -> tuple[Array, Array, None]:
    hidden, weight, labels, raw, lse, entropy = residuals
    a, b = (x[:, None] for x in cotangents)
    logp = raw.astype(jnp.float32) - lse[:, None]
    is_label = jnp.arange(weight.shape[0], dtype=jnp.int32) == labels[:, None]
    d = jnp.where(is_label, a, 0.0) - jnp.exp(logp) * (a + b * (logp + entropy[:, None]))
    d = d.astype(raw.dtype)
    return d @ weight, d.T @ hidden, None


materialised_by_hand.defvjp(_stored_logits_forward, _stored_logits_backward)


def product(hidden: Array, weight: Array, *_: Array) -> Array:
    """Multiplies hidden states by the weight, and does nothing else. Its time is the unit of every table."""
    return lax.dot_general(hidden, weight, (((1,), (1,)), ((), ())))


def _gemm(problem: Problem) -> Candidate:
    """Returns the bare product, whose time is the unit of a forward pass."""

    def label_logits(logits: Array) -> Results:
        return {"label logit": jnp.take_along_axis(logits, problem.labels[:, None], axis=1)[:, 0].astype(jnp.float32)}

    compiled = functools.partial(compile_jax, product, problem.hidden, problem.weight)
    return Candidate("gemm", "bare GEMM hidden · weightᵀ", GEMM, compiled, label_logits, logits_rounded=True)


def forward(
    problem: Problem, key: str, label: str, function: LogprobFunction, logits_rounded: bool = False
) -> Candidate:
    """Returns a candidate for log-probabilities and entropy."""

    def outputs(hidden: Array, weight: Array, labels: Array) -> dict[str, Any]:
        return dict(zip(("logprobs", "entropy"), function(hidden, weight, labels), strict=True))

    compiled = functools.partial(compile_jax, outputs, *problem[:3])
    return Candidate(key, label, FORWARD, compiled, logits_rounded=logits_rounded)


def both(problem: Problem, key: str, label: str, function: LogprobFunction, logits_rounded: bool = False) -> Candidate:
    """Returns the same candidate with the gradients of the results' sum, weighted by the cotangents."""

    def forward_backward(hidden: Array, weight: Array, labels: Array, a: Array, b: Array) -> dict[str, Any]:
        def loss(hidden: Array, weight: Array) -> tuple[Array, Any]:
            logprobs, entropy = function(hidden, weight, labels)
            out = {"logprobs": logprobs} | ({} if entropy is None else {"entropy": entropy})
            return right.weighted(out, a, b), out

        (_, out), gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(hidden, weight)
        return out | dict(zip(right.GRADIENTS, gradients, strict=True))

    compiled = functools.partial(compile_jax, forward_backward, *problem)
    return Candidate(key, label, BOTH, compiled, logits_rounded=logits_rounded)


def _topk(problem: Problem) -> list[Candidate]:
    """Returns candidates for the most likely tokens: `linear_topk`, and ``jax.lax.top_k`` of float32 logits."""
    k = min(MOST_LIKELY, problem.weight.shape[0])

    def ours(hidden: Array, weight: Array) -> dict[str, Array]:
        top = linear_topk(hidden, weight, k)
        return {TOPK_NAME: top.logprobs, "lse": top.lse, "ids": top.ids}

    def stored(hidden: Array, weight: Array) -> dict[str, Array]:
        z = lax.dot_general(hidden, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        largest, ids = lax.top_k(z, k)
        lse = jax.nn.logsumexp(z, axis=1)
        return {TOPK_NAME: largest - lse[:, None], "lse": lse, "ids": ids}

    def drop_ids(results: dict[str, Array]) -> dict[str, Array]:
        return {name: x for name, x in results.items() if name != "ids"}  # rounding may exchange two ids

    def row(key: str, label: str, function: Callable[..., dict[str, Array]]) -> Candidate:
        compiled = functools.partial(compile_jax, function, problem.hidden, problem.weight)
        return Candidate(key, f"{label}, k {k}", TOPK, compiled, drop_ids)

    return [
        row("ours", "lce_jax.linear_topk", ours),
        row("materialised", "XLA, stored float32 logits, jax.lax.top_k", stored),
    ]
