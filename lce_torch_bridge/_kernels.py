"""Calls as lists of kernels: allocate, launch on torch's current stream, nothing else.

Which kernels a pass launches on what, `lce_jax.passes` says: a program for each kind of call, made once. A program has
rows for up to so many tokens, and a run says how many there are. Here is what surrounds it: torch's memory, the
collectives of a vocabulary that is split, and which calls are served. What depends on shapes and options alone is a
plan, found again by one key.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from lce_jax import passes
from lce_torch_bridge import _direct, _rows, _torch, tensor_parallel
from lce_torch_bridge._loaded import Loaded, stride
from lce_torch_bridge._main_grad import nothing_like
from lce_torch_bridge._prepared import MOST_PLANS, Allocated, allocated
from lce_torch_bridge._types import Call, Operands

SMALL = (128, 512)  # rows of programs below `_rows.SMALLEST`
ORDER: tuple[str, ...] = ("logprobs", "entropy", "lse", "max_logit", "min_logit")  # of a program's results
ZEROS = 256  # rows after the last token that kernels may read

_plans: dict[Any, Any] = {}


_forward, _part = functools.cache(passes.forward), functools.cache(passes.part)
_merge, _backward = functools.cache(passes.merge), functools.cache(passes.backward)


def rows_of(tokens: int, keep_cache: bool) -> int:
    """The rows of the program for so many tokens."""
    small = [rows for rows in SMALL if tokens <= rows]
    return small[0] if small and not keep_cache else _rows.whole(tokens).rows


def why_not(x: Operands, call: Call) -> str | None:
    """Why such calls are no lists of kernels; None if they are."""
    reason = _direct.why_not(x.hidden.device)
    if reason is not None:
        return reason
    options = {"bias": x.bias is not None, "candidates": call.num_candidates > 0, "mean_logit": call.mean_logit}
    options["gradient_threshold"] = call.gradient_threshold > 0
    for name, asked in options.items():
        if asked:
            return f"{name}: no kernel computes what it needs between the others"
    if call.implementation and "mosaic_gpu" not in call.implementation.split(","):
        return f"implementation={call.implementation!r}"
    return passes.refusal(_head(x.hidden, x.weight, call, x.temperature is not None, passes.THREADS))


def _head(hidden: torch.Tensor, weight: torch.Tensor, call: Call, has_temperature: bool, rows: int) -> passes.Head:
    device = _direct.device_of(hidden.device)
    assert device is not None
    _, rank = tensor_parallel.size_and_rank(call.group)
    return passes.Head(
        num_tokens=rows,
        hidden_size=int(hidden.shape[1]),
        num_columns=int(weight.shape[0]),
        vocab_size=call.vocab_size,
        start=rank * int(weight.shape[0]),
        dtype=str(weight.dtype).removeprefix("torch."),
        device=device,
        entropy=call.entropy != "none",
        stats=call.stats,
        logit_scale=call.logit_scale,
        logit_softcap=call.logit_softcap,
        cache_bytes=call.cache_bytes,
        has_temperature=has_temperature,
        megatron=call.megatron,
    )


def _found(key: Any, plan: Callable[[], Any]) -> Any:
    """What ``plan()`` is, made once for a key; None where lists do not serve such calls."""
    if key not in _plans:
        if len(_plans) >= MOST_PLANS:
            _plans.clear()
        _plans[key] = plan()
    return _plans[key]


class Forward(NamedTuple):
    """The plan of a forward."""

    head: passes.Head
    first: Loaded  # of the whole vocabulary, or of this rank's part
    merge: Loaded | None  # of what the ranks gathered
    fields: list[Allocated]
    sent: Allocated
    kept: Allocated
    cache: list[Allocated]
    order: list[int]  # of the results, as ``Call.fields`` has them


def forward(x: Operands, call: Call, keep_cache: bool) -> list[torch.Tensor] | None:
    """What `_execute.forward` returns; None where lists do not serve the call."""
    hidden, weight, device = x.hidden, x.weight, x.hidden.get_device()
    if device != _torch.current_device():
        with torch.cuda.device(device):
            return forward(x, call, keep_cache)
    ranks = call.group and tensor_parallel.size_and_rank(call.group)
    options = call, ranks, keep_cache, x.bias is None, x.temperature is None, x.candidates is None
    key = "forward", device, hidden.shape, hidden.dtype, weight.shape, weight.dtype, *options
    plan = _found(key, lambda: _plan_of_forward(x, call, keep_cache))
    if plan is None:
        return None
    tokens = hidden.shape[0]
    labels = _in_rows(x.labels if x.labels.dtype is torch.int64 else x.labels.long())
    per_token = [] if x.temperature is None else [_in_rows(x.temperature)]
    given = [_hidden(hidden, weight, plan.head.num_tokens), _direct.usable(weight), labels, *per_token]
    fields, kept = [_torch.empty(*each) for each in plan.fields], _torch.empty(*plan.kept)
    cache = [_torch.empty(*each) for each in plan.cache]
    if plan.merge is None:
        plan.first.run(device, [*fields, kept, *cache, *given])
    else:
        sent = _torch.empty(*plan.sent)
        plan.first.run(device, [sent, kept, *cache, *given])
        sent[:, -1].fill_(plan.head.num_columns)
        gathered = tensor_parallel.gather(sent, call.group)
        plan.merge.run(device, [*fields, gathered, kept, *per_token])
    found = [*(fields[i] for i in plan.order), kept]
    if tokens < passes.THREADS:
        found = [
            y[..., :tokens].clone(memory_format=torch.contiguous_format) for y in found
        ]  # views are not written to
    return [*found, *cache]


def _plan_of_forward(x: Operands, call: Call, keep_cache: bool) -> Forward | None:
    if why_not(x, call) is not None:
        return None
    tokens = x.hidden.shape[0]
    head = _head(x.hidden, x.weight, call, x.temperature is not None, rows_of(tokens, keep_cache))
    ranks, _ = tensor_parallel.size_and_rank(call.group)
    make = _forward if ranks == 1 else _part
    first = Loaded(make(head, keep_cache), tokens)
    outputs = [x for x in first.program.outputs if x is not None]
    count = (len(call.fields) if ranks == 1 else 1) + 1
    names = [name for name in ORDER if name in call.fields]
    return Forward(
        head=head,
        first=first,
        merge=None if ranks == 1 else Loaded(_merge(head, ranks), tokens),
        fields=[allocated((stride(tokens),), torch.float32)] * len(names),
        sent=allocated(head.sent_shape, torch.float32),
        kept=allocated((head.kept_fields, stride(tokens)), torch.int32),
        cache=[allocated(x.shape, getattr(torch, x.dtype.name)) for x in outputs[count:]],
        order=[names.index(name) for name in list[str](call.fields)],
    )


class Backward(NamedTuple):
    """The plan of a backward."""

    rows: int
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
    """What `_execute.gradients` returns of a call without a bias; None where lists do not serve it.

    ``sums`` are `_execute.Sums`.
    """
    device, owns_cache, adds = (
        hidden.get_device(),
        sums.owns_cache and bool(cache),
        sums.main_grad if sums.total is None else sums.total,
    )
    if not _direct.on_gpu(hidden) or not _can_add(sums):
        return None
    if device != _torch.current_device():
        with torch.cuda.device(device):
            return gradients(hidden, weight, saved, cache, cotangents, wanted, call, sums)
    ranks = call.group and tensor_parallel.size_and_rank(call.group)
    shapes = hidden.shape, hidden.dtype, weight.shape, weight.dtype, len(saved), len(cache), ranks
    how = call, tuple(cotangents), wanted, adds is None, owns_cache
    plan = _found(("gradients", device, *shapes, *how), lambda: _plan_of_backward(hidden, weight, saved, cache, *how))
    if plan is None:
        return None
    into = [] if adds is None else [sums.main_grad if sums.total is None else sums.total.tensor()]
    if into or owns_cache:
        torch.autograd.graph.increment_version([*into, *cache] if owns_cache else into)  # as any change in place
    grads = [_torch.empty(*each) for each in plan.results]
    seeds = [_in_rows(x) for x in cotangents.values()]
    given = [_hidden(hidden, weight, plan.rows), _direct.usable(weight), _kept(saved), *seeds]
    plan.program.run(device, [*grads, *given, *into, *map(_direct.usable, cache)])
    if plan.reduced:
        grads[0] = tensor_parallel.all_reduce(grads[0], call.group).to(hidden.dtype)
    return grads if sums.main_grad is None else [*grads, nothing_like(sums.main_grad, weight.dtype)]


def _can_add(sums: Any) -> bool:
    """Whether kernels can add dweight where it is asked for."""
    if sums.total is not None:
        return sums.total.is_torchs
    return sums.main_grad is None or _direct.is_usable(sums.main_grad)


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
) -> Backward | None:
    tokens, has_temperature = hidden.shape[0], len(saved) > 1 + 3 + (call.entropy != "none")
    if why_not(Operands(hidden, weight, None, saved[0], None, None), call) is not None:
        return None
    rows = cache[0].shape[0] if cache else rows_of(tokens, keep_cache=False)
    reduced = call.reduce_grad_hidden and call.group != tensor_parallel.NO_GROUP
    dtype = torch.float32 if reduced else hidden.dtype
    program = _backward(
        _head(hidden, weight, call, has_temperature, rows), seeds, wanted[:2], str(dtype).removeprefix("torch."),
        cached=bool(cache), owns_cache=owns_cache, adds=not returns_dweight, exact=tokens == rows,
    )  # fmt: skip
    results = [allocated(hidden.shape, dtype)] if wanted[0] else []
    if wanted[1] and returns_dweight:
        results.append(allocated(weight.shape, weight.dtype))
    return Backward(rows, Loaded(program, tokens), results, reduced and wanted[0])


def _kept(saved: torch.Tensor) -> torch.Tensor:
    """What a forward kept, as it wrote it."""
    fields, tokens = saved.shape
    if saved.stride() == (stride(tokens), 1):
        return saved
    whole = saved.new_empty((fields, stride(tokens)))
    whole[:, :tokens] = saved
    return whole


def _hidden(hidden: torch.Tensor, weight: torch.Tensor, rows: int) -> torch.Tensor:
    """Hidden in the weight's dtype and in the program's rows, zero where kernels look beyond the last token."""
    if hidden.shape[0] == rows:
        return _direct.usable(hidden if hidden.dtype == weight.dtype else hidden.to(weight.dtype))
    padded = hidden.new_empty((rows, hidden.shape[1]), dtype=weight.dtype)
    padded[: len(hidden)] = hidden
    padded[len(hidden) : len(hidden) + ZEROS] = 0
    return padded


def _in_rows(x: torch.Tensor) -> torch.Tensor:
    """What is per token, contiguous, in as many rows as kernels read."""
    if x.shape[0] >= passes.THREADS:
        return _direct.usable(x)
    padded = x.new_zeros((passes.THREADS, *x.shape[1:]))
    padded[: x.shape[0]] = x
    return padded
