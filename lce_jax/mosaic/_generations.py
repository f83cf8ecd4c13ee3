"""The generations of GPUs, and which one serves a device. Each generation is a folder like `sm90` and an entry here."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import jax

from lce_jax.mosaic._call import Generation
from lce_jax.mosaic.common import _refusal
from lce_jax.mosaic.mma import SM80, SM89, SM120
from lce_jax.mosaic.sm90 import HOPPER
from lce_jax.types._types import Call, Device

JAX_OF_THE_KERNELS = (0, 11, 2)  # the oldest JAX whose kernel language has been tested on a GPU
GENERATIONS: tuple[Generation, ...] = (HOPPER, SM120, SM80, SM89)
RELEASED = GENERATIONS  # those without what `using` adds
# By number of heads: what the first call on a GPU of this machine found wrong; None if nothing was wrong.
FAULTS: dict[tuple[Generation, Device, int], str | None] = {}


def serving(device: Device) -> Generation | None:
    """Returns the generation of ``device``; None if no kernels serve it.

    A device that is only described, for compilation ahead of time, has a name and no compute capability.
    """
    for generation in GENERATIONS:
        if device.compute_capability in generation.compute_capabilities:
            return generation
        if not device.compute_capability and re.search(rf"\b({'|'.join(generation.devices)})\b", device.kind):
            return generation
    return None


@contextlib.contextmanager
def using(generation: Generation) -> Iterator[None]:
    """In this context, ``generation`` serves its compute capabilities. Sweeps and tests use this.

    Tracing chooses the generation, so functions that are already traced must be traced again in the context.
    """
    global GENERATIONS
    before = GENERATIONS
    others = (one for one in before if one.compute_capabilities != generation.compute_capabilities)
    GENERATIONS = (generation, *others)
    try:
        yield
    finally:
        GENERATIONS = before


def refusal(call: Call) -> str | None:
    """Says why no kernels can serve ``call``; None if they can."""
    reason = device_refusal(call.device, 1 if call.teacher is None else 2)
    if reason is not None:
        return reason
    generation = serving(call.device)
    assert generation is not None
    return _refusal.refusal(call, generation)


def device_refusal(device: Device, heads: int = 1) -> str | None:
    """Says why no kernels can serve any call with this number of ``heads`` on ``device``; None if they can."""
    *others, last = sorted((one for each in GENERATIONS for one in each.compute_capabilities), key=float)
    capabilities = f"{', '.join(others)} or {last} ({', '.join(one.devices[0] for one in GENERATIONS)})"
    if device.platform not in ("gpu", "cuda"):
        return f"needs an NVIDIA GPU of compute capability {capabilities}, this is {device.platform}"
    if jax.__version_info__ < JAX_OF_THE_KERNELS:
        return f"needs JAX {'.'.join(map(str, JAX_OF_THE_KERNELS))} or newer, this is {jax.__version__}"
    generation = serving(device)
    if generation is None:
        its = device.compute_capability or "another, or a name that does not tell it"
        return f"needs compute capability {capabilities}, {device.kind} has {its}"
    if device.core_count < 2:
        return f"needs to know the number of multiprocessors of {device.kind}"
    faults = (FAULTS.get((generation, device, number)) for number in range(1, heads + 1))
    return next(filter(None, faults), None)


def unchecked(device: Device, heads: int = 1) -> Generation | None:
    """Returns the generation of ``device`` if it has run only on other cards, and no call here has checked it yet."""
    generation = serving(device)
    is_known = generation is None or generation.ran_on is None or (generation, device, heads) in FAULTS
    return None if is_known else generation
