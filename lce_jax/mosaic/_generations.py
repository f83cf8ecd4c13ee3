"""Which kernel set serves a device: a new generation of GPUs is a folder beside `sm90`, and its name here."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator

import jax

from lce_jax._types import Case, Device
from lce_jax.mosaic._kernel_set import KernelSet

JAX_OF_THE_KERNELS = (0, 11, 2)  # the oldest whose kernel language has been tested on a GPU
GENERATIONS = ("sm90",)  # folders, each with a `KernelSet` named KERNELS
KERNEL_SETS: tuple[KernelSet, ...] = tuple(
    importlib.import_module(f"lce_jax.mosaic.{name}").KERNELS for name in GENERATIONS
)


def serving(device: Device) -> KernelSet | None:
    """The kernel set for ``device``; None where none is written for it.

    A device that is only described, for compiling ahead of time, has a name and no compute capability.
    """
    for kernels in KERNEL_SETS:
        described = not device.compute_capability and any(name in device.kind for name in kernels.devices)
        if device.compute_capability in kernels.compute_capabilities or described:
            return kernels
    return None


@contextlib.contextmanager
def using(kernels: KernelSet) -> Iterator[None]:
    """Within it, ``kernels`` serves in place of the kernel set for the same compute capabilities: for sweeps and tests.

    It is read while tracing, so trace afresh inside.
    """
    global KERNEL_SETS
    before = KERNEL_SETS
    same = [one.compute_capabilities == kernels.compute_capabilities for one in before]
    KERNEL_SETS = tuple(kernels if is_same else one for one, is_same in zip(before, same, strict=True))
    try:
        yield
    finally:
        KERNEL_SETS = before


def refusal(case: Case) -> str | None:
    """Why no kernel set can serve ``case``; None where one can."""
    device = case.device
    each = (f"{', '.join(one.compute_capabilities)} ({', '.join(one.devices[:3])})" for one in KERNEL_SETS)
    capabilities = " or ".join(each)
    if device.platform not in ("gpu", "cuda"):
        return f"needs an NVIDIA GPU of compute capability {capabilities}, this is {device.platform}"
    if jax.__version_info__ < JAX_OF_THE_KERNELS:
        return f"needs JAX {'.'.join(map(str, JAX_OF_THE_KERNELS))} or newer, this is {jax.__version__}"
    kernels = serving(device)
    if kernels is None:
        return f"needs compute capability {capabilities}, {device.kind} has {device.compute_capability or 'another'}"
    if device.core_count < 2:
        return f"needs to know the number of multiprocessors of {device.kind}"
    return kernels.refusal(case)
