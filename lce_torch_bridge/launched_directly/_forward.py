"""The forward as lists of kernels: allocate, launch on torch's current stream, nothing else.

Which kernels it launches on what, `lce_jax.launch_lists` says: a list for each kind of call, made once. A list has rows
for up to so many tokens, and a launch says how many there are. Here is what surrounds it: torch's memory, and the
collectives of a vocabulary that is split.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from lce_jax import launch_lists
from lce_torch_bridge._types import PER_CANDIDATE, Call, Operands
from lce_torch_bridge.launched_directly import _launcher, _plan_cache
from lce_torch_bridge.launched_directly._launcher import Launcher, stride
from lce_torch_bridge.launched_directly._refusal import kind_of, refusal
from lce_torch_bridge.launched_directly._way import Way
from lce_torch_bridge.tensors import _device, _padding, _tensor_parallel
from lce_torch_bridge.tensors._device import Allocated, allocated

ORDER: tuple[str, ...] = (*launch_lists.RESULTS, PER_CANDIDATE)  # of a list's results

ODD = 0x01000193  # a product with an odd number loses nothing modulo 2³²

_whole, _part = functools.cache(launch_lists.forward), functools.cache(launch_lists.part)
_merge = functools.cache(launch_lists.merge)


class ForwardPlan(NamedTuple):
    """The plan of a forward."""

    kind: launch_lists.CallKind
    first: Launcher  # of the whole vocabulary, or of this rank's part
    merge: Launcher | None  # of what the ranks gathered
    fields: list[Allocated]
    sent: Allocated
    sent_candidates: list[Allocated]  # their x, if there are any
    saved: Allocated
    cache: list[Allocated]  # with a threshold: of the whole vocabulary, the live tiles; of a part, what tells them
    live: list[Allocated]  # the live tiles of a part
    order: list[int]  # of the results, as ``Call.fields`` has them
    number: int  # of what must be the same on all ranks, and is so for all tokens


def forward(x: Operands, call: Call, keep_cache: bool, way: Way) -> list[torch.Tensor] | None:
    """What `operators._execute.forward` returns; None if JAX is to run the call."""
    hidden, weight, device = x.hidden, x.weight, x.hidden.get_device()
    if device != _device.current_device():
        with torch.cuda.device(device):
            return forward(x, call, keep_cache, way)
    ranks = call.group and _tensor_parallel.size_and_rank(call.group)
    options = call, ranks, keep_cache, x.bias is None, x.temperature is None, x.candidates is None
    key = "forward", device, hidden.shape, hidden.dtype, weight.shape, weight.dtype, *options
    plan = _plan_cache.plan_of(key, lambda: _plan(x, call, keep_cache))
    if isinstance(plan, str):
        way.refuse(plan)
        return None
    tokens = hidden.shape[0]
    labels = _launcher.in_rows(x.labels if x.labels.dtype is torch.int64 else x.labels.long())
    per_token = [_launcher.in_rows(y) for y in (x.temperature, x.floor) if y is not None]
    ids = [] if x.candidates is None else [_launcher.in_rows(_padding.candidate_ids(x.candidates, call.vocab_size))]
    given = [_device.usable(hidden), _device.usable(weight), labels, *per_token, *ids]
    fields, saved = [_device.empty(*each) for each in plan.fields], _device.empty(*plan.saved)
    cache = [_device.empty(*each) for each in plan.cache]
    if plan.merge is None:
        plan.first.launch(device, [*fields, saved, *cache, *given])
    else:
        sent, x_of_part = _device.empty(*plan.sent), [_device.empty(*each) for each in plan.sent_candidates]
        plan.first.launch(device, [sent, *x_of_part, saved, *cache, *given])
        _put_tags(sent, saved[0, :tokens], plan.number, [*per_token, *ids])
        gathered = [_tensor_parallel.gather(each, call.group) for each in (sent, *x_of_part)]
        live = [_device.empty(*each) for each in plan.live]
        plan.merge.launch(device, [*fields, *live, *gathered, saved, *per_token, *cache[: len(live)]])
        cache = live or cache
    found = [fields[i] for i in plan.order]
    if tokens < launch_lists.THREADS:  # copies, because views are not written to
        found = [y[:tokens].clone() for y in found]
        saved = saved[:, :tokens].clone(memory_format=torch.contiguous_format)
    return [*found, saved, *cache]


def _put_tags(sent: torch.Tensor, labels: torch.Tensor, number: int, given: list[torch.Tensor]) -> None:
    """Writes a tag for each token, which must be the same on all ranks, into the last field of the first group."""
    tags = sent[0, -1, : len(labels)].view(torch.int32)
    torch.add(labels, number, out=tags)
    for x in given:
        bits = x[: len(labels)].view(torch.int32)
        torch.add(tags, bits if x.ndim == 1 else bits.sum(1, dtype=torch.int32), alpha=ODD, out=tags)


def _plan(x: Operands, call: Call, keep_cache: bool) -> ForwardPlan | str:
    """The plan, or why JAX is to run such calls."""
    reason = refusal(x, call)
    if reason is not None:
        return reason
    tokens = x.hidden.shape[0]
    kind = kind_of(x.hidden, x.weight, call, x.temperature is not None, _padding.size(tokens))
    ranks, _ = _tensor_parallel.size_and_rank(call.group)
    make = _whole if ranks == 1 else _part
    first = Launcher(make(kind, keep_cache), tokens)
    names = [name for name in ORDER if name in call.fields]
    keeps_tiles = keep_cache and call.gradient_threshold > 0
    of_call = tokens, kind.num_columns, call.vocab_size, call.logit_scale, call.logit_softcap
    merge = None if ranks == 1 else Launcher(_merge(kind, ranks, keeps_tiles), tokens)
    return ForwardPlan(
        kind=kind,
        first=first,
        merge=merge,
        fields=[
            allocated((stride(tokens), *[call.num_candidates] * (name == PER_CANDIDATE)), torch.float32)
            for name in names
        ],
        sent=allocated(kind.sent_shape, torch.float32),
        sent_candidates=first.outputs(1)[:1] if ranks > 1 and call.num_candidates else [],
        saved=allocated((kind.saved_fields, stride(tokens)), torch.int32),
        cache=first.outputs((len(names) if ranks == 1 else 1 + (call.num_candidates > 0)) + 1),
        live=[] if merge is None else merge.outputs(len(names)),
        order=[names.index(name) for name in list[str](call.fields)],
        number=0 if ranks == 1 else _tensor_parallel.number_of(*of_call),
    )


def live_shape(x: Operands, call: Call, way: Way) -> tuple[int, int] | None:
    """The shape of the live tiles, where a forward keeps these."""
    if not (call.gradient_threshold and way.direct) or refusal(x, call) is not None:
        return None
    rows = _padding.size(x.hidden.shape[0])
    return launch_lists.live_shape(kind_of(x.hidden, x.weight, call, x.temperature is not None, rows))
