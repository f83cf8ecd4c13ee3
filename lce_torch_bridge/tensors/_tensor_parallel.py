"""The vocabulary split over a torch process group: who owns which columns, and the two collectives.

Forward, one all-gather of each rank's packed statistics, a few numbers per token; every rank merges them in rank
order, so that all hold the same bits. Backward, one all-reduce of dhidden, if the caller asks for it.

Operators know a group by its name, as torch's own functional collectives do.
"""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist

from lce_torch_bridge.tensors import _device

NO_GROUP = ""  # nothing to reduce over
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"  # before 2.14
# How many weights of a call were found to have equal parts in a group. Not by its name, which may be used again.
_asked: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def name_of(group: dist.ProcessGroup | None) -> str:
    """The name of ``group``, or `NO_GROUP` if it has one rank."""
    return NO_GROUP if group is None or group.size() == 1 else group.group_name


def size_and_rank(name: str) -> tuple[int, int]:
    """How many shards the vocabulary has, and which one is this rank's."""
    if name == NO_GROUP:
        return 1, 0
    group = _resolve(name)
    return group.size(), group.rank()


def check_equal_parts(name: str, direct: bool, *weights: torch.Tensor) -> None:
    """In a group's first call the ranks compare their numbers of rows and their ways, and all raise if these differ.

    ``weights``: the head's, or the student's and the teacher's, which must have as many rows.

    Only in the first call: every rank knows which call is the first, and so all of them join the collective. Later
    calls send the number with their statistics, and their results are NaN if it differs. Where kernels
    are launched directly, that needs parts with as many groups of tiles, 4096 columns each: otherwise the ranks send
    arrays of different sizes, which NCCL does not notice. ``direct``: this rank launches kernels where they serve its
    device.

    Raises:
        ValueError: the parts of the vocabulary are of different sizes, or some ranks launch kernels directly and others
            do not, which send other numbers.
    """
    device = weights[0].device
    if name == NO_GROUP or device.type == "meta":
        return
    group = _resolve(name)
    if _asked.get(group, 0) >= len(weights):
        return
    launches = direct and _device.why_not(device) is None
    sent = torch.tensor([[int(launches), *(int(weight.shape[0]) for weight in weights)]], device=device)
    ways, *sizes = gather(sent, name).view(-1, 1 + len(weights)).T.tolist()
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
    _asked[group] = len(weights)


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
    """``dhidden`` summed over the group in float32, and rounded once; over `NO_GROUP` as it is."""
    return dhidden if name == NO_GROUP else all_reduce(dhidden.contiguous(), name).to(dtype)


def add_parts(x: torch.Tensor, rows: int, name: str) -> torch.Tensor:
    """The sum of ``x`` over the group, of which one rank holds each element and the others 0, so that it is exact.

    ``rows`` is this rank's part of the vocabulary. It goes along in the one collective, and if it differs between the
    ranks, results are NaN, as in `through_jax._programs.results`.
    """
    group = _resolve(name)
    parts = x.new_zeros((group.size(), 2))
    parts[group.rank(), 0], parts[group.rank(), 1] = rows >> 16, rows & 0xFFFF  # float32 holds each half exactly
    packed = all_reduce(torch.cat([x.reshape(-1), parts.view(-1)]), name)
    found, parts = packed[: x.numel()].view(x.shape), packed[x.numel() :].view(parts.shape)
    return found.where((parts == parts[0]).all(), torch.nan)


def _resolve(name: str) -> dist.ProcessGroup:
    from torch.distributed import distributed_c10d  # no public function finds a group by its name

    return distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]
