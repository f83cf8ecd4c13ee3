"""The implementation for Hopper GPUs (compute capability 9.0): Pallas kernels on Mosaic GPU.

forward    hidden·weightᵀ in [128, 256] tiles, statistics from the accumulators; the logits exist nowhere else
backward   the same tiles again, turned into dlogits one chunk of the vocabulary at a time, and two products
cache      with ``cache_bytes``, the forward keeps the first tiles' exponentials and the backward skips theirs
"""

from __future__ import annotations

from typing import Any

from lce_jax._types import ALONE, Case, Operands, Plan, Primals, RowCoefficients, ShardStatistics, Surroundings
from lce_jax.mosaic import _config

NAME = "mosaic_gpu"


def supports(case: Case) -> str | None:
    """Why the kernels cannot serve ``case``: the device, the dtype, or a shape they cannot tile."""
    return _config.refusal(case)


def plan(case: Case, around: Surroundings = ALONE) -> Plan:
    """Tiles and bytes; what ``cache_bytes`` will keep."""
    return _config.plan(case, NAME, around)


def statistics(
    operands: Operands, case: Case, keep_cache: bool = False, *, interpret: Any = None
) -> tuple[ShardStatistics, Any]:
    """Eq. 1 of the whole shard, and the cache. ``interpret`` runs the kernels on the CPU, for tests."""
    from lce_jax.mosaic import _forward  # imports the kernel language, which only these calls need

    return _forward.statistics(operands, case, keep_cache, interpret)


def gradients(
    operands: Operands,
    case: Case,
    rows: RowCoefficients,
    cache: Any = None,
    *,
    may_round_dhidden: bool = False,
    may_overwrite_cache: bool = True,
    interpret: Any = None,
) -> Primals:
    """Eq. 5: dhidden in float32, dweight in the weight's dtype.

    dhidden is in the weight's dtype too where it may be rounded and one launch computes all of it.
    """
    from lce_jax.mosaic import _backward

    allowed = (may_round_dhidden, may_overwrite_cache)
    return Primals(*_backward.gradients(operands, case, rows, cache, *allowed, interpret))
