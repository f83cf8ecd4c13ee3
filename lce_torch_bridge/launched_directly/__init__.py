"""Kernels on torch's current stream, in torch's memory.

`_way` decides whether a pass is launched directly. `_passes` has the two passes, and the reasons why a call has none.
`_host` runs a pass: it executes the host code of `lce_jax.run.kernels` with torch as its host.
"""
