"""The passes of `lce_jax.linear_kl` as kernel launches, for a host: a caller with its own memory and stream.

    forward    row scales ─ statistics ─ join ─ (exchange between shards) ─ join ─ save
               for a mixture also          sums ─ join ─ (exchange) ─ join ─ save
    backward   row scales ─ coefficients ─ (dlogits ─ dhidden ─ dweight) …

The forward saves a flat array with ``stride`` numbers for each field: the temperatures that the call has, the merged
statistics of both heads, and the sums of a mixture.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lce_jax.mathematics._kl import KLStatistics, MixtureSums, Pair
from lce_jax.mosaic import _backward, _chunks, _forward, _generations
from lce_jax.mosaic._call import KernelCall
from lce_jax.mosaic._chunks import KLCache
from lce_jax.mosaic._host import Host
from lce_jax.mosaic._operands import Marked
from lce_jax.mosaic.common import _refusal, _tokens
from lce_jax.mosaic.common._kl_tokens import (
    KLRows,
    compute_coefficients,
    compute_row_scales,
    save_mixture,
    save_statistics,
)
from lce_jax.run import kernels
from lce_jax.run.kernels import Buffer, HostPass, LaunchedCall
from lce_jax.types._types import Call
from lce_jax.xla._kl import KLPlan

__all__ = ["Forward", "Heads", "LaunchedKL", "Pair", "backward", "forward", "refusal"]

# (the tile groups of a shard, the saved array or None if the groups have no tags) -> the tile groups of all shards
type Exchange = Callable[[Buffer, Buffer | None], Buffer]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchedKL:
    """A call of two heads whose kernels a host launches. Both heads have equally many rows and columns.

    Attributes:
        heads: the call of each head.
        beta: the teacher's weight in a mixture, ½ in "tv"; None in a KL.
    """

    heads: Pair[LaunchedCall]
    beta: float | None

    @property
    def plan(self) -> KLPlan:
        """The plan that kernels are compiled for."""
        calls = Pair(*(head.compiled for head in self.heads))
        return KLPlan(calls, self.heads.student.call.direction, calls.student.columns)

    @property
    def rows(self) -> KLRows:
        """The static part of the kernels that compute a few numbers per token."""
        return KLRows(self.plan, Pair(*(head.has_temperature for head in self.heads)), self.beta)


def refusal(launched: LaunchedKL) -> str | None:
    """Returns why no kernels serve the call; None if kernels serve it."""
    student, teacher = launched.heads
    reason = kernels.refusal(student)
    if reason is not None:
        return reason
    reason = kernels.refusal(teacher)
    if reason is not None:
        return f"the teacher: {reason}"
    if student.call.columns != teacher.call.columns:
        return f"both weights must have equally many rows, got {student.call.columns} and {teacher.call.columns}"
    if student.generation.ran_on is not None:
        return f"linear_kl: on {student.call.device.kind} a first call through JAX compares its kernels' results"
    calls: tuple[Call, ...] = student.compiled, teacher.compiled
    return _generations.device_refusal(student.call.device, 2) or _refusal.kl_refusal(calls, student.generation)


class Heads(NamedTuple):
    """The operands of both heads."""

    hidden: Pair[Buffer]
    weight: Pair[Buffer]


class Forward(NamedTuple):
    """What a forward returns."""

    divergence: Buffer  # [R]
    saved: Buffer  # flat
    cached: list[Buffer]  # the arrays of a `KLCache`


def _kernel_call(launched: LaunchedKL, host: Host, heads: Heads, row_scales: Pair[Buffer]) -> KernelCall:
    """Returns the `KernelCall`, from which `lce_jax.mosaic` launches kernels."""
    calls = []
    for head, hidden, weight, row_scale in zip(launched.heads, *heads, row_scales, strict=True):
        run, without_labels = HostPass(head, host), None
        marked: Any = Marked(without_labels, row_scale, without_labels)  # type: ignore[arg-type]
        calls.append(run.kernel_call(run.rows(hidden), weight, marked, None))
    student, teacher = calls
    return student._replace(teacher=teacher, plan=launched.plan)


def forward(
    launched: LaunchedKL,
    host: Host,
    heads: Heads,
    temperatures: tuple[Buffer, ...],
    keep_cache: bool,
    exchange: Exchange | None = None,
) -> Forward:
    """Launches the forward of all columns, or of a shard of the vocabulary whose statistics ``exchange`` gathers.

    Args:
        launched: the call.
        host: launches the kernels.
        heads: hidden ``[R, H]`` and weight ``[V, H]`` of both heads.
        temperatures: the temperatures that the call has, ``[R]`` each, the student's first.
        keep_cache: whether tiles are cached, as many as ``cache_bytes`` hold.
        exchange: gathers the groups of all shards. None: the vocabulary is not split.
    """
    of, numbers = launched.rows, HostPass(launched.heads.student, host).row_numbers
    saved = host.empty((of.num_saved * launched.heads.student.rows,), jnp.float32)
    row_scales, saved = host.launch(compute_row_scales, of, temperatures, numbers, saved)
    kernel_call = _kernel_call(launched, host, heads, row_scales)
    groups, cache = _forward.join_heads(kernel_call, keep_cache, more_fields=int(exchange is not None))
    tags = None
    if exchange is not None:
        groups = exchange(groups, saved)
        tags = groups.view(groups.shape, jnp.int32)
    num_rows = launched.heads.student.call.num_tokens
    joined = _forward.join_groups(host, KLStatistics, kernel_call.kernel_scales, num_rows, groups)
    result, saved = host.launch(save_statistics, of, joined, numbers, saved, tags)
    if of.beta is not None:
        sums = _forward.join_mixture(kernel_call, result)
        sums = sums if exchange is None else exchange(sums, None)
        joined = _forward.join_groups(host, MixtureSums, (), num_rows, sums)
        result, saved = host.launch(save_mixture, of, joined, numbers, saved)
    return Forward(result, saved, jax.tree.leaves(cache))


def backward(
    launched: LaunchedKL,
    host: Host,
    heads: Heads,
    saved: Buffer,
    seed: Buffer,
    cached: list[Buffer],
    dhidden_dtype: str,
    *,
    owns_cache: bool,
    total: Buffer | None = None,
) -> tuple[Buffer, Buffer]:
    """Launches the backward. Returns the student's dhidden ``[R, H]`` and dweight.

    Args:
        launched: the same as in the forward.
        host: launches the kernels.
        heads: hidden and weight of both heads.
        saved: the flat array that the forward saved.
        seed: ``[R]``, the cotangent of the divergence.
        cached: `Forward.cached`; empty if the forward cached nothing.
        dhidden_dtype: the dtype of dhidden.
        owns_cache: whether the cache's memory may be overwritten.
        total: a float32 sum to which dweight is added. None: dweight is in the weight's dtype.
    """
    of, student = launched.rows, launched.heads.student
    numbers = HostPass(student, host).row_numbers
    row_scales, saved = host.launch(compute_row_scales, of, (), numbers, saved)
    kernel_call = _kernel_call(launched, host, heads, row_scales)
    factors = host.launch(compute_coefficients, of, saved, seed, numbers)
    cache, call = KLCache(*cached) if cached else None, student.call
    shape = 1, call.num_tokens, call.hidden_size
    may_round = _chunks.dhidden_shape(student.compiled, student.shape) == shape and dhidden_dtype == call.dtype.name
    sums, dweight = _backward.walk(kernel_call, factors, None, cache, may_round, owns_cache, total, total is not None)
    if sums.dtype == jnp.float32:
        count = host.numbers(call.num_tokens)
        sums = host.launch(_tokens.total, student.compiled, sums, jnp.dtype(dhidden_dtype), count)
    return sums, dweight
