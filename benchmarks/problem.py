"""One problem's arrays, and what a right answer to it is.

No speed is printed for a result that differs from the reference: the materialised oracle of this package, run in
float32 with exact products over blocks of tokens, so that it fits wherever the problem does.

How far a right result may lie from it, with eps(d) the spacing of dtype d at 1:

    outputs    max |x - ref| / max(1, |ref|)  ≤  64 eps(f32) + eps(x's dtype) + r · max |logit|
    gradients  ‖x - ref‖ / ‖ref‖              ≤  64 eps(f32) + 2 eps(operands' dtype) + r · max |logit|

64 eps(f32) = 7.6e-6 is for float32 sums over H, V or T terms, in the result and in the reference. Rounding moves a
number by at most eps / 2 of itself. A gradient is rounded twice, as dlogits and in the end; 2 eps is twice that. r is
eps of the dtype that a candidate rounds its logits to; on a GPU at least what its products lose, 2^-10 where float32
operands are multiplied as TF32, and H / 16 · 2^-24 for half precision, whose tensor cores cut off the float32 sum after
every 16 terms: half a unit in the last place on average, always towards zero. A logit that is off by r / 2 · |logit|
moves itself, lse and the probabilities by that much each.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.shapes import Shape
from lce_jax import LogprobOutput, linear_logprobs
from lce_jax.explain._models import ModelHead

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Float, Int

type Objective = Literal["logprob+entropy", "logprob", "sum of logprobs"]
type Results = Mapping[str, Array]

LOGIT_SPREAD = 3.0  # standard deviation of the logits, at which the softmax carries a third of the gradients
GRADIENTS = ("dhidden", "dweight")
TOPK_NAME, MOST_LIKELY = "logprobs of the most likely", 64
BLOCK_BYTES = 512 << 20  # of the reference's logits at a time
TF32_EPS = 2.0**-10
TENSOR_CORE_TERMS = 16  # between two roundings of the float32 sum of a product in half precision
TENSOR_CORE_CUT = 2.0**-24


class Problem(NamedTuple):
    """The operands of one shape, and the cotangents of its two outputs."""

    shape: Shape
    hidden: Float[Array, "T H"]
    weight: Float[Array, "V H"]
    labels: Int[Array, "T"]
    logprob_weight: Float[Array, "T"]
    entropy_weight: Float[Array, "T"]

    @property
    def arrays(self) -> tuple[Array, ...]:
        """What a candidate takes: everything but the shape."""
        return self[1:]


class Reference(NamedTuple):
    """The right results for one objective, and the largest logit by magnitude."""

    results: dict[str, Array]
    largest_logit: float


def random_problem(shape: Shape, dtype: Any, seed: int = 0) -> Problem:
    """Normal operands whose logits have standard deviation `LOGIT_SPREAD`; random labels; normal cotangents."""
    tokens, head = shape.tokens, shape.head

    @jax.jit
    def draw(key: Array) -> tuple[Array, ...]:
        keys = jax.random.split(key, 5)
        scale = jnp.asarray(LOGIT_SPREAD * head.hidden_size**-0.5, dtype)
        return (
            jax.random.normal(keys[0], (tokens, head.hidden_size), dtype),
            jax.random.normal(keys[1], (head.vocab_size, head.hidden_size), dtype) * scale,
            jax.random.randint(keys[2], (tokens,), 0, head.vocab_size, jnp.int32),
            jax.random.normal(keys[3], (tokens,), jnp.float32),
            jax.random.normal(keys[4], (tokens,), jnp.float32),
        )

    return Problem(shape, *jax.block_until_ready(draw(jax.random.key(seed))))


def cotangents(problem: Problem, objective: Objective) -> tuple[Array, Array]:
    """The weights of logprobs and entropy in the scalar that an objective differentiates."""
    ones = jnp.ones_like(problem.logprob_weight)
    if objective == "sum of logprobs":
        return ones, 0 * ones
    return problem.logprob_weight, problem.entropy_weight if objective == "logprob+entropy" else 0 * ones


def reference(problem: Problem, objective: Objective, topk: bool = True) -> Reference:
    """Outputs, the objective and its gradients in float32, from blocks of tokens through the materialised oracle.

    ``topk`` says whether the most likely tokens are among the outputs, which takes a product more and a selection.
    """
    head = problem.shape.head
    weight = problem.weight.astype(jnp.float32)
    per_token = (problem.hidden, problem.labels, *cotangents(problem, objective))
    most = max(1, BLOCK_BYTES // (4 * head.vocab_size))
    rows = 1 << (most.bit_length() - 1)  # a power of two, as most token counts are: the last block is then whole
    loss, outputs, tops, dhidden, dweight = jnp.float32(0), [], [], [], jnp.zeros_like(weight)
    for start in range(0, problem.shape.tokens, rows):
        (value, out), (dh, dw) = _block(head.logit_softcap, weight, *(x[start : start + rows] for x in per_token))
        loss, dweight = loss + value, dweight + dw
        outputs.append(out)
        if topk:
            tops.append(_block_topk(head, weight, problem.hidden[start : start + rows]) - out.lse[:, None])
        dhidden.append(dh)
    whole = jax.tree.map(lambda *parts: jnp.concatenate(parts), *outputs)
    results = {
        "logprobs": whole.logprobs,
        "entropy": whole.entropy,
        "lse": whole.lse,
        "label logit": whole.logprobs + whole.lse,
        "loss": loss,
        "dhidden": jnp.concatenate(dhidden),
        "dweight": dweight,
    }
    if topk:
        results[TOPK_NAME] = jnp.concatenate(tops)
    return Reference(results, float(jnp.maximum(jnp.max(whole.max_logit), -jnp.min(whole.min_logit))))


@functools.partial(jax.jit, static_argnums=0)
def _block(
    softcap: float | None, weight: Array, hidden: Array, labels: Array, a: Array, b: Array
) -> tuple[tuple[Array, LogprobOutput], tuple[Array, Array]]:
    """The objective and the outputs over one block of tokens, and the gradients in hidden and weight."""

    def loss(hidden: Array, weight: Array) -> tuple[Array, LogprobOutput]:
        out = linear_logprobs(hidden, weight, labels, logit_softcap=softcap, stats=True, implementation="reference")
        return jnp.sum(a * out.logprobs + b * jnp.asarray(out.entropy)), out

    return jax.value_and_grad(loss, (0, 1), has_aux=True)(hidden.astype(jnp.float32), weight)


def num_largest(head: ModelHead) -> int:
    """The k of the rows that select the most likely tokens."""
    return min(MOST_LIKELY, head.vocab_size)


@functools.partial(jax.jit, static_argnums=0)
def _block_topk(head: ModelHead, weight: Array, hidden: Array) -> Array:
    """The largest logits over one block of tokens."""
    z = jnp.matmul(hidden.astype(jnp.float32), weight.T, precision="highest")
    z = z if head.logit_softcap is None else head.logit_softcap * jnp.tanh(z / head.logit_softcap)
    return jax.lax.top_k(z, num_largest(head))[0]


def product_eps(problem: Problem) -> float:
    """What a GPU's products lose, relative to the logits: to TF32 in float32, to truncated sums in half precision."""
    if next(iter(problem.hidden.devices())).platform != "gpu":
        return 0.0
    if problem.hidden.dtype == jnp.float32:
        return TF32_EPS
    return problem.shape.head.hidden_size / TENSOR_CORE_TERMS * TENSOR_CORE_CUT


def error(name: str, result: Array, right: Array) -> float:
    """How far ``result`` lies from ``right``: by norm for gradients, by the worst element for outputs."""
    if result.shape != right.shape:
        return float("inf")
    if name in GRADIENTS:
        difference, size = _norms(result, right)
        return float(difference / size)
    return float(jnp.max(jnp.abs(result.astype(jnp.float32) - right) / jnp.maximum(1.0, jnp.abs(right))))


def bound(
    name: str, result: Array, problem: Problem, logits_rounded: bool, largest_logit: float, slack: float = 0.0
) -> float:
    """The largest `error` of a right result; see the module's docstring. Gradients may lie ``slack`` further off."""
    sums = 64 * float(jnp.finfo(jnp.float32).eps)
    operand_eps = float(jnp.finfo(problem.hidden.dtype).eps)
    logits = max(product_eps(problem), operand_eps if logits_rounded else 0.0) * largest_logit
    result_eps = slack + 2 * operand_eps if name in GRADIENTS else float(jnp.finfo(result.dtype).eps)
    return sums + result_eps + logits


def refusal(
    results: Results, problem: Problem, right: Reference, logits_rounded: bool = False, slack: float = 0.0
) -> tuple[str | None, dict[str, float]]:
    """Why ``results`` are wrong (None if they are right), and each one's `error`."""
    errors = {name: error(name, x, right.results[name]) for name, x in results.items()}
    for name, x in results.items():
        limit = bound(name, x, problem, logits_rounded, right.largest_logit, slack)
        if not errors[name] <= limit:  # also where it is NaN
            return f"wrong result: {name} is off by {errors[name]:.2g}, the bound is {limit:.2g}", errors
    return None, errors


@jax.jit
def _norms(result: Array, right: Array) -> tuple[Array, Array]:
    """Norm of the difference and of ``right``, in one pass that stores neither upcast operand."""
    return jnp.sqrt(jnp.sum((result.astype(jnp.float32) - right) ** 2)), jnp.sqrt(jnp.sum(right**2))
