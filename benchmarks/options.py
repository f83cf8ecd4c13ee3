"""What options cost: candidates and a floor beside the log-probabilities of labels, linear_logits, and linear_topk.

Each stands beside stored logits, whose standard deviation is 3; linear_topk beside ``jax.lax.top_k``.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks import programs
from benchmarks.programs import PRODUCT, Program
from benchmarks.records import Job, Measured
from lce_jax import linear_logits, linear_logprobs, linear_topk
from lce_jax.explain import _arguments

if TYPE_CHECKING:
    from lce_jax._shapes import Array

LOGIT_SPREAD = 3.0
COUNTS = (8, 64)  # of candidates
FLOOR = 0.0  # half of the logits reach it
PLAIN = "linear_logprobs"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options."""
    programs.add_arguments(command)
    command.add_argument("--no-stored", action="store_true", help="leave out what stores logits")
    command.add_argument(
        "--k", type=_arguments.positive, nargs="+", default=[64], help="of the most likely ids (default 64)"
    )


def jobs(options: argparse.Namespace, _: argparse.ArgumentParser) -> list[Job]:
    """One for each shape."""
    dtype, partial = programs.dtype_of(options), options.no_stored or options.k != [64]
    return [
        Job(programs.words("options", shape, dtype), functools.partial(_measure, shape, dtype, options), partial)
        for shape in programs.shapes_of(options)
    ]


def _measure(shape: tuple[int, int, int], dtype: Any, options: argparse.Namespace) -> Measured:
    (tokens, hidden_size, vocab_size), keys = shape, jax.random.split(jax.random.key(0), 4)
    operands = [
        *programs.draw_model(keys[0], tokens, hidden_size, vocab_size, dtype, LOGIT_SPREAD),
        jax.random.randint(keys[1], (tokens,), 0, vocab_size, jnp.int32),
        jax.random.randint(keys[2], (tokens, max(COUNTS)), 0, vocab_size, jnp.int32),
        jax.random.normal(keys[3], (tokens, 2 + max(COUNTS)), jnp.float32),
    ]
    chosen = _programs() | _topk_programs([min(k, vocab_size) for k in options.k])
    if options.no_stored:
        chosen = {name: program for name, program in chosen.items() if "stored" not in name}
    sizes = {"T": tokens, "H": hidden_size, "V": vocab_size}
    measured = programs.measure(chosen, operands, options.rounds, sizes, dtype)
    _print_additions({name: row.get("median_seconds", math.nan) for name, row in measured.rows.items()})
    return measured


def _print_additions(seconds: dict[str, float]) -> None:
    for end, passes in (("", "the forward"), (", + backward", "forward + backward")):
        for what in (*(f"{count} candidates" for count in COUNTS), "a floor"):
            adds = "adds" if what == "a floor" else "add"
            print(f"{what} {adds} {seconds[f'{PLAIN}, {what}{end}'] / seconds[PLAIN + end] - 1:.1%} to {passes}")


def of_logprobs(count: int, hidden: Array, weight: Array, labels: Array, ids: Array) -> tuple[Any, ...]:
    """Log-probability and entropy of the labels, and with a ``count`` those of candidates."""
    out = linear_logprobs(hidden, weight, labels, candidates=ids[:, :count] if count else None)
    return (out.logprobs, out.entropy, out.candidate_logprobs)[: 3 if count else 2]


def of_stored(count: int, hidden: Array, weight: Array, labels: Array, ids: Array) -> tuple[Any, ...]:
    """The same from stored logits in the operands' dtype, whose sums are float32."""
    z = programs.product(hidden, weight).astype(jnp.float32)
    logp = z - jax.nn.logsumexp(z, axis=-1, keepdims=True)
    found = [jnp.take_along_axis(logp, labels[:, None], axis=-1)[:, 0], -jnp.sum(jnp.exp(logp) * logp, axis=-1)]
    return (*found, jnp.take_along_axis(logp, ids[:, :count], axis=-1)) if count else tuple(found)


def of_floor(count: int, hidden: Array, weight: Array, labels: Array, ids: Array) -> tuple[Any, ...]:
    """Log-probability and entropy over the logits that reach a floor, of each token."""
    del count, ids
    out = linear_logprobs(hidden, weight, labels, logit_floor=jnp.full(labels.shape, FLOOR))
    return out.logprobs, out.entropy


def of_stored_floor(count: int, hidden: Array, weight: Array, labels: Array, ids: Array) -> tuple[Any, ...]:
    """The same from stored logits, which are rounded: those near the floor may be on its other side."""
    del count, ids
    z = programs.product(hidden, weight).astype(jnp.float32)
    is_label = jnp.arange(z.shape[1])[None, :] == labels[:, None]
    logp = jax.nn.log_softmax(jnp.where((z >= FLOOR) | is_label, z, -1e30))
    entropy = -jnp.sum(jnp.exp(logp) * jnp.where(logp > -1e20, logp, 0.0), axis=-1)
    return jnp.take_along_axis(logp, labels[:, None], axis=-1)[:, 0], entropy


def of_logits(count: int, hidden: Array, weight: Array, labels: Array, ids: Array) -> tuple[Any, ...]:
    """`linear_logits`."""
    del labels
    return (linear_logits(hidden, weight, ids[:, :count]),)


def of_stored_logits(count: int, hidden: Array, weight: Array, labels: Array, ids: Array) -> tuple[Any, ...]:
    """The same, of all logits."""
    del labels
    return (jnp.take_along_axis(programs.product(hidden, weight).astype(jnp.float32), ids[:, :count], axis=-1),)


def _programs() -> dict[str, Program]:
    def forward(function: Callable[..., Any], count: int, *operands: Array) -> Any:
        return function(count, *operands[:4])

    def both(function: Callable[..., Any], count: int, *operands: Array) -> Any:
        hidden, weight, labels, ids, seeds = operands

        def results(hidden: Array, weight: Array) -> Any:
            return function(count, hidden, weight, labels, ids)

        shapes, columns = jax.eval_shape(results, hidden, weight), iter(seeds.T)
        own = [next(columns) if x.ndim == 1 else seeds[:, 2 : 2 + count] for x in shapes]
        return programs.with_gradients(results, own, hidden, weight)

    found = {PRODUCT: Program(programs.product)}
    rows = [(PLAIN, of_logprobs, of_stored, 0)]
    rows += [(f"{PLAIN}, {count} candidates", of_logprobs, of_stored, count) for count in COUNTS]
    rows += [(f"{PLAIN}, a floor", of_floor, of_stored_floor, 0)]
    rows += [(f"linear_logits, {count} ids", of_logits, of_stored_logits, count) for count in COUNTS]
    for name, ours, stored, count in rows:
        for way, end in ((forward, ""), (both, ", + backward")):
            right = f"{name}, stored{end}"
            found[f"{name}{end}"] = Program(functools.partial(way, ours, count), right)
            if count in (0, COUNTS[-1]):
                found[right] = Program(functools.partial(way, stored, count))
    return found


def _topk_programs(numbers: list[int]) -> dict[str, Program]:
    def ours(k: int, hidden: Array, weight: Array, *_: Array) -> Any:
        top = linear_topk(hidden, weight, k)
        return top.ids, top.logprobs, top.lse

    def stored(k: int, hidden: Array, weight: Array, *_: Array) -> Any:
        z = lax.dot_general(hidden, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        largest, ids = lax.top_k(z, k)
        lse = jax.nn.logsumexp(z, axis=1)
        return ids, largest - lse[:, None], lse

    found = {}
    for k in numbers:
        right = f"jax.lax.top_k, k {k}, stored"
        found[f"linear_topk, k {k}"] = Program(functools.partial(ours, k), right)
        found[right] = Program(functools.partial(stored, k))
    return found
