"""One of several ranks, each with its part of the vocabulary: over gloo on the CPU, or over NCCL with DEVICE=cuda.

`test_tensor_parallel` and `test_gpu` start them:
``torchrun --nproc-per-node 2 -m tests.torch.shards_worker <name of a check>...``
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lce_torch_bridge import explain, linear_logprobs
from lce_torch_bridge.tensors import _padding
from lce_torch_bridge.tensors._tensor_parallel import ALL_GATHER
from tests.torch import problem as p
from tests.torch import shards_functions, shards_groups
from tests.torch.shards import DEVICE, GRADIENT, VALUE, draw, same_on_all_ranks, shard


def run(problem: p.Problem, group: dist.ProcessGroup, reduce_grad_hidden: bool = True, **options: Any) -> Any:
    """The results, dhidden and this rank's dweight."""
    local = problem._replace(weight=shard(problem.weight, group))
    K = options["candidates"].shape[-1] if "candidates" in options else 0
    return p.gradients(
        local, p.seeds_like(problem.labels, K=K), tp_group=group, reduce_grad_hidden=reduce_grad_hidden, **options
    )


def foreign_labels(group: dist.ProcessGroup) -> None:
    """Labels out of vocabulary, and on either side of a part's edge, with candidates like them."""
    problem, options = draw(T=37, V=104), dict(vocab_size=97)
    problem.labels[:6] = torch.tensor([-100, 2**32 + 3, 10**6, 104, 52, 51], device=DEVICE)
    options["candidates"] = p.candidates_like(problem.labels)
    plan = explain(problem.hidden, shard(problem.weight, group), problem.labels, tp_group=group, **options).plan
    assert plan.call.columns == 104 // group.size()
    out, (dhidden, dweight) = run(problem, group, stats=True, mean_logit=True, **options)
    want, (true_hidden, true_weight) = p.exact(problem, p.seeds_like(problem.labels, K=5), **options)
    assert max(map(p.value_error, out, want)) < VALUE
    assert p.relative_norm(dhidden, true_hidden) < GRADIENT
    assert p.relative_norm(dweight, shard(true_weight, group)) < GRADIENT
    assert all(same_on_all_ranks(field, group) for field in (*out[:7], dhidden))


def negative_controls(group: dist.ProcessGroup) -> None:
    """If dhidden is not summed, or summed twice, it is far off, although the forward is right."""
    problem = draw()
    _, (whole, _) = p.exact(problem, p.seeds_like(problem.labels))
    out, (part, _) = run(problem, group, reduce_grad_hidden=False)
    _, (summed, _) = run(problem, group)
    twice = summed.clone()
    dist.all_reduce(twice, group=group)
    assert p.value_error(out.logprobs, p.stored(*problem).logprobs) < VALUE
    assert p.relative_norm(part, whole) > 0.3
    assert p.relative_norm(twice, whole) > 0.9
    dist.all_reduce(part, group=group)
    assert p.relative_norm(part, whole) < GRADIENT
    assert p.relative_norm(summed, whole) < GRADIENT


def collectives(group: dist.ProcessGroup) -> None:
    """One all-gather forward, for all pieces of the tokens together; one all-reduce backward, if it is asked for."""
    counts = {ALL_GATHER: 0, "all_reduce": 0}

    def counted(name: str) -> Any:
        real = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return real(*args, **kwargs)

        return call

    for name in counts:
        setattr(dist, name, counted(name))
    T = _padding.FORWARD_ROWS + 50
    problem = draw(T=T, H=8, V=16)
    run(draw(T=4, H=8, V=16), group)  # the first call compares the sizes of the parts
    counts.update(dict.fromkeys(counts, 0))
    out, grads = run(problem, group)
    assert counts == {ALL_GATHER: 1, "all_reduce": 1}, counts
    assert all(same_on_all_ranks(field, group) for field in out[:3])
    want, wanted = p.exact(problem, p.seeds_like(problem.labels))
    assert p.value_error(out.logprobs, want.logprobs) < VALUE
    assert p.relative_norm(grads[0], wanted[0]) < GRADIENT
    run(problem, group, reduce_grad_hidden=False)
    assert counts == {ALL_GATHER: 2, "all_reduce": 1}, counts


def kept_rows(group: dist.ProcessGroup) -> None:
    problem = draw(T=300)
    rows = torch.randperm(300, generator=torch.Generator().manual_seed(0))[:77].to(DEVICE)
    told = dict(stats=True, mean_logit=True, candidates=p.candidates_like(problem.labels))
    full, _ = run(problem, group, **told)
    out, (dhidden, _) = run(problem, group, where=rows, **told)
    assert all(torch.equal(got[rows], want[rows]) for got, want in zip(out[:8], full[:8], strict=True))
    assert dhidden.abs().sum(1).count_nonzero() == 77


def empty_and_compiled(group: dist.ProcessGroup) -> None:
    out, (dhidden, dweight) = run(draw(T=0), group)
    assert out.logprobs.shape == (0,)
    assert dhidden.shape == (0, 32)
    assert not dweight.any()
    problem = draw()
    compiled = torch.compile(linear_logprobs, fullgraph=True, backend="aot_eager")
    told: Any = dict(candidates=p.candidates_like(problem.labels))
    eager, want = run(problem, group, **told)
    local = problem._replace(weight=shard(problem.weight, group))
    told |= dict(tp_group=group, reduce_grad_hidden=True)
    out, grads = p.gradients(local, p.seeds_like(problem.labels, K=5), call=compiled, **told)
    for one, other in zip((*out, *grads), (*eager, *want), strict=True):
        assert one is other is None or torch.equal(one, other)


def uneven(group: dist.ProcessGroup) -> None:
    """Parts of different sizes raise in a group's first call and give NaN later, on every rank: no rank hangs."""
    problem = draw(T=5, V=51)
    part = problem._replace(weight=problem.weight.chunk(2)[group.rank()])
    other = dist.new_group(list(range(dist.get_world_size())))
    for vocab_size in (None, 51):
        with pytest.raises(ValueError, match="26, 25 rows on the ranks of tp_group"):
            linear_logprobs(*part, tp_group=other, vocab_size=vocab_size)
    for V in (52, 104):  # a second head of another size is as good as the first
        even = draw(T=5, V=V)
        assert p.value_error(run(even, other)[0].logprobs, p.stored(*even).logprobs) < VALUE
    out, grads = p.gradients(part, p.seeds_like(part.labels), tp_group=other, reduce_grad_hidden=True)
    assert all(x.isnan().all() for x in (*out[:3], *grads))


def rounding(group: dist.ProcessGroup) -> None:
    """bfloat16: dhidden summed in float32 and rounded once is closer than a sum of what each rank has rounded."""
    problem = draw(T=256, H=128, V=1024, dtype=torch.bfloat16)
    _, (whole, _) = p.exact(problem, p.seeds_like(problem.labels))
    _, (once, _) = run(problem, group)
    _, (part, _) = run(problem, group, reduce_grad_hidden=False)
    assert part.dtype == once.dtype == torch.bfloat16
    dist.all_reduce(part, group=group)
    print("dhidden summed in float32", p.relative_norm(once, whole), "in bfloat16", p.relative_norm(part, whole))
    # On the CPU that is the only rounding; on a GPU dlogits are rounded before, and both sums share that error.
    factor = 0.75 if problem.hidden.device.type == "cpu" else 0.95
    assert p.relative_norm(once, whole) < factor * p.relative_norm(part, whole)


def main() -> None:
    warnings.simplefilter("error")
    rank = int(os.environ["LOCAL_RANK"])
    if DEVICE == "cuda":  # every rank sees every GPU
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    group = dist.new_group(list(range(dist.get_world_size())))
    for name in sys.argv[1:]:
        check = globals().get(name) or getattr(shards_functions, name, None) or getattr(shards_groups, name)
        check(group)
        print("done", name, flush=True)
    if DEVICE == "cuda":
        assert torch.cuda.current_device() == rank  # JAX's start has not changed it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
