"""``python -m lce_jax.bench.chosen``: what a few ids per token cost, and the most likely ones.

Candidates beside the log-probabilities and entropies of labels, a floor of the logits, `linear_logits` alone, and
`linear_topk` against ``jax.lax.top_k``, each beside stored logits. Logits have a standard deviation of 3.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax import linear_logits, linear_logprobs, linear_topk
from lce_jax.bench import programs
from lce_jax.bench.programs import PRODUCT, Program, Table
from lce_jax.explain import _arguments

if TYPE_CHECKING:
    from lce_jax._shapes import Array

MODULE = "lce_jax.bench.chosen"
LOGIT_SPREAD = 3.0
COUNTS = (8, 64)  # of candidates
FLOOR = 0.0  # half of the logits reach it
PLAIN = "linear_logprobs"


def main(arguments: list[str] | None = None) -> Table:
    """Measures, prints and, if asked to, writes."""
    command = programs.parser(MODULE, __doc__)
    command.add_argument("--no-stored", action="store_true", help="leave out what stores logits")
    command.add_argument(
        "--k", type=_arguments.positive, nargs="+", default=[64], help="of the most likely ids (default 64)"
    )
    arguments = sys.argv[1:] if arguments is None else arguments
    options = command.parse_args(arguments)
    tokens, hidden_size, vocab_size = options.shape
    dtype, keys = programs.dtype_of(options), jax.random.split(jax.random.key(0), 4)
    operands = [
        *programs.draw_model(keys[0], tokens, hidden_size, vocab_size, dtype, LOGIT_SPREAD),
        jax.random.randint(keys[1], (tokens,), 0, vocab_size, jnp.int32),
        jax.random.randint(keys[2], (tokens, max(COUNTS)), 0, vocab_size, jnp.int32),
        jax.random.normal(keys[3], (tokens, 2 + max(COUNTS)), jnp.float32),
    ]
    chosen = _programs() | _topk_programs([min(k, vocab_size) for k in options.k])
    if options.no_stored:
        chosen = {name: program for name, program in chosen.items() if "stored" not in name}
    rows = programs.measure(chosen, operands, options.rounds)
    shape = {"T": tokens, "H": hidden_size, "V": vocab_size}
    table = Table(MODULE, arguments, shape, dtype.name, options.rounds, rows)
    table.write(options.out)
    for end, passes in (("", "the forward"), (", + backward", "forward + backward")):
        plain = table.row(PLAIN + end).seconds
        for count in COUNTS:
            more = table.row(f"{PLAIN}, {count} candidates{end}").seconds / plain - 1
            print(f"{count} candidates add {more:.1%} to {passes}")
        more = table.row(f"{PLAIN}, a floor{end}").seconds / plain - 1
        print(f"a floor adds {more:.1%} to {passes}")
    return table


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

        def loss(hidden: Array, weight: Array) -> Any:
            out = function(count, hidden, weight, labels, ids)
            columns = iter(seeds.T)
            own = [next(columns) if x.ndim == 1 else seeds[:, 2 : 2 + count] for x in out]
            return sum(jnp.sum(seed * x) for seed, x in zip(own, out, strict=True)), out

        gradients, out = jax.grad(loss, argnums=(0, 1), has_aux=True)(hidden, weight)
        return *out, *gradients

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


if __name__ == "__main__":
    main()
