"""The vocabulary split over a torch process group: who owns which columns, and the two collectives.

Forward, one all-gather of each rank's packed statistics, a few numbers per token; every rank merges them in rank
order, so that all hold the same bits. Backward, one all-reduce of dhidden, if the caller asks for it.

In a group's first call the ranks compare what they hold (`check`), and in the first call of each kind the options
(`compare_options`), because ranks that exchange different numbers hang, abort, or read each other's as their own.

Operators know a group by its name, as torch's own functional collectives do.
"""

from __future__ import annotations

import contextlib
import itertools
import struct
import weakref
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from lce_torch_bridge._types import TorchCall, call_with
from lce_torch_bridge.tensors import _device

NO_GROUP = ""  # nothing to reduce over
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"  # before 2.14
SAMPLE = 16, 64  # rows of hidden or a weight, and elements of each, that a first call compares
APART = 0.25  # of a row's length: rounding is a hundredth, other tokens are further off
WHICH_GROUP = (
    "tp_group must be the group that splits the vocabulary, whose ranks hold the same tokens, and not that of data or "
    "context parallelism, nor all ranks; leave it out where weight is whole"
)
# How many heads of a call a group's ranks have compared. Not by the group's name, which may be used again.
_asked: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
# The kinds of calls whose options a group's ranks have compared.
_compared: weakref.WeakKeyDictionary[dist.ProcessGroup, set[tuple[Any, ...]]] = weakref.WeakKeyDictionary()
NAMES = {  # of the fields of a call that are not called as the option
    "requested": "implementation",
    "top_k": "k",
    "metric_entropy": 'entropy="metric"',
    "num_candidates": "candidates (their number)",
    "has_floor": "logit_floor (whether there is one)",
    "mean_logit": "mean_logit (which label_smoothing needs)",
    "megatron": 'out_of_vocab="megatron"',
    "in_chunks": "one pass for the loss (linear_loss, and a mean or sum of linear_cross_entropy without cache_bytes)",
}


def name_of(group: dist.ProcessGroup | None) -> str:
    """The name of ``group``, or `NO_GROUP` if it has one rank."""
    return NO_GROUP if group is None or group.size() == 1 else group.group_name


def size_and_rank(name: str) -> tuple[int, int]:
    """How many shards the vocabulary has, and which one is this rank's."""
    if name == NO_GROUP:
        return 1, 0
    group = _resolve(name)
    return group.size(), group.rank()


def with_vocabulary(call: TorchCall, weight: torch.Tensor) -> TorchCall:
    """The call, which has been traced, with the size of its vocabulary."""
    shards, _ = size_and_rank(call.group)
    return call_with(call.text, vocab_size=int(weight.shape[0]) * shards)


def number_of(*given: object) -> int:
    """An int32 number of what is the same for all rows of a call, the same on every rank for equal things."""
    (number,) = struct.unpack("i", struct.pack("I", zlib.crc32(repr(given).encode())))
    return int(number)


def is_new(name: str, heads: int = 1) -> bool:
    """Whether the group's ranks have not compared what they are given for calls of so many heads (`check`)."""
    return name != NO_GROUP and _asked.get(_resolve(name), 0) < heads


def check(
    name: str,
    launches: Callable[[torch.device], bool],
    hidden: torch.Tensor,
    ids: torch.Tensor | None,
    vocab_size: int | None,
    *weights: torch.Tensor,
    rows: torch.Tensor | None = None,
) -> None:
    """In a group's first call the ranks compare what they were given, and all raise if it is not one call's.

    Only in the first call: every rank knows which call is the first, so all of them join the collective. Later calls
    send tags with their statistics, and a row whose tags differ between the ranks is NaN. Where kernels are launched
    directly, that needs parts with as many groups of tiles, 4096 columns each: otherwise the ranks send arrays of
    different sizes, which NCCL does not notice.

    The head, or the student's and the teacher's, are ``weights``. ``rows`` is an index of the tokens that count, of
    ``hidden [T, H]`` and of ``ids`` ``[T]`` or ``[T, K]``, if there are any. ``launches``: whether this rank
    launches kernels on a device. Without a ``vocab_size`` every column counts.

    Raises:
        ValueError: some ranks launch kernels directly and others do not, which send other numbers; or the ranks' parts
            of the vocabulary are of different sizes, two are the same columns, or their tokens are not the same.
    """
    if name == NO_GROUP or weights[0].device.type == "meta" or not is_new(name, len(weights)):
        return
    group, heads = _resolve(name), len(weights)
    tokens = len(hidden) if rows is None else len(rows)
    sizes = [int(weight.shape[0]) for weight in weights]
    samples = [_sample(hidden, rows, tokens)]
    for weight, size in zip(weights, sizes, strict=True):
        live = size if vocab_size is None else min(max(vocab_size - group.rank() * size, 0), size)
        samples.append(_sample(weight, None, live))
    held = 0 if ids is None else _parts_of(ids if rows is None else ids[rows], sizes[0], group.size())
    counts = [int(launches(weights[0].device)), held, tokens, *sizes]
    own = torch.tensor(counts, dtype=torch.int32, device=hidden.device)
    sent = torch.cat([own, *(x.view(torch.int32).reshape(-1) for x in samples)])
    every = gather(sent[None], name)[:, 0].cpu()
    ways, parts, counted, *of_ranks = every[:, : len(counts)].T.tolist()
    of_hidden, *of_weights = every[:, len(counts) :].view(group.size(), 1 + heads, *SAMPLE).unbind(1)
    _refuse_sizes_and_ways(of_ranks, ways)
    for sample in of_weights:
        _refuse_equal_parts(sample, sizes[0], max(parts))
    _refuse_other_tokens(counted, of_hidden.view(torch.float32))
    _asked[group] = heads


def compare_options(call: TorchCall, device: torch.device, **others: object) -> None:
    """In the first call of a kind the group's ranks compare its options, and all raise if these differ.

    A kind is what decides which numbers are exchanged: the function, most options, and ``others``. A rank compares
    when the kind is new to it. In a group's first call that holds on all ranks, and so in the first call of each
    function. Later the ranks compare if each of them has a new kind. If the kind is new to some ranks alone, these
    compare while the others send results: a group cannot know that without a collective in each call.

    Raises:
        ValueError: the options differ. The message names them, with the values of all ranks.
    """
    if call.group == NO_GROUP or device.type == "meta":
        return
    kind, seen = call.exchanged, _compared.setdefault(_resolve(call.group), set())
    if (kind, *others.values()) in seen:
        return
    # Tags tell whether the vocabularies are the same, and a cache is each rank's own.
    options = call.options | {"group": "", "vocab_size": 0, "cache_bytes": 0} | others
    numbers = gather(torch.tensor([number_of(options)], dtype=torch.int32, device=device), call.group)
    if len(set(numbers.flatten().tolist())) > 1:
        _refuse_other_options(options, call.group, device)
    seen.add((kind, *others.values()))


def _refuse_other_options(options: dict[str, object], name: str, device: torch.device) -> None:
    """Each rank sends all of its options, since all know that they differ."""
    group = _resolve(name)
    every: list[Any] = [None] * group.size()
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        dist.all_gather_object(every, options, group=group)
    differ = []
    for option in [x for x in options if all(x in each for each in every)]:
        ranks: dict[str, list[int]] = {}  # by the value
        for rank, each in enumerate(every):
            ranks.setdefault(repr(each[option]), []).append(rank)
        if len(ranks) > 1:
            values = (f"{value} on ranks {of}" for value, of in ranks.items())
            differ.append(f"{NAMES.get(option, option)} is {' and '.join(values)}")
    raise ValueError(
        f"the ranks of tp_group make different calls: {', '.join(differ)}. They exchange what each call computes: make "
        "the same call on every rank, and ignore the results that a rank does not need"
    )


def _sample(x: torch.Tensor, rows: torch.Tensor | None, count: int) -> torch.Tensor:
    """Some elements of some of the first ``count`` rows, or of those that an index names, in float32."""
    if count == 0:
        return torch.zeros(SAMPLE, device=x.device)
    row, column = (
        torch.arange(n, device=x.device) * size // n for n, size in zip(SAMPLE, (count, x.shape[1]), strict=True)
    )
    return x.detach()[(row if rows is None else rows[row])[:, None], column].float()


def _parts_of(ids: torch.Tensor, size: int, ranks: int) -> int:
    """How many parts of a vocabulary a quarter of the ids lie beyond."""
    ids = ids.long()  # torch compares only some of the unsigned types
    inside = ids[(ids >= 0) & (ids < ranks * size)].sort()[0]
    return int(inside[3 * len(inside) // 4]) // size if len(inside) else 0


def _refuse_sizes_and_ways(sizes: list[list[int]], ways: list[int]) -> None:
    if len({size for rows in sizes for size in rows}) > 1:
        found = ", the teacher's ".join(", ".join(map(str, rows)) for rows in sizes)
        raise ValueError(
            f"weight has {found} rows on the ranks of tp_group, and its parts must be of the same "
            "size: pad the vocabulary and give vocab_size"
        )
    if len(set(ways)) > 1:
        raise ValueError(
            f"ranks {[rank for rank, way in enumerate(ways) if way]} of tp_group launch kernels directly, the others "
            'do not: give all GPUs of one kind, and the same lce_torch_bridge.launch_with("direct") or "jax"'
        )


def _refuse_equal_parts(bits: torch.Tensor, size: int, beyond: int) -> None:
    """``bits`` ``[N, *SAMPLE]``. Rows that are all equal, such as those of zeros, may be so on every rank.

    And if a quarter of the ids lie ``beyond`` the parts that differ, it is a vocabulary of which some parts are equal.
    """
    vary = (bits != bits[:, :1]).flatten(1).any(1).tolist()
    pairs = itertools.combinations(range(len(bits)), 2)
    equal = [(one, other) for one, other in pairs if vary[one] and torch.equal(bits[one], bits[other])]
    if not equal or beyond >= len(bits) - len({other for _, other in equal}):
        return
    one, other = equal[0]
    raise ValueError(
        f"ranks {one} and {other} of tp_group hold the same {size} rows of weight, which would be columns "
        f"[{one * size}, {(one + 1) * size}) and [{other * size}, {(other + 1) * size}) of a vocabulary of "
        f"{len(bits) * size}. {WHICH_GROUP}. Parts that are drawn at random need another seed on each rank"
    )


def _refuse_other_tokens(tokens: list[int], hidden: torch.Tensor) -> None:
    """``hidden`` ``[N, *SAMPLE]``: most rows must be alike but for rounding. Some may be padding that nobody wrote."""
    if len(set(tokens)) > 1:
        raise ValueError(f"the ranks of tp_group pass {', '.join(map(str, tokens))} tokens. {WHICH_GROUP}")
    length = hidden.norm(dim=2)
    differ = (hidden - hidden[:1]).norm(dim=2) > APART * torch.maximum(length, length[:1])
    for rank, count in enumerate(differ.sum(1).tolist()):
        if 2 * count > SAMPLE[0]:
            raise ValueError(
                f"hidden differs between the ranks 0 and {rank} of tp_group, in {count} of {SAMPLE[0]} places by more "
                f"than rounding. {WHICH_GROUP}. Under sequence parallelism gather hidden over tp_group before"
            )


def gather(x: torch.Tensor, name: str) -> torch.Tensor:
    """``[N, ...]`` of every rank's ``x``, in rank order."""
    group = _resolve(name)
    gathered = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
    getattr(dist, ALL_GATHER)(gathered, x, group=group)
    return gathered.view(group.size(), *x.shape)


def all_reduce(x: torch.Tensor, name: str) -> torch.Tensor:
    """The sum of ``x`` over the group, in place."""
    dist.all_reduce(x, group=_resolve(name))
    return x


def total_dhidden(dhidden: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """``dhidden`` summed over the group in float32, and rounded once."""
    return all_reduce(dhidden.contiguous(), name).to(dtype)


def add_parts(x: torch.Tensor, columns: int, name: str) -> torch.Tensor:
    """The sum of ``x [T, columns]`` over the group, of which one rank holds each element and the others 0: exact.

    Further columns are the ranks' `lce_jax.run._local.differences`: where their sum is not 0, the row is NaN.
    """
    found = all_reduce(x.contiguous(), name)
    return found[:, :columns].where((found[:, columns:] == 0).all(1, keepdim=True), torch.nan)


def _resolve(name: str) -> dist.ProcessGroup:
    return _device.group_of(name)
