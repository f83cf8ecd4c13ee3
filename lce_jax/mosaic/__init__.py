"""The implementation with GPU kernels, in Pallas on Mosaic GPU: the logits exist in registers only.

forward    hidden·weightᵀ tile by tile, statistics from the accumulators
backward   the same tiles again, turned into dlogits one chunk of the vocabulary at a time, and two products
threshold  with ``gradient_threshold``, the backward visits the tiles alone that carry gradient
cache      with ``cache_bytes``, the forward keeps the first tiles' exponentials and the backward skips theirs

`lce_jax.linear_kl` takes the same way with two heads: a `KernelCall` with a teacher.

The modules here are host code, the same for every generation of GPUs. `common` has the kernels, which the host code
calls by name. A generation is a folder with a pipeline and a tuning, which the kernels with tensor cores take: `sm90`
for Hopper (compute capability 9.0), `mma` for others. `_generations` picks one by device. `_pallas` is the one importer
of the kernel language.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from lce_jax.mathematics._kl import KLCoefficients, KLStatistics, Mixture, MixtureCoefficients, MixtureSums
from lce_jax.mathematics._statistics import Normalizer, Parts
from lce_jax.mosaic import _backward, _forward, _generations, _pallas, _plan, _threshold
from lce_jax.mosaic._call import Generation
from lce_jax.mosaic.common import _refusal, _tokens
from lce_jax.types._types import (
    Call,
    Device,
    Operands,
    Plan,
    Primals,
    RowCoefficients,
    ShardStatistics,
    UnsupportedError,
)
from lce_jax.xla._kl import KLPlan
from lce_jax.xla._walk import Shard

NAME = "mosaic_gpu"


def _launches[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """``function`` of a call or a plan of one, whose kernels are lowered for its device, which need not be there.

    Code and kernels rely on ranks being promoted, whatever the caller's configuration says.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        (call,) = (x.calls.student if isinstance(x, KLPlan) else x for x in args if isinstance(x, (Call, KLPlan)))
        capability = call.device.compute_capability or _generation_of(call).compute_capabilities[0]
        with jax.numpy_rank_promotion("allow"), _pallas.lowering_for(capability, unless_told=True):
            return function(*args, **kwargs)

    return run


def supports(call: Call) -> str | None:
    """Why the kernels cannot serve ``call``: the function, the device, the dtype, or a shape they cannot tile."""
    reason = without_kernels(call) or _generations.refusal(call)
    if reason is not None or call.teacher is None:
        return reason
    of_teacher = _generations.refusal(call.teacher)
    return _refusal.kl_refusal(call.heads, _generation_of(call)) if of_teacher is None else f"the teacher: {of_teacher}"


def without_kernels(call: Call) -> str | None:
    """Why no device has kernels for the function of ``call``; None if some have."""
    if call.top_k:
        return "linear_topk runs no kernel: XLA's product of a few hundred tokens at a time and a selection serve it"
    if call.function == "linear_logits":
        return "linear_logits runs no kernel: it is a few dot products per token, and never visits the vocabulary"
    return None


def plan(call: Call) -> Plan:
    """Tiles and bytes; what ``cache_bytes`` will keep."""
    return _plan.plan(call, _generation_of(call), NAME)


@_launches
def statistics(operands: Operands, call: Call, keep_cache: bool = False) -> tuple[ShardStatistics, Any]:
    """Eq. 1 of the whole shard, and the cache."""
    return _forward.statistics(operands, call, _generation_of(call), keep_cache)


@_launches
def in_parts(operands: Operands, call: Call, keep_cache: bool = False) -> tuple[Parts, Any]:
    """Eq. 1 of each group of tiles, and the cache."""
    return _forward.in_parts(operands, call, _generation_of(call), keep_cache)


@_launches
def merged(parts: Parts, call: Call, inverse_temperature: Any, num_rows: Any) -> ShardStatistics:
    """All shards' groups joined in their order."""
    return _forward.merged(parts, call, _generation_of(call), inverse_temperature, num_rows)


@_launches
def per_token(call: Call, function: Callable[..., Any], *operands: Any) -> Any:
    """In a kernel."""
    del call
    return _tokens.per_token(function, *operands)


def serves(device: Device) -> bool:
    """Whether a device has kernels, and they were not found wrong there."""
    return _generations.device_refusal(device) is None


@_launches
def selected(call: Call, cache: Any, of_rows: Normalizer, num_rows: Any) -> tuple[Any, Any]:
    """The live tiles, and the dropped mass."""
    if cache is None:
        return None, None
    return _threshold.select(call, cache, of_rows, num_rows)


@_launches
def gradients(
    operands: Operands,
    call: Call,
    rows: RowCoefficients,
    cache: Any = None,
    *,
    may_round_dhidden: bool = False,
    may_overwrite_cache: bool = True,
    dweight: Any = None,
    adds_dweight: Any = True,
) -> Primals:
    """Eq. 5: dhidden in float32; dweight in the weight's dtype, or added to ``dweight`` in float32, or written there.

    dhidden is in the weight's dtype too where it may be rounded and one launch computes all of it. The tiles here know
    no parts of the vocabulary.
    """
    call = call.single_part
    if call.gradient_threshold:
        assert cache is not None, "the forward keeps which tiles are live"
        return _threshold.gradients(operands, call, _generation_of(call), rows, cache, dweight)
    allowed = (may_round_dhidden, may_overwrite_cache)
    return _backward.gradients(operands, call, _generation_of(call), rows, cache, *allowed, dweight, adds_dweight)


def kl_plan(plan: KLPlan) -> Plan:
    """What `explain` says of it."""
    return _plan.kl_plan(plan, _generation_of(plan.calls.student), NAME)


@_launches
def kl_statistics(plan: KLPlan, shard: Shard, keep_cache: bool = False) -> tuple[KLStatistics, Any]:
    """`lce_jax.xla._kl.statistics`, with kernels."""
    return _forward.kl_statistics(plan, shard, _generation_of(plan.calls.student), keep_cache)


@_launches
def kl_mixture_sums(plan: KLPlan, shard: Shard, rows: Mixture) -> MixtureSums:
    """`lce_jax.xla._kl.mixture_sums`, with kernels."""
    return _forward.kl_mixture_sums(plan, shard, rows, _generation_of(plan.calls.student))


@_launches
def kl_gradients(plan: KLPlan, shard: Shard, rows: KLCoefficients | MixtureCoefficients, cache: Any = None) -> Primals:
    """`lce_jax.xla._kl.gradients`, with kernels."""
    return _backward.kl_gradients(plan, shard, rows, cache, _generation_of(plan.calls.student))


def _generation_of(call: Call) -> Generation:
    generation = _generations.serving(call.device)
    if generation is None:
        raise UnsupportedError(f'implementation "{NAME}": {_generations.refusal(call)}')
    return generation
