"""``lce-jax explain --pod``: compiles a head's forward and backward for a pod, and runs nothing.

The machine needs no device of the pod. The report has the memory of each program and the collectives that one device
takes part in.

For a TPU, its compiler libtpu needs only the TPU's name. For a GPU, XLA needs a description. Its numbers here are those
of https://github.com/openxla/xla/tree/main/xla/backends/gpu/target_config/specs, without those of features that these
programs do not use.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lce_jax
from lce_jax.explain import _call
from lce_jax.explain._models import ModelHead
from lce_jax.types.scalars import format_bytes

COMPILER = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-nvrtc", "nvidia-nvjitlink")


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU to compile for."""

    kind: str  # as JAX names it
    capability: tuple[int, int]
    core_count: int  # multiprocessors; the kernels' chunks depend on it
    memory_bytes: int
    memory_bandwidth: int  # bytes per second
    clock_ghz: float
    l2_bytes: int
    shared_bytes: int  # of a multiprocessor

    @property
    def config(self) -> str:
        """The ``target_config`` of `jax.experimental.topologies.get_topology_desc`."""
        major, minor = self.capability
        newer = major >= 9
        features = "ACCELERATED_FEATURES" if newer else "NONE"
        return f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: {self.core_count}
  fpus_per_core: {128 if newer else 64} block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_core: {self.shared_bytes}
  shared_memory_per_block_optin: {self.shared_bytes - 1024} l2_cache_size: {self.l2_bytes}
  memory_bandwidth: {self.memory_bandwidth} device_memory_size: {self.memory_bytes} clock_rate_ghz: {self.clock_ghz}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {features} }}
  device_vendor: "NVIDIA Corporation" name: "{self.kind}" device_address_bits: 64 ecc_enabled: true
  platform_version: "Compute Capability {major}.{minor}{"a" if newer else ""}"
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{self.kind}"
"""

    platform: ClassVar[str] = "gpu"
    jit_axes: ClassVar[AxisType] = AxisType.Auto  # the type of mesh axes under plain jit

    def refuses(self, devices: int) -> None:
        """Returns None, because a pod of GPUs may have any number of devices."""
        del devices

    def mesh(self, data: int, tensor: int, axis_type: AxisType = AxisType.Auto) -> Mesh:
        """Returns a mesh of ``data`` x ``tensor`` described devices, with axes of these names.

        Raises:
            ModuleNotFoundError: the wheels with JAX's CUDA plugin are missing; the message says which to install.
        """
        description = {"target_config": self.config, "topology": f"1x{data}x{tensor}"}
        try:
            topology = topologies.get_topology_desc(self.kind, platform="cuda", **description)
        except NotImplementedError:
            plugin = (f"jax-cuda13-{part}=={jax.__version__}" for part in ("plugin", "pjrt"))
            raise ModuleNotFoundError(
                f"to compile for {self.kind} without one, install JAX's CUDA plugin and NVIDIA's compiler: pip install "
                f"--no-deps {' '.join([*plugin, *COMPILER])}"
            ) from None
        return _make_mesh(topology.devices, data, tensor, axis_type)


@dataclasses.dataclass(frozen=True)
class TPU:
    """A TPU to compile for. Its compiler reads no partitioning rule, so axes are Explicit under plain ``jit``."""

    kind: str  # as JAX names it
    name: str  # as libtpu names it
    most_chips: int  # of a slice
    dimensions: int  # of a slice's torus
    core_count: int  # of a device
    devices_per_chip: int = 1

    platform: ClassVar[str] = "tpu"
    jit_axes: ClassVar[AxisType] = AxisType.Explicit

    def mesh(self, data: int, tensor: int, axis_type: AxisType = AxisType.Auto) -> Mesh:
        """Returns a mesh of ``data`` x ``tensor`` described devices of one slice, with axes of these names.

        Raises:
            ValueError: no slice has so many devices.
            ModuleNotFoundError: the wheel with the compiler is missing; the message says which to install.
        """
        if reason := self.refuses(data * tensor):
            raise ValueError(reason)
        try:
            topology = topologies.get_topology_desc(f"{self.name}:{self._torus(data * tensor)}", platform="tpu")
        except RuntimeError as error:
            if "not installed" not in str(error):
                raise
            raise ModuleNotFoundError(
                f"to compile for {self.kind} without one, install its compiler: pip install --no-deps '{libtpu()}'"
            ) from None
        return _make_mesh(topology.devices[: data * tensor], data, tensor, axis_type)

    def refuses(self, devices: int) -> str | None:
        """Returns why there is no pod of so many devices; None if there is one."""
        most = self.most_chips * self.devices_per_chip
        if not devices & (devices - 1) and devices <= most:
            return None
        return f"a slice of {self.kind} has a power of 2 of devices, {most} at most, not {devices}"

    def _torus(self, devices: int) -> str:
        """Returns the chips of a slice along each dimension, such as "4x2", as equal as possible."""
        twos = max(devices // self.devices_per_chip, 1).bit_length() - 1
        sides = [1 << (twos + self.dimensions - 1 - i) // self.dimensions for i in range(self.dimensions)]
        return "x".join(map(str, sides))


def libtpu() -> str:
    """Returns the requirement of this JAX for libtpu, the compiler of TPUs, as pip takes it."""
    requirement = next(one for one in metadata.requires("jax") or () if one.startswith("libtpu"))
    return requirement.partition(";")[0].strip()


def _make_mesh(devices: Any, data: int, tensor: int, axis_type: AxisType) -> Mesh:
    return Mesh(np.array(devices).reshape(data, tensor), ("data", "tensor"), axis_types=(axis_type,) * 2)


GPUS = {
    "h100": Target("NVIDIA H100 80GB HBM3", (9, 0), 132, 84942979072, 3352320000000, 1.98, 50 << 20, 228 << 10),
    "h200": Target("NVIDIA H200", (9, 0), 132, 151397597184, 4800000000000, 1.965, 50 << 20, 228 << 10),
    "a100": Target("NVIDIA A100-SXM4-80GB", (8, 0), 108, 85100068864, 2039040000000, 1.41, 40 << 20, 164 << 10),
    "a10": Target("NVIDIA A10", (8, 6), 72, 23609475072, 600096000000, 1.695, 6 << 20, 100 << 10),
    "l40s": Target("NVIDIA L40S", (8, 9), 142, 48305799168, 864000000000, 2.52, 96 << 20, 100 << 10),
    "rtx5090": Target("NVIDIA GeForce RTX 5090", (12, 0), 170, 33668988928, 1792000000000, 2.407, 96 << 20, 100 << 10),
    "b200": Target("NVIDIA B200", (10, 0), 148, 191514411008, 7672320000000, 1.965, 132644864, 228 << 10),
    "b300": Target("NVIDIA B300", (10, 3), 158, 297021865984, 7936000000000, 1.965, 135528448, 228 << 10),
}
TPUS = {
    "v5e": TPU("TPU v5 lite", "v5e", 256, 2, 1),
    "v5p": TPU("TPU v5", "v5p", 4096, 3, 2),
    "v6e": TPU("TPU v6 lite", "v6e", 256, 2, 1),
    "tpu7x": TPU("TPU7x", "tpu7x", 4096, 3, 1, devices_per_chip=2),
}
TARGETS: dict[str, Target | TPU] = {**GPUS, **TPUS}


KINDS = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
BITS = {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64}  # other names contain it: s32, u8, f8e4m3fn
_collective = re.compile(rf"= (?P<type>\S.*?) (?P<kind>{KINDS})(?P<start>-start)?\((?P<rest>.*)")
_array = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")


class Collective(NamedTuple):
    """A collective of a program, or several collectives that are equal."""

    kind: str
    devices: int  # of one group
    arrays: str  # the types of operands or results, whichever are larger
    num_bytes: int  # of these arrays, on one device
    times: int = 1


def collectives(text: str, devices: int) -> list[Collective]:
    """Returns the collectives in the text of a program for so many devices, the largest first.

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
        if match["start"]:  # a pair of operands and results
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
    """Returns the number of devices in a group, from one of the three forms that XLA writes."""
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
    """A mesh of devices: replicas of the tokens, and shards of the vocabulary."""

    data: int
    tensor: int

    def __str__(self) -> str:
        return f"{self.data}x{self.tensor}"

    @classmethod
    def of(cls, text: str) -> Pod:
        """Parses "64x8"."""
        sizes = text.split("x")
        if len(sizes) != 2 or not all(size.isascii() and size.isdigit() and int(size) for size in sizes):
            raise ValueError(f"{text!r} must be DATAxTENSOR, two positive numbers of devices, such as 64x8")
        return cls(*map(int, sizes))


class Split(NamedTuple):
    """How operands are split over the pod, in addition to the batch over data and the vocabulary over tensor."""

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
    tokens: int  # of a replica
    pod: Pod
    target: Target | TPU
    dtype: Any = jnp.bfloat16
    function: str = "linear_logprobs"
    split: Split = SPLITS[0]
    sharded: bool = False  # whether it calls the function that takes mesh axes by name; else jit splits the call

    @property
    def columns(self) -> int:
        """The columns of the weight on each device, padding included."""
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
        """Returns the function of these operands to compile."""
        options: dict[str, Any] = {"vocab_size": self.head.vocab_size, "logit_softcap": self.head.logit_softcap}
        function = getattr(lce_jax, f"sharded_{self.function}" if self.sharded else self.function)
        if self.sharded:
            options |= {"mesh": mesh, "batch_axes": "data", "vocab_axis": "tensor"}
            options["sequence_axis"] = "tensor" if self.split.sequence else None
        if self.function == "linear_kl":
            options["teacher_logit_softcap"] = "same"
        arguments = ARGUMENTS[self.function]
        return lambda *operands: function(*arguments(*operands), **options)


# The positional arguments of each function, made of hidden states, weight and labels. The teacher of a divergence is
# the student's head with other hidden states.
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
    """Yields the lines to print, each program's lines once it is compiled."""
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
