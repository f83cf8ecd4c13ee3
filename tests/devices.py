"""GPUs for which tests plan and lower kernels without running them."""

from __future__ import annotations

from lce_jax.types._types import Device

H200 = Device("gpu", "NVIDIA H200", "9.0", 132)
A100 = Device("gpu", "NVIDIA A100-SXM4-80GB", "8.0", 108)
B200 = Device("gpu", "NVIDIA B200", "10.0", 148)
