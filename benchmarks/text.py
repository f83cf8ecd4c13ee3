"""Operands with distributions like those of a language model, and the share of tiles that a threshold leaves out.

Most probabilities of a real softmax are negligible, and the others lie in few tiles. Random logits do not show the gain
of a threshold. So these operands are drawn as follows:

- Every token's logits contain a unigram prior by Zipf's law, -ln(rank + 10). Ids follow the ranks loosely, like the
  merges of a tokenizer, so that frequent tokens share tiles.
- Each token has `CANDIDATES` plausible ids, drawn from that prior. Its hidden state is the sum of their rows of the
  weight, with squares of sorted uniform numbers as amplitudes, plus a little noise.
- The label is drawn from the softmax over these candidates.

At (8192, 4096, 151936) in bfloat16 the mean entropy is 0.72 nats, and in 77 % of the tiles of 128 tokens by 256 columns
every probability is below 2^-12 (on an H200).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.problem import Problem, Shape
from lce_jax import explain, linear_logprobs, mosaic
from lce_jax.call import _dispatch

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array

CANDIDATES = 32  # plausible ids of a token
GAIN = 15.0  # how far the likeliest id's logit lies above the prior
NOISE = 0.3  # standard deviation of the noise in hidden states
PRIOR = 8.0  # the first number of hidden, which multiplies the prior in the weight's first number
SCATTER = 0.7  # standard deviation of ids around their ranks, in natural logarithms
THRESHOLD = 2.0**-12  # CCE's default


def text_problem(shape: Shape, dtype: Any) -> Problem:
    """Draws operands as in the module's docstring, and normal cotangents."""
    tokens, hidden_size, vocab_size = shape

    @jax.jit
    def draw(key: Array) -> Problem:
        keys = jax.random.split(key, 8)
        rank = jnp.arange(vocab_size) + 10.0
        prior = -jnp.log(rank * jnp.exp(SCATTER * jax.random.normal(keys[0], rank.shape)))
        prior -= jax.nn.logsumexp(prior)
        weight = jax.random.normal(keys[1], (vocab_size, hidden_size), dtype)
        weight = (weight * jnp.asarray(hidden_size**-0.5, dtype)).at[:, 0].set((prior / PRIOR).astype(dtype))
        total = jnp.cumsum(jnp.exp(prior))
        drawn = jax.random.uniform(keys[2], (tokens, CANDIDATES)) * total[-1]
        ids = jnp.minimum(jnp.searchsorted(total, drawn), vocab_size - 1)
        amplitude = jnp.sort(jax.random.uniform(keys[3], ids.shape), axis=1) ** 2
        noise = NOISE * jax.random.normal(keys[4], (tokens, hidden_size))

        def draw_token(token: tuple[Array, ...]) -> tuple[Array, Array]:
            ids, amplitude, noise, key = token
            rows = weight[ids].astype(jnp.float32)
            hidden = (noise + GAIN * amplitude @ rows).at[0].set(PRIOR)
            label = ids[jax.random.categorical(key, rows @ hidden)]
            return hidden.astype(dtype), label.astype(jnp.int32)

        each = (ids, amplitude, noise, jax.random.split(keys[5], tokens))
        hidden, labels = lax.map(draw_token, each, batch_size=256)
        cotangents = (jax.random.normal(key, (tokens,), jnp.float32) for key in keys[6:])
        return Problem(hidden, weight, labels, *cotangents)

    return jax.block_until_ready(draw(jax.random.key(0)))


def measure_skipped(problem: Problem, implementation: str | None) -> dict[str, float]:
    """Returns the share of tiles that `THRESHOLD` leaves out of the gradients, and the mean probability in them.

    Both are 0 if the implementation cannot leave out tiles.
    """
    options: Any = {
        "gradient_threshold": THRESHOLD,
        "stats": True,
        "implementation": implementation or tuple(_dispatch.IMPLEMENTATIONS),
    }
    plan = explain(*problem[:3], **options)
    out = jax.jit(lambda *operands: linear_logprobs(*operands, **options))(*problem[:3])
    kernels = plan.implementation == mosaic.NAME
    skipped = share_below(problem, plan.tiles["tokens"], plan.tiles["vocabulary"]) if kernels else 0.0
    return {"skipped": skipped, "dropped_mass": float(jnp.mean(out.dropped_mass))}


def share_below(problem: Problem, rows: int, columns: int) -> float:
    """Returns the share of tiles of ``rows`` by ``columns`` without a label and with no probability of `THRESHOLD`."""
    (hidden, weight, labels, *_), vocab_size = problem, problem.weight.shape[0]

    @jax.jit
    def share_of_block(weight: Array, hidden: Array, labels: Array) -> Array:
        logits = lax.dot_general(hidden, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        is_label = jnp.arange(vocab_size) == labels[:, None]
        counts = (jax.nn.softmax(logits) >= THRESHOLD) | is_label
        padded = jnp.pad(counts, ((0, 0), (0, -vocab_size % columns)))
        return jnp.mean(~jnp.any(padded.reshape(len(labels), -1, columns), axis=(0, 2)))

    starts = range(0, len(labels), rows)
    return float(sum(share_of_block(weight, hidden[i : i + rows], labels[i : i + rows]) for i in starts) / len(starts))
