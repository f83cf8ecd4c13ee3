"""``python -m lce_jax.bench.kl``: exact divergences of two heads, by `linear_kl` and from stored logits.

Times, memory, and how far the results of both lie apart. Logits have a standard deviation of 2.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax import linear_kl
from lce_jax.bench import programs
from lce_jax.bench.programs import PRODUCT, Program, Table
from lce_jax.explain import _arguments

if TYPE_CHECKING:
    from lce_jax._shapes import Array

MODULE = "lce_jax.bench.kl"
LOGIT_SPREAD = 2.0
DIRECTIONS = ("forward", "reverse", "jsd")


def main(arguments: list[str] | None = None) -> Table:
    """Measures, prints and, if asked to, writes."""
    command = programs.parser(MODULE, __doc__)
    command.add_argument("--teacher-hidden-size", type=_arguments.positive, metavar="G", help="default: the student's")
    arguments = sys.argv[1:] if arguments is None else arguments
    options = command.parse_args(arguments)
    tokens, hidden_size, vocab_size = options.shape
    dtype, teachers = programs.dtype_of(options), options.teacher_hidden_size or hidden_size
    *keys, last = jax.random.split(jax.random.key(0), 3)
    operands = [jax.random.normal(last, (tokens,), jnp.float32)]
    for key, size in zip(reversed(keys), (teachers, hidden_size), strict=True):
        operands = programs.draw_model(key, tokens, size, vocab_size, dtype, LOGIT_SPREAD) + operands
    rows = programs.measure(_programs(), operands, options.rounds)
    shape = {"T": tokens, "H": hidden_size, "G": teachers, "V": vocab_size}
    table = Table(MODULE, arguments, shape, dtype.name, options.rounds, rows)
    table.write(options.out)
    return table


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


def _programs() -> dict[str, Program]:
    def forward(function: Callable[..., Array], direction: str, *operands: Array) -> Array:
        return function(*operands[:4], direction=direction)

    def both(function: Callable[..., Array], direction: str, *operands: Array) -> tuple[Array, ...]:
        def loss(hidden: Array, weight: Array) -> tuple[Array, Array]:
            kl = function(hidden, weight, *operands[2:4], direction=direction)
            return jnp.sum(operands[4] * kl), kl

        gradients, kl = jax.grad(loss, argnums=(0, 1), has_aux=True)(*operands[:2])
        return kl, *gradients

    found = {PRODUCT: Program(programs.product)}
    for direction in DIRECTIONS:
        for way, end in ((forward, ""), (both, ", + backward")):
            right = f"{direction}, stored logits{end}"
            found[f"{direction}, linear_kl{end}"] = Program(functools.partial(way, linear_kl, direction), right)
            found[right] = Program(functools.partial(way, stored, direction))
    return found


if __name__ == "__main__":
    main()
