"""Programs timed in turns beside one product, each compared with stored logits: losses, options, divergences.

    losses     linear_cross_entropy and linear_logprobs as they are called without options, and what some of them change
    options    candidates and a floor beside the log-probabilities of labels, and linear_logits
    kl         exact divergences of two heads, by linear_kl and by TRL
    precision  float32 operands by what multiplies them; what the device cannot multiply so is left out
    pipelines  the kernels of every generation, of two heads too, on an H100, whose tensor cores know mma.sync as well

The product is one of the first two operands; under `precision`, of these in bfloat16.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks import measure, peers
from benchmarks.candidates import product
from benchmarks.heads import add_shapes, shapes_here, words
from benchmarks.measure import Fields, Run, compile_jax
from benchmarks.problem import Shape, default_dtype, draw_model, random_problem, said, sizes
from benchmarks.records import Job, Measured
from lce_jax import linear_cross_entropy, linear_kl, linear_logits, linear_logprobs
from lce_jax.call._dispatch import current_device
from lce_jax.mosaic import NAME, _generations, _pallas, mma, sm90
from lce_jax.mosaic._call import Generation
from lce_jax.types import scalars

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array

PRODUCT = "one product"
BACKWARD = ", + backward"  # ends the names of programs with gradients
COUNTS = (8, 64)  # of candidates
FLOOR = 0.0  # half of the logits reach it
KL_SPREAD = 2.0  # standard deviation of both heads' logits
FULL_CACHE = 1 << 50  # bytes: as many as there are
PRECISIONS = ("TF32_TF32_F32", "BF16_BF16_F32_X3", "BF16_BF16_F32_X6", "highest")

type Function = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Program:
    """One row of the table."""

    function: Function
    like: str | None = None  # the program with stored logits whose results it should have
    compile: Callable[..., Run] = compile_jax  # of the function and its operands
    results: Callable[[Any], Any] = lambda found: found  # as JAX arrays


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options."""
    add_shapes(command)
    command.add_argument("--no-stored", action="store_true", help="leave out what stores logits")


def jobs(options: argparse.Namespace, _: argparse.ArgumentParser) -> list[Job]:
    """One for each shape that is asked for; else for the device's first."""
    more = ["--no-stored"] if options.no_stored else []
    return [
        Job([*words(options.part, shape), *more], functools.partial(_measure, shape, options))
        for shape in options.shape or shapes_here()[:1]
    ]


def _measure(shape: Shape, options: argparse.Namespace) -> Measured:
    drawn, made = PARTS[options.part]
    programs = {name: one for name, one in made().items() if not (options.no_stored and "stored" in name)}
    return timed(programs, drawn(shape), shape, options.rounds)


def timed(programs: Mapping[str, Program], operands: Sequence[Array], shape: Shape, rounds: int) -> Measured:
    """The programs, of which the first is one product: their rows, printed and for the file."""
    runs: dict[str, Run] = {}
    right: set[str] = set()

    def compiled(name: str) -> Run:
        runs[name] = programs[name].compile(programs[name].function, *operands)
        return runs[name]

    def judge(name: str, found: Any) -> tuple[None, Fields]:
        like = programs[name].like
        right.add(name)
        if like not in right:
            return None, {}
        return None, {"apart": apart(programs[name].results(found), runs[like].wait(runs[like].launch()))}

    stored_first = sorted(programs, key=lambda name: programs[name].like is not None)
    found = measure.rows({name: functools.partial(compiled, name) for name in stored_first}, judge, rounds)
    rows = {name: found[name] for name in programs}
    about = {"shape": sizes(shape), "dtype": operands[0].dtype.name}
    measure.show(rows, f"{said(shape)}, {operands[0].dtype.name}")
    # Stored logits do not fit everywhere, and not every device multiplies in every way.
    ours = {name: row["left_out"] for name, row in rows.items() if "left_out" in row and "linear_" in name}
    return Measured(rows, about, all("stored" in name or "not supported" in why for name, why in ours.items()))


def with_gradients(results: Function, seeds: Sequence[Array], hidden: Array, weight: Array) -> tuple[Any, ...]:
    """``results(hidden, weight)``, and the gradients of their sum weighted by ``seeds``."""

    def loss(hidden: Array, weight: Array) -> Any:
        out = results(hidden, weight)
        return sum(jnp.sum(seed * x) for seed, x in zip(seeds, out, strict=True)), out

    gradients, out = jax.grad(loss, argnums=(0, 1), has_aux=True)(hidden, weight)
    return *out, *gradients


def apart(found: Any, right: Any) -> float:
    """The largest distance between results and those that they should be, by norm."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True)
    wide = ([x.astype(jnp.float32) for x in pair] for pair in pairs)
    return max(float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in wide)


def _drawn_for_losses(shape: Shape) -> Sequence[Array]:
    return random_problem(shape, default_dtype())


def stored_cross_entropy(hidden: Array, weight: Array, labels: Array) -> Array:
    """The mean over the labels that are not -100, from stored logits in the operands' dtype."""
    logp, kept = jax.nn.log_softmax(product(hidden, weight).astype(jnp.float32)), labels != -100
    at = jnp.take_along_axis(logp, jnp.where(kept, labels, 0)[:, None], axis=-1)[:, 0]
    return -jnp.sum(jnp.where(kept, at, 0.0)) / jnp.sum(kept)


def _losses() -> dict[str, Program]:
    def evaluated(function: Function, *operands: Array) -> Any:
        return function(*operands[:3])

    def both(function: Function, *operands: Array) -> Any:
        hidden, weight, labels, *_ = operands
        return jax.value_and_grad(lambda h, w: function(h, w, labels), argnums=(0, 1))(hidden, weight)

    def frozen(function: Function, *operands: Array) -> Any:
        hidden, weight, labels, *_ = operands
        return jax.value_and_grad(lambda h: function(h, weight, labels))(hidden)

    def of_seeds(function: Function, *operands: Array) -> Any:
        hidden, weight, labels, *seeds = operands
        return with_gradients(lambda h, w: function(0, h, w, labels, labels), seeds, hidden, weight)

    def by_default(_: int, hidden: Array, weight: Array, labels: Array, __: Array) -> tuple[Any, ...]:
        out = linear_logprobs(hidden, weight, labels)
        return out.logprobs, out.entropy

    ours, frozen_end = linear_cross_entropy, f", frozen weight{BACKWARD}"
    least: Any = functools.partial(linear_cross_entropy, cache_bytes=0)
    found = {PRODUCT: Program(product)}
    for end, way in (("", evaluated), (BACKWARD, both), (frozen_end, frozen)):
        found[f"linear_cross_entropy{end}"] = Program(functools.partial(way, ours), f"cross entropy, stored{end}")
        found[f"cross entropy, stored{end}"] = Program(functools.partial(way, stored_cross_entropy))
    for name, function in (("checkpointed", jax.checkpoint(ours)), ("cache_bytes=0", least)):
        like = f"cross entropy, stored{BACKWARD}"
        found[f"linear_cross_entropy, {name}{BACKWARD}"] = Program(functools.partial(both, function), like)
    like = f"logprobs, stored{BACKWARD}"
    for name, logprobs in (("linear_logprobs", by_default), ("linear_logprobs, cache_bytes=0", of_logprobs)):
        found[f"{name}{BACKWARD}"] = Program(functools.partial(of_seeds, logprobs), like)
    return found | {like: Program(functools.partial(of_seeds, of_stored))}


def _drawn_for_options(shape: Shape) -> list[Array]:
    (tokens, _, vocab_size), keys = shape, jax.random.split(jax.random.key(0), 4)
    return [
        *draw_model(keys[0], shape, default_dtype()),
        jax.random.randint(keys[1], (tokens,), 0, vocab_size, jnp.int32),
        jax.random.randint(keys[2], (tokens, max(COUNTS)), 0, vocab_size, jnp.int32),
        jax.random.normal(keys[3], (tokens, 2 + max(COUNTS)), jnp.float32),
    ]


def of_logprobs(count: int, hidden: Array, weight: Array, labels: Array, ids: Array) -> tuple[Any, ...]:
    """Log-probability and entropy of the labels, and with a ``count`` those of candidates."""
    out = linear_logprobs(hidden, weight, labels, candidates=ids[:, :count] if count else None, cache_bytes=0)
    return (out.logprobs, out.entropy, out.candidate_logprobs)[: 3 if count else 2]


def of_stored(count: int, hidden: Array, weight: Array, labels: Array, ids: Array) -> tuple[Any, ...]:
    """The same from stored logits in the operands' dtype, whose sums are float32."""
    logp = jax.nn.log_softmax(product(hidden, weight).astype(jnp.float32))
    found = [jnp.take_along_axis(logp, labels[:, None], axis=-1)[:, 0], -jnp.sum(jnp.exp(logp) * logp, axis=-1)]
    return (*found, jnp.take_along_axis(logp, ids[:, :count], axis=-1)) if count else tuple(found)


def of_floor(_: int, hidden: Array, weight: Array, labels: Array, __: Array) -> tuple[Any, ...]:
    """Log-probability and entropy over the logits that reach a floor, of each token."""
    out = linear_logprobs(hidden, weight, labels, logit_floor=jnp.full(labels.shape, FLOOR), cache_bytes=0)
    return out.logprobs, out.entropy


def of_stored_floor(_: int, hidden: Array, weight: Array, labels: Array, __: Array) -> tuple[Any, ...]:
    """The same from stored logits, which are rounded: those near the floor may be on its other side."""
    z = product(hidden, weight).astype(jnp.float32)
    is_label = jnp.arange(z.shape[1])[None, :] == labels[:, None]
    logp = jax.nn.log_softmax(jnp.where((z >= FLOOR) | is_label, z, -1e30))
    entropy = -jnp.sum(jnp.exp(logp) * jnp.where(logp > -1e20, logp, 0.0), axis=-1)
    return jnp.take_along_axis(logp, labels[:, None], axis=-1)[:, 0], entropy


def of_logits(count: int, hidden: Array, weight: Array, _: Array, ids: Array) -> tuple[Any, ...]:
    """`linear_logits`."""
    return (linear_logits(hidden, weight, ids[:, :count]),)


def of_stored_logits(count: int, hidden: Array, weight: Array, _: Array, ids: Array) -> tuple[Any, ...]:
    """The same, of all logits."""
    return (jnp.take_along_axis(product(hidden, weight).astype(jnp.float32), ids[:, :count], axis=-1),)


def _options() -> dict[str, Program]:
    def forward(function: Function, count: int, *operands: Array) -> Any:
        return function(count, *operands[:4])

    def both(function: Function, count: int, *operands: Array) -> Any:
        hidden, weight, labels, ids, seeds = operands

        def results(hidden: Array, weight: Array) -> Any:
            return function(count, hidden, weight, labels, ids)

        shapes, columns = jax.eval_shape(results, hidden, weight), iter(seeds.T)
        own = [next(columns) if x.ndim == 1 else seeds[:, 2 : 2 + count] for x in shapes]
        return with_gradients(results, own, hidden, weight)

    found = {PRODUCT: Program(product)}
    rows: list[tuple[str, Function, Function, int]] = [("linear_logprobs", of_logprobs, of_stored, 0)]
    rows += [(f"linear_logprobs, {count} candidates", of_logprobs, of_stored, count) for count in COUNTS]
    rows += [("linear_logprobs, a floor", of_floor, of_stored_floor, 0)]
    rows += [(f"linear_logits, {count} ids", of_logits, of_stored_logits, count) for count in COUNTS]
    for name, ours, stored, count in rows:
        for way, end in ((forward, ""), (both, BACKWARD)):
            right = f"{name}, stored{end}"
            found[f"{name}{end}"] = Program(functools.partial(way, ours, count), right)
            if count in (0, COUNTS[-1]):
                found[right] = Program(functools.partial(way, stored, count))
    return found


def _drawn_for_kl(shape: Shape) -> list[Array]:
    student, teacher, last = jax.random.split(jax.random.key(0), 3)
    heads = (draw_model(key, shape, default_dtype(), KL_SPREAD) for key in (student, teacher))
    return [*(x for head in heads for x in head), jax.random.normal(last, shape[:1], jnp.float32)]


def stored_kl(hidden: Array, weight: Array, teacher_hidden: Array, teacher_weight: Array, direction: str) -> Array:
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


def _divergences() -> dict[str, Program]:
    def forward(function: Function, *operands: Array) -> Array:
        return function(*operands[:4])

    def both(function: Function, *operands: Array) -> tuple[Array, ...]:
        return with_gradients(lambda h, w: (function(h, w, *operands[2:4]),), operands[4:], *operands[:2])

    found = {PRODUCT: Program(product)}
    for direction in scalars.DIRECTIONS:
        kl: Any = linear_kl
        ours = functools.partial(kl, direction=direction, cache_bytes=0)
        for way, end in ((forward, ""), (both, BACKWARD)):
            right = f"{direction}, stored logits{end}"
            found[f"{direction}, linear_kl{end}"] = Program(functools.partial(way, ours), right)
            found[right] = Program(functools.partial(way, functools.partial(stored_kl, direction=direction)))
        trl = functools.partial(peers.trl_divergence, direction)
        found[f"{direction}, TRL{BACKWARD}"] = Program(trl, right, peers.compile_divergence, peers.as_jax)
        keeping = functools.partial(both, functools.partial(ours, cache_bytes=FULL_CACHE))
        found[f"{direction}, linear_kl, full cache{BACKWARD}"] = Program(keeping, right)
    return found


def _drawn_for_precision(shape: Shape) -> Sequence[Array]:
    return random_problem(shape, jnp.dtype("float32"))


def of_precision(precision: Any, hidden: Array, weight: Array, labels: Array) -> tuple[Any, ...]:
    """Log-probability and entropy."""
    out = linear_logprobs(hidden, weight, labels, precision=precision, cache_bytes=0)
    return out.logprobs, out.entropy


def of_stored_precision(precision: Any, hidden: Array, weight: Array, labels: Array) -> tuple[Any, ...]:
    """The same from stored logits."""
    logp = jax.nn.log_softmax(lax.dot_general(hidden, weight, (((1,), (1,)), ((), ())), precision=precision))
    return jnp.take_along_axis(logp, labels[:, None], axis=-1)[:, 0], -jnp.sum(jnp.exp(logp) * logp, axis=-1)


def _precisions() -> dict[str, Program]:
    def forward(function: Function, precision: Any, *operands: Array) -> Any:
        return function(precision, *operands[:3])

    def both(function: Function, precision: Any, *operands: Array) -> Any:
        hidden, weight, labels, *seeds = operands
        return with_gradients(lambda h, w: function(precision, h, w, labels), seeds, hidden, weight)

    def in_half(function: Function, hidden: Array, weight: Array, *_: Array) -> Run:
        return compile_jax(function, hidden.astype(jnp.bfloat16), weight.astype(jnp.bfloat16))

    found = {PRODUCT: Program(product, compile=in_half)}
    for way, end in ((forward, ""), (both, BACKWARD)):
        for name in PRECISIONS:
            precision = name if name == "highest" else lax.DotAlgorithmPreset[name]
            for function, where in ((of_precision, "linear_logprobs"), (of_stored_precision, "stored logits")):
                right = None if where == "stored logits" and name == "highest" else f"stored logits, highest{end}"
                found[f"{where}, {name}{end}"] = Program(functools.partial(way, function, precision), right)
    return found


@contextlib.contextmanager
def with_kernels_of(generation: Generation) -> Iterator[None]:
    """Within it, calls on this device run the kernels of ``generation``. They are chosen while tracing: afresh."""
    capability = current_device().compute_capability or "9.0"  # none on a CPU, where kernels are refused
    own = dataclasses.replace(generation, compute_capabilities=(capability,), ran_on=None)
    known = generation.compute_capabilities
    is_forced = not generation.has_tma and capability not in known  # where JAX would copy by TMA
    jax.clear_caches()
    with _generations.using(own), _pallas.lowering_for(known[0]) if is_forced else contextlib.nullcontext():
        yield
    jax.clear_caches()


def compiled_by(generation: Generation, function: Function, *operands: Array) -> Run:
    """``function`` with the kernels of ``generation``."""
    with with_kernels_of(generation):
        return compile_jax(function, *operands)


KERNELS = {"wgmma": sm90.HOPPER, "mma.sync by TMA": mma.SM120, "mma.sync by cp.async": mma.SM80}


def _pipelines() -> dict[str, Program]:
    def forward(options: dict[str, Any], *operands: Array) -> tuple[Any, ...]:
        out = linear_logprobs(*operands[:3], **options)
        return out.logprobs, out.entropy

    def both(options: dict[str, Any], *operands: Array) -> tuple[Any, ...]:
        hidden, weight, labels, *seeds = operands
        return with_gradients(lambda h, w: forward(options, h, w, labels), seeds, hidden, weight)

    def divergence(options: dict[str, Any], *operands: Array) -> Array:
        hidden, weight = operands[:2]
        return linear_kl(hidden, weight, hidden[::-1], weight, **options)

    def both_of_divergence(options: dict[str, Any], *operands: Array) -> tuple[Any, ...]:
        hidden, weight, _, seed, *_ = operands
        return with_gradients(lambda h, w: (linear_kl(h, w, hidden[::-1], weight, **options),), [seed], hidden, weight)

    found = {PRODUCT: Program(product)}
    of_labels: Any = (forward, "", 0), (both, BACKWARD, 0), (both, f", full cache{BACKWARD}", FULL_CACHE)
    of_heads: Any = (divergence, ", two heads", 0), (both_of_divergence, f", two heads{BACKWARD}", 0)
    for way, end, kept in (*of_labels, *of_heads):
        right = f"xla{end}"
        found[right] = Program(functools.partial(way, {"implementation": "xla", "cache_bytes": kept}))
        ours = functools.partial(way, {"implementation": NAME, "cache_bytes": kept})
        for name, generation in KERNELS.items():
            found[f"{name}{end}"] = Program(ours, right, functools.partial(compiled_by, generation))
    return found


# What each part draws and times.
PARTS: dict[str, tuple[Callable[[Shape], Sequence[Array]], Callable[[], dict[str, Program]]]] = {
    "losses": (_drawn_for_losses, _losses),
    "options": (_drawn_for_options, _options),
    "kl": (_drawn_for_kl, _divergences),
    "precision": (_drawn_for_precision, _precisions),
    "pipelines": (_drawn_for_losses, _pipelines),
}
