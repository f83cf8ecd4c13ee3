"""GPUs and TPUs to compile for ahead of time, on a machine that need not have them.

For a TPU, the compiler libtpu needs only the TPU's name. For a GPU, XLA needs a description. The numbers here are from
https://github.com/openxla/xla/tree/main/xla/backends/gpu/target_config/specs. Fields that these programs do not use are
left out.
"""

from __future__ import annotations

import dataclasses
from importlib import metadata
from typing import Any, ClassVar

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

COMPILER = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-nvrtc", "nvidia-nvjitlink")


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU to compile for."""

    kind: str  # JAX's name for it
    capability: tuple[int, int]
    core_count: int  # how many multiprocessors; the kernels' chunks depend on it
    memory_bytes: int
    memory_bandwidth: int  # bytes per second
    clock_ghz: float
    l2_bytes: int
    shared_bytes: int  # the shared memory of a multiprocessor

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
        """Returns a mesh whose axes data and tensor have these sizes. Its devices are only described.

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
    """A TPU to compile for. TPUs' compiler reads no partitioning rules, so axes are Explicit under plain ``jit``."""

    kind: str  # JAX's name for it
    name: str  # libtpu's name for it
    most_chips: int  # the size of the largest slice
    dimensions: int  # a slice is a torus of chips with this many dimensions
    core_count: int  # how many cores a device has
    devices_per_chip: int = 1

    platform: ClassVar[str] = "tpu"
    jit_axes: ClassVar[AxisType] = AxisType.Explicit

    def mesh(self, data: int, tensor: int, axis_type: AxisType = AxisType.Auto) -> Mesh:
        """Returns a mesh whose axes data and tensor have these sizes. Its devices, of one slice, are only described.

        Raises:
            ValueError: no slice has this number of devices.
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
        """Returns why no slice has this number of ``devices``; None if one has."""
        most = self.most_chips * self.devices_per_chip
        if not devices & (devices - 1) and devices <= most:
            return None
        return f"a slice of {self.kind} has a power of 2 of devices, {most} at most, not {devices}"

    def _torus(self, devices: int) -> str:
        """Returns a slice's chips along each dimension, as equal as possible, such as "4x2"."""
        twos = max(devices // self.devices_per_chip, 1).bit_length() - 1
        sides = [1 << (twos + self.dimensions - 1 - i) // self.dimensions for i in range(self.dimensions)]
        return "x".join(map(str, sides))


def libtpu() -> str:
    """Returns what pip must install to compile for TPUs: libtpu, in the version that this JAX requires."""
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
