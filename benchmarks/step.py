"""A whole training step of a transformer, with stored logits and without.

The head is only a part of a training step, so this part shows the gain of a whole step. It trains a decoder-only
transformer with random weights and the sizes of a published model for a few steps, with AdamW, parameters and moments
in float32, products in bfloat16, and every block recomputed in the backward. For each batch it reports tokens per
second, the memory of the compiled step, and whether the step fits.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax import lax

from benchmarks.records import Job, Measured
from lce_jax import linear_cross_entropy, linear_loss, losses
from lce_jax.explain import _arguments
from lce_jax.types.scalars import format_bytes

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Float, Int

STEPS = 3  # steps that each round times together


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a transformer with grouped queries and a SwiGLU, whose embedding is also its head."""

    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_size: int
    mlp_size: int
    vocab_size: int


MODELS = {
    "tiny": Sizes(2, 64, 4, 2, 16, 128, 512),
    "qwen3-0.6b": Sizes(28, 1024, 16, 8, 128, 3072, 151936),
    "qwen3-1.7b": Sizes(28, 2048, 16, 8, 128, 6144, 151936),
}


def draw(sizes: Sizes, key: Array) -> dict[str, Array]:
    """Draws random parameters. Each array has the parameters of all blocks."""
    h, n, k, d, m = sizes.hidden_size, sizes.heads, sizes.kv_heads, sizes.head_size, sizes.mlp_size
    shapes = {"query": (h, n * d), "key": (h, k * d), "value": (h, k * d), "out": (n * d, h)}
    shapes |= {"gate": (h, m), "up": (h, m), "down": (m, h)}
    names = ["embed", *shapes]
    keys = dict(zip(names, jax.random.split(key, len(names)), strict=True))
    drawn = {
        name: jax.random.normal(keys[name], (sizes.layers, *shape)) * shape[0] ** -0.5 for name, shape in shapes.items()
    }
    return drawn | {"embed": jax.random.normal(keys["embed"], (sizes.vocab_size, h)) * h**-0.5}


def _normalize(x: Array) -> Array:
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)


def _rotate(x: Float[Array, "B S N D"]) -> Float[Array, "B S N D"]:
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 1e6 ** (-jnp.arange(half) / half)
    cos, sin = (f(angles)[None, :, None, :].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def hidden_states(
    sizes: Sizes, parameters: dict[str, Array], tokens: Int[Array, "B S"], dtype: Any
) -> Float[Array, "B S H"]:
    """Computes the hidden states that the head takes."""
    attention: Literal["cudnn", "xla"] = "cudnn" if jax.default_backend() == "gpu" and dtype == jnp.bfloat16 else "xla"

    @jax.checkpoint
    def block(x: Array, weights: dict[str, Array]) -> tuple[Array, None]:
        weights = jax.tree.map(lambda w: w.astype(dtype), weights)
        y = _normalize(x)
        q, k, v = ((y @ weights[name]).reshape(*x.shape[:2], -1, sizes.head_size) for name in ("query", "key", "value"))
        q, k = _rotate(q), _rotate(k)
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=attention)
        x = x + attended.reshape(*x.shape[:2], -1) @ weights["out"]
        y = _normalize(x)
        return x + (jax.nn.silu(y @ weights["gate"]) * (y @ weights["up"])) @ weights["down"], None

    blocks = {name: x for name, x in parameters.items() if name != "embed"}
    x = parameters["embed"][tokens].astype(dtype) * sizes.hidden_size**0.5
    return _normalize(lax.scan(block, x, blocks)[0])


def _cross_entropy_stored(hidden: Array, weight: Array, labels: Array, _: Any) -> Array:
    log_p = jax.nn.log_softmax((hidden @ weight.T).astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(log_p, labels[..., None], axis=-1))


_policy = losses.with_entropy_bonus(losses.ppo_clip, 0.01)


def _policy_stored(hidden: Array, weight: Array, labels: Array, more: tuple[Array, Array]) -> Array:
    log_p = jax.nn.log_softmax((hidden @ weight.T).astype(jnp.float32))
    logprobs = jnp.take_along_axis(log_p, labels[..., None], axis=-1)[..., 0]
    entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
    return jnp.mean(_policy(logprobs, entropy, logprobs, *more))  # this loss does not use its third argument, lse


def _policy_ours(hidden: Array, weight: Array, labels: Array, more: tuple[Array, Array]) -> Array:
    return linear_loss(_policy, hidden, weight, labels, *more)[0] / labels.size


OBJECTIVES: dict[str, dict[str, Callable[..., Array]]] = {
    "cross entropy": {
        "logits stored": _cross_entropy_stored,
        "lce_jax": lambda *operands: linear_cross_entropy(*operands[:3]),
    },
    "PPO + entropy": {"logits stored": _policy_stored, "lce_jax": _policy_ours},
}


def train_step(sizes: Sizes, head: Callable[..., Array], optimizer: Any, dtype: Any) -> Any:
    """Returns a training step, ``(state, tokens, more) -> (state, loss)``, which donates the state."""

    def loss(parameters: dict[str, Array], tokens: Array, more: Any) -> Array:
        hidden = hidden_states(sizes, parameters, tokens[:, :-1], dtype)
        return head(hidden, parameters["embed"].astype(dtype), tokens[:, 1:], more)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, tokens: Array, more: Any) -> tuple[Any, Array]:
        parameters, moments = state
        value, gradients = jax.value_and_grad(loss)(parameters, tokens, more)
        updates, moments = optimizer.update(gradients, moments, parameters)
        return (jax.tree.map(jnp.add, parameters, updates), moments), value

    return step


def measure(
    sizes: Sizes, objective: str, head: str, batch: int, length: int, rounds: int, dtype: Any
) -> dict[str, Any]:
    """Measures one row: seconds of a step, bytes of the compiled step with its arguments, and the last loss.

    A step that runs out of memory has no seconds. If it already does so while compiling, it has no bytes either.
    """
    optimizer = optax.adamw(1e-5)
    step = train_step(sizes, OBJECTIVES[objective][head], optimizer, dtype)
    tokens = jax.random.randint(jax.random.key(1), (batch, length + 1), 0, sizes.vocab_size)
    more = -jnp.full((batch, length), 11.0), jax.random.normal(jax.random.key(2), (batch, length))
    row = {"objective": objective, "head": head, "batch": batch, "tokens": batch * length}
    row |= dict.fromkeys(("seconds", "memory_bytes", "loss"))
    try:
        parameters = jax.jit(functools.partial(draw, sizes))(jax.random.key(0))
        state = parameters, jax.jit(optimizer.init)(parameters)
        compiled = step.lower(state, tokens, more).compile()
        memory: Any = compiled.memory_analysis()
        results = memory.output_size_in_bytes - memory.alias_size_in_bytes
        row["memory_bytes"] = memory.argument_size_in_bytes + results + memory.temp_size_in_bytes
        state, value = jax.block_until_ready(compiled(state, tokens, more))
        samples = []
        for _ in range(rounds):
            start = time.perf_counter()
            for _ in range(STEPS):
                state, value = compiled(state, tokens, more)
            jax.block_until_ready(value)
            samples.append((time.perf_counter() - start) / STEPS)
    except jax.errors.JaxRuntimeError as failure:
        if "RESOURCE_EXHAUSTED" not in str(failure):
            raise
        return row
    if not jnp.isfinite(value):
        raise FloatingPointError(f"{objective}, {head}: a loss of {value} after {1 + rounds * STEPS} steps")
    return row | {"seconds": statistics.median(samples), "loss": float(value)}


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the options of this part."""
    on_gpu = jax.default_backend() == "gpu"
    models = f"one of {', '.join(MODELS)} (default: qwen3-1.7b on a GPU, else tiny)"
    command.add_argument("--model", choices=MODELS, default="qwen3-1.7b" if on_gpu else "tiny", help=models)
    command.add_argument("--batch", type=_arguments.positives, default=(2, 4), metavar="B,B,...", help="sequences")
    command.add_argument("--length", type=_arguments.positive, default=4096 if on_gpu else 128, help="tokens of each")
    command.add_argument("--objective", choices=OBJECTIVES, action="append", help="default: all; repeatable")


def jobs(options: argparse.Namespace, _: argparse.ArgumentParser) -> list[Job]:
    """Returns a job for each objective and batch, which measures both heads."""
    result = []
    for objective in options.objective or OBJECTIVES:
        for batch in options.batch:
            sizes = {"--model": options.model, "--length": options.length, "--batch": batch, "--objective": objective}
            arguments = [str(word) for pair in sizes.items() for word in pair]
            result.append(Job(["step", *arguments], functools.partial(_measure, options, objective, batch)))
    return result


def _measure(options: argparse.Namespace, objective: str, batch: int) -> Measured:
    sizes, rows = MODELS[options.model], {}
    dtype = jnp.dtype("bfloat16" if jax.default_backend() == "gpu" else "float32")
    for head in OBJECTIVES[objective]:
        rows[head] = measure(sizes, objective, head, batch, options.length, options.rounds, dtype)
        seconds, memory_bytes = rows[head]["seconds"], rows[head]["memory_bytes"]
        speed = "out of memory" if seconds is None else f"{batch * options.length / seconds:,.0f} tokens/s"
        print(f"{objective}, {head}, {batch} sequences: {speed}, {format_bytes(memory_bytes or 0)}", flush=True)
    about = {"model": options.model, "sizes": dataclasses.asdict(sizes), "length": options.length, "dtype": dtype.name}
    return Measured(rows, about)
