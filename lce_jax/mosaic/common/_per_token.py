"""Any step on a few numbers per token, as a kernel: one thread per token, rounded as the other kernels round.

XLA has another logarithm and another division, so its results differ from theirs in the last bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax.mosaic import _pallas
from lce_jax.mosaic._pallas import pl, plgpu
from lce_jax.mosaic.common._threads import THREADS, Rows


def per_token(function: Callable[..., Any], *operands: Any) -> Any:
    """``function(*operands)`` of trees of arrays [T], computed for `THREADS` tokens at a time."""
    leaves: list[Any] = jax.tree.leaves(operands)
    tree: Any = jax.tree.structure(operands)
    count = leaves[0].shape[0]
    missing = max(THREADS - count, 0)
    given = [jnp.pad(x, (0, missing)) for x in leaves] if missing else leaves
    of_block = [jax.ShapeDtypeStruct((THREADS,), x.dtype) for x in given]
    found = jax.eval_shape(function, *tree.unflatten(of_block))
    results, out_tree = jax.tree.leaves(found), jax.tree.structure(found)
    run = _pallas.kernel(
        functools.partial(_kernel, function, tree, count + missing),
        out_type=[jax.ShapeDtypeStruct((count + missing,), x.dtype) for x in results],
        grid=(-(-count // THREADS),),
        grid_names=("rows",),
        compiler_params=plgpu.CompilerParams(approx_math=False),
        kernel_name="lce_per_token",
    )
    return jax.tree.unflatten(out_tree, [x[:count] for x in run(*given)])


def _kernel(function: Callable[..., Any], tree: Any, count: int, *refs: Any) -> None:
    given, results = refs[: tree.num_leaves], refs[tree.num_leaves :]
    rows = Rows.of(lax.axis_index("rows"), count)

    def write() -> None:
        found = function(*tree.unflatten([ref[rows.here] for ref in given]))
        for ref, x in zip(results, jax.tree.leaves(found), strict=True):
            ref.at[rows.here][...] = x

    pl.when(rows.live)(write)
