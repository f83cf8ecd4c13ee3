"""One of several ranks, each with its part of the vocabulary: over gloo, or over NCCL with DEVICE=cuda (`test_gpu`)."""

from __future__ import annotations

import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from lce_torch_bridge import (
    explain,
    launch_with,
    linear_kl,
    linear_logits,
    linear_logprobs,
    linear_loss,
    linear_topk,
    masked_logprobs,
    verl,
)
from lce_torch_bridge.tensors import _padding
from lce_torch_bridge.tensors._tensor_parallel import ALL_GATHER
from tests.torch import executor
from tests.torch import problem as p
from tests.torch import test_every_function as f
from tests.torch.group_calls import (
    FUNCTIONS,
    IDS,
    LABEL,
    TEMPERATURE,
    Given,
    T,
    V,
    cross_entropy,
    functions_on,
    given,
    kl,
    logits,
    logprobs,
    loss,
    new_group,
    topk,
    verls,
)
from tests.torch.ranks import DEVICE, draw, same_on_all_ranks, shard
from tests.torch.split_sequences import segment_sums
from tests.torch.unlike_calls import other_options
from tests.torch.weighted_classes import class_weights

__all__ = ["class_weights", "other_options", "segment_sums"]  # run by its name, as all here
VALUE, GRADIENT = 2e-6, 1e-6  # as in test_parity


def run(problem: p.Problem, group: dist.ProcessGroup, reduce_grad_hidden: bool = True, **options: Any) -> Any:
    """The results, dhidden and this rank's dweight."""
    local = problem._replace(weight=shard(problem.weight, group))
    K = options["candidates"].shape[-1] if "candidates" in options else 0
    seeds, told = p.seeds_like(problem.labels, K=K), dict(tp_group=group, reduce_grad_hidden=reduce_grad_hidden)
    return p.gradients(local, seeds, **told, **options)


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
    for told in (True, False):  # the first call of a kind compares its options, and the first of all the parts' sizes
        run(draw(T=4, H=8, V=16), group, reduce_grad_hidden=told)
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


def empty(group: dist.ProcessGroup) -> None:
    out, (dhidden, dweight) = run(draw(T=0), group)
    assert out.logprobs.shape == (0,)
    assert dhidden.shape == (0, 32)
    assert not dweight.any()


def uneven(group: dist.ProcessGroup) -> None:
    """Parts of different sizes raise in a group's first call and give NaN later, on every rank: no rank hangs."""
    problem = draw(T=5, V=51)
    part = problem._replace(weight=problem.weight.chunk(2)[group.rank()])
    other = dist.new_group(list(range(dist.get_world_size())))
    for vocab_size in (None, 51):
        with pytest.raises(ValueError, match="26, 25 rows on the ranks of tp_group"):
            linear_logprobs(*part, tp_group=other, vocab_size=vocab_size)
    for columns in (52, 104):  # a second head of another size is as good as the first
        even = draw(T=5, V=columns)
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


def common_offset(group: dist.ProcessGroup) -> None:
    """All logits near 2²⁰, and exact there: the log-probabilities are as right as on one rank."""
    eighths = torch.randint(-40, 40, (104, 8), generator=torch.Generator().manual_seed(0)).to(DEVICE) / 8
    weight = torch.cat([eighths, torch.full_like(eighths[:, :1], 2.0**20)], 1)
    top = linear_topk(torch.ones(3, 9, device=DEVICE), shard(weight, group), 40, tp_group=group)
    want = eighths.sum(1).double().log_softmax(0).sort(descending=True)[0][:40].expand(3, -1)
    assert p.value_error(top.logprobs, want) < VALUE
    assert all(same_on_all_ranks(x, group) for x in top)


def of_verl(hidden: torch.Tensor, weight: torch.Tensor, _: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    """It leaves dhidden each rank's own part, as verl's kernel does."""
    return list(verl.linear_cross_entropy(hidden, weight, f.PROBLEM.labels.to(DEVICE), 0.7, "none", *options.values()))


SCALED: Any = dict(temperature=0.7, logit_scale=1.3, logit_softcap=4.0)
CAPPED: Any = SCALED | dict(teacher_logit_softcap="same", teacher_logit_scale="same", teacher_temperature=1.2)
CASES: list[tuple[Any, dict[str, Any]]] = [  # of 97 columns the last one's some are padding, of 40 all
    (f.logprobs, SCALED | dict(vocab_size=97)), (f.cross_entropy, {}), (f.logits, SCALED | dict(vocab_size=97)),
    (floored, {}), (f.loss, dict(vocab_size=97)), (f.mean, dict(vocab_size=97)),
    (twice_the_same, SCALED | dict(vocab_size=97)), (divergence, CAPPED | dict(direction="jsd", cache_bytes=1 << 20)),
    (of_verl, {}),
]  # fmt: skip
MORE = [(f.logprobs, SCALED), (f.logprobs, dict(vocab_size=97)), (f.logprobs, dict(vocab_size=40))]
MORE += [(f.cross_entropy, {}), (f.entropy, {}), (f.logits, {}), (twice_the_same, dict(vocab_size=40))]
MORE += [(divergence, dict(vocab_size=40)), (divergence, CAPPED | dict(vocab_size=97, direction="reverse"))]
MORE += [(divergence, CAPPED | dict(vocab_size=97, direction="tv"))]


def more_of_every_function(group: dist.ProcessGroup) -> None:
    every_function(group, MORE, (f.logprobs, f.cross_entropy, f.logits, divergence, twice_the_same))


def every_function(group: dist.ProcessGroup, cases: Any = CASES, graphed: Any = ()) -> None:
    """Eager and in one graph: what float64 has of the whole vocabulary, with the same bits on all ranks."""
    operands = [x.to(DEVICE) for x in (f.PROBLEM.hidden, f.PROBLEM.weight, f.BIAS)]
    seen = set()
    for function, options in cases:
        launch_with("jax")
        with executor.in_float64():
            want = f.measured(function, [x.clone().requires_grad_() for x in operands], **options)
        launch_with(None)
        told: Any = dict(tp_group=group)
        if function not in (twice_the_same, of_verl):
            told |= dict(reduce_grad_hidden=True)
        calls = [function]
        if function in graphed and function not in seen:
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
        return masked_logprobs(linear_logits(hidden, weight, own, **told), own, labels).logprobs

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


def rows_that_differ(group: dist.ProcessGroup) -> None:
    """A label, a temperature, an id: NaN in that row alone, in every output and gradient, on every rank."""
    x, odd = given().with_parts(group), group.rank() % 2 == 1
    for tensor, row in ((x.labels, LABEL), (x.temperature, TEMPERATURE), (x.ids, IDS)):
        tensor[row] += odd
    for function, rows in functions_on(group).items():
        hidden, weight = x.hidden.clone().requires_grad_(), x.weight.clone().requires_grad_()
        found = function(x._replace(hidden=hidden, weight=weight), tp_group=group, reduce_grad_hidden=True)
        for field in found:
            assert nan_rows(field) == rows, (function.__name__, nan_rows(field))
        if found[0].requires_grad:
            found[0].sum().backward()
            assert nan_rows(hidden.grad) == rows, (function.__name__, nan_rows(hidden.grad))
            ranks = weight.grad.isnan().any().float()
            dist.all_reduce(ranks, group=group)
            assert ranks == group.size() or (function is logits and ranks > 0), function.__name__  # those of an id
    masks = dict(where=torch.arange(T, device=DEVICE) != (2 if odd else 4))  # as many tokens, but others
    assert {2, 3, 4} - nan_rows(logprobs(x, tp_group=group, **masks)[0]) == {2 if odd else 4}


def in_16_bits(group: dist.ProcessGroup) -> None:
    """As kernels are launched directly on a GPU: the other rows keep their bits."""
    problem = draw(T=256, H=128, V=1024, dtype=torch.bfloat16)
    problem, ids = problem._replace(weight=shard(problem.weight, group)), p.candidates_like(problem.labels, V=1024)
    temperature, odd = torch.linspace(0.5, 2.0, 256, device=DEVICE), group.rank() % 2 == 1
    told: Any = dict(tp_group=group, candidates=ids, temperature=temperature, stats=True)
    right = linear_logprobs(*problem, **told)
    if odd:
        problem.labels[LABEL], ids[IDS, 1] = -100, (ids[IDS, 1] + 1).clamp(min=0)
        temperature[TEMPERATURE] += 1
    found, others = linear_logprobs(*problem, **told), [i for i in range(256) if i not in (LABEL, TEMPERATURE, IDS)]
    for want, got in zip(right, found, strict=True):
        if got is not None:
            assert nan_rows(got) == {LABEL, TEMPERATURE, IDS}
            assert torch.equal(got[others], want[others])


def nan_rows(x: torch.Tensor) -> set[int]:
    return set(x.isnan().reshape(len(x), -1).any(1).nonzero()[:, 0].tolist())


def other_tokens(group: dist.ProcessGroup) -> None:
    """Each rank has tokens of its own: a group's first call says so, later calls are NaN."""
    x, rank, size = given().with_parts(group), group.rank(), group.size()
    own = x._replace(**{name: getattr(x, name).roll(rank, 0) for name in ("hidden", "labels", "ids", "teacher_hidden")})
    few = Given(*(y[: T - rank] if len(y) == T else y for y in x))
    other = new_group()
    counts = ", ".join(str(T - rank) for rank in range(size))
    for function in (*FUNCTIONS, verls):
        with pytest.raises(ValueError, match=r"hidden differs between the ranks 0 and 1 of tp_group, in 1\d of 16"):
            function(own, tp_group=other)
        with pytest.raises(
            ValueError, match=rf"the ranks of tp_group pass {counts} tokens\. tp_group must be the group"
        ):
            function(few, tp_group=other)
    for function, rows in functions_on(group).items():
        right = function(x, tp_group=other)
        assert not any(field.isnan().any() for field in right), function.__name__
        if rows != {TEMPERATURE}:
            assert all(len(nan_rows(field)) > 0.9 * T for field in function(own, tp_group=other)), function.__name__
        if function not in (topk, logits):  # which send arrays of as many tokens as there are
            assert all(field.isnan().all() for field in function(few, tp_group=other)), function.__name__


def whole_weights(group: dist.ProcessGroup) -> None:
    """Each rank has all columns: an error with both ranges, unless vocab_size says so; what it advises is right."""
    x, size = given(), group.size()
    ranges = rf"ranks 0 and 1 .* columns \[0, {V}\) and \[{V}, {2 * V}\) of a vocabulary of {size * V}\..*"
    for function in (*FUNCTIONS, verls):
        with pytest.raises(ValueError, match=ranges + "leave it out if each rank has the full weight"):
            function(x, tp_group=new_group())
    want = p.stored(*x[:3], temperature=x.temperature)
    for told in ({}, dict(tp_group=new_group(), vocab_size=V)):
        out = linear_logprobs(*x[:3], temperature=x.temperature, **told)
        assert max(map(p.value_error, out[:3], want[:3])) < VALUE, told
    compiled = torch.compile(linear_logprobs, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match=ranges):
        compiled(*x[:3], tp_group=new_group())
    zeros = x._replace(weight=torch.zeros_like(x.weight))
    with pytest.raises(ValueError, match=ranges):  # of the teacher's alone
        kl(zeros, tp_group=new_group())
    if size == 4:  # two pairs that split the vocabulary: all four are no such group
        halves = [x.weight.chunk(2)[rank % 2] for rank in range(4)]
        with pytest.raises(ValueError, match=r"ranks 0 and 2 .* columns \[0, 52\) and \[104, 156\) of .* 208\."):
            linear_logprobs(x.hidden, halves[group.rank()], x.labels, tp_group=new_group())


class Right(NamedTuple):
    """What a right group may hold."""

    name: str
    x: Given
    told: Mapping[str, Any] = types.MappingProxyType({})
    functions: tuple[Callable[..., list[torch.Tensor]], ...] = (logprobs, topk)
    error: float = 1e-5


def right_groups(group: dist.ProcessGroup) -> None:
    """It is never refused and never NaN, in a group's first call and later ones, and all ranks have the same bits."""
    for name, x, told, functions, error in _rights(given(), group):
        other = new_group()
        for function in functions:
            for _ in range(2):
                found = function(x.with_parts(group), tp_group=other, **told)
                assert not any(field.isnan().any() for field in found), (name, function.__name__)
                assert all(same_on_all_ranks(field, group) for field in found), (name, function.__name__)
        _compare_with_stored(name, x, told, error, group, other)


def right_first_calls(group: dist.ProcessGroup) -> None:
    """The same of two functions, each in a group of its own: one with labels, one without."""
    for name, x, told, functions, error in _rights(given(), group):
        _compare_with_stored(name, x, told, error, group, new_group())
        if topk in functions:
            found = topk(x.with_parts(group), tp_group=new_group(), **told)
            assert not any(field.isnan().any() for field in found), name


def _compare_with_stored(
    name: str, x: Given, told: Mapping[str, Any], error: float, group: dist.ProcessGroup, tp_group: dist.ProcessGroup
) -> None:
    want = p.stored(*x[:3], temperature=x.temperature, vocab_size=told.get("vocab_size"))
    out = linear_logprobs(*x.with_parts(group)[:3], temperature=x.temperature, tp_group=tp_group, **told)
    assert all(same_on_all_ranks(field, group) for field in out[:3]), name
    kept = told.get("where", torch.arange(T, device=DEVICE))
    assert max(p.value_error(y[kept], z[kept]) for y, z in zip(out[:3], want[:3], strict=True)) < error, name


def _rights(x: Given, group: dist.ProcessGroup) -> Iterator[Right]:
    rank, size, rows = group.rank(), group.size(), torch.arange(V, device=DEVICE)
    yield Right("zeros", x._replace(weight=torch.zeros_like(x.weight)))
    yield Right("a constant", x._replace(weight=torch.full_like(x.weight, 0.1)))
    yield Right("equal columns", x._replace(weight=x.weight[:1].expand(V, -1)))
    yield Right("columns twice", x._replace(weight=x.weight[rows % 15]))
    # Labels tell that the vocabulary is larger than each part.
    yield Right("equal parts", x._replace(weight=x.weight[rows % (V // size)]), {}, (logprobs, cross_entropy, loss))
    columns = V - V // size - 3
    yield Right("padding", x._replace(weight=x.weight[rows.where(rows < columns, 0)]), dict(vocab_size=columns))
    yield Right("zero hidden", x._replace(hidden=torch.zeros_like(x.hidden)))
    # As kernels leave it that are not deterministic.
    yield Right("rounded", x._replace(hidden=x.hidden * (1 + 2.0**-23 * rank)), {}, (*functions_on(group), verls))
    rounded = (x.hidden * (1 + 2.0**-8 * rank)).bfloat16().float()
    yield Right("rounded to 8 bits", x._replace(hidden=rounded), {}, (*functions_on(group), verls), 0.05)
    where = torch.arange(T, device=DEVICE) % 3 > 0
    junk, labels = x.hidden.clone(), x.labels.clone()
    junk[~where], labels[~where] = torch.nan if rank else 7.0, rank
    masked = x._replace(hidden=junk, labels=labels)
    yield Right("masked", masked, dict(where=where))
    yield Right("an index", masked, dict(where=where.nonzero()[:, 0]))
    few = torch.arange(T, device=DEVICE) % 3 == 1
    yield Right("mostly masked", x._replace(hidden=x.hidden.where(few[:, None], float(rank))), dict(where=few))
    some = x.hidden.clone()
    some[30:] += rank  # padding that nobody has written
    yield Right("some padding", x._replace(hidden=some), {}, (*functions_on(group), verls), torch.inf)


def main() -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", ".*labels that count lie outside the vocabulary", RuntimeWarning)  # on purpose
    rank = int(os.environ["LOCAL_RANK"])
    if DEVICE == "cuda":  # every rank sees every GPU
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    group = dist.new_group(list(range(dist.get_world_size())))
    for name in sys.argv[1:]:
        globals()[name](group)
        print("done", name, flush=True)
    if DEVICE == "cuda":
        assert torch.cuda.current_device() == rank  # JAX's start has not changed it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
