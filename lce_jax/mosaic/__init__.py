"""The implementation with GPU kernels, in Pallas on Mosaic GPU. Logits exist only in registers.

forward    computes hidden·weightᵀ tile by tile, and statistics from the accumulators
backward   computes the same tiles again, as dlogits of one chunk of the vocabulary at a time, then two products
threshold  with ``gradient_threshold``, the backward visits only the active tiles, which have gradients
cache      with ``cache_bytes``, the forward caches the first tiles' exponentials, which the backward then reads

`lce_jax.linear_kl` runs in the same way with two heads: a `KernelCall` with a teacher.

The modules here are host code, which all generations of GPUs share. `common` has the kernels. A generation is a folder
with a pipeline and tunings for the kernels with tensor cores: `sm90` for Hopper (compute capability 9.0), `mma` for
others. `_generations` chooses one by device. Only `_pallas` imports the kernel language.
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


def _lowers_for_device[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Makes a function of a `Call` or a `KLPlan` lower its kernels for the call's device, which may be absent.

    Ranks are promoted in ``function``, whatever the caller's configuration of JAX says.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        (call,) = (x.calls.student if isinstance(x, KLPlan) else x for x in args if isinstance(x, (Call, KLPlan)))
        capability = call.device.compute_capability or _generation_of(call).compute_capabilities[0]
        with jax.numpy_rank_promotion("allow"), _pallas.lowering_for(capability, as_default=True):
            return function(*args, **kwargs)

    return run


def supports(call: Call) -> str | None:
    """Says why the kernels cannot serve ``call``: its function, device, dtype or shape; None if they can."""
    reason = refuse_function(call) or _generations.refusal(call)
    if reason is not None or call.teacher is None:
        return reason
    of_teacher = _generations.refusal(call.teacher)
    return _refusal.kl_refusal(call.heads, _generation_of(call)) if of_teacher is None else f"the teacher: {of_teacher}"


def refuse_function(call: Call) -> str | None:
    """Says why no device has kernels for the function of ``call``; None if some device has."""
    if call.top_k:
        return (
            "linear_topk runs no kernel: XLA multiplies a few hundred tokens at a time, and selects from the products"
        )
    if call.function == "linear_logits":
        return "linear_logits runs no kernel: it is a few dot products per token, without a pass over the vocabulary"
    return None


def plan(call: Call) -> Plan:
    """Returns the plan of a call: its tiles, their bytes, and what ``cache_bytes`` caches."""
    return _plan.plan(call, _generation_of(call), NAME)


@_lowers_for_device
def statistics(operands: Operands, call: Call, keep_cache: bool = False) -> tuple[ShardStatistics, Any]:
    """Computes the statistics of the shard (eq. 1), and the cache if ``keep_cache``."""
    return _forward.statistics(operands, call, _generation_of(call), keep_cache)


@_lowers_for_device
def partial_statistics(operands: Operands, call: Call, keep_cache: bool = False) -> tuple[Parts, Any]:
    """Computes the statistics of each group of tiles (eq. 1), and the cache if ``keep_cache``."""
    return _forward.partial_statistics(operands, call, _generation_of(call), keep_cache)


@_lowers_for_device
def merge_statistics(parts: Parts, call: Call, inverse_temperature: Any, num_rows: Any) -> ShardStatistics:
    """Merges the statistics of all shards' groups of tiles, in the order of the groups."""
    return _forward.merge_statistics(parts, call, _generation_of(call), inverse_temperature, num_rows)


@_lowers_for_device
def compute_per_token(call: Call, function: Callable[..., Any], *operands: Any) -> Any:
    """Computes ``function(*operands)`` in a kernel; the operands are per-token arrays."""
    del call
    return _tokens.compute_per_token(function, *operands)


def serves(device: Device) -> bool:
    """Whether kernels serve a device. They do not if the first call there found wrong results."""
    return _generations.device_refusal(device) is None


@_lowers_for_device
def select_tiles(call: Call, cache: Any, normalizer: Normalizer, num_rows: Any) -> tuple[Any, Any]:
    """Selects the active tiles. Returns their mask, and the dropped mass if requested."""
    if cache is None:
        return None, None
    return _threshold.select(call, cache, normalizer, num_rows)


@_lowers_for_device
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
    """Computes the gradients (eq. 5): dhidden in float32, and dweight in the weight's dtype.

    dhidden is in the weight's dtype if it may be rounded and one launch computes all of it. If ``dweight`` is given, a
    float32 sum, kernels add to it, or overwrite it if not ``adds_dweight``. The backward ignores vocab_part_size.
    """
    call = call.single_part
    if call.gradient_threshold:
        assert cache is not None, "the forward saves which tiles are active"
        return _threshold.gradients(operands, call, _generation_of(call), rows, cache, dweight)
    allowed = (may_round_dhidden, may_overwrite_cache)
    return _backward.gradients(operands, call, _generation_of(call), rows, cache, *allowed, dweight, adds_dweight)


def kl_plan(plan: KLPlan) -> Plan:
    """Returns the plan of a call with two heads."""
    return _plan.kl_plan(plan, _generation_of(plan.calls.student), NAME)


@_lowers_for_device
def kl_statistics(plan: KLPlan, shard: Shard, keep_cache: bool = False) -> tuple[KLStatistics, Any]:
    """Computes `lce_jax.xla._kl.statistics` with kernels."""
    return _forward.kl_statistics(plan, shard, _generation_of(plan.calls.student), keep_cache)


@_lowers_for_device
def kl_mixture_sums(plan: KLPlan, shard: Shard, rows: Mixture) -> MixtureSums:
    """Computes `lce_jax.xla._kl.mixture_sums` with kernels."""
    return _forward.kl_mixture_sums(plan, shard, rows, _generation_of(plan.calls.student))


@_lowers_for_device
def kl_gradients(plan: KLPlan, shard: Shard, rows: KLCoefficients | MixtureCoefficients, cache: Any = None) -> Primals:
    """Computes `lce_jax.xla._kl.gradients` with kernels."""
    return _backward.kl_gradients(plan, shard, rows, cache, _generation_of(plan.calls.student))


def _generation_of(call: Call) -> Generation:
    generation = _generations.serving(call.device)
    if generation is None:
        raise UnsupportedError(f'implementation "{NAME}": {_generations.refusal(call)}')
    return generation
