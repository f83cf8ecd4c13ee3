"""Calls as lists of kernels: allocate, launch on torch's current stream, nothing else.

Which kernels a pass launches on what, `lce_jax.launch_lists` says: a program for each kind of call, made once. A
program has rows for up to so many tokens, and a run says how many there are. Here is what surrounds it: torch's
memory, the collectives of a vocabulary that is split, and which calls are served. What depends on shapes and options
alone is a plan, found again by one key.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from lce_jax import launch_lists
from lce_torch_bridge import _launch_with, tensor_parallel
from lce_torch_bridge._types import PER_CANDIDATE, Call, Operands
from lce_torch_bridge.kernels import _plans, _rows
from lce_torch_bridge.kernels._added import added_apart, can_add
from lce_torch_bridge.kernels._loaded import Loaded, of_stride, stride
from lce_torch_bridge.tensors import _device, _torch
from lce_torch_bridge.tensors._device import name_of
from lce_torch_bridge.tensors._main_grad import nothing_like
from lce_torch_bridge.tensors._torch import Allocated, allocated

# Of a program's results.
ORDER: tuple[str, ...] = (*launch_lists.RESULTS, PER_CANDIDATE)

_forward, _part = functools.cache(launch_lists.forward), functools.cache(launch_lists.part)
_merge, _backward = functools.cache(launch_lists.merge), functools.cache(launch_lists.backward)


def why_not(x: Operands, call: Call) -> str | None:
    """Why such calls are no lists of kernels; None if they are."""
    reason = _device.why_not(x.hidden.device)
    if reason is not None:
        return reason
    options = {"bias": x.bias is not None, "mean_logit": call.mean_logit}
    for name, asked in options.items():
        if asked:
            return f"{name}: no kernel computes what it needs between the others"
    if call.implementation and call.implementation.split(",")[0] != "mosaic_gpu":
        return f"implementation={call.implementation!r}"
    return launch_lists.refusal(_head(x.hidden, x.weight, call, x.temperature is not None, launch_lists.THREADS))


def _head(
    hidden: torch.Tensor, weight: torch.Tensor, call: Call, has_temperature: bool, rows: int
) -> launch_lists.Head:
    device = _device.device_of(hidden.device)
    assert device is not None
    _, rank = tensor_parallel.size_and_rank(call.group)
    return launch_lists.Head(
        num_tokens=rows,
        hidden_size=int(hidden.shape[1]),
        num_columns=int(weight.shape[0]),
        vocab_size=call.vocab_size,
        start=rank * int(weight.shape[0]),
        dtype=name_of(weight.dtype),
        device=device,
        entropy=call.entropy != "none",
        stats=call.stats,
        logit_scale=call.logit_scale,
        logit_softcap=call.logit_softcap,
        cache_bytes=call.cache_bytes,
        gradient_threshold=call.gradient_threshold,
        vocab_part_size=call.vocab_part_size,
        num_candidates=call.num_candidates,
        has_temperature=has_temperature,
        has_floor=call.has_floor,
        copied_from=None if rows == len(hidden) and hidden.dtype == weight.dtype else name_of(hidden.dtype),
        megatron=call.megatron,
    )


class Forward(NamedTuple):
    """The plan of a forward."""

    head: launch_lists.Head
    first: Loaded  # of the whole vocabulary, or of this rank's part
    merge: Loaded | None  # of what the ranks gathered
    fields: list[Allocated]
    sent: Allocated
    sent_candidates: list[Allocated]  # their x, if there are any
    kept: Allocated
    cache: list[Allocated]  # with a threshold: of the whole vocabulary, the live tiles; of a part, what tells them
    live: list[Allocated]  # the live tiles of a part
    order: list[int]  # of the results, as ``Call.fields`` has them


def forward(x: Operands, call: Call, keep_cache: bool) -> list[torch.Tensor] | None:
    """What `operators._execute.forward` returns; None if JAX is to run the call."""
    hidden, weight, device = x.hidden, x.weight, x.hidden.get_device()
    if not _launch_with.may_be_direct(hidden):
        return None
    if device != _torch.current_device():
        with torch.cuda.device(device):
            return forward(x, call, keep_cache)
    ranks = call.group and tensor_parallel.size_and_rank(call.group)
    options = call, ranks, keep_cache, x.bias is None, x.temperature is None, x.candidates is None
    key = "forward", device, hidden.shape, hidden.dtype, weight.shape, weight.dtype, *options
    plan = _plans.found(key, lambda: _plan_of_forward(x, call, keep_cache))
    if plan is None:
        return None
    tokens = hidden.shape[0]
    labels = _in_rows(x.labels if x.labels.dtype is torch.int64 else x.labels.long())
    per_token = [_in_rows(y) for y in (x.temperature, x.floor) if y is not None]
    ids = [] if x.candidates is None else [_in_rows(_rows.candidate_ids(x.candidates, call.vocab_size))]
    given = [_device.usable(hidden), _device.usable(weight), labels, *per_token, *ids]
    fields, kept = [_torch.empty(*each) for each in plan.fields], _torch.empty(*plan.kept)
    cache = [_torch.empty(*each) for each in plan.cache]
    if plan.merge is None:
        plan.first.run(device, [*fields, kept, *cache, *given])
    else:
        sent, x_of_part = _torch.empty(*plan.sent), [_torch.empty(*each) for each in plan.sent_candidates]
        plan.first.run(device, [sent, *x_of_part, kept, *cache, *given])
        sent[:, -1].fill_(plan.head.num_columns)
        gathered = [tensor_parallel.gather(each, call.group) for each in (sent, *x_of_part)]
        live = [_torch.empty(*each) for each in plan.live]
        plan.merge.run(device, [*fields, *live, *gathered, kept, *per_token, *cache[: len(live)]])
        cache = live or cache
    found = [fields[i] for i in plan.order]
    if tokens < launch_lists.THREADS:  # copies, because views are not written to
        found = [y[:tokens].clone() for y in found]
        kept = kept[:, :tokens].clone(memory_format=torch.contiguous_format)
    return [*found, kept, *cache]


def _plan_of_forward(x: Operands, call: Call, keep_cache: bool) -> Forward | str:
    """The plan, or why JAX is to run such calls."""
    reason = why_not(x, call)
    if reason is not None:
        return reason
    tokens = x.hidden.shape[0]
    head = _head(x.hidden, x.weight, call, x.temperature is not None, _rows.size(tokens))
    ranks, _ = tensor_parallel.size_and_rank(call.group)
    make = _forward if ranks == 1 else _part
    first = Loaded(make(head, keep_cache), tokens)
    names = [name for name in ORDER if name in call.fields]
    keeps_tiles = keep_cache and call.gradient_threshold > 0
    merge = None if ranks == 1 else Loaded(_merge(head, ranks, keeps_tiles), tokens)
    return Forward(
        head=head,
        first=first,
        merge=merge,
        fields=[
            allocated((stride(tokens), *[call.num_candidates] * (x == PER_CANDIDATE)), torch.float32) for x in names
        ],
        sent=allocated(head.sent_shape, torch.float32),
        sent_candidates=first.outputs(1)[:1] if ranks > 1 and call.num_candidates else [],
        kept=allocated((head.kept_fields, stride(tokens)), torch.int32),
        cache=first.outputs((len(names) if ranks == 1 else 1 + (call.num_candidates > 0)) + 1),
        live=[] if merge is None else merge.outputs(len(names)),
        order=[names.index(name) for name in list[str](call.fields)],
    )


def live_shape(x: Operands, call: Call) -> tuple[int, int] | None:
    """The shape of the live tiles, where a forward keeps these."""
    if not call.gradient_threshold or not _launch_with.launches_kernels(x.hidden) or why_not(x, call) is not None:
        return None
    rows = _rows.size(x.hidden.shape[0])
    return launch_lists.live_shape(_head(x.hidden, x.weight, call, x.temperature is not None, rows))


class Backward(NamedTuple):
    """The plan of a backward."""

    program: Loaded
    results: list[Allocated]
    reduced: bool  # dhidden is summed over the group, in float32


def gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    saved: torch.Tensor,
    cache: Sequence[torch.Tensor],
    cotangents: dict[str, torch.Tensor],
    wanted: tuple[bool, ...],
    call: Call,
    sums: Any,
) -> list[torch.Tensor] | None:
    """What `operators._execute.gradients` returns of a call without a bias; None if JAX is to run it.

    ``sums`` are `operators._execute.Sums`.
    """
    adds = sums.main_grad if sums.total is None else sums.total
    device, owns_cache = hidden.get_device(), sums.owns_cache and bool(cache) and not call.gradient_threshold
    if not _launch_with.may_be_direct(hidden) or not can_add(sums):
        if not call.gradient_threshold or _is_of_jax(cache):
            return None
        again = functools.partial(gradients, hidden, weight, saved, cache, cotangents, wanted, call)
        return added_apart(hidden, sums, again)
    if device != _torch.current_device():
        with torch.cuda.device(device):
            return gradients(hidden, weight, saved, cache, cotangents, wanted, call, sums)
    ranks = call.group and tensor_parallel.size_and_rank(call.group)
    shapes = hidden.shape, hidden.dtype, weight.shape, weight.dtype, len(saved), len(cache), ranks
    how = call, tuple(cotangents), wanted, adds is None, owns_cache
    key = "gradients", device, *shapes, *how, call.gradient_threshold and _is_of_jax(cache)
    plan = _plans.found(key, lambda: _plan_of_backward(hidden, weight, saved, cache, *how))
    if plan is None:
        return None
    into = [] if adds is None else [sums.main_grad if sums.total is None else sums.total.tensor()]
    if into or owns_cache:
        torch.autograd.graph.increment_version([*into, *cache] if owns_cache else into)  # as any change in place
    grads = [_torch.empty(*each) for each in plan.results]
    seeds = [_in_rows(x) for x in cotangents.values()]
    given = [_device.usable(hidden), _device.usable(weight), of_stride(saved), *seeds]
    plan.program.run(device, [*grads, *given, *into, *map(_device.usable, cache)])
    if plan.reduced:
        grads[0] = tensor_parallel.all_reduce(grads[0], call.group).to(hidden.dtype)
    return grads if sums.main_grad is None else [*grads, nothing_like(sums.main_grad, weight.dtype)]


def _plan_of_backward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    saved: torch.Tensor,
    cache: Sequence[torch.Tensor],
    call: Call,
    seeds: tuple[str, ...],
    wanted: tuple[bool, ...],
    returns_dweight: bool,
    owns_cache: bool,
) -> Backward | str:
    """The plan, or why JAX is to run such calls."""
    tokens = hidden.shape[0]
    has_temperature = len(saved) > 1 + 3 + (call.entropy != "none") + call.has_floor + 2 * call.num_candidates
    reason = why_not(Operands(hidden, weight, None, saved[0], None, None), call)
    if reason is not None:
        return reason
    if call.gradient_threshold and _is_of_jax(cache):
        return "gradient_threshold: JAX ran the forward, and kept other things than kernels do"
    rows = _rows.size(tokens)
    reduced = call.reduce_grad_hidden and call.group != tensor_parallel.NO_GROUP
    dtype = torch.float32 if reduced else hidden.dtype
    program = _backward(
        _head(hidden, weight, call, has_temperature, rows), seeds, wanted[:2], name_of(dtype),
        cached=bool(cache), owns_cache=owns_cache, adds=not returns_dweight,
    )  # fmt: skip
    results = [allocated(hidden.shape, dtype)] if wanted[0] else []
    if wanted[1] and returns_dweight:
        results.append(allocated(weight.shape, weight.dtype))
    return Backward(Loaded(program, tokens), results, reduced and wanted[0])


def _is_of_jax(cache: Sequence[torch.Tensor]) -> bool:
    """Whether, with a threshold, JAX kept this: the tiles' maxima or nothing, where kernels where which are live."""
    return not cache or cache[0].dtype is not torch.int32


def _in_rows(x: torch.Tensor) -> torch.Tensor:
    """What is per token, contiguous, in as many rows as kernels read."""
    if x.shape[0] >= launch_lists.THREADS:
        return _device.usable(x)
    padded = x.new_zeros((launch_lists.THREADS, *x.shape[1:]))
    padded[: x.shape[0]] = x
    return padded
