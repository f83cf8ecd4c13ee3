"""Programs timed in turns with one product, and compared with stored logits: losses, options, divergences.

    losses     linear_cross_entropy and linear_logprobs without options, and with some that change the cost
    options    log-probabilities of labels with candidates and with a floor, and linear_logits
    kl         exact divergences of two heads, by linear_kl and, but for tv, by TRL
    precision  float32 operands, by the precision of the products; those that the device does not support are left out
    pipelines  the kernels of every generation, also for two heads, on an H100, whose tensor cores support mma.sync too

The product is that of the first two operands; under `precision` they are cast to bfloat16.
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
from benchmarks.heads import add_shapes, job_arguments, shapes_here
from benchmarks.measure import Fields, Run, compile_jax
from benchmarks.problem import Shape, default_dtype, describe_shape, draw_model, random_problem, sizes
from benchmarks.records import Job, Measured
from lce_jax import linear_cross_entropy, linear_kl, linear_logits, linear_logprobs
from lce_jax.call._dispatch import current_device
from lce_jax.mosaic import NAME, _generations, _pallas, mma, sm90
from lce_jax.mosaic._call import Generation
from lce_jax.types import scalars

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array

PRODUCT = "one product"
BACKWARD = ", + backward"  # the end of the names of programs with gradients
COUNTS = (8, 64)  # numbers of candidates
FLOOR = 0.0  # half of the logits reach it
KL_SPREAD = 2.0  # standard deviation of both heads' logits
FULL_CACHE = 1 << 50  # cache_bytes that nothing exceeds
PRECISIONS = ("TF32_TF32_F32", "BF16_BF16_F32_X3", "BF16_BF16_F32_X6", "highest")

type Function = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Program:
    """One row of the table."""

    function: Function
    like: str | None = None  # the program with stored logits that its results are compared with
    compile: Callable[..., Run] = compile_jax  # compiles the function for its operands
    results: Callable[[Any], Any] = lambda outputs: outputs  # converts outputs to JAX arrays


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the options of these parts."""
    add_shapes(command)
    command.add_argument("--no-stored", action="store_true", help="leave out programs that store logits")


def jobs(options: argparse.Namespace, _: argparse.ArgumentParser) -> list[Job]:
    """Returns a job for each shape on the command line, or for the first of the device's shapes."""
    more = ["--no-stored"] if options.no_stored else []
    return [
        Job([*job_arguments(options.part, shape), *more], functools.partial(_measure, shape, options))
        for shape in options.shape or shapes_here()[:1]
    ]


def _measure(shape: Shape, options: argparse.Namespace) -> Measured:
    draw, make_programs = PARTS[options.part]
    programs = {name: one for name, one in make_programs().items() if not (options.no_stored and "stored" in name)}
    return time_programs(programs, draw(shape), shape, options.rounds)


def time_programs(programs: Mapping[str, Program], operands: Sequence[Array], shape: Shape, rounds: int) -> Measured:
    """Times and prints the programs, of which the first is one product. Returns their rows for the file."""
    runs: dict[str, Run] = {}
    right: set[str] = set()

    def compiled(name: str) -> Run:
        runs[name] = programs[name].compile(programs[name].function, *operands)
        return runs[name]

    def judge(name: str, outputs: Any) -> tuple[None, Fields]:
        like = programs[name].like
        right.add(name)
        if like not in right:
            return None, {}
        expected = runs[like].wait(runs[like].launch())
        return None, {"apart": relative_distance(programs[name].results(outputs), expected)}

    stored_first = sorted(programs, key=lambda name: programs[name].like is not None)
    measured = measure.rows({name: functools.partial(compiled, name) for name in stored_first}, judge, rounds)
    rows = {name: measured[name] for name in programs}
    about = {"shape": sizes(shape), "dtype": operands[0].dtype.name}
    measure.show(rows, f"{describe_shape(shape)}, {operands[0].dtype.name}")
    # Stored logits may not fit, and a device may not support a precision. Neither makes this package unhealthy.
    ours = {name: row["left_out"] for name, row in rows.items() if "left_out" in row and "linear_" in name}
    return Measured(rows, about, all("stored" in name or "not supported" in reason for name, reason in ours.items()))


def add_gradients(results: Function, seeds: Sequence[Array], hidden: Array, weight: Array) -> tuple[Any, ...]:
    """Returns ``results(hidden, weight)`` and the gradients of their sum weighted by ``seeds``."""

    def loss(hidden: Array, weight: Array) -> Any:
        out = results(hidden, weight)
        return sum(jnp.sum(seed * x) for seed, x in zip(seeds, out, strict=True)), out

    gradients, out = jax.grad(loss, argnums=(0, 1), has_aux=True)(hidden, weight)
    return *out, *gradients


def relative_distance(results: Any, expected: Any) -> float:
    """Returns the largest distance between results and the expected results, relative by norm."""
    pairs = zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True)
    wide = ([x.astype(jnp.float32) for x in pair] for pair in pairs)
    return max(float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in wide)


def _draw_for_losses(shape: Shape) -> Sequence[Array]:
    return random_problem(shape, default_dtype())


def stored_cross_entropy(hidden: Array, weight: Array, labels: Array) -> Array:
    """Returns the mean over labels other than -100, from stored logits in the operands' dtype."""
    logp, counts = jax.nn.log_softmax(product(hidden, weight).astype(jnp.float32)), labels != -100
    logprobs = jnp.take_along_axis(logp, jnp.where(counts, labels, 0)[:, None], axis=-1)[:, 0]
    return -jnp.sum(jnp.where(counts, logprobs, 0.0)) / jnp.sum(counts)


def _losses() -> dict[str, Program]:
    def forward(function: Function, *operands: Array) -> Any:
        return function(*operands[:3])

    def both(function: Function, *operands: Array) -> Any:
        hidden, weight, labels, *_ = operands
        return jax.value_and_grad(lambda h, w: function(h, w, labels), argnums=(0, 1))(hidden, weight)

    def frozen(function: Function, *operands: Array) -> Any:
        hidden, weight, labels, *_ = operands
        return jax.value_and_grad(lambda h: function(h, weight, labels))(hidden)

    def both_of_logprobs(function: Function, *operands: Array) -> Any:
        hidden, weight, labels, *seeds = operands
        return add_gradients(lambda h, w: function(0, h, w, labels, labels), seeds, hidden, weight)

    def default_logprobs(_: int, hidden: Array, weight: Array, labels: Array, __: Array) -> tuple[Any, ...]:
        out = linear_logprobs(hidden, weight, labels)
        return out.logprobs, out.entropy

    ours, frozen_end = linear_cross_entropy, f", frozen weight{BACKWARD}"
    uncached: Any = functools.partial(linear_cross_entropy, cache_bytes=0)
    programs = {PRODUCT: Program(product)}
    for end, way in (("", forward), (BACKWARD, both), (frozen_end, frozen)):
        programs[f"linear_cross_entropy{end}"] = Program(functools.partial(way, ours), f"cross entropy, stored{end}")
        programs[f"cross entropy, stored{end}"] = Program(functools.partial(way, stored_cross_entropy))
    for name, function in (("checkpointed", jax.checkpoint(ours)), ("cache_bytes=0", uncached)):
        like = f"cross entropy, stored{BACKWARD}"
        programs[f"linear_cross_entropy, {name}{BACKWARD}"] = Program(functools.partial(both, function), like)
    like = f"logprobs, stored{BACKWARD}"
    for name, logprobs in (("linear_logprobs", default_logprobs), ("linear_logprobs, cache_bytes=0", compute_logprobs)):
        programs[f"{name}{BACKWARD}"] = Program(functools.partial(both_of_logprobs, logprobs), like)
    return programs | {like: Program(functools.partial(both_of_logprobs, compute_stored))}


def _draw_for_options(shape: Shape) -> list[Array]:
    (tokens, _, vocab_size), keys = shape, jax.random.split(jax.random.key(0), 4)
    return [
        *draw_model(keys[0], shape, default_dtype()),
        jax.random.randint(keys[1], (tokens,), 0, vocab_size, jnp.int32),
        jax.random.randint(keys[2], (tokens, max(COUNTS)), 0, vocab_size, jnp.int32),
        jax.random.normal(keys[3], (tokens, 2 + max(COUNTS)), jnp.float32),
    ]


def compute_logprobs(count: int, hidden: Array, weight: Array, labels: Array, ids: Array) -> tuple[Any, ...]:
    """Computes log-probability and entropy of the labels, and log-probabilities of ``count`` candidates."""
    out = linear_logprobs(hidden, weight, labels, candidates=ids[:, :count] if count else None, cache_bytes=0)
    return (out.logprobs, out.entropy, out.candidate_logprobs)[: 3 if count else 2]


def compute_stored(count: int, hidden: Array, weight: Array, labels: Array, ids: Array) -> tuple[Any, ...]:
    """Computes the same from stored logits in the operands' dtype, with float32 sums."""
    logp = jax.nn.log_softmax(product(hidden, weight).astype(jnp.float32))
    results = jnp.take_along_axis(logp, labels[:, None], axis=-1)[:, 0], -jnp.sum(jnp.exp(logp) * logp, axis=-1)
    return (*results, jnp.take_along_axis(logp, ids[:, :count], axis=-1)) if count else results


def compute_above_floor(_: int, hidden: Array, weight: Array, labels: Array, __: Array) -> tuple[Any, ...]:
    """Computes log-probability and entropy of each token over the logits that reach a floor."""
    out = linear_logprobs(hidden, weight, labels, logit_floor=jnp.full(labels.shape, FLOOR), cache_bytes=0)
    return out.logprobs, out.entropy


def compute_stored_above_floor(_: int, hidden: Array, weight: Array, labels: Array, __: Array) -> tuple[Any, ...]:
    """Computes the same from stored logits. Their rounding may move a logit near the floor to its other side."""
    z = product(hidden, weight).astype(jnp.float32)
    is_label = jnp.arange(z.shape[1])[None, :] == labels[:, None]
    logp = jax.nn.log_softmax(jnp.where((z >= FLOOR) | is_label, z, -1e30))
    entropy = -jnp.sum(jnp.exp(logp) * jnp.where(logp > -1e20, logp, 0.0), axis=-1)
    return jnp.take_along_axis(logp, labels[:, None], axis=-1)[:, 0], entropy


def compute_logits(count: int, hidden: Array, weight: Array, _: Array, ids: Array) -> tuple[Any, ...]:
    """Computes `linear_logits`."""
    return (linear_logits(hidden, weight, ids[:, :count]),)


def compute_stored_logits(count: int, hidden: Array, weight: Array, _: Array, ids: Array) -> tuple[Any, ...]:
    """Computes the same from stored logits."""
    return (jnp.take_along_axis(product(hidden, weight).astype(jnp.float32), ids[:, :count], axis=-1),)


def _options() -> dict[str, Program]:
    def forward(function: Function, count: int, *operands: Array) -> Any:
        return function(count, *operands[:4])

    def both(function: Function, count: int, *operands: Array) -> Any:
        hidden, weight, labels, ids, seeds = operands

        def results(hidden: Array, weight: Array) -> Any:
            return function(count, hidden, weight, labels, ids)

        shapes, columns = jax.eval_shape(results, hidden, weight), iter(seeds.T)
        result_seeds = [next(columns) if x.ndim == 1 else seeds[:, 2 : 2 + count] for x in shapes]
        return add_gradients(results, result_seeds, hidden, weight)

    programs = {PRODUCT: Program(product)}
    rows: list[tuple[str, Function, Function, int]] = [("linear_logprobs", compute_logprobs, compute_stored, 0)]
    rows += [(f"linear_logprobs, {count} candidates", compute_logprobs, compute_stored, count) for count in COUNTS]
    rows += [("linear_logprobs, a floor", compute_above_floor, compute_stored_above_floor, 0)]
    rows += [(f"linear_logits, {count} ids", compute_logits, compute_stored_logits, count) for count in COUNTS]
    for name, ours, stored, count in rows:
        for way, end in ((forward, ""), (both, BACKWARD)):
            right = f"{name}, stored{end}"
            programs[f"{name}{end}"] = Program(functools.partial(way, ours, count), right)
            if count in (0, COUNTS[-1]):
                programs[right] = Program(functools.partial(way, stored, count))
    return programs


def _draw_for_kl(shape: Shape) -> list[Array]:
    student, teacher, last = jax.random.split(jax.random.key(0), 3)
    heads = (draw_model(key, shape, default_dtype(), KL_SPREAD) for key in (student, teacher))
    return [*(x for head in heads for x in head), jax.random.normal(last, shape[:1], jnp.float32)]


def stored_kl(hidden: Array, weight: Array, teacher_hidden: Array, teacher_weight: Array, direction: str) -> Array:
    """Computes the divergence from two arrays of float32 logits."""
    pairs = (hidden, weight), (lax.stop_gradient(teacher_hidden), lax.stop_gradient(teacher_weight))
    dims = (((1,), (1,)), ((), ()))
    log_q, log_p = (
        jax.nn.log_softmax(lax.dot_general(h, w, dims, preferred_element_type=jnp.float32)) for h, w in pairs
    )
    if direction == "jsd":
        log_m = jnp.logaddexp(log_p, log_q) - jnp.log(2.0)
        return 0.5 * jnp.sum(jnp.exp(log_p) * (log_p - log_m) + jnp.exp(log_q) * (log_q - log_m), axis=-1)
    if direction == "tv":
        return 0.5 * jnp.sum(jnp.abs(jnp.exp(log_p) - jnp.exp(log_q)), axis=-1)
    log_p, log_q = (log_p, log_q) if direction == "forward" else (log_q, log_p)
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


def _divergences() -> dict[str, Program]:
    def forward(function: Function, *operands: Array) -> Array:
        return function(*operands[:4])

    def both(function: Function, *operands: Array) -> tuple[Array, ...]:
        return add_gradients(lambda h, w: (function(h, w, *operands[2:4]),), operands[4:], *operands[:2])

    programs = {PRODUCT: Program(product)}
    for direction in scalars.DIRECTIONS:
        kl: Any = linear_kl
        ours = functools.partial(kl, direction=direction, cache_bytes=0)
        for way, end in ((forward, ""), (both, BACKWARD)):
            right = f"{direction}, stored logits{end}"
            programs[f"{direction}, linear_kl{end}"] = Program(functools.partial(way, ours), right)
            programs[right] = Program(functools.partial(way, functools.partial(stored_kl, direction=direction)))
        if direction in peers.TRL_BETAS:
            trl = functools.partial(peers.trl_divergence, direction)
            programs[f"{direction}, TRL{BACKWARD}"] = Program(trl, right, peers.compile_divergence, peers.to_jax)
        keeping = functools.partial(both, functools.partial(ours, cache_bytes=FULL_CACHE))
        programs[f"{direction}, linear_kl, full cache{BACKWARD}"] = Program(keeping, right)
    return programs


def _draw_for_precision(shape: Shape) -> Sequence[Array]:
    return random_problem(shape, jnp.dtype("float32"))


def compute_with_precision(precision: Any, hidden: Array, weight: Array, labels: Array) -> tuple[Any, ...]:
    """Computes log-probability and entropy."""
    out = linear_logprobs(hidden, weight, labels, precision=precision, cache_bytes=0)
    return out.logprobs, out.entropy


def compute_stored_with_precision(precision: Any, hidden: Array, weight: Array, labels: Array) -> tuple[Any, ...]:
    """Computes the same from stored logits."""
    logp = jax.nn.log_softmax(lax.dot_general(hidden, weight, (((1,), (1,)), ((), ())), precision=precision))
    return jnp.take_along_axis(logp, labels[:, None], axis=-1)[:, 0], -jnp.sum(jnp.exp(logp) * logp, axis=-1)


def _precisions() -> dict[str, Program]:
    def forward(function: Function, precision: Any, *operands: Array) -> Any:
        return function(precision, *operands[:3])

    def both(function: Function, precision: Any, *operands: Array) -> Any:
        hidden, weight, labels, *seeds = operands
        return add_gradients(lambda h, w: function(precision, h, w, labels), seeds, hidden, weight)

    def compile_half_precision(function: Function, hidden: Array, weight: Array, *_: Array) -> Run:
        return compile_jax(function, hidden.astype(jnp.bfloat16), weight.astype(jnp.bfloat16))

    programs = {PRODUCT: Program(product, compile=compile_half_precision)}
    for way, end in ((forward, ""), (both, BACKWARD)):
        for name in PRECISIONS:
            precision = name if name == "highest" else lax.DotAlgorithmPreset[name]
            for function, label in (
                (compute_with_precision, "linear_logprobs"),
                (compute_stored_with_precision, "stored logits"),
            ):
                right = None if label == "stored logits" and name == "highest" else f"stored logits, highest{end}"
                programs[f"{label}, {name}{end}"] = Program(functools.partial(way, function, precision), right)
    return programs


@contextlib.contextmanager
def use_kernels(generation: Generation) -> Iterator[None]:
    """Makes calls on this device run the kernels of ``generation``.

    Kernels are chosen while tracing, so cached traces are cleared before and after.
    """
    capability = current_device().compute_capability or "9.0"  # a CPU has none, and refuses kernels anyway
    served = dataclasses.replace(generation, compute_capabilities=(capability,), ran_on=None)
    known = generation.compute_capabilities
    is_forced = not generation.machine.has_tma and capability not in known  # else JAX would copy by TMA
    jax.clear_caches()
    try:
        with _generations.using(served), _pallas.lowering_for(known[0]) if is_forced else contextlib.nullcontext():
            yield
    finally:
        jax.clear_caches()


def compile_with_kernels(generation: Generation, function: Function, *operands: Array) -> Run:
    """Compiles ``function`` with the kernels of ``generation``."""
    with use_kernels(generation):
        return compile_jax(function, *operands)


KERNELS = {"wgmma": sm90.HOPPER, "mma.sync by TMA": mma.SM120, "mma.sync by cp.async": mma.SM80}


def _pipelines() -> dict[str, Program]:
    def forward(options: dict[str, Any], *operands: Array) -> tuple[Any, ...]:
        out = linear_logprobs(*operands[:3], **options)
        return out.logprobs, out.entropy

    def both(options: dict[str, Any], *operands: Array) -> tuple[Any, ...]:
        hidden, weight, labels, *seeds = operands
        return add_gradients(lambda h, w: forward(options, h, w, labels), seeds, hidden, weight)

    def divergence(options: dict[str, Any], *operands: Array) -> Array:
        hidden, weight = operands[:2]
        return linear_kl(hidden, weight, hidden[::-1], weight, **options)

    def both_of_divergence(options: dict[str, Any], *operands: Array) -> tuple[Any, ...]:
        hidden, weight, _, seed, *_ = operands
        return add_gradients(lambda h, w: (linear_kl(h, w, hidden[::-1], weight, **options),), [seed], hidden, weight)

    programs = {PRODUCT: Program(product)}
    one_head: Any = (forward, "", 0), (both, BACKWARD, 0), (both, f", full cache{BACKWARD}", FULL_CACHE)
    two_heads: Any = (divergence, ", two heads", 0), (both_of_divergence, f", two heads{BACKWARD}", 0)
    for way, end, cache_bytes in (*one_head, *two_heads):
        right = f"xla{end}"
        programs[right] = Program(functools.partial(way, {"implementation": "xla", "cache_bytes": cache_bytes}))
        ours = functools.partial(way, {"implementation": NAME, "cache_bytes": cache_bytes})
        for name, generation in KERNELS.items():
            programs[f"{name}{end}"] = Program(ours, right, functools.partial(compile_with_kernels, generation))
    return programs


# For each part, the function that draws its operands and the one that returns its programs.
PARTS: dict[str, tuple[Callable[[Shape], Sequence[Array]], Callable[[], dict[str, Program]]]] = {
    "losses": (_draw_for_losses, _losses),
    "options": (_draw_for_options, _options),
    "kl": (_draw_for_kl, _divergences),
    "precision": (_draw_for_precision, _precisions),
    "pipelines": (_draw_for_losses, _pipelines),
}
