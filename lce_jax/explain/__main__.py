"""``lce-jax explain`` prints the memory that a head will take per device. It needs no GPU and changes nothing.

The memory is what this package requests. With ``--compile``, the command also prints the memory of XLA's programs. With
``--pod``, it compiles for a whole pod (`lce_jax.explain._pod`). ``--remembered`` prints what first calls have saved in
the user's cache folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from lce_jax import Plan, explain
from lce_jax.call import _lowered, _remembered
from lce_jax.explain import _pod
from lce_jax.explain._arguments import gibibytes, positive
from lce_jax.explain._compile_targets import TARGETS
from lce_jax.explain._models import MODELS, ModelHead, find_model, model_head
from lce_jax.types import scalars
from lce_jax.types._jax import abstract_device
from lce_jax.types.scalars import format_bytes

DTYPES = ("bfloat16", "float16", "float32")
CPU = {"cpu": ("cpu", "cpu", None)}
DEVICES = {name: (target.platform, target.kind, target.core_count) for name, target in TARGETS.items()} | CPU
TENSOR = "tensor"
BOTH = ("forward", "forward + backward")
PRODUCTS = 3  # matrix products of a forward and a backward: logits, dhidden, dweight. Recomputed logits are one more


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    out = argparse.ArgumentParser(
        prog="lce-jax explain",
        description="The memory of a language-model head per device: with stored logits, and with this package.",
    )
    models = f"a model's head; names of Hugging Face work too: {', '.join(MODELS)}"
    out.add_argument("--model", type=find_model, choices=MODELS, metavar="NAME", help=models)
    out.add_argument("--hidden", type=positive, metavar="H", help="hidden size, in place of a model")
    out.add_argument("--vocab", type=positive, metavar="V", help="vocabulary, in place of a model")
    out.add_argument("--softcap", type=_softcap, help="logit softcap, in place of a model")
    out.add_argument("--tokens", type=positive, required=True, help="of one call: micro-batch times sequence")
    out.add_argument("--tensor-parallel", type=positive, default=1, metavar="N", help="devices that split V")
    out.add_argument("--sequence-parallel", action="store_true", help="these devices split the tokens of hidden too")
    out.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default: bfloat16")
    out.add_argument("--device", type=str.lower, choices=DEVICES, default="h200", help="default: h200")
    spare = "GiB per device for tiles kept from forward to backward (default 4)"
    out.add_argument("--spare-gib", type=gibibytes, default=4.0, metavar="G", help=spare)
    out.add_argument("--pod", type=_parse_pod, metavar="DxN", help="compile for D replicas, with the vocabulary over N")
    compile_help = "also compile each way for the device, which this machine need not have, and print XLA's memory"
    out.add_argument("--compile", action="store_true", help=compile_help)
    functions = f"the function that --pod compiles: {', '.join(_pod.CALLS)} (default linear_logprobs)"
    out.add_argument("--function", choices=_pod.CALLS, metavar="NAME", help=functions)
    remembered = "print what first calls have remembered, where, and how to forget it; and exit"
    out.add_argument("--remembered", action=_PrintRemembered, nargs=0, help=remembered)
    return out


class _PrintRemembered(argparse.Action):
    """Prints what first calls have saved, and exits. Like ``--help``, this option needs no other."""

    def __call__(self, command: argparse.ArgumentParser, *_: Any) -> None:
        print(*_remembered.report(), *_lowered.report(), sep="\n")
        command.exit()


def main(arguments: list[str] | None = None) -> int:
    """Prints the table and the recommendation, or the memory of a pod's programs."""
    command, options = parser(), parser().parse_args(arguments)
    if options.pod is not None or options.compile:
        jax.config.update("jax_enable_compilation_cache", False)  # the cache cannot hold programs for described devices
    lines = report(*read(arguments), options.compile) if options.pod is None else _report_pod(command, options)
    try:
        for line in lines:
            print(line, flush=True)
    except ModuleNotFoundError as error:
        command.error(str(error))
    return 0


def _report_pod(command: argparse.ArgumentParser, options: argparse.Namespace) -> Iterator[str]:
    """Returns the report of ``--pod``. An invalid combination of options ends the command."""
    if options.tensor_parallel != 1 or options.sequence_parallel:
        command.error(f"--pod {options.pod} says how many devices split V, and prints the sequence split and not split")
    if options.device not in TARGETS:
        command.error(f"--pod compiles for {', '.join(TARGETS)}, not for {options.device}")
    if reason := TARGETS[options.device].refuses(options.pod.data * options.pod.tensor):
        command.error(f"--pod {options.pod}: {reason}")
    if options.tokens % options.pod.tensor:
        command.error(f"--tokens {options.tokens} must divide by the {options.pod.tensor} of --pod {options.pod}")
    dtype, function = jnp.dtype(options.dtype), options.function or "linear_logprobs"
    return _pod.report(_head(command, options), options.tokens, options.pod, options.device, dtype, function)


def read(arguments: list[str] | None = None) -> tuple[ExplainedCall, int]:
    """Parses a command line. Returns the call to explain, and the bytes that ``--spare-gib`` allows."""
    command = parser()
    options = command.parse_args(arguments)
    if options.function is not None:
        command.error(f"--function {options.function} is for --pod")
    head = _head(command, options)
    if options.sequence_parallel and options.tokens % options.tensor_parallel:
        command.error(f"--tokens {options.tokens} must divide by --tensor-parallel {options.tensor_parallel}")
    if options.compile and (reason := _refuse_devices(options.device, options.tensor_parallel)):
        command.error(f"--compile: {reason}")
    split = (options.tensor_parallel, options.sequence_parallel)
    call = ExplainedCall(head, options.tokens, *split, jnp.dtype(options.dtype), options.device)
    return call, int(options.spare_gib * (1 << 30))


def _refuse_devices(name: str, count: int) -> str | None:
    """Returns why a program for ``count`` devices cannot be compiled; None if it can."""
    if name in TARGETS:
        return TARGETS[name].refuses(count)
    available = len(jax.devices("cpu"))
    return f"{count} devices of {name} are asked for, but this machine has {available}" if count > available else None


def _head(command: argparse.ArgumentParser, options: argparse.Namespace) -> ModelHead:
    sizes = (options.hidden, options.vocab)
    if (options.model is None) == (sizes == (None, None)) or (options.model is None and None in sizes):
        command.error("give --model, or --hidden and --vocab")
    if options.model is not None and options.softcap is not None:
        command.error(f"--softcap belongs to --hidden and --vocab; {options.model} has its own")
    return ModelHead(*sizes, logit_softcap=options.softcap) if options.model is None else model_head(options.model)


@dataclasses.dataclass(frozen=True)
class ExplainedCall:
    """One call of a head on a device that this machine need not have."""

    head: ModelHead
    tokens: int
    shards: int  # how many split the vocabulary
    sequence_split: bool
    dtype: Any
    device: str  # a key of `DEVICES`

    @property
    def columns(self) -> int:
        """The number of columns of each shard, padding included."""
        return -(-self.head.vocab_size // self.shards)

    def plan(self, **options: Any) -> Plan:
        """Returns the plan that `explain` makes for the call on its device."""
        mesh = self._make_mesh(is_compiled=options.get("compile", False))
        split = TENSOR if self.sequence_split else None

        def struct(shape: tuple[int, ...], dtype: Any, *axes: str | None) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))

        hidden = struct((self.tokens, self.head.hidden_size), self.dtype, split)
        weight = struct((self.columns * self.shards, self.head.hidden_size), self.dtype, TENSOR)
        return explain(
            hidden, weight, struct((self.tokens,), jnp.int32), mesh=mesh, vocab_axis=TENSOR, sequence_axis=split,
            logit_softcap=self.head.logit_softcap, vocab_size=self.head.vocab_size, **options,
        )  # fmt: skip

    def _make_mesh(self, is_compiled: bool) -> Mesh | AbstractMesh:
        """Returns a mesh whose tensor axis splits the vocabulary. Its devices are only names unless ``is_compiled``."""
        if is_compiled and self.device in TARGETS:
            return TARGETS[self.device].mesh(1, self.shards)
        if is_compiled:
            return jax.make_mesh((1, self.shards), ("data", TENSOR), (AxisType.Auto,) * 2, devices=jax.devices("cpu"))
        platform, kind, cores = DEVICES[self.device]
        device = abstract_device(platform, kind, cores)
        return AbstractMesh((self.shards,), (TENSOR,), axis_types=(AxisType.Auto,), abstract_device=device)


def report(call: ExplainedCall, spare: int, compiles: bool = False) -> Iterator[str]:
    """Yields the lines to print, for ``spare`` bytes per device."""
    plain, in_forward = call.plan(cache_bytes=0), call.plan(gradients_in_forward=True)
    yield from _heading(call, plain)
    yield ""
    full, cache = plain.full_cache_bytes, _cache_bytes(call, plain.full_cache_bytes, spare)
    default_cache = call.plan().kept_bytes - plain.kept_bytes
    ways = [Line(f"linear_logprobs, cache_bytes={size}", {"cache_bytes": size}, 1 - size / full) for size in (0, full)]
    if 0 < cache < full:
        ways.insert(1, Line(f"linear_logprobs, cache_bytes={cache}", {"cache_bytes": cache}, 1 - cache / full))
    ways.insert(0, Line("linear_logprobs", {}, 1 - default_cache / full))
    ways.append(Line("linear_loss, linear_cross_entropy", {"gradients_in_forward": True}, 0))
    yield from _table(call, ways, plain.logits_bytes, compiles)
    yield ""
    yield from _advice(plain, in_forward, cache, spare)


class Line(NamedTuple):
    """A line of the table: one way to compute the head."""

    label: str
    options: dict[str, Any]
    recomputed: float  # how many matrix products are computed again


def _table(call: ExplainedCall, ways: list[Line], logits_bytes: int, compiles: bool) -> Iterator[str]:
    one_copy = [format_bytes(logits_bytes)] * 2
    rows = [
        ["per device", *BOTH, *[f"compiled: {name}" for name in BOTH] * compiles, "matrix products"],
        ["logits stored, one copy", *one_copy, *[""] * (2 * compiles), f"{PRODUCTS:.2f}"],
    ]
    for label, options, recomputed in ways:
        plan = call.plan(**options, compile=compiles)
        sizes = [plan.forward_bytes, plan.most_bytes, *(plan.compiled or ())]
        rows.append([label, *map(format_bytes, sizes), f"{PRODUCTS + recomputed:.2f}"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for label, *cells in rows:
        yield "  ".join([label.ljust(widths[0]), *map(str.rjust, cells, widths[1:])])


def _heading(call: ExplainedCall, plan: Plan) -> Iterator[str]:
    head, weight = call.head, call.columns * call.head.hidden_size * call.dtype.itemsize
    tied = ", tied to the embedding" if head.tied else ""
    yield f"{head}{tied}; {call.dtype.name} on {plan.call.device.kind}, implementation {plan.implementation}"
    share = f"{call.shards} devices with {call.columns:,} columns each" if call.shards > 1 else "one device"
    padding = call.columns * call.shards - head.vocab_size
    rows = f"pad weight to {call.columns * call.shards} rows, pass vocab_size={head.vocab_size}"
    padded = f" ({padding} of padding: {rows})" if padding else ""
    size = format_bytes(weight)
    yield f"{call.tokens:,} tokens on {share}{padded}; weight and gradient, {size} each, are not counted"


def _cache_bytes(call: ExplainedCall, full: int, spare: int) -> int:
    """Returns how many of the ``spare`` bytes a cache would use."""
    if full <= spare:
        return full
    cached, uncached = (call.plan(cache_bytes=size).kept_bytes for size in (spare, 0))
    return cached - uncached


def _advice(plain: Plan, in_forward: Plan, cache: int, spare: int) -> Iterator[str]:
    full = plain.full_cache_bytes
    for other, reason in plain.refused.items():
        yield f"not {other}: {reason}"
    size = format_bytes(in_forward.most_bytes)
    yield f"a loss that is a sum over tokens: linear_loss and linear_cross_entropy recompute nothing, in {size}"
    available = f"{format_bytes(spare)} to spare (--spare-gib)"
    if cache == full:
        yield f"else: cache_bytes={full} recomputes nothing; it keeps {format_bytes(full)} of {available}"
    elif cache:
        yield f"else: cache_bytes={cache} spares {cache / full:.0%} of the recomputation, with {available}"
    else:
        yield f"else: cache_bytes=0, because one tile of the vocabulary takes more than {available}"


def _parse_pod(text: str) -> _pod.Pod:
    try:
        return _pod.Pod.of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _softcap(text: str) -> float:
    try:
        return scalars.positive("it", float(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}; leave --softcap out for no cap") from None


if __name__ == "__main__":
    sys.exit(main())
