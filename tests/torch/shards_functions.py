"""Checks of `shards_worker`: logits at chosen ids, a loss with its gradients in the forward, the most likely tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from lce_torch_bridge import linear_kl, linear_logits, linear_logprobs, linear_loss, linear_topk, masked_logprobs
from tests.torch import problem as p
from tests.torch.shards import DEVICE, GRADIENT, VALUE, draw, same_on_all_ranks, shard


def chosen_logits(group: dist.ProcessGroup) -> None:
    """Logits at ids of any rank, eager and compiled, the same bits on all; parts of different sizes are NaN."""
    problem, bias = draw(), torch.linspace(-2, 2, 104, device=DEVICE)
    problem.hidden[3] = torch.nan  # of a token whose ids are all none
    ids, told = p.candidates_like(problem.labels), dict(temperature=0.7, logit_softcap=4.0, vocab_size=97)
    ids[3] = -1
    seed = p.seeds_like(problem.labels, K=5)[3]

    def measured(call: Any, problem: p.Problem, bias: torch.Tensor, **more: Any) -> Any:
        leaves, leaf = problem.leaves(), bias.clone().requires_grad_()
        z = call(leaves.hidden, leaves.weight, ids, bias=leaf, **told, **more)
        return z, torch.autograd.grad((seed.to(z.dtype) * z).sum(), (*leaves[:2], leaf))

    true = problem.hidden.double().nan_to_num(), problem.weight.double(), problem.labels
    want, wanted = measured(p.stored_logits, p.Problem(*true), bias.double())
    local = problem._replace(weight=shard(problem.weight, group)), shard(bias, group)
    for call in (linear_logits, torch.compile(linear_logits, fullgraph=True, backend="aot_eager")):
        z, (dhidden, dweight, dbias) = measured(call, *local, tp_group=group, reduce_grad_hidden=True)
        assert p.value_error(z, want) < VALUE
        assert same_on_all_ranks(z, group)
        assert same_on_all_ranks(dhidden, group)
        assert p.relative_norm(dhidden, wanted[0]) < GRADIENT
        assert p.relative_norm(dweight, shard(wanted[1], group)) < GRADIENT
        assert p.relative_norm(dbias, shard(wanted[2], group)) < GRADIENT
    odd = problem.weight[: 51 + group.rank()]
    assert linear_logits(problem.hidden, odd, ids, tp_group=group).isnan().all()


def loss_in_forward(group: dist.ProcessGroup) -> None:
    """Three chunks: the sum and its gradients against float64, the same bits on all ranks; a sum of parts is no sum."""
    problem, advantages = draw(T=5000), torch.randn(5000, generator=torch.Generator().manual_seed(2)).to(DEVICE)

    def loss_fn(logprobs: torch.Tensor, entropy: torch.Tensor, lse: torch.Tensor, advantages: Any) -> torch.Tensor:
        return -torch.exp(logprobs / 10) * advantages - 0.1 * entropy + 0.01 * lse**2

    double = p.Problem(problem.hidden.double(), problem.weight.double(), problem.labels).leaves()
    true = loss_fn(*p.stored(*double, vocab_size=97)[:3], advantages).sum()
    wanted = torch.autograd.grad(true / 37, double[:2])
    leaves = problem._replace(weight=shard(problem.weight, group)).leaves()
    told: Any = dict(vocab_size=97, tp_group=group, chunk_bytes=p.bytes_of(2048, leaves.weight))
    total, out = linear_loss(loss_fn, *leaves, advantages, reduce_grad_hidden=True, **told)
    dhidden, dweight = torch.autograd.grad(total / 37, leaves[:2])
    assert abs((total / true).item() - 1) < 1e-5
    assert all(same_on_all_ranks(x, group) for x in (total[None], *out[:3], dhidden))
    assert p.relative_norm(dhidden, wanted[0]) < GRADIENT
    assert p.relative_norm(dweight, shard(wanted[1], group)) < GRADIENT
    total, _ = linear_loss(loss_fn, *leaves, advantages, **told)
    (part,) = torch.autograd.grad(total / 37, leaves.hidden)
    assert p.relative_norm(part, wanted[0]) > 0.3


def floors(group: dist.ProcessGroup) -> None:
    """A floor that some ranks have no token above: values and gradients against float64, the same bits on all ranks."""
    problem = draw(T=37, V=104)
    problem.labels[:2] = torch.tensor([-100, 104], device=DEVICE)
    z = p.stored_logits(problem.hidden.double(), problem.weight.double(), torch.arange(104).expand(37, -1)).sort(-1)[0]
    options: Any = dict(logit_floor=((z[:, -3] + z[:, -4]) / 2).float())
    seeds, leaves = p.seeds_like(problem.labels), problem._replace(weight=shard(problem.weight, group)).leaves()
    out = linear_logprobs(*leaves, tp_group=group, reduce_grad_hidden=True, stats=True, **options)
    dhidden, dweight = torch.autograd.grad(p.objective(out, seeds), leaves[:2])
    want, (true_hidden, true_weight) = p.exact(problem, seeds, **options)
    assert max(map(p.value_error, out[:3], want[:3])) < VALUE
    assert p.relative_norm(dhidden, true_hidden) < GRADIENT
    assert p.relative_norm(dweight, shard(true_weight, group)) < GRADIENT
    assert out.support is not None
    assert set(out.support.tolist()) == {3, 4}
    assert all(same_on_all_ranks(x, group) for x in (*out[:5], out.support, dhidden))


def most_likely(group: dist.ProcessGroup) -> None:
    """Those of one rank that holds all columns, of which some are equal on several ranks: the smaller ids first."""
    problem = draw()
    problem.weight[60:90] = problem.weight[:30].clone()
    for V, k in ((104, 64), (97, 5), (40, 40)):  # with padding, and ranks of padding alone
        options: Any = dict(vocab_size=V, temperature=0.7, logit_softcap=4.0)
        want = linear_topk(problem.hidden, problem.weight, k, **options)
        for call in (linear_topk, torch.compile(linear_topk, fullgraph=True, backend="aot_eager")):
            got = call(problem.hidden, shard(problem.weight, group), k, tp_group=group, **options)
            assert all(same_on_all_ranks(x, group) for x in got)
            assert torch.equal(got.ids, want.ids)
            assert max(map(p.value_error, got[1:], want[1:])) < VALUE


def chosen_on_one_rank(group: dist.ProcessGroup) -> None:
    """bfloat16: candidates and a softmax over a set as one rank has them that holds all columns, on all the same."""
    problem = draw(T=256, H=128, V=1024, dtype=torch.bfloat16)
    ids = p.candidates_like(problem.labels, K=8, V=1024)
    local = problem._replace(weight=shard(problem.weight, group))
    seeds = p.seeds_like(problem.labels, K=8)

    def of_set(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, **told: Any) -> torch.Tensor:
        own = ids.where((ids >= 0) & (ids < 1024), -1)
        return masked_logprobs(linear_logits(hidden, weight, own, **told), own, labels)

    def of_candidates(*operands: torch.Tensor, **told: Any) -> torch.Tensor:
        return linear_logprobs(*operands, candidates=ids, **told).candidate_logprobs

    for call, seed in ((of_set, seeds[0]), (of_candidates, seeds[3])):
        found = []
        for operands, told in ((problem, {}), (local, dict(tp_group=group, reduce_grad_hidden=True))):
            leaves = operands.leaves()
            out = call(*leaves, **told)
            found.append((out, torch.autograd.grad((seed * out).sum(), leaves[:2])))
        (want, wanted), (got, grads) = found
        assert same_on_all_ranks(got, group)
        assert same_on_all_ranks(grads[0], group)
        errors = p.relative_norm(grads[0], wanted[0]), p.relative_norm(grads[1], shard(wanted[1], group))
        print(call.__name__, "value", p.value_error(got, want), "gradients", *errors)
        assert p.value_error(got, want) < 1e-5  # other tiles are summed
        assert max(errors) < torch.finfo(torch.bfloat16).eps / 2  # one rounding


def divergences(group: dist.ProcessGroup) -> None:
    """Those of one rank that holds all columns, eager and compiled, the same bits on all; of padding alone too."""
    problem, teacher, bias = draw(), draw(H=16, seed=1), torch.linspace(-2, 2, 104, device=DEVICE)
    seed = p.seeds_like(problem.labels)[0]

    def measured(function: Any, own: Any, teachers: Any, **told: Any) -> Any:
        leaves = [x.clone().requires_grad_() for x in (problem.hidden, *own)]
        kl = function(*leaves[:2], teacher.hidden, teachers[0], bias=leaves[2], teacher_bias=teachers[1], **told)
        return kl, torch.autograd.grad((seed * kl).sum(), leaves)

    heads = (problem.weight, bias), (teacher.weight, bias.flip(0))
    local = [[shard(x, group) for x in head] for head in heads]
    split: Any = dict(tp_group=group, reduce_grad_hidden=True)
    compiled = torch.compile(linear_kl, fullgraph=True, backend="aot_eager")
    cap = dict(logit_softcap=4.0, teacher_logit_softcap="same")
    for direction, function, further in (
        ("forward", linear_kl, dict(vocab_size=40)),
        ("reverse", linear_kl, dict(vocab_size=97, temperature=0.7, teacher_temperature=1.2, **cap)),
        ("jsd", compiled, dict(cache_bytes=1 << 20)),
    ):
        told: Any = dict(direction=direction, **further)
        want, wanted = measured(linear_kl, *heads, **told)
        kl, (dhidden, dweight, dbias) = measured(function, *local, **told, **split)
        assert p.value_error(kl, want) < VALUE, direction
        assert same_on_all_ranks(kl, group)
        assert same_on_all_ranks(dhidden, group)
        assert p.relative_norm(dhidden, wanted[0]) < GRADIENT, direction
        assert p.relative_norm(dweight, shard(wanted[1], group)) < GRADIENT, direction
        assert p.relative_norm(dbias, shard(wanted[2], group)) < GRADIENT, direction
    mesh = init_device_mesh(problem.hidden.device.type, (group.size(),))
    (weight, _), (teachers, _) = local
    want = linear_kl(problem.hidden, weight, teacher.hidden, teachers, tp_group=group)
    for own, other in ((True, False), (False, True)):  # a DTensor beside a plain part
        heads = [DTensor.from_local(x, mesh, [Shard(0)]) if y else x for x, y in ((weight, own), (teachers, other))]
        got = linear_kl(problem.hidden, heads[0], teacher.hidden, heads[1], tp_group=mesh.get_group())
        assert torch.equal(got, want)
    _parts_of_other_sizes(problem, teacher, group)


def _parts_of_other_sizes(problem: Any, teacher: Any, group: dist.ProcessGroup) -> None:
    """The student's, the teacher's, or both differ in size: no rank hangs."""
    odd = [(x[: 51 + group.rank()], x[:52]) for x in (problem.weight, teacher.weight)]
    for which in ((0, 0), (0, 1), (1, 0)):
        parts = [x[i].clone().requires_grad_() for x, i in zip(odd, which, strict=True)]
        kl = linear_kl(problem.hidden, parts[0], teacher.hidden, parts[1], tp_group=group, vocab_size=99)
        assert kl.isnan().all()
        kl.sum().backward()
        assert parts[0].grad.shape == parts[0].shape
    size = dist.get_world_size()
    other = dist.new_group(list(range(size)))
    whole, cut = (", ".join(str(first + rank * step) for rank in range(size)) for first, step in ((52, 0), (51, 1)))
    with pytest.raises(ValueError, match=f"weight has {whole}, the teacher's {cut} rows on the ranks of tp_group"):
        linear_kl(problem.hidden, odd[0][1], teacher.hidden, odd[1][0], tp_group=other, vocab_size=99)
