"""Checks of `shards_worker`: process groups that hold something else than one call's tokens and a split vocabulary."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from lce_torch_bridge import (
    linear_cross_entropy,
    linear_entropy,
    linear_kl,
    linear_logits,
    linear_logprobs,
    linear_loss,
    linear_topk,
    verl,
)
from tests.torch import problem as p
from tests.torch.shards import DEVICE, VALUE, draw, same_on_all_ranks, shard

T, V = 37, 104


class Given(NamedTuple):
    """All that the functions take."""

    hidden: torch.Tensor
    weight: torch.Tensor
    labels: torch.Tensor
    ids: torch.Tensor
    temperature: torch.Tensor
    teacher_hidden: torch.Tensor
    teacher_weight: torch.Tensor

    def with_parts(self, group: dist.ProcessGroup) -> Given:
        """The same with this rank's columns."""
        return self._replace(weight=shard(self.weight, group), teacher_weight=shard(self.teacher_weight, group))


def given() -> Given:
    problem, teacher = draw(T=T, V=V), draw(T=T, H=16, V=V, seed=1)
    problem.labels[1] = -100
    temperature = torch.linspace(0.5, 2.0, T, device=DEVICE)
    return Given(*problem, p.candidates_like(problem.labels), temperature, *teacher[:2])


def logprobs(x: Given, **told: Any) -> list[torch.Tensor]:
    how: Any = dict(candidates=x.ids, temperature=x.temperature, stats=True, mean_logit=True)
    return [y for y in linear_logprobs(*x[:3], **how, **told) if y is not None]


def with_floor(x: Given, **told: Any) -> list[torch.Tensor]:
    how: Any = dict(logit_floor=x.temperature - 1.5, stats=True, out_of_vocab="megatron")
    return [y for y in linear_logprobs(*x[:3], **how, **told) if y is not None]


def cross_entropy(x: Given, **told: Any) -> list[torch.Tensor]:
    return [linear_cross_entropy(*x[:3], reduction="none", ignore_index=None, temperature=x.temperature, **told)]


def entropy(x: Given, **told: Any) -> list[torch.Tensor]:
    return list(linear_entropy(*x[:2], temperature=x.temperature, **told))


def loss(x: Given, **told: Any) -> list[torch.Tensor]:
    total, out = linear_loss(lambda logprobs, *_: -logprobs, *x[:3], temperature=x.temperature, **told)
    differs = out.lse.isnan()
    assert total.isnan() == differs.any()
    return [torch.where(differs, total, -out.logprobs), *out[:3]]


def verls(x: Given, reduce_grad_hidden: bool = False, **told: Any) -> list[torch.Tensor]:
    del reduce_grad_hidden
    return list(verl.linear_cross_entropy(*x[:3], 1.0, "none", *told.values()))


def topk(x: Given, **told: Any) -> list[torch.Tensor]:
    told.pop("reduce_grad_hidden", None)
    ids, *floats = linear_topk(*x[:2], 5, temperature=x.temperature, **told)
    assert (ids[floats[1].isnan()] == -1).all()
    return floats


def logits(x: Given, **told: Any) -> list[torch.Tensor]:
    return [linear_logits(*x[:2], x.ids, temperature=x.temperature, **told)]


def kl(x: Given, **told: Any) -> list[torch.Tensor]:
    return [linear_kl(*x[:2], *x[5:], temperature=x.temperature, teacher_temperature=1.0, **told)]


LABEL, TEMPERATURE, IDS = 3, 5, 7  # rows of which that differs between the ranks
FUNCTIONS: dict[Callable[..., list[torch.Tensor]], set[int]] = {  # and the rows that are NaN then
    logprobs: {LABEL, TEMPERATURE, IDS},
    with_floor: {LABEL, TEMPERATURE},
    cross_entropy: {LABEL, TEMPERATURE},
    entropy: {TEMPERATURE},
    loss: {LABEL, TEMPERATURE},
    topk: {TEMPERATURE},
    logits: {TEMPERATURE, IDS},
    kl: {TEMPERATURE},
}


def new_group() -> dist.ProcessGroup:
    """One whose first call is still to come."""
    return dist.new_group(list(range(dist.get_world_size())))


def rows_that_differ(group: dist.ProcessGroup) -> None:
    """A label, a temperature, an id: NaN in that row alone, in every output and gradient, on every rank."""
    x, odd = given().with_parts(group), group.rank() % 2 == 1
    for tensor, row in ((x.labels, LABEL), (x.temperature, TEMPERATURE), (x.ids, IDS)):
        tensor[row] += odd
    for function, rows in FUNCTIONS.items():
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
    for function, rows in FUNCTIONS.items():
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
        with pytest.raises(ValueError, match=ranges + "leave it out where weight is whole"):
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
        want = p.stored(*x[:3], temperature=x.temperature, vocab_size=told.get("vocab_size"))
        out = linear_logprobs(*x.with_parts(group)[:3], temperature=x.temperature, tp_group=other, **told)
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
    yield Right("rounded", x._replace(hidden=x.hidden * (1 + 2.0**-23 * rank)), {}, (*FUNCTIONS, verls))
    rounded = (x.hidden * (1 + 2.0**-8 * rank)).bfloat16().float()
    yield Right("rounded to 8 bits", x._replace(hidden=rounded), {}, (*FUNCTIONS, verls), 0.05)
    where = torch.arange(T, device=DEVICE) % 3 > 0
    junk, labels = x.hidden.clone(), x.labels.clone()
    junk[~where], labels[~where] = torch.nan if rank else 7.0, rank
    masked = x._replace(hidden=junk, labels=labels)
    yield Right("masked", masked, dict(where=where))
    yield Right("an index", masked, dict(where=where.nonzero()[:, 0]))
    some = x.hidden.clone()
    some[30:] += rank  # padding that nobody has written
    yield Right("some padding", x._replace(hidden=some), {}, (*FUNCTIONS, verls), torch.inf)
