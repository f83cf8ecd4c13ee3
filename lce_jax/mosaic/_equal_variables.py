"""A faster step of Mosaic's search for layouts, for JAX before 0.12.

Before JAX 0.12, Mosaic sorts variables by their text before it groups equal ones. A variable's text has its operation,
which for a loop is the whole body. This printing took half of the time to lower the kernels of a "jsd". JAX 0.12 does
not sort. The lowered kernels are the same, bit for bit.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import jax


@functools.cache
def group_without_sorting() -> None:
    """Replaces Mosaic's function, once, in versions of JAX where it sorts."""
    if jax.__version_info__ < (0, 12):
        constraints: Any = importlib.import_module("jax.experimental.mosaic.gpu.constraints")
        constraints.compute_transitively_equal_vars = functools.partial(find_equal_variables, constraints)


def find_equal_variables(constraints: Any, system: Any) -> dict[Any, list[Any]]:
    """Maps each variable of ``system`` to the other variables that equations make equal to it."""
    groups: dict[Any, list[Any]] = {}
    for constraint in system.constraints:
        match constraint:
            case constraints.Equals(lhs=constraints.Variable() as lhs, rhs=constraints.Variable() as rhs):
                first, second = (groups.setdefault(variable, [variable]) for variable in (lhs, rhs))
                if first is not second:
                    first += second
                    groups.update(dict.fromkeys(second, first))
    return {variable: [other for other in group if other != variable] for variable, group in groups.items()}
