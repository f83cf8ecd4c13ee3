"""GPUs that need not be there: as `explain` plans for them, and as XLA compiles for them, in its own words.

The numbers are those of XLA's descriptions of the cards,
https://github.com/openxla/xla/tree/main/xla/backends/gpu/target_config/specs, without what the programs here leave
alone.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

COMPILER = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-nvrtc", "nvidia-nvjitlink")


@dataclasses.dataclass(frozen=True)
class Target:
    """A kind of GPU."""

    kind: str  # as JAX names it
    capability: tuple[int, int]
    core_count: int  # multiprocessors, which decide the kernels' chunks
    memory_bytes: int
    memory_bandwidth: int  # bytes per second
    clock_ghz: float
    l2_bytes: int
    shared_bytes: int  # of a multiprocessor

    @property
    def config(self) -> str:
        """What ``target_config`` of `jax.experimental.topologies.get_topology_desc` takes."""
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

    def mesh(self, data: int, tensor: int) -> jax.sharding.Mesh:
        """``data`` x ``tensor`` such devices, which are only described, as Auto axes of these names.

        Raises:
            ModuleNotFoundError: the wheels with JAX's CUDA plugin are missing; the message says which to install.
        """
        given = {"target_config": self.config, "topology": f"1x{data}x{tensor}"}
        try:
            described = topologies.get_topology_desc(self.kind, platform="cuda", **given)
        except NotImplementedError:
            plugin = (f"jax-cuda13-{part}=={jax.__version__}" for part in ("plugin", "pjrt"))
            raise ModuleNotFoundError(
                f"to compile for {self.kind} without one, install JAX's CUDA plugin and NVIDIA's compiler: pip install "
                f"--no-deps {' '.join([*plugin, *COMPILER])}"
            ) from None
        devices: Any = np.array(described.devices).reshape(data, tensor)
        return jax.sharding.Mesh(devices, ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


TARGETS = {
    "h100": Target("NVIDIA H100 80GB HBM3", (9, 0), 132, 84942979072, 3352320000000, 1.98, 50 << 20, 228 << 10),
    "h200": Target("NVIDIA H200", (9, 0), 132, 151397597184, 4800000000000, 1.965, 50 << 20, 228 << 10),
    "a100": Target("NVIDIA A100-SXM4-80GB", (8, 0), 108, 85100068864, 2039040000000, 1.41, 40 << 20, 164 << 10),
    "b200": Target("NVIDIA B200", (10, 0), 148, 191514411008, 7672320000000, 1.965, 132644864, 228 << 10),
    "b300": Target("NVIDIA B300", (10, 3), 158, 297021865984, 7936000000000, 1.965, 135528448, 228 << 10),
}
