"""Lists of Hopper kernels, for callers who bring their own memory and stream.

    program = passes.forward(passes.Head(...), keep_cache=False)   # host only: nothing is asked of the GPU
    run = program.load(number)                                     # compiled for the current CUDA device
    run(stream, workspace, numbers, addresses)                     # nothing is allocated, nothing waits

The lists are made by the host code that JAX traces elsewhere. No client of JAX's is made on the GPU, and JAX allocates
nothing there.
"""

from __future__ import annotations

from lce_jax._devices import for_device
from lce_jax._types import RESULTS, Device
from lce_jax.launch_lists._head import THREADS, Head, refusal
from lce_jax.launch_lists._kept import live_shape
from lce_jax.launch_lists._list import Program
from lce_jax.launch_lists._mosaic import why_not
from lce_jax.launch_lists._passes import backward, forward, merge, part
from lce_jax.launch_lists._refusal import UnservedError
from lce_jax.launch_lists._scale import refusal_to_scale, scale

__all__ = [
    "RESULTS",
    "THREADS",
    "Device",
    "Head",
    "Program",
    "UnservedError",
    "backward",
    "for_device",
    "forward",
    "live_shape",
    "merge",
    "part",
    "refusal",
    "refusal_to_scale",
    "scale",
    "why_not",
]
