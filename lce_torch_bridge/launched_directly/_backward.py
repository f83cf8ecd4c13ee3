"""The backward as a list of kernels: allocate, launch on torch's current stream, nothing else."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from lce_jax import launch_lists
from lce_torch_bridge._types import Call, Operands, Sums
from lce_torch_bridge.launched_directly import _launcher, _plan_cache
from lce_torch_bridge.launched_directly._launcher import Launcher, of_stride
from lce_torch_bridge.launched_directly._refusal import kind_of, refusal
from lce_torch_bridge.launched_directly._way import Way
from lce_torch_bridge.tensors import _device, _padding, _tensor_parallel
from lce_torch_bridge.tensors._device import Allocated, allocated, name_of
from lce_torch_bridge.tensors._weight import empty_sparse_like

_list_of = functools.cache(launch_lists.backward)


class BackwardPlan(NamedTuple):
    """The plan of a backward."""

    launcher: Launcher
    results: list[Allocated]


def gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    saved: torch.Tensor,
    cache: Sequence[torch.Tensor],
    cotangents: dict[str, torch.Tensor],
    wanted: tuple[bool, ...],
    call: Call,
    sums: Sums,
    way: Way,
) -> list[torch.Tensor] | None:
    """What `operators._execute.gradients` returns of a call without a bias; None if JAX is to run it."""
    adds = sums.main_grad if sums.total is None else sums.total
    device, owns_cache = hidden.get_device(), sums.owns_cache and bool(cache) and not call.gradient_threshold
    if sums.total is not None and not sums.total.is_torchs:
        way.refuse("JAX has added to the sum of dweight")
        return None
    if device != _device.current_device():
        with torch.cuda.device(device):
            return gradients(hidden, weight, saved, cache, cotangents, wanted, call, sums, way)
    ranks = call.group and _tensor_parallel.size_and_rank(call.group)
    shapes = hidden.shape, hidden.dtype, weight.shape, weight.dtype, len(saved), len(cache), ranks
    how = call, tuple(cotangents), wanted, adds is None, owns_cache
    key = "gradients", device, *shapes, *how, call.gradient_threshold and are_live_tiles(cache)
    plan = _plan_cache.plan_of(key, lambda: _plan(hidden, weight, saved, cache, *how))
    if isinstance(plan, str):
        way.refuse(plan)
        return None
    into: Any = [] if adds is None else [sums.main_grad if sums.total is None else sums.total.tensor()]
    if into or owns_cache:
        torch.autograd.graph.increment_version([*into, *cache] if owns_cache else into)  # as any change in place
    grads = [_device.empty(*each) for each in plan.results]
    seeds = [_launcher.in_rows(x) for x in cotangents.values()]
    given = [_device.usable(hidden), _device.usable(weight), of_stride(saved), *seeds]
    plan.launcher.launch(device, [*grads, *given, *into, *map(_device.usable, cache)])
    if wanted[0] and call.reduce_grad_hidden:
        grads[0] = _tensor_parallel.total_dhidden(grads[0], hidden.dtype, call.group)
    return grads if sums.main_grad is None else [*grads, empty_sparse_like(sums.main_grad, weight.dtype)]


def _plan(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    saved: torch.Tensor,
    cache: Sequence[torch.Tensor],
    call: Call,
    seeds: tuple[str, ...],
    wanted: tuple[bool, ...],
    returns_dweight: bool,
    owns_cache: bool,
) -> BackwardPlan | str:
    """The plan, or why JAX is to run such calls."""
    tokens = hidden.shape[0]
    has_temperature = len(saved) > 1 + 3 + (call.entropy != "none") + call.has_floor + 2 * call.num_candidates
    reason = refusal(Operands(hidden, weight, None, saved[0], None, None), call)
    if reason is not None:
        return reason
    if call.gradient_threshold and not are_live_tiles(cache):
        return "gradient_threshold: JAX ran the forward, and kept other things than kernels do"
    rows = _padding.size(tokens)
    dtype = torch.float32 if call.reduce_grad_hidden else hidden.dtype
    launches = _list_of(
        kind_of(hidden, weight, call, has_temperature, rows), seeds, wanted[:2], name_of(dtype),
        cached=bool(cache), owns_cache=owns_cache, adds=not returns_dweight,
    )  # fmt: skip
    results = [allocated(hidden.shape, dtype)] if wanted[0] else []
    if wanted[1] and returns_dweight:
        results.append(allocated(weight.shape, weight.dtype))
    return BackwardPlan(Launcher(launches, tokens), results)


def are_live_tiles(cache: Sequence[torch.Tensor]) -> bool:
    """Whether, with a threshold, kernels kept this: which tiles are live. JAX keeps the tiles' maxima, or nothing."""
    return bool(cache) and cache[0].dtype is torch.int32
