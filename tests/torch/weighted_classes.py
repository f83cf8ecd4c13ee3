"""Class weights over several ranks: run by `shards_worker`."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lce_torch_bridge import linear_cross_entropy
from tests.torch.ranks import DEVICE, draw, shard


def class_weights(group: dist.ProcessGroup) -> None:
    """Each rank's part of the class weights. If a rank has none in the first call, all ranks refuse it."""
    problem, weights = draw(T=37, V=104), torch.linspace(0.5, 2.0, 104, device=DEVICE)
    problem.labels[:3] = torch.tensor([-100, 52, 51], device=DEVICE)
    weight = shard(problem.weight, group).requires_grad_()
    part = shard(weights, group)
    only_one = dict(class_weights=part) if group.rank() == 0 else {}
    with pytest.raises(ValueError, match=r"class_weights is True on ranks \[0\] and False on ranks \[1\]"):
        linear_cross_entropy(problem.hidden, weight, problem.labels, tp_group=group, **only_one)
    for options in ({}, {"cache_bytes": 0, "reduction": "sum"}):
        told = dict(tp_group=group, class_weights=part, **options)
        loss = linear_cross_entropy(problem.hidden, weight, problem.labels, **told)
        full = problem.weight.clone().requires_grad_()
        logits, reduction = problem.hidden @ full.T, options.get("reduction", "mean")
        want = torch.nn.functional.cross_entropy(logits, problem.labels, weights, reduction=reduction)
        torch.testing.assert_close(loss, want)
        (dweight,), (expected,) = torch.autograd.grad(loss, weight), torch.autograd.grad(want, full)
        torch.testing.assert_close(dweight, shard(expected, group), rtol=1e-4, atol=1e-5)
