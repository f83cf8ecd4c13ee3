"""The rows that JAX computes: the bare product, this package, and what it replaces."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks.measure import Run, compile_jax
from benchmarks.problem import Objective, Problem, Results
from benchmarks.shapes import BOTH, FORWARD, GEMM
from lce_jax import LogprobOutput, _dispatch, explain, linear_logprobs, linear_loss, sharded_linear_logprobs

if TYPE_CHECKING:
    from lce_jax._shapes import Array

UNLIMITED = 1 << 62  # bytes of cache

type LogprobFunction = Callable[[Array, Array, Array], tuple[Array, Array | None]]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One row of the table, not yet compiled.

    Attributes:
        key: what the row is, the same on every device and in both directions ("ours", "materialised").
        label: its name for people.
        direction: "gemm", "forward" or "forward+backward".
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


def jax_candidates(
    problem: Problem, implementation: str | None, devices: int = 1, threshold: float = 0.0
) -> list[Candidate]:
    """The bare product, this package (with a cache where one is kept), the chunked loop, and stored logits.

    With several ``devices``, this package with the vocabulary split over them too; with a ``threshold``, its gradients
    without the tiles below it too.
    """
    shape, dtype = problem.shape, problem.hidden.dtype
    softcap = shape.head.logit_softcap
    wanted = implementation or _dispatch.AUTOMATIC

    def plan(cache_bytes: int = 0) -> Any:
        return explain(*problem.arrays[:3], logit_softcap=softcap, cache_bytes=cache_bytes, implementation=wanted)

    def ours(cache_bytes: int = 0, name: str | tuple[str, ...] = wanted) -> LogprobFunction:
        return _ours(linear_logprobs, logit_softcap=softcap, cache_bytes=cache_bytes, implementation=name)

    served_by = plan().implementation
    name = f"lce_jax ({served_by})"
    rows = [_gemm(problem), _forward(problem, "ours", name, ours()), _both(problem, "ours", name, ours())]
    full = plan(UNLIMITED).kept_bytes - plan().kept_bytes  # what the backward could use, 0 where it always recomputes
    for part, cache_bytes in (("half", full // 2), ("full", full)):
        if plan(cache_bytes).kept_bytes > plan().kept_bytes:
            rows.append(_both(problem, f"ours {part} cache", f"{name}, {part} cache", ours(cache_bytes)))
    if full:
        rows.append(in_forward(problem, name, wanted))
    if threshold:
        rows += _over_threshold(problem, name, threshold, logit_softcap=softcap, implementation=wanted)
    if devices > 1:
        rows += _split(problem, wanted, name, devices, cached=full > 0)
    if served_by != "xla":
        chunked = ours(name="xla")
        rows += [direction(problem, "chunked", "lce_jax (xla)", chunked) for direction in (_forward, _both)]
    stored, label = materialised(softcap), f"XLA, stored {dtype.name} logits"
    rows += [direction(problem, "materialised", label, stored, True) for direction in (_forward, _both)]
    by_hand = materialised_by_hand(softcap)
    return [*rows, _both(problem, "materialised by hand", f"{label}, gradient by hand", by_hand, True)]


def _ours(call: Callable[..., LogprobOutput], **options: Any) -> LogprobFunction:
    def logprobs(hidden: Array, weight: Array, labels: Array) -> tuple[Array, Array | None]:
        out = call(hidden, weight, labels, **options)
        return out.logprobs, out.entropy

    return logprobs


def in_forward(problem: Problem, label: str, implementation: str | tuple[str, ...]) -> Candidate:
    """`linear_loss`: the same gradients, computed in the forward a chunk of tokens at a time."""
    options: Any = {"logit_softcap": problem.shape.head.logit_softcap, "implementation": implementation}

    def loss_of_token(logprob: Array, entropy: Array, lse: Array, a: Array, b: Array) -> Array:
        del lse
        return a * logprob + b * entropy

    def forward_backward(hidden: Array, weight: Array, labels: Array, a: Array, b: Array) -> dict[str, Any]:
        def loss(hidden: Array, weight: Array) -> tuple[Array, LogprobOutput]:
            return linear_loss(loss_of_token, hidden, weight, labels, a, b, **options)

        (_, out), (dhidden, dweight) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(hidden, weight)
        return {"logprobs": out.logprobs, "entropy": out.entropy, "dhidden": dhidden, "dweight": dweight}

    compiled = functools.partial(compile_jax, forward_backward, *problem.arrays)
    return Candidate("ours in forward", f"{label}, linear_loss", BOTH, compiled)


def _over_threshold(problem: Problem, name: str, threshold: float, **options: Any) -> list[Candidate]:
    """With entropy and, as Cut Cross-Entropy computes it, without.

    At 2^-12 what is left out moves dhidden by 0.9 % without entropy. An entropy of the same weight in the objective
    makes it 6.6 %, because p |ln p| of many small probabilities adds up. (An entropy bonus has a weight of 0.01.)
    """
    function = _ours(linear_logprobs, gradient_threshold=threshold, **options)
    label = f"{name}, gradient_threshold {threshold:.2g}"
    row = dataclasses.replace(_both(problem, "ours threshold", label, function), gradient_slack=2.0**-3)
    function = _ours(linear_logprobs, gradient_threshold=threshold, entropy=False, **options)
    without = _both(problem, "ours threshold without entropy", f"{label}, no entropy", function)
    return [row, dataclasses.replace(without, objective="logprob", gradient_slack=2.0**-6)]


def _split(
    problem: Problem, implementation: str | tuple[str, ...], label: str, devices: int, cached: bool
) -> list[Candidate]:
    """This package on a mesh of ``devices``, without and with a cache; hidden states and results on all of them."""
    mesh = jax.make_mesh((devices,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    first = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    options = {"mesh": mesh, "logit_softcap": problem.shape.head.logit_softcap, "implementation": implementation}

    def place(array: Array, *axes: str) -> Array:
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*axes)))

    hidden, weight, *rest = problem.arrays
    if weight.shape[0] % devices == 0:  # else left to the call, which says what it needs
        problem = Problem(problem.shape, place(hidden), place(weight, "tensor"), *map(place, rest))
    label = f"{label}, {devices} devices"
    without = _ours(sharded_linear_logprobs, **options)
    rows = [direction(problem, "ours split", label, without) for direction in (_forward, _both)]
    if cached:
        full = _ours(sharded_linear_logprobs, cache_bytes=UNLIMITED, **options)
        rows.append(_both(problem, "ours split full cache", f"{label}, full cache", full))
    return [dataclasses.replace(row, results=lambda found: jax.device_put(dict(found), first)) for row in rows]


def materialised(softcap: float | None) -> LogprobFunction:
    """What one writes without this package.

    Half-precision operands keep half-precision logits: asking for float32 ones makes autodiff run both backward
    products on upcast copies in TF32, twice as slow. Sums and softmax are float32 all the same.
    """

    def logprobs(hidden: Array, weight: Array, labels: Array) -> tuple[Array, Array]:
        z = _product(hidden, weight).astype(jnp.float32)
        if softcap is not None:
            z = softcap * jnp.tanh(z / softcap)
        lse = jax.nn.logsumexp(z, axis=-1)
        p = jnp.exp(z - lse[:, None])
        entropy = lse - jnp.sum(p * z, axis=-1)
        return jnp.take_along_axis(z, labels[:, None], axis=-1)[:, 0] - lse, entropy

    return logprobs


def materialised_by_hand(softcap: float | None) -> LogprobFunction:
    """The best that stores the logits: autodiff keeps several [T, V] arrays, this keeps the logits alone."""

    @jax.custom_vjp
    def logprobs(hidden: Array, weight: Array, labels: Array) -> tuple[Array, Array | None]:
        return forward(hidden, weight, labels)[0]

    def transform(raw: Array) -> Array:
        z = raw.astype(jnp.float32)
        return z if softcap is None else softcap * jnp.tanh(z / softcap)

    def forward(hidden: Array, weight: Array, labels: Array) -> tuple[tuple[Array, Array], Any]:
        raw = _product(hidden, weight)
        z = transform(raw)
        lse = jax.nn.logsumexp(z, axis=-1)
        entropy = lse - jnp.sum(jnp.exp(z - lse[:, None]) * z, axis=-1)
        logprob = jnp.take_along_axis(z, labels[:, None], axis=-1)[:, 0] - lse
        return (logprob, entropy), (hidden, weight, labels, raw, lse, entropy)

    def backward(residuals: Any, cotangents: Any) -> tuple[Array, Array, None]:
        hidden, weight, labels, raw, lse, entropy = residuals
        a, b = (x[:, None] for x in cotangents)
        z = transform(raw)
        logp = z - lse[:, None]
        is_label = jnp.arange(weight.shape[0], dtype=jnp.int32) == labels[:, None]
        d = jnp.where(is_label, a, 0.0) - jnp.exp(logp) * (a + b * (logp + entropy[:, None]))
        if softcap is not None:
            d *= 1.0 - (z / softcap) ** 2
        d = d.astype(raw.dtype)
        return d @ weight, d.T @ hidden, None

    logprobs.defvjp(forward, backward)
    return logprobs


def _product(hidden: Array, weight: Array) -> Array:
    return lax.dot_general(hidden, weight, (((1,), (1,)), ((), ())))


def _gemm(problem: Problem) -> Candidate:
    """The product hidden · weightᵀ and nothing else: the time a forward pass is held against."""

    def label_logits(logits: Array) -> Results:
        z = jnp.take_along_axis(logits, problem.labels[:, None], axis=1)[:, 0].astype(jnp.float32)
        cap = problem.shape.head.logit_softcap
        return {"label logit": z if cap is None else cap * jnp.tanh(z / cap)}

    return Candidate(
        "gemm",
        "bare GEMM hidden · weightᵀ",
        GEMM,
        lambda: compile_jax(_product, problem.hidden, problem.weight),
        results=label_logits,
        logits_rounded=True,
    )


def _forward(
    problem: Problem, key: str, label: str, function: LogprobFunction, logits_rounded: bool = False
) -> Candidate:
    def forward(hidden: Array, weight: Array, labels: Array) -> dict[str, Any]:
        logprobs, entropy = function(hidden, weight, labels)
        return {"logprobs": logprobs, "entropy": entropy}

    return Candidate(
        key, label, FORWARD, lambda: compile_jax(forward, *problem.arrays[:3]), logits_rounded=logits_rounded
    )


def _both(problem: Problem, key: str, label: str, function: LogprobFunction, logits_rounded: bool = False) -> Candidate:
    def forward_backward(hidden: Array, weight: Array, labels: Array, a: Array, b: Array) -> dict[str, Any]:
        def loss(hidden: Array, weight: Array) -> tuple[Array, Any]:
            logprobs, entropy = function(hidden, weight, labels)
            total = jnp.sum(a * logprobs if entropy is None else a * logprobs + b * entropy)
            return total, (logprobs, entropy)

        (_, outputs), gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(hidden, weight)
        named = dict(zip(("logprobs", "entropy", "dhidden", "dweight"), (*outputs, *gradients), strict=True))
        return {name: x for name, x in named.items() if x is not None}

    return Candidate(
        key, label, BOTH, lambda: compile_jax(forward_backward, *problem.arrays), logits_rounded=logits_rounded
    )
