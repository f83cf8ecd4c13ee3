"""Steps on a few numbers per token, in the arithmetic that an implementation has for them.

XLA and the kernels round logarithms and quotients differently, so a token's results keep their bits only where all such
steps are of one kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lce_jax import _devices, mosaic
from lce_jax._types import is_array
from lce_jax.mesh._by_platform import by_platform


def of_arrays(function: Callable[..., Any], operands: Any) -> tuple[Callable[..., Any], list[Any]]:
    """``function(*operands)`` as a function of the arrays among the trees ``operands``, and these."""
    leaves, tree = jax.tree.leaves(operands), jax.tree.structure(operands)

    def run(*arrays: Any) -> Any:
        given = iter(arrays)
        return function(*jax.tree.unflatten(tree, [next(given) if is_array(x) else x for x in leaves]))

    return run, list(filter(is_array, leaves))


def on_device(function: Callable[..., Any], *operands: Any) -> Any:
    """``function(*operands)`` of trees of [T] and of numbers: in a kernel, where there are any for their device."""
    run, arrays = of_arrays(function, operands)
    device = _devices.current_device(*arrays)
    kernels = mosaic.on(device)
    if kernels is None or not all(x.dtype in (jnp.float32, jnp.int32) for x in arrays):
        return run(*arrays)

    def in_kernel(*arrays: Any) -> Any:
        return kernels.per_token(run, *arrays)

    return by_platform(in_kernel, run, *arrays, device=device)
