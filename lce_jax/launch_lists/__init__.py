"""Lists of Hopper kernels, for callers who bring their own memory and stream.

    launches = launch_lists.forward(launch_lists.CallKind(...), keep_cache=False)  # host only: no GPU is asked
    run = launches.load(number)                                                    # compiled for the current device
    run(stream, workspace, numbers, addresses)                                     # nothing is allocated or waits

The lists are made by the host code that JAX traces elsewhere. No client of JAX's is made on the GPU, and JAX allocates
nothing there.
"""

from __future__ import annotations

from lce_jax._dispatch import for_device
from lce_jax._types import RESULTS, Device
from lce_jax.launch_lists._call_kind import SERVED, THREADS, CallKind, refusal
from lce_jax.launch_lists._compiler import why_not
from lce_jax.launch_lists._launch_list import LaunchList
from lce_jax.launch_lists._passes import backward, forward, merge, part
from lce_jax.launch_lists._refusal import UnservedError
from lce_jax.launch_lists._saved_tiles import live_shape
from lce_jax.launch_lists._scale import refusal_to_scale, scale

__all__ = [
    "RESULTS",
    "SERVED",
    "THREADS",
    "CallKind",
    "Device",
    "LaunchList",
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
