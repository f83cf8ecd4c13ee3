"""Sums over sequences that context parallelism splits over several ranks: run by `shards_worker`."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist

from lce_torch_bridge import rows
from tests.torch.ranks import DEVICE, same_on_all_ranks


def segment_sums(group: dist.ProcessGroup) -> None:
    """Packed sequences that context parallelism splits over the ranks: values and gradients of all rows, the same bits.

    By ids and by a rank's offsets; the second sequence has no token that counts.
    """
    draws, size = torch.Generator().manual_seed(0), group.size()
    offsets = torch.tensor([0, 16, 24, 40])
    ids = torch.arange(3).repeat_interleave(offsets.diff()).expand(2, -1)
    x, seed = (torch.randn(2, 40, generator=draws).to(DEVICE) for _ in range(2))
    where = (torch.rand(2, 40, generator=draws) < 0.6) & (ids != 1)
    split = functools.partial(rows.of_rank, cp_rank=group.rank(), cp_size=size, cu_seqlens=offsets)
    for function in (rows.segment_mean, rows.segment_sum):
        alone = x.clone().requires_grad_()
        want = function(alone, where=where.to(DEVICE), segment_ids=ids.to(DEVICE))
        (wanted,) = torch.autograd.grad(want.sin(), alone, seed)
        for said in ({"segment_ids": split(ids).to(DEVICE)}, {"cu_seqlens": (offsets // size).to(DEVICE)}):
            leaf = split(x).clone().requires_grad_()
            got = function(leaf, where=split(where).to(DEVICE), group=group, **said)
            (gradient,) = torch.autograd.grad(got.sin(), leaf, split(seed))
            torch.testing.assert_close(got, split(want), rtol=2e-6, atol=1e-6)
            torch.testing.assert_close(gradient, split(wanted), rtol=1e-5, atol=1e-5)
            assert same_on_all_ranks(got[:, :1], group)  # of the first sequence, of which every rank has a part
