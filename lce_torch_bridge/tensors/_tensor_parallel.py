"""A vocabulary that is split over a torch process group: each rank's columns, comparisons of ranks, collectives.

The forward has one all-gather of the ranks' statistics, a few values per token. Every rank merges them in rank order,
so that all ranks get the same bits. The backward has one all-reduce of dhidden, if the caller requests it.

In a group's first call the ranks compare their tensors (`check`). In the first call of each kind they compare the
options (`compare_options`). Without these checks, ranks that exchange different arrays would hang, abort, or compute
wrong results.

Operators refer to a group by its name, as torch's functional collectives do.
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

from lce_torch_bridge._types import TorchCall, make_call
from lce_torch_bridge.tensors import _device

NO_GROUP = ""  # stands for the name of a group if there is none
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"  # before 2.14
SAMPLE = 16, 64  # how many rows of hidden or of a weight a first call compares, and how many elements of each row
APART = 0.25  # of a row's norm: rounding changes a row by a hundredth of the norm, another token by more than this
WHICH_GROUP = (
    "tp_group must be the group that splits the vocabulary, whose ranks hold the same tokens, and not that of data or "
    "context parallelism, nor all ranks; leave it out if each rank has the full weight"
)
# For each group, the largest number of heads of a call that its ranks have compared. The keys are groups and not their
# names, because torch may reuse a name.
_compared_heads: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
# For each group, the kinds of calls whose options its ranks have compared.
_compared: weakref.WeakKeyDictionary[dist.ProcessGroup, set[tuple[Any, ...]]] = weakref.WeakKeyDictionary()
NAMES = {  # the options' names, for fields of a call that have other names
    "requested": "implementation",
    "top_k": "k",
    "metric_entropy": 'entropy="metric"',
    "num_candidates": "candidates (their number)",
    "has_floor": "logit_floor (whether there is one)",
    "mean_logit": "mean_logit (which label_smoothing needs)",
    "megatron": 'out_of_vocab="megatron"',
    "in_chunks": "one pass for the loss (linear_loss, and a mean or sum of linear_cross_entropy without cache_bytes)",
}


def name_group(group: dist.ProcessGroup | None) -> str:
    """Returns the name of ``group``; `NO_GROUP` for None and for a group of one rank."""
    return NO_GROUP if group is None or group.size() == 1 else group.group_name


def size_and_rank(name: str) -> tuple[int, int]:
    """Returns how many shards the vocabulary has, and the index of this rank's shard."""
    if name == NO_GROUP:
        return 1, 0
    group = _resolve(name)
    return group.size(), group.rank()


def set_vocab_size(call: TorchCall, weight: torch.Tensor) -> TorchCall:
    """Returns a call that was traced without a vocabulary size, with the size filled in."""
    shards, _ = size_and_rank(call.group)
    return make_call(call.text, vocab_size=int(weight.shape[0]) * shards)


def compute_checksum(*values: object) -> int:
    """Returns an int32 checksum of the arguments, with which ranks compare the options of a call."""
    (number,) = struct.unpack("i", struct.pack("I", zlib.crc32(repr(values).encode())))
    return int(number)


def is_new(name: str, heads: int = 1) -> bool:
    """Whether the group's ranks have not run `check` yet for a call with this number of heads."""
    return name != NO_GROUP and _compared_heads.get(_resolve(name), 0) < heads


def check(
    name: str,
    launches: Callable[[torch.device], bool],
    hidden: torch.Tensor,
    ids: torch.Tensor | None,
    vocab_size: int | None,
    *weights: torch.Tensor,
    rows: torch.Tensor | None = None,
) -> None:
    """Compares the ranks' tensors in a group's first call. If they do not fit together, all ranks raise an error.

    Only the first call is checked, because every rank knows which call is the first, so that all ranks join the
    collective. Later calls send tags with their statistics, and a row whose tags differ between the ranks is NaN. With
    direct launches, this detection requires that all vocabulary parts have equally many tile groups, of 4096 columns
    each. Otherwise the ranks send arrays of different sizes, which NCCL does not notice.

    ``weights`` are the head, or the student's head and the teacher's. ``rows`` are the indices of the unmasked tokens
    in ``hidden [T, H]`` and in ``ids``, which is ``[T]``, ``[T, K]`` or None. ``launches`` says whether this rank
    launches kernels directly on a device. Without a ``vocab_size`` every column counts.

    Raises:
        ValueError: some ranks launch kernels directly and others do not, so that they would send different arrays; or
            the ranks' parts of the vocabulary differ in size, two ranks have the same part, or their tokens differ.
    """
    if name == NO_GROUP or weights[0].device.type == "meta" or not is_new(name, len(weights)):
        return
    group, heads = _resolve(name), len(weights)
    tokens = len(hidden) if rows is None else len(rows)
    sizes = [int(weight.shape[0]) for weight in weights]
    samples = [_take_sample(hidden, rows, tokens)]
    for weight, size in zip(weights, sizes, strict=True):
        num_columns = size if vocab_size is None else min(max(vocab_size - group.rank() * size, 0), size)
        samples.append(_take_sample(weight, None, num_columns))
    id_parts = 0 if ids is None else _count_parts(ids if rows is None else ids[rows], sizes[0], group.size())
    counts = [int(launches(weights[0].device)), id_parts, tokens, *sizes]
    numbers = torch.tensor(counts, dtype=torch.int32, device=hidden.device)
    local = torch.cat([numbers, *(x.view(torch.int32).reshape(-1) for x in samples)])
    every = gather(local[None], name)[:, 0].cpu()
    ways, parts, token_counts, *weight_sizes = every[:, : len(counts)].T.tolist()
    hidden_samples, *weight_samples = every[:, len(counts) :].view(group.size(), 1 + heads, *SAMPLE).unbind(1)
    _refuse_different_layouts(weight_sizes, ways)
    for sample in weight_samples:
        _refuse_equal_parts(sample, sizes[0], max(parts))
    _refuse_different_tokens(token_counts, hidden_samples.view(torch.float32))
    _compared_heads[group] = heads


def compare_options(call: TorchCall, device: torch.device, **others: object) -> None:
    """Compares the options of a call between ranks in the first call of its kind. If they differ, all ranks raise.

    A kind consists of everything that decides which arrays are exchanged: the function, most options, and ``others``. A
    rank compares when the kind is new to it. In a group's first call, and in the first call of each function, the kind
    is new to all ranks, so that all compare. Later, they compare whenever a kind is new to all of them. If it is new
    only to some ranks, these compare while the others send results. Only a collective in each call could detect that.

    Raises:
        ValueError: the options differ. The message names them, with the values of all ranks.
    """
    if call.group == NO_GROUP or device.type == "meta":
        return
    kind, seen = call.exchanged, _compared.setdefault(_resolve(call.group), set())
    if (kind, *others.values()) in seen:
        return
    # vocab_size is left out because tags compare it, and cache_bytes because it may differ between ranks.
    options = call.options | {"group": "", "vocab_size": 0, "cache_bytes": 0} | others
    numbers = gather(torch.tensor([compute_checksum(options)], dtype=torch.int32, device=device), call.group)
    if len(set(numbers.flatten().tolist())) > 1:
        _refuse_other_options(options, call.group, device)
    seen.add((kind, *others.values()))


def _refuse_other_options(options: dict[str, object], name: str, device: torch.device) -> None:
    """Raises an error that names the options that differ. All ranks call this, and send all their options."""
    group = _resolve(name)
    every: list[Any] = [None] * group.size()
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        dist.all_gather_object(every, options, group=group)
    differ = []
    for option in [x for x in options if all(x in each for each in every)]:
        ranks: dict[str, list[int]] = {}  # keyed by the option's value
        for rank, each in enumerate(every):
            ranks.setdefault(repr(each[option]), []).append(rank)
        if len(ranks) > 1:
            values = (f"{value} on ranks {with_value}" for value, with_value in ranks.items())
            differ.append(f"{NAMES.get(option, option)} is {' and '.join(values)}")
    raise ValueError(
        f"the ranks of tp_group make different calls: {', '.join(differ)}. They exchange what each call computes: make "
        "the same call on every rank, and ignore the results that a rank does not need"
    )


def _take_sample(x: torch.Tensor, rows: torch.Tensor | None, count: int) -> torch.Tensor:
    """Returns a float32 sample of shape `SAMPLE`, from the first ``count`` rows or the ``count`` rows in ``rows``."""
    if count == 0:
        return torch.zeros(SAMPLE, device=x.device)
    row, column = (
        torch.arange(n, device=x.device) * size // n for n, size in zip(SAMPLE, (count, x.shape[1]), strict=True)
    )
    return x.detach()[(row if rows is None else rows[row])[:, None], column].float()


def _count_parts(ids: torch.Tensor, size: int, ranks: int) -> int:
    """Returns how many vocabulary parts lie below the upper quartile of the ids."""
    ids = ids.long()  # torch compares only some of the unsigned types
    inside = ids[(ids >= 0) & (ids < ranks * size)].sort()[0]
    return int(inside[3 * len(inside) // 4]) // size if len(inside) else 0


def _refuse_different_layouts(sizes: list[list[int]], ways: list[int]) -> None:
    if len({size for rows in sizes for size in rows}) > 1:
        counts = ", the teacher's ".join(", ".join(map(str, rows)) for rows in sizes)
        raise ValueError(
            f"weight has {counts} rows on the ranks of tp_group, and its parts must be of the same "
            "size: pad the vocabulary and give vocab_size"
        )
    if len(set(ways)) > 1:
        raise ValueError(
            f"ranks {[rank for rank, way in enumerate(ways) if way]} of tp_group launch kernels directly, the others "
            'do not: give all GPUs of one kind, and the same lce_torch_bridge.launch_with("direct") or "jax"'
        )


def _refuse_equal_parts(bits: torch.Tensor, size: int, beyond: int) -> None:
    """Raises if two of N ranks have the same rows of weight, according to the samples ``bits`` ``[N, *SAMPLE]``.

    Two cases are legitimate. Parts may be equal if all their rows are the same, such as zeros. And the vocabulary
    itself may have equal parts. It does if the distinct parts alone are too small for a quarter of the ids; ``beyond``
    counts the parts below these ids.
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


def _refuse_different_tokens(tokens: list[int], hidden: torch.Tensor) -> None:
    """Raises if most rows of ``hidden`` ``[N, *SAMPLE]`` differ by more than rounding. A few rows may be padding."""
    if len(set(tokens)) > 1:
        raise ValueError(f"the ranks of tp_group pass {', '.join(map(str, tokens))} tokens. {WHICH_GROUP}")
    norms = hidden.norm(dim=2)
    differ = (hidden - hidden[:1]).norm(dim=2) > APART * torch.maximum(norms, norms[:1])
    for rank, count in enumerate(differ.sum(1).tolist()):
        if 2 * count > SAMPLE[0]:
            raise ValueError(
                f"hidden differs between the ranks 0 and {rank} of tp_group, in {count} of {SAMPLE[0]} places by more "
                f"than rounding. {WHICH_GROUP}. Under sequence parallelism gather hidden over tp_group before"
            )


def gather(x: torch.Tensor, name: str) -> torch.Tensor:
    """Returns every rank's ``x``, stacked in rank order, ``[N, ...]``."""
    group = _resolve(name)
    gathered = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
    getattr(dist, ALL_GATHER)(gathered, x, group=group)
    return gathered.view(group.size(), *x.shape)


def all_reduce(x: torch.Tensor, name: str) -> torch.Tensor:
    """Sums ``x`` over the group in place, and returns it."""
    dist.all_reduce(x, group=_resolve(name))
    return x


def sum_dhidden(dhidden: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Returns float32 ``dhidden`` summed over the group, rounded once to ``dtype``."""
    return all_reduce(dhidden.contiguous(), name).to(dtype)


def add_parts(x: torch.Tensor, columns: int, name: str) -> torch.Tensor:
    """Returns the sum of ``x [T, columns]`` over the group. It is exact, because only one rank's element is not 0.

    Further columns of ``x`` are `lce_jax.run._local.difference_terms`. A row is NaN if its sum of these terms is not 0.
    """
    total = all_reduce(x.contiguous(), name)
    return total[:, :columns].where((total[:, columns:] == 0).all(1, keepdim=True), torch.nan)


def _resolve(name: str) -> dist.ProcessGroup:
    return _device.group_of(name)
