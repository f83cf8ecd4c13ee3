"""Programs with Hopper kernels as lists of launches, for callers who bring their own memory and stream.

    program = launch.program(function, operands, device)        # host only: nothing is asked of the GPU
    run = program.load(number)                                  # compiled for the current CUDA device
    run(stream, workspace, (), addresses)                       # nothing is allocated, nothing waits

``function`` is one that ``jax.jit`` takes. Its Mosaic kernels are launched as they are. What lies between them, some
hundred operations on a few numbers per token, is generated as CUDA C++ from StableHLO, a few launches in all: so the
mathematics stays in one place. No client of JAX's is made on the GPU, and JAX allocates nothing there.
"""

from __future__ import annotations

from lce_jax._dispatch import for_device
from lce_jax._types import Device
from lce_jax.launch._graph import Rows
from lce_jax.launch._jax import why_not
from lce_jax.launch._program import Program, program
from lce_jax.launch._refusal import UnservedError

__all__ = ["Device", "Program", "Rows", "UnservedError", "for_device", "program", "why_not"]
