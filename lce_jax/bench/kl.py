"""``python -m lce_jax.bench.kl``: the exact KL of two heads, by `linear_kl` and from stored logits.

Times, memory, and how far the results of both lie apart. Logits have a standard deviation of 2.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax import linear_kl
from lce_jax.bench.measure import Run, compile_jax, interleave, median

if TYPE_CHECKING:
    from jaxtyping import Array

LOGIT_SPREAD = 2.0
DIRECTIONS = ("forward", "reverse")


class Row(NamedTuple):
    """One program of the table."""

    name: str
    seconds: float
    temp_bytes: int
    apart: float | None  # from stored logits: the largest over the results, by norm


def main(arguments: list[str] | None = None) -> list[Row]:
    """Measures and prints."""
    options = _parser().parse_args(arguments)
    tokens, hidden_size, vocab_size = options.shape
    on_gpu = jax.default_backend() == "gpu"
    dtype = jnp.dtype(options.dtype or ("bfloat16" if on_gpu else "float32"))
    operands = _draw(tokens, hidden_size, options.teacher_hidden_size or hidden_size, vocab_size, dtype)
    runs = {name: compile_jax(function, *operands) for name, function in _programs().items()}
    apart = {name: _apart(runs, name) for name in runs}
    samples = interleave(runs, options.rounds, on_gpu)
    rows = [Row(name, median(samples[name]), run.temp_bytes, apart[name]) for name, run in runs.items()]
    device = jax.devices()[0].device_kind
    print(f"{device}, JAX {jax.__version__}, {dtype.name}, T {tokens}, H {hidden_size}, V {vocab_size}")
    for row in rows:
        ratio, memory = row.seconds / rows[0].seconds, row.temp_bytes / 2**20
        times = f"{row.seconds * 1e3:9.2f} ms {ratio:6.2f} products {memory:8.0f} MiB"
        print(f"{row.name:42s}{times}" + ("" if row.apart is None else f"   {row.apart:.1e} from stored logits"))
    return rows


def _parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="python -m lce_jax.bench.kl", description=__doc__)
    shape = "tokens, the student's hidden size, vocabulary (default 1024,512,32768)"
    out.add_argument("--shape", type=_shape, default=(1024, 512, 32768), metavar="T,H,V", help=shape)
    out.add_argument("--teacher-hidden-size", type=int, metavar="G", help="default: the student's")
    out.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), help="default: float32 on CPU, else bfloat16"
    )
    out.add_argument("--rounds", type=int, default=5, help="timings of each row; the median is shown (default 5)")
    return out


def _shape(text: str) -> tuple[int, ...]:
    numbers = tuple(int(part) for part in text.split(","))
    if len(numbers) != 3 or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not three positive numbers T,H,V")
    return numbers


def _draw(tokens: int, hidden_size: int, teachers: int, vocab_size: int, dtype: Any) -> tuple[Array, ...]:
    """Hidden states and weight of the student and of the teacher, and a cotangent."""
    keys = jax.random.split(jax.random.key(0), 5)
    models = []
    for i, size in enumerate((hidden_size, teachers)):
        weight = jax.random.normal(keys[2 * i + 1], (vocab_size, size), dtype) * jnp.asarray(
            LOGIT_SPREAD * size**-0.5, dtype
        )
        models += [jax.random.normal(keys[2 * i], (tokens, size), dtype), weight]
    return *models, jax.random.normal(keys[4], (tokens,), jnp.float32)


def stored(hidden: Array, weight: Array, teacher_hidden: Array, teacher_weight: Array, direction: str) -> Array:
    """The divergence from two arrays of float32 logits."""
    pairs = (hidden, weight), (lax.stop_gradient(teacher_hidden), lax.stop_gradient(teacher_weight))
    dims = (((1,), (1,)), ((), ()))
    log_q, log_p = (
        jax.nn.log_softmax(lax.dot_general(h, w, dims, preferred_element_type=jnp.float32)) for h, w in pairs
    )
    log_p, log_q = (log_p, log_q) if direction == "forward" else (log_q, log_p)
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


def _programs() -> dict[str, Callable[..., Any]]:
    def product(hidden: Array, weight: Array, *_: Array) -> Array:
        return lax.dot_general(hidden, weight, (((1,), (1,)), ((), ())))

    def forward(function: Callable[..., Array], direction: str, *operands: Array) -> Array:
        return function(*operands[:4], direction=direction)

    def both(function: Callable[..., Array], direction: str, *operands: Array) -> tuple[Array, ...]:
        def loss(hidden: Array, weight: Array) -> tuple[Array, Array]:
            kl = function(hidden, weight, *operands[2:4], direction=direction)
            return jnp.sum(operands[4] * kl), kl

        gradients, kl = jax.grad(loss, argnums=(0, 1), has_aux=True)(*operands[:2])
        return kl, *gradients

    found: dict[str, Callable[..., Any]] = {"one product": product}
    for direction in DIRECTIONS:
        for name, function in (("linear_kl", linear_kl), ("stored logits", stored)):
            found[f"{direction}, {name}"] = functools.partial(forward, function, direction)
            found[f"{direction}, {name}, + backward"] = functools.partial(both, function, direction)
    return found


def _apart(runs: dict[str, Run], name: str) -> float | None:
    if "linear_kl" not in name:
        return None
    ours, theirs = (
        jax.tree.leaves(run.wait(run.launch()))
        for run in (runs[name], runs[name.replace("linear_kl", "stored logits")])
    )
    pairs = [[x.astype(jnp.float32) for x in pair] for pair in zip(ours, theirs, strict=True)]
    return max(float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in pairs)


if __name__ == "__main__":
    main()
