"""Operands whose distributions look like a language model's, and what a threshold leaves out of their gradients.

Most of a real softmax is nothing, and what is something lies in few tiles: a gain that random logits do not show. Here

- a unigram prior by Zipf's law, -ln(rank + 10), is in every token's logits. Ids follow the ranks loosely, as the merges
  of a tokenizer do, so that frequent tokens share tiles;
- each token has `CANDIDATES` plausible ids, drawn from that prior. Its hidden state is the sum of their rows of the
  weight, with squares of sorted uniform numbers as amplitudes, and a little noise;
- the label is drawn from the softmax over these candidates.

At (8192, 4096, 151936) in bfloat16 the mean entropy is 0.72 nats, and 77 % of the tiles of 128 tokens by 256 columns
have no probability of 2^-12 (on an H200).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.problem import Problem
from benchmarks.shapes import Shape
from lce_jax import _dispatch, explain, local, mosaic
from lce_jax.mathematics._statistics import Normalizer

if TYPE_CHECKING:
    from lce_jax._shapes import Array

CANDIDATES = 32  # plausible ids of a token
GAIN = 15.0  # of the likeliest one's logit above the prior
NOISE = 0.3  # of each hidden number
PRIOR = 8.0  # hidden's first number, which multiplies the prior in the weight's first
SCATTER = 0.7  # of the ids around the ranks, in natural logarithms
THRESHOLD = 2.0**-12  # CCE's default


def text_problem(shape: Shape, dtype: Any, seed: int = 0) -> Problem:
    """Operands as the module says; normal cotangents."""
    tokens, head = shape.tokens, shape.head

    @jax.jit
    def draw(key: Array) -> tuple[Array, ...]:
        keys = jax.random.split(key, 8)
        rank = jnp.arange(head.vocab_size) + 10.0
        prior = -jnp.log(rank * jnp.exp(SCATTER * jax.random.normal(keys[0], rank.shape)))
        prior -= jax.nn.logsumexp(prior)
        weight = jax.random.normal(keys[1], (head.vocab_size, head.hidden_size), dtype)
        weight = (weight * jnp.asarray(head.hidden_size**-0.5, dtype)).at[:, 0].set((prior / PRIOR).astype(dtype))
        total = jnp.cumsum(jnp.exp(prior))
        drawn = jax.random.uniform(keys[2], (tokens, CANDIDATES)) * total[-1]
        ids = jnp.minimum(jnp.searchsorted(total, drawn), head.vocab_size - 1)
        amplitude = jnp.sort(jax.random.uniform(keys[3], ids.shape), axis=1) ** 2
        noise = NOISE * jax.random.normal(keys[4], (tokens, head.hidden_size))

        def of_token(own: tuple[Array, ...]) -> tuple[Array, Array]:
            ids, amplitude, noise, key = own
            rows = weight[ids].astype(jnp.float32)
            hidden = (noise + GAIN * amplitude @ rows).at[0].set(PRIOR)
            label = ids[jax.random.categorical(key, rows @ hidden)]
            return hidden.astype(dtype), label.astype(jnp.int32)

        each = (ids, amplitude, noise, jax.random.split(keys[5], tokens))
        hidden, labels = lax.map(of_token, each, batch_size=256)
        cotangents = (jax.random.normal(key, (tokens,), jnp.float32) for key in keys[6:])
        return hidden, weight, labels, *cotangents

    return Problem(shape, *jax.block_until_ready(draw(jax.random.key(seed))))


class LeftOut(NamedTuple):
    """What a threshold leaves out."""

    skipped: float  # share of the tiles
    dropped_mass: float  # mean over the tokens


def left_out(problem: Problem, threshold: float, implementation: str | None) -> LeftOut:
    """Of the problem's gradients; nothing where the implementation has no tiles to leave out."""
    options: Any = {
        "gradient_threshold": threshold,
        "stats": True,
        "logit_softcap": problem.shape.head.logit_softcap,
        "implementation": implementation or _dispatch.AUTOMATIC,
    }
    operands = problem.arrays[:3]
    plan = explain(*operands, **options)

    @jax.jit
    def of_tiles(*operands: Array) -> Any:
        stats, cache = local.statistics(*operands, keep_cache=True, **options)
        of_rows = Normalizer(stats.max, stats.sumexp)
        return mosaic.selected(plan.case, cache, of_rows, None)

    if plan.implementation != mosaic.NAME:
        return LeftOut(0.0, 0.0)
    live, dropped = of_tiles(*operands)
    blocks = -(-plan.case.num_tokens // plan.tiles["tokens"])
    return LeftOut(1.0 - float(live[:, :blocks].mean()), float(dropped.mean()))
