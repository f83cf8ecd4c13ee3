"""``lce-jax explain --pod``: compiles a head's forward and backward for a pod, and runs nothing.

The machine needs no device of the pod. The report has the memory of each program and the collectives that one device
takes part in.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lce_jax
from lce_jax.explain import _call
from lce_jax.explain._compile_targets import TARGETS, TPU, Target
from lce_jax.explain._models import ModelHead
from lce_jax.types.scalars import format_bytes

KINDS = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
BITS = {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64}  # other names contain the number: s32, u8, f8e4m3fn
_collective = re.compile(rf"= (?P<type>\S.*?) (?P<kind>{KINDS})(?P<start>-start)?\((?P<rest>.*)")
_array = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")


class Collective(NamedTuple):
    """A collective of a program, or several equal ones."""

    kind: str
    devices: int  # how many form one group
    arrays: str  # the types of the operands or of the results, whichever are larger
    num_bytes: int  # of these arrays, on one device
    times: int = 1


def collectives(text: str, devices: int) -> list[Collective]:
    """Returns the collectives in the text of a program for this number of ``devices``, the largest first.

    A collective in a loop counts once.
    """
    counts = collections.Counter(_parse_collectives(text, devices))
    counted = [one._replace(times=times) for one, times in counts.items()]
    return sorted(counted, key=lambda one: (-one.num_bytes, one))


def largest_array(text: str) -> int:
    """Returns the number of elements of a program's largest array, operands and results included."""
    return max(map(_elements, {shape for _, shape in _array.findall(text)}))


def _parse_collectives(text: str, devices: int) -> Iterator[Collective]:
    for line in text.splitlines():
        match = _collective.search(line)
        if match is None:
            continue
        arrays, size = _array.findall(match["type"]), _group_size(match["rest"], devices)
        if match["start"]:  # the type of an asynchronous start lists its operands and its results
            half = len(arrays) // 2
            arrays = max(arrays[:half], arrays[half:], key=_num_bytes)
        scattered = size if match["kind"] == "reduce-scatter" and not match["start"] else 1
        types = ", ".join(f"{dtype}[{shape}]" for dtype, shape in arrays)
        yield Collective(match["kind"], size, types, _num_bytes(arrays) * scattered)


def _num_bytes(arrays: list[tuple[str, str]]) -> int:
    return sum(_elements(shape) * _bits(dtype) // 8 for dtype, shape in arrays)


def _elements(shape: str) -> int:
    return math.prod(int(n) for n in shape.split(",") if n)


def _bits(dtype: str) -> int:
    return BITS.get(dtype) or int(re.findall(r"\d+", dtype)[0])


def _group_size(rest: str, devices: int) -> int:
    """Returns the number of devices in a group, which XLA writes in one of three forms."""
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", rest):
        sizes = dict(re.findall(r"'?(\w+)'?=(\d+)", named[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"\w+", named[2]))
    if counted := re.search(r"replica_groups=\[\d+,(\d+)\]", rest):
        return int(counted[1])
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", rest)
    return devices if listed is None else len(listed[1].split(","))


NUM_LARGEST = 64  # the k of linear_topk
LISTED = 6  # how many collectives of a program are printed, the largest first


class Pod(NamedTuple):
    """A mesh of devices: ``data`` replicas, each with its own tokens, by ``tensor`` shards of the vocabulary."""

    data: int
    tensor: int

    def __str__(self) -> str:
        return f"{self.data}x{self.tensor}"

    @classmethod
    def of(cls, text: str) -> Pod:
        """Parses a text such as "64x8"."""
        sizes = text.split("x")
        if len(sizes) != 2 or not all(size.isascii() and size.isdigit() and int(size) for size in sizes):
            raise ValueError(f"{text!r} must be DATAxTENSOR, two positive numbers of devices, such as 64x8")
        return cls(*map(int, sizes))


class Split(NamedTuple):
    """Which further dimensions are split over the pod. Data always splits the batch, and tensor the vocabulary."""

    fsdp: bool = False  # whether the weight's hidden size is split over data
    sequence: bool = False  # whether hidden's sequence is split over tensor

    def __str__(self) -> str:
        parts = ["batch, vocabulary", "weight over data" * self.fsdp, "sequence over tensor" * self.sequence]
        return ", ".join(filter(None, parts))


SPLITS = (Split(), Split(fsdp=True), Split(fsdp=True, sequence=True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PodProgram:
    """A program for a pod: a call of a public function, with its backward if it has one."""

    head: ModelHead
    tokens: int  # how many each replica has
    pod: Pod
    target: Target | TPU
    dtype: Any = jnp.bfloat16
    function: str = "linear_logprobs"
    split: Split = SPLITS[0]
    sharded: bool = False  # whether it calls the sharded_ function; else jit splits the call

    @property
    def columns(self) -> int:
        """The number of columns of the weight on each device, padding included."""
        return -(-self.head.vocab_size // self.pod.tensor)

    def compiled(self) -> Any:
        """Returns the program compiled by XLA for the target."""
        mesh = self.target.mesh(*self.pod, AxisType.Auto if self.sharded else self.target.jit_axes)
        trained = (0, 1) if self.function in DIFFERENTIABLE else ()
        return _call.compile_program(self._step(mesh), self._operands(mesh), trained)

    def _operands(self, mesh: Mesh) -> tuple[Any, Any, Any]:
        """Returns the shapes and shardings of hidden states, weight and labels."""

        def struct(shape: tuple[int, ...], dtype: Any, *axes: str | None) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*axes)))

        tokens, H = (self.pod.data, self.tokens), self.head.hidden_size
        rows = "tensor" if self.split.sequence else None
        return (
            struct((*tokens, H), self.dtype, "data", rows, None),
            struct((self.columns * self.pod.tensor, H), self.dtype, "tensor", "data" if self.split.fsdp else None),
            struct(tokens, jnp.int32, "data", None),
        )

    def _step(self, mesh: Mesh) -> Callable[..., Any]:
        """Returns the function to compile, which takes the operands of `_operands`."""
        options: dict[str, Any] = {"vocab_size": self.head.vocab_size, "logit_softcap": self.head.logit_softcap}
        function = getattr(lce_jax, f"sharded_{self.function}" if self.sharded else self.function)
        if self.sharded:
            options |= {"mesh": mesh, "batch_axes": "data", "vocab_axis": "tensor"}
            options["sequence_axis"] = "tensor" if self.split.sequence else None
        if self.function == "linear_kl":
            options["teacher_logit_softcap"] = "same"
        arguments = ARGUMENTS[self.function]
        return lambda *operands: function(*arguments(*operands), **options)


# The positional arguments of each function, from hidden states, weight and labels. The teacher of a divergence has the
# student's weight, and other hidden states.
ARGUMENTS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "linear_logprobs": lambda *operands: operands,
    "linear_cross_entropy": lambda *operands: operands,
    "linear_loss": lambda *operands: (_call.example_loss, *operands),
    "linear_kl": lambda hidden, weight, _: (hidden, weight, hidden * 2, weight),
    "linear_topk": lambda hidden, weight, _: (hidden, weight, NUM_LARGEST),
}
CALLS = tuple(ARGUMENTS)
DIFFERENTIABLE = frozenset(CALLS) - {"linear_topk"}


def report(head: ModelHead, tokens: int, pod: Pod, device: str, dtype: Any, function: str) -> Iterator[str]:
    """Yields the lines to print, those of a program as soon as it is compiled."""
    first = PodProgram(head=head, tokens=tokens, pod=pod, target=TARGETS[device], dtype=dtype, function=function)
    both = " and its backward" if function in DIFFERENTIABLE else ""
    yield f"{head}; {jnp.dtype(dtype).name} on {pod.data * pod.tensor} of {first.target.kind}, {pod} (data x tensor)"
    yield f"{function}{both} of {tokens:,} tokens a replica, compiled by JAX {jax.__version__} and not run; per device:"
    for sharded in (False, True):
        for split in SPLITS:
            yield ""
            yield from _report_program(dataclasses.replace(first, split=split, sharded=sharded))


def _report_program(program: PodProgram) -> Iterator[str]:
    start = time.monotonic()
    compiled = program.compiled()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    implementation = "kernels" if "mosaic_gpu" in text else "xla"
    axes = "" if program.target.jit_axes is AxisType.Auto else ", Explicit axes"
    way = f"sharded_{program.function}" if program.sharded else f"{program.function} under jit{axes}"
    yield f"{way}: {program.split} ({implementation}, {time.monotonic() - start:.0f} s)"
    sizes = (memory.argument_size_in_bytes, memory.temp_size_in_bytes, memory.output_size_in_bytes)
    yield "  arguments {:>10}   temporaries {:>10}   results {:>10}".format(*map(format_bytes, sizes))
    sorted_collectives = collectives(text, program.pod.data * program.pod.tensor)
    for one in sorted_collectives[:LISTED]:
        times = f"{one.times} x " if one.times > 1 else ""
        yield f"  {one.kind:<14} over {one.devices:>3}  {times + format_bytes(one.num_bytes):>14}  {one.arrays}"
    if smaller := sorted_collectives[LISTED:]:
        total = format_bytes(sum(one.times * one.num_bytes for one in smaller))
        yield f"  {sum(one.times for one in smaller)} smaller ones, {total} together"
