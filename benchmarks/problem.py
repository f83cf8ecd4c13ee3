"""The operands of one benchmark problem, the reference results, and the bounds of right results.

No speed is printed for a result that differs from the reference by more than its bound. The reference stores logits in
float32, with exact products, over blocks of tokens, so that it fits wherever the problem fits.

The bounds, where eps(d) is the spacing of dtype d at 1:

    outputs    max |x - ref| / max(1, |ref|)  ≤  64 eps(f32) + eps(x's dtype) + r · max |logit|
    gradients  ‖x - ref‖ / ‖ref‖              ≤  64 eps(f32) + 2 eps(operands' dtype) + r · max |logit|

64 eps(f32) = 7.6e-6 allows for float32 sums over H, V or T terms, in the result and in the reference. Rounding changes
a number by at most eps / 2 of itself. A gradient is rounded twice, as dlogits and at the end; 2 eps is twice that.

r is eps of the dtype that a candidate rounds its logits to. On a GPU it is at least the error of the products: 2^-10
for float32 operands, which are multiplied as TF32, and H / 16 · 2^-24 for half precision. Tensor cores truncate the
float32 sum of half-precision products after every 16 terms, by half a unit in the last place on average, always towards
zero. An error of r / 2 · |logit| in a logit causes an error of that size in the logit, in lse and in the probabilities.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Float, Int

type Shape = tuple[int, int, int]  # tokens, hidden size, vocabulary
type Objective = Literal["logprob+entropy", "logprob", "sum of logprobs"]
type Results = Mapping[str, Array]

CPU_SHAPES = ((2048, 512, 32768),)
GPU_SHAPES = (
    (4096, 4096, 151936),
    (8192, 4096, 131072),
    (8192, 2048, 151936),
    (8192, 1024, 151936),
    (32768, 4096, 151936),
    (512, 4096, 151936),
)
LOGIT_SPREAD = 3.0  # standard deviation of the logits; the softmax makes a third of the gradients then
GRADIENTS = ("dhidden", "dweight")
TOPK_NAME, MOST_LIKELY = "logprobs of the most likely", 64
BLOCK_BYTES = 512 << 20  # of the reference's logits in one block
TF32_EPS = 2.0**-10
TENSOR_CORE_TERMS = 16  # between two roundings of the float32 sum of a product in half precision
TENSOR_CORE_CUT = 2.0**-24


class Problem(NamedTuple):
    """The operands of one shape, and the cotangents of its two outputs."""

    hidden: Float[Array, "T H"]
    weight: Float[Array, "V H"]
    labels: Int[Array, "T"]
    logprob_weight: Float[Array, "T"]
    entropy_weight: Float[Array, "T"]


def default_dtype() -> Any:
    """Returns the dtype of operands on this device."""
    return jnp.dtype("float32" if jax.default_backend() == "cpu" else "bfloat16")


def sizes(shape: Shape) -> dict[str, int]:
    """Returns the sizes by name, as they stand in the file of a card."""
    return dict(zip("THV", shape, strict=True))


def describe_shape(shape: Shape) -> str:
    """Returns the sizes in words."""
    return ", ".join(f"{name} {size:,}" for name, size in sizes(shape).items())


def random_problem(shape: Shape, dtype: Any, spread: float = LOGIT_SPREAD) -> Problem:
    """Normal operands whose logits have the standard deviation ``spread``; random labels; normal cotangents."""
    tokens, _, vocab_size = shape

    @jax.jit
    def draw(key: Array) -> Problem:
        model_key, label_key, *seed_keys = jax.random.split(key, 4)
        labels = jax.random.randint(label_key, (tokens,), 0, vocab_size, jnp.int32)
        seeds = (jax.random.normal(key, (tokens,), jnp.float32) for key in seed_keys)
        return Problem(*draw_model(model_key, shape, dtype, spread), labels, *seeds)

    return jax.block_until_ready(draw(jax.random.key(0)))


def draw_model(key: Array, shape: Shape, dtype: Any, spread: float = LOGIT_SPREAD) -> tuple[Array, Array]:
    """Draws normal hidden states, and a weight that gives logits the standard deviation ``spread``."""
    (tokens, hidden_size, vocab_size), (hidden_key, weight_key) = shape, jax.random.split(key)
    scale = jnp.asarray(spread * hidden_size**-0.5, dtype)
    weight = jax.random.normal(weight_key, (vocab_size, hidden_size), dtype) * scale
    return jax.random.normal(hidden_key, (tokens, hidden_size), dtype), weight


def cotangents(problem: Problem, objective: Objective) -> tuple[Array, Array]:
    """Returns the weights of logprobs and entropy in the scalar that an objective differentiates."""
    ones = jnp.ones_like(problem.logprob_weight)
    if objective == "sum of logprobs":
        return ones, 0 * ones
    return problem.logprob_weight, problem.entropy_weight if objective == "logprob+entropy" else 0 * ones


def stored(
    hidden: Array,
    weight: Array,
    labels: Array,
    *,
    where: Array | None = None,
    temperature: Array | float = 1.0,
    candidates: Array | None = None,
    logit_softcap: float | None = None,
    logit_scale: float = 1.0,
    vocab_size: int | None = None,
) -> dict[str, Array]:
    """Computes the outputs of `linear_logprobs` and `linear_topk` by name, from stored logits.

    A label out of vocabulary has a logprob of 0 and the gradient of -lse. A candidate out of vocabulary has no
    gradient.
    """
    z = logit_scale * jnp.matmul(hidden, weight.T, precision="highest")[:, :vocab_size]
    z = z if logit_softcap is None else logit_softcap * jnp.tanh(z / logit_softcap)
    z /= jnp.broadcast_to(temperature, labels.shape)[:, None]
    lse = jax.nn.logsumexp(z, axis=1, keepdims=True)
    logp = z - lse
    p = jnp.exp(logp)

    def take(ids: Array, otherwise: Any) -> Array:
        inside = (ids >= 0) & (ids < z.shape[1])
        return jnp.where(inside, jnp.take_along_axis(logp, jnp.where(inside, ids, 0), axis=1), otherwise)

    results = {
        "logprobs": take(labels[:, None], jax.lax.stop_gradient(lse) - lse)[:, 0],
        "entropy": -jnp.sum(p * logp, axis=1),
        "lse": lse[:, 0],
        "max_logit": jnp.max(z, axis=1),
        "min_logit": jnp.min(z, axis=1),
        "sum_p_squared": jnp.sum(p * p, axis=1),
        TOPK_NAME: jax.lax.top_k(logp, min(MOST_LIKELY, logp.shape[1]))[0],
    }
    if candidates is not None:
        results["candidate_logprobs"] = take(candidates, 0.0)
    return results if where is None else {name: jnp.where(where, x.T, 0.0).T for name, x in results.items()}


def weighted(outputs: Any, a: Array, b: Array) -> Array:
    """Returns the scalar that is differentiated: outputs weighted by cotangents, candidates by that of the label."""
    more = outputs.get("candidate_logprobs")
    total = jnp.sum(a * outputs["logprobs"]) + (
        0.0 if outputs.get("entropy") is None else jnp.sum(b * outputs["entropy"])
    )
    return total if more is None else total + jnp.sum(a[:, None] * more)


def reference(problem: Problem, a: Array, b: Array, **options: Any) -> dict[str, Array]:
    """Computes outputs of `stored`, their sum weighted by ``a`` and ``b``, and its gradients, in blocks of tokens."""
    static: dict[str, Any] = {name: x for name, x in options.items() if not isinstance(x, jax.Array)}

    @jax.jit
    def block(weight: Array, hidden: Array, labels: Array, a: Array, b: Array, arrays: dict[str, Any]) -> Any:
        def loss(hidden: Array, weight: Array) -> tuple[Array, dict[str, Array]]:
            out = stored(hidden, weight, labels, **static, **arrays)
            return weighted(out, a, b), out

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(hidden.astype(jnp.float32), weight)

    weight = problem.weight.astype(jnp.float32)
    total, dweight, parts = jnp.float32(0), jnp.zeros_like(weight), []
    arrays = {name: x for name, x in options.items() if name not in static}
    for operands in split_blocks((problem.hidden, problem.labels, a, b, arrays), problem.weight.shape[0]):
        (value, out), (dhidden, dw) = block(weight, *operands)
        total, dweight = total + value, dweight + dw
        parts.append(out | {"label logit": out["logprobs"] + out["lse"], "dhidden": dhidden})
    return join_blocks(parts) | {"loss": total, "dweight": dweight}


def split_blocks(per_token: Any, vocab_size: int) -> Iterator[Any]:
    """Splits arrays of all tokens into blocks, whose logits in float32 take at most `BLOCK_BYTES`.

    The tokens of a block are a power of two. Most token counts are, so the last block is as large as the others.
    """
    tokens = jax.tree.leaves(per_token)[0].shape[0]
    rows = 1 << (max(1, BLOCK_BYTES // (4 * vocab_size)).bit_length() - 1)
    for start in range(0, tokens, rows):
        yield jax.tree.map(lambda x, start=start: x[start : start + rows], per_token)


def join_blocks(parts: Sequence[Results]) -> dict[str, Array]:
    """Concatenates the arrays of all blocks."""
    return {name: jnp.concatenate([part[name] for part in parts]) for name in parts[0]}


def largest_logit(right: Results) -> float:
    """Returns the largest magnitude of a logit."""
    return float(jnp.maximum(jnp.max(right["max_logit"]), -jnp.min(right["min_logit"])))


def product_eps(problem: Problem) -> float:
    """Returns the relative error of a GPU's products: that of TF32, or of truncated sums in half precision."""
    if next(iter(problem.hidden.devices())).platform != "gpu":
        return 0.0
    if problem.hidden.dtype == jnp.float32:
        return TF32_EPS
    return problem.hidden.shape[1] / TENSOR_CORE_TERMS * TENSOR_CORE_CUT


def error(name: str, result: Array, right: Array) -> float:
    """Returns the error of ``result``: relative by norm for gradients, that of the worst element for outputs."""
    if result.shape != right.shape:
        return float("inf")
    if name in GRADIENTS:
        difference, size = _norms(result, right)
        return float(difference / size)
    return float(jnp.max(jnp.abs(result.astype(jnp.float32) - right) / jnp.maximum(1.0, jnp.abs(right))))


def bound(
    name: str, result: Array, problem: Problem, logits_rounded: bool, largest_logit: float, slack: float = 0.0
) -> float:
    """Returns the largest `error` of a right result, as in the module's docstring. ``slack`` is added for gradients."""
    sums = 64 * float(jnp.finfo(jnp.float32).eps)
    operand_eps = float(jnp.finfo(problem.hidden.dtype).eps)
    logits = max(product_eps(problem), operand_eps if logits_rounded else 0.0) * largest_logit
    result_eps = slack + 2 * operand_eps if name in GRADIENTS else float(jnp.finfo(result.dtype).eps)
    return sums + result_eps + logits


class Verdict(NamedTuple):
    """The `error` and the `bound` of each result, and the reason why the results are wrong, or None."""

    errors: dict[str, float]
    bounds: dict[str, float]
    reason: str | None


def verdict(
    results: Results, problem: Problem, right: Results, logits_rounded: bool = False, slack: float = 0.0
) -> Verdict:
    """Compares results by name with those of `reference`."""
    largest = largest_logit(right)
    errors = {name: error(name, x, right[name]) for name, x in results.items()}
    bounds = {name: bound(name, x, problem, logits_rounded, largest, slack) for name, x in results.items()}
    wrong = [name for name in errors if not errors[name] <= bounds[name]]  # also where it is NaN
    reasons = [f"{name} is off by {errors[name]:.2g}, the bound is {bounds[name]:.2g}" for name in wrong]
    return Verdict(errors, bounds, f"wrong result: {', '.join(reasons)}" if reasons else None)


@jax.jit
def _norms(result: Array, right: Array) -> tuple[Array, Array]:
    """Returns the norms of the difference and of ``right``, in one pass that stores no upcast operand."""
    return jnp.sqrt(jnp.sum((result.astype(jnp.float32) - right) ** 2)), jnp.sqrt(jnp.sum(right**2))
