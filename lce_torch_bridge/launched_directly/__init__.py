"""Kernels on torch's current stream, in torch's memory.

`_launch_with` decides whether a pass is launched directly. `_passes` and `_kl` have the forward and backward passes,
and the reasons why a call cannot be launched directly. `_launches` runs a pass: it records the host code of
`lce_jax.run.kernels` once, and launches the recorded kernels from torch.
"""
