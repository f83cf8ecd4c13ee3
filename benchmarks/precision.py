"""float32 operands by what multiplies them: lce_jax and stored logits, forward and with gradients.

A product of the same operands in bfloat16 is the unit of time. Results are compared with stored logits under
precision="highest"; logits have a standard deviation of 3. What the device cannot multiply so is left out.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks import programs
from benchmarks.programs import PRODUCT, Program
from benchmarks.records import Job, Measured
from lce_jax import linear_logprobs

if TYPE_CHECKING:
    from lce_jax._shapes import Array

LOGIT_SPREAD = 3.0
PRECISIONS = ("TF32_TF32_F32", "BF16_BF16_F32_X3", "BF16_BF16_F32_X6", "highest")


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options."""
    programs.add_arguments(command, with_dtype=False)


def jobs(options: argparse.Namespace, _: argparse.ArgumentParser) -> list[Job]:
    """One for each shape."""
    return [
        Job(programs.words("precision", shape), functools.partial(_measure, shape, options.rounds))
        for shape in programs.shapes_of(options)
    ]


def _measure(shape: tuple[int, int, int], rounds: int) -> Measured:
    (tokens, hidden_size, vocab_size), keys = shape, jax.random.split(jax.random.key(0), 3)
    float32 = jnp.dtype("float32")
    operands = programs.draw_model(keys[0], tokens, hidden_size, vocab_size, float32, LOGIT_SPREAD)
    half = [x.astype(jnp.bfloat16) for x in operands]
    labels = jax.random.randint(keys[1], (tokens,), 0, vocab_size, jnp.int32)
    seeds = jax.random.normal(keys[2], (tokens, 2), jnp.float32)
    sizes = {"T": tokens, "H": hidden_size, "V": vocab_size}
    return programs.measure(_programs(), [*operands, labels, seeds, *half], rounds, sizes, float32)


def ours(precision: Any, hidden: Array, weight: Array, labels: Array) -> tuple[Any, ...]:
    """Log-probability and entropy."""
    out = linear_logprobs(hidden, weight, labels, precision=precision)
    return out.logprobs, out.entropy


def stored(precision: Any, hidden: Array, weight: Array, labels: Array) -> tuple[Any, ...]:
    """The same from stored logits."""
    z = lax.dot_general(hidden, weight, (((1,), (1,)), ((), ())), precision=precision)
    logp = jax.nn.log_softmax(z)
    return jnp.take_along_axis(logp, labels[:, None], axis=-1)[:, 0], -jnp.sum(jnp.exp(logp) * logp, axis=-1)


def _programs() -> dict[str, Program]:
    def forward(function: Callable[..., Any], precision: Any, *operands: Array) -> Any:
        return function(precision, *operands[:3])

    def both(function: Callable[..., Any], precision: Any, *operands: Array) -> Any:
        hidden, weight, labels, seeds, *_ = operands
        return programs.with_gradients(lambda h, w: function(precision, h, w, labels), list(seeds.T), hidden, weight)

    found = {PRODUCT: Program(lambda *operands: programs.product(*operands[-2:]))}
    for way, end in ((forward, ""), (both, ", + backward")):
        for name in PRECISIONS:
            precision = name if name == "highest" else lax.DotAlgorithmPreset[name]
            for function, where in ((ours, "linear_logprobs"), (stored, "stored logits")):
                right = None if (function, name) == (stored, "highest") else f"stored logits, highest{end}"
                found[f"{where}, {name}{end}"] = Program(functools.partial(way, function, precision), right)
    return found
