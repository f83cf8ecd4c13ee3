"""The rows of heads that JAX computes: the bare product, this package, and what it replaces."""

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

GEMM, FORWARD, TOPK, BOTH = "gemm", "forward", "top-k", "forward+backward"  # the directions a row can time
DIRECTIONS = (GEMM, FORWARD, TOPK, BOTH)
UNLIMITED = 1 << 62  # bytes of cache

type LogprobFunction = Callable[[Array, Array, Array], tuple[Array, Array | None]]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One row of the table, not yet compiled.

    Attributes:
        key: what the row is, the same on every device and in both directions ("ours", "materialised").
        label: its name for people.
        direction: "gemm", "forward", "top-k" or "forward+backward".
        compile: compiles it for the problem.
        results: its outputs by name, as JAX arrays, for the check against the reference.
        objective: the scalar that forward+backward differentiates.
        logits_rounded: whether it rounds the logits to the operands' dtype.
        gradient_slack: how much further from the reference its gradients may lie, relative by norm.
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
        """Of its row in the file."""
        return f"{self.label}, {self.direction}"


def judge(candidates: Iterable[Candidate], problem: Problem) -> Callable[[str, Any], tuple[str | None, Fields]]:
    """What compares the results of each with the reference of its objective: see `measure.rows`."""
    by_name = {one.name: one for one in candidates}
    references: dict[Objective, Mapping[str, Array]] = {}

    def judged(name: str, outputs: Any) -> tuple[str | None, Fields]:
        one = by_name[name]
        if one.objective not in references:
            references[one.objective] = right.reference(problem, *right.cotangents(problem, one.objective))
        beside = problem, references[one.objective], one.logits_rounded, one.gradient_slack
        found = right.verdict(one.results(outputs), *beside)
        fields = {"key": one.key, "label": one.label, "direction": one.direction, "objective": one.objective}
        return found.reason, fields | {"errors": found.errors}

    return judged


def jax_candidates(problem: Problem, implementation: str | None, threshold: float = 0.0) -> list[Candidate]:
    """The bare product, this package (with a cache where one is kept), the chunked loop, and stored logits.

    With a ``threshold``, its gradients without the tiles below it too.
    """
    wanted = implementation or tuple(_dispatch.IMPLEMENTATIONS)

    def plan(cache_bytes: int = 0) -> Any:
        return explain(*problem[:3], cache_bytes=cache_bytes, implementation=wanted)

    def ours(cache_bytes: int = 0, name: str | tuple[str, ...] = wanted) -> LogprobFunction:
        return _ours(linear_logprobs, cache_bytes=cache_bytes, implementation=name)

    served_by = plan().implementation
    name = f"lce_jax ({served_by})"
    rows = [_gemm(problem), forward(problem, "ours", name, ours()), both(problem, "ours", name, ours())]
    full = plan(UNLIMITED).kept_bytes - plan().kept_bytes  # what the backward could use, 0 where it always recomputes
    for part, cache_bytes in (("half", full // 2), ("full", full)):
        if plan(cache_bytes).kept_bytes > plan().kept_bytes:
            rows.append(both(problem, f"ours {part} cache", f"{name}, {part} cache", ours(cache_bytes)))
    if full:
        rows.append(in_forward(problem, name, wanted))
    if threshold:
        rows += _over_threshold(problem, name, threshold, wanted)
    if served_by != "xla":
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


def in_forward(problem: Problem, label: str, implementation: str | tuple[str, ...]) -> Candidate:
    """`linear_loss`: the same gradients, computed in the forward a chunk of tokens at a time."""

    def loss_of_token(logprob: Array, entropy: Array, lse: Array, a: Array, b: Array) -> Array:
        del lse
        return a * logprob + b * entropy

    def forward_backward(hidden: Array, weight: Array, labels: Array, a: Array, b: Array) -> dict[str, Any]:
        def loss(hidden: Array, weight: Array) -> tuple[Array, LogprobOutput]:
            return linear_loss(loss_of_token, hidden, weight, labels, a, b, implementation=implementation)

        (_, out), (dhidden, dweight) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(hidden, weight)
        return {"logprobs": out.logprobs, "entropy": out.entropy, "dhidden": dhidden, "dweight": dweight}

    compiled = functools.partial(compile_jax, forward_backward, *problem)
    return Candidate("ours in forward", f"{label}, linear_loss", BOTH, compiled)


def _over_threshold(problem: Problem, name: str, threshold: float, wanted: str | tuple[str, ...]) -> list[Candidate]:
    """With entropy and, as Cut Cross-Entropy computes it, without.

    At 2^-12 what is left out moves dhidden by 0.9 % without entropy. An entropy of the same weight in the objective
    makes it 6.6 %, because p |ln p| of many small probabilities adds up. (An entropy bonus has a weight of 0.01.)
    """
    function = functools.partial(_ours, linear_logprobs, gradient_threshold=threshold, implementation=wanted)
    label = f"{name}, gradient_threshold {threshold:.2g}"
    row = dataclasses.replace(both(problem, "ours threshold", label, function()), gradient_slack=2.0**-3)
    without = both(problem, "ours threshold without entropy", f"{label}, no entropy", function(entropy=False))
    return [row, dataclasses.replace(without, objective="logprob", gradient_slack=2.0**-6)]


def materialised(hidden: Array, weight: Array, labels: Array) -> tuple[Array, Array]:
    """What one writes without this package.

    Half-precision operands keep half-precision logits: asking for float32 ones makes autodiff run both backward
    products on upcast copies in TF32, twice as slow. Sums and softmax are float32 all the same.
    """
    z = product(hidden, weight).astype(jnp.float32)
    lse = jax.nn.logsumexp(z, axis=-1)
    p = jnp.exp(z - lse[:, None])
    entropy = lse - jnp.sum(p * z, axis=-1)
    return jnp.take_along_axis(z, labels[:, None], axis=-1)[:, 0] - lse, entropy


@jax.custom_vjp
def materialised_by_hand(hidden: Array, weight: Array, labels: Array) -> tuple[Array, Array]:
    """The best that stores the logits: autodiff keeps several [T, V] arrays, this keeps the logits alone."""
    return _keeping_logits(hidden, weight, labels)[0]


def _keeping_logits(hidden: Array, weight: Array, labels: Array) -> tuple[tuple[Array, Array], Any]:
    raw = product(hidden, weight)
    z = raw.astype(jnp.float32)
    lse = jax.nn.logsumexp(z, axis=-1)
    entropy = lse - jnp.sum(jnp.exp(z - lse[:, None]) * z, axis=-1)
    logprob = jnp.take_along_axis(z, labels[:, None], axis=-1)[:, 0] - lse
    return (logprob, entropy), (hidden, weight, labels, raw, lse, entropy)


def _of_kept_logits(residuals: Any, cotangents: Any) -> tuple[Array, Array, None]:
    hidden, weight, labels, raw, lse, entropy = residuals
    a, b = (x[:, None] for x in cotangents)
    logp = raw.astype(jnp.float32) - lse[:, None]
    is_label = jnp.arange(weight.shape[0], dtype=jnp.int32) == labels[:, None]
    d = jnp.where(is_label, a, 0.0) - jnp.exp(logp) * (a + b * (logp + entropy[:, None]))
    d = d.astype(raw.dtype)
    return d @ weight, d.T @ hidden, None


materialised_by_hand.defvjp(_keeping_logits, _of_kept_logits)


def product(hidden: Array, weight: Array, *_: Array) -> Array:
    """Of hidden states and weight, and nothing else: the unit of every table."""
    return lax.dot_general(hidden, weight, (((1,), (1,)), ((), ())))


def _gemm(problem: Problem) -> Candidate:
    """The bare product: the time a forward pass is held against."""

    def label_logits(logits: Array) -> Results:
        return {"label logit": jnp.take_along_axis(logits, problem.labels[:, None], axis=1)[:, 0].astype(jnp.float32)}

    compiled = functools.partial(compile_jax, product, problem.hidden, problem.weight)
    return Candidate("gemm", "bare GEMM hidden · weightᵀ", GEMM, compiled, label_logits, logits_rounded=True)


def forward(
    problem: Problem, key: str, label: str, function: LogprobFunction, logits_rounded: bool = False
) -> Candidate:
    """Log-probabilities and entropy."""

    def outputs(hidden: Array, weight: Array, labels: Array) -> dict[str, Any]:
        return dict(zip(("logprobs", "entropy"), function(hidden, weight, labels), strict=True))

    compiled = functools.partial(compile_jax, outputs, *problem[:3])
    return Candidate(key, label, FORWARD, compiled, logits_rounded=logits_rounded)


def both(problem: Problem, key: str, label: str, function: LogprobFunction, logits_rounded: bool = False) -> Candidate:
    """The same, and the gradients of their sum weighted by the cotangents."""

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
    """The most likely tokens: `linear_topk`, and ``jax.lax.top_k`` of float32 logits."""
    k = min(MOST_LIKELY, problem.weight.shape[0])

    def ours(hidden: Array, weight: Array) -> dict[str, Array]:
        top = linear_topk(hidden, weight, k)
        return {TOPK_NAME: top.logprobs, "lse": top.lse, "ids": top.ids}

    def stored(hidden: Array, weight: Array) -> dict[str, Array]:
        z = lax.dot_general(hidden, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        largest, ids = lax.top_k(z, k)
        lse = jax.nn.logsumexp(z, axis=1)
        return {TOPK_NAME: largest - lse[:, None], "lse": lse, "ids": ids}

    def without_ids(found: dict[str, Array]) -> dict[str, Array]:
        return {name: x for name, x in found.items() if name != "ids"}  # rounding may exchange two of them

    def row(key: str, label: str, function: Callable[..., dict[str, Array]]) -> Candidate:
        compiled = functools.partial(compile_jax, function, problem.hidden, problem.weight)
        return Candidate(key, f"{label}, k {k}", TOPK, compiled, without_ids)

    return [
        row("ours", "lce_jax.linear_topk", ours),
        row("materialised", "XLA, stored float32 logits, jax.lax.top_k", stored),
    ]
