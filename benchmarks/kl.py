"""Exact divergences of two heads, by linear_kl, by TRL and from stored logits, whose standard deviation is 2.

Times, memory, and how far the results of both lie apart.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks import peers, programs
from benchmarks.programs import PRODUCT, Program
from benchmarks.records import Job, Measured
from lce_jax import linear_kl, scalars
from lce_jax.explain import _arguments

if TYPE_CHECKING:
    from lce_jax._shapes import Array

LOGIT_SPREAD = 2.0


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options."""
    programs.add_arguments(command)
    command.add_argument("--teacher-hidden-size", type=_arguments.positive, metavar="G", help="default: the student's")


def jobs(options: argparse.Namespace, _: argparse.ArgumentParser) -> list[Job]:
    """One for each shape."""
    dtype, found = programs.dtype_of(options), []
    for shape in programs.shapes_of(options):
        words, teachers = programs.words("kl", shape, dtype), options.teacher_hidden_size or shape[1]
        words += ["--teacher-hidden-size", str(teachers)] if teachers != shape[1] else []
        found.append(Job(words, functools.partial(_measure, shape, teachers, dtype, options.rounds)))
    return found


def _measure(shape: tuple[int, int, int], teachers: int, dtype: Any, rounds: int) -> Measured:
    tokens, hidden_size, vocab_size = shape
    *keys, last = jax.random.split(jax.random.key(0), 3)
    operands = [jax.random.normal(last, (tokens,), jnp.float32)]
    for key, size in zip(reversed(keys), (teachers, hidden_size), strict=True):
        operands = programs.draw_model(key, tokens, size, vocab_size, dtype, LOGIT_SPREAD) + operands
    sizes = {"T": tokens, "H": hidden_size, "G": teachers, "V": vocab_size}
    return programs.measure(_programs(), operands, rounds, sizes, dtype)


def stored(hidden: Array, weight: Array, teacher_hidden: Array, teacher_weight: Array, direction: str) -> Array:
    """The divergence from two arrays of float32 logits."""
    pairs = (hidden, weight), (lax.stop_gradient(teacher_hidden), lax.stop_gradient(teacher_weight))
    dims = (((1,), (1,)), ((), ()))
    log_q, log_p = (
        jax.nn.log_softmax(lax.dot_general(h, w, dims, preferred_element_type=jnp.float32)) for h, w in pairs
    )
    if direction == "jsd":
        log_m = jnp.logaddexp(log_p, log_q) - jnp.log(2.0)
        return 0.5 * jnp.sum(jnp.exp(log_p) * (log_p - log_m) + jnp.exp(log_q) * (log_q - log_m), axis=-1)
    log_p, log_q = (log_p, log_q) if direction == "forward" else (log_q, log_p)
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


FULL_CACHE = 1 << 50  # bytes: as many as there are


def _programs() -> dict[str, Program]:
    def forward(function: Callable[..., Array], direction: str, *operands: Array) -> Array:
        return function(*operands[:4], direction=direction)

    def both(function: Callable[..., Array], direction: str, *operands: Array) -> tuple[Array, ...]:
        def results(hidden: Array, weight: Array) -> tuple[Array]:
            return (function(hidden, weight, *operands[2:4], direction=direction),)

        return programs.with_gradients(results, operands[4:], *operands[:2])

    found = {PRODUCT: Program(programs.product)}
    for direction in scalars.DIRECTIONS:
        for way, end in ((forward, ""), (both, ", + backward")):
            right = f"{direction}, stored logits{end}"
            found[f"{direction}, linear_kl{end}"] = Program(functools.partial(way, linear_kl, direction), right)
            found[right] = Program(functools.partial(way, stored, direction))
        trl = peers.trl_divergence(direction)
        found[f"{direction}, TRL, + backward"] = Program(
            trl, f"{direction}, stored logits, + backward", compile=peers.compile_divergence
        )
        keeping = functools.partial(linear_kl, cache_bytes=FULL_CACHE)
        name = f"{direction}, linear_kl, full cache, + backward"
        found[name] = Program(functools.partial(both, keeping, direction), right)
    return found
