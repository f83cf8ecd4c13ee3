"""Functions of the bridge as the ranks of a group call them, each with its part of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

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
from tests.torch.ranks import DEVICE, draw, shard

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


def functions_on(group: dist.ProcessGroup) -> dict[Callable[..., list[torch.Tensor]], set[int]]:
    """Two ranks on a CPU compile no function that has another one's operator, but for the loss."""
    same = (with_floor, cross_entropy, entropy) if group.size() == 2 and DEVICE == "cpu" else ()
    return {function: rows for function, rows in FUNCTIONS.items() if function not in same}


def new_group() -> dist.ProcessGroup:
    """One whose first call is still to come."""
    return dist.new_group(list(range(dist.get_world_size())))
