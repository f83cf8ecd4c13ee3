"""Checks of `shards_worker`: every function of a vocabulary that is split, against float64 of the whole one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from lce_torch_bridge import (
    launch_with,
    linear_kl,
    linear_logits,
    linear_logprobs,
    linear_loss,
    linear_topk,
    masked_logprobs,
    verl,
)
from tests.torch import executor
from tests.torch import problem as p
from tests.torch import test_every_function as f
from tests.torch.shards import DEVICE, GRADIENT, VALUE, draw, same_on_all_ranks, shard


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


TEACHER, OF_TEACHER = draw(T=f.T, H=16, seed=1), torch.linspace(2, -2, f.V, device=DEVICE)


def divergence(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    """`linear_kl` with a teacher whose head is split as the student's."""
    heads, group = [TEACHER.weight, OF_TEACHER], options.get("tp_group")
    heads = heads if group is None else [shard(x, group) for x in heads]
    return [linear_kl(hidden, weight, TEACHER.hidden, heads[0], bias=bias, teacher_bias=heads[1], **options)]


def floored(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    """With a floor that some ranks have no token above."""
    z = p.capped(f.PROBLEM.hidden.double() @ f.PROBLEM.weight.double().T, bias=f.BIAS).sort(-1)[0]
    floor = ((z[:, -3] + z[:, -4]) / 2).float().to(DEVICE)
    labels, told = f.PROBLEM.labels.to(DEVICE), dict(bias=bias, logit_floor=floor, stats=True)
    out = linear_logprobs(hidden, weight, labels, **told, **options)
    return [*out[:3], out.support]


def twice_the_same(hidden: torch.Tensor, weight: torch.Tensor, _: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    """The most likely where some columns are equal, on several ranks: the smaller ids first."""
    del weight
    whole = f.PROBLEM.weight.clone().to(DEVICE)
    whole[60:90] = whole[:30]
    group = options.get("tp_group")
    return list(linear_topk(hidden, whole if group is None else shard(whole, group), 40, **options))


def of_verl(hidden: torch.Tensor, weight: torch.Tensor, _: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    """It leaves dhidden each rank's own part, as verl's kernel does."""
    return list(verl.linear_cross_entropy(hidden, weight, f.PROBLEM.labels.to(DEVICE), 0.7, "none", *options.values()))


SCALED: Any = dict(temperature=0.7, logit_scale=1.3, logit_softcap=4.0)
CAPPED: Any = SCALED | dict(teacher_logit_softcap="same", teacher_logit_scale="same", teacher_temperature=1.2)
CASES: list[tuple[Any, dict[str, Any]]] = [  # of 97 columns the last one's some are padding, of 40 all
    (f.logprobs, SCALED), (f.logprobs, dict(vocab_size=97)), (f.logprobs, dict(vocab_size=40)),
    (f.cross_entropy, {}), (f.entropy, {}), (f.logits, SCALED | dict(vocab_size=97)), (floored, {}),
    (f.loss, dict(vocab_size=97)), (twice_the_same, SCALED | dict(vocab_size=97)),
    (twice_the_same, dict(vocab_size=40)), (divergence, dict(vocab_size=40)),
    (divergence, CAPPED | dict(vocab_size=97, direction="reverse")),
    (divergence, dict(direction="jsd", cache_bytes=1 << 20)), (of_verl, {}),
]  # fmt: skip
COMPILED = (f.logprobs, f.cross_entropy, f.logits, divergence, twice_the_same)


def every_function(group: dist.ProcessGroup) -> None:
    """Eager and in one graph: what float64 has of the whole vocabulary, with the same bits on all ranks."""
    operands = [x.to(DEVICE) for x in (f.PROBLEM.hidden, f.PROBLEM.weight, f.BIAS)]
    seen = set()
    for function, options in CASES:
        launch_with("jax")
        with executor.in_float64():
            want = f.measured(function, [x.clone().requires_grad_() for x in operands], **options)
        launch_with(None)
        told: Any = dict(tp_group=group)
        if function not in (twice_the_same, of_verl):
            told |= dict(reduce_grad_hidden=True)
        calls = [function]
        if function in COMPILED and function not in seen:
            calls.append(torch.compile(function, fullgraph=True, backend="aot_eager"))
        seen.add(function)
        for call in calls:
            parts = operands[0], *(shard(x, group) for x in operands[1:])
            got = f.measured(call, [x.clone().requires_grad_() for x in parts], **options, **told)
            _compare(f"{function.__name__}, {', '.join(options)}", got, want, group, function is not twice_the_same)


def _compare(name: str, got: list[Any], want: list[Any], group: dist.ProcessGroup, differentiable: bool) -> None:
    results = len(want) - 3 * differentiable
    for x, y in zip(got[:results], want[:results], strict=True):
        assert same_on_all_ranks(x, group), name
        assert torch.equal(x, y) if x.dtype == torch.int64 else p.value_error(x, y) < 5 * VALUE, name
    if not differentiable:
        return
    (dhidden, *of_head), (whole, *wanted) = got[results:], want[results:]
    if name.startswith("of_verl"):
        dist.all_reduce(dhidden, group=group)
    assert same_on_all_ranks(dhidden, group), name
    assert p.relative_norm(dhidden, whole) < 2 * GRADIENT, name
    for x, y in zip(of_head, wanted, strict=True):
        assert x is y is None or p.relative_norm(x, shard(y, group)) < 2 * GRADIENT, name


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


def of_dtensors(group: dist.ProcessGroup) -> None:
    """A DTensor beside a plain part: of the student's head, or of the teacher's."""
    problem, teacher = draw(), draw(H=16, seed=1)
    mesh = init_device_mesh(problem.hidden.device.type, (group.size(),))
    weight, teachers = shard(problem.weight, group), shard(teacher.weight, group)
    want = linear_kl(problem.hidden, weight, teacher.hidden, teachers, tp_group=group)
    for own, other in ((True, False), (False, True)):
        heads = [DTensor.from_local(x, mesh, [Shard(0)]) if y else x for x, y in ((weight, own), (teachers, other))]
        got = linear_kl(problem.hidden, heads[0], teacher.hidden, heads[1], tp_group=mesh.get_group())
        assert torch.equal(got, want)
    odd = problem.weight[: 51 + group.rank()]
    ids = p.candidates_like(problem.labels)
    assert linear_logits(problem.hidden, odd, ids, tp_group=group).isnan().all()
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
