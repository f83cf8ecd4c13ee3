"""Kernels on torch's current stream, in torch's memory.

`_way` says whether a pass may be launched so. `_passes` are the two passes, and which calls have them. `_host` runs
them: the host code of `lce_jax.run.kernels` with torch as its host.
"""
