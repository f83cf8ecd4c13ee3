"""Ranks of one group that make calls with different options: all of them raise (`shards_worker` runs this)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from lce_torch_bridge import linear_cross_entropy, linear_kl, linear_logprobs, linear_loss, linear_topk
from tests.torch import problem as p
from tests.torch.ranks import draw, shard


class Unlike(NamedTuple):
    """A call whose options differ between the ranks, and what the message says."""

    call: Callable[..., Any]
    options: dict[str, Any]
    message: str


def other_options(group: dist.ProcessGroup) -> None:
    """In the first call of a kind all ranks raise, with the values of all; after that the group serves."""
    whole, odd = draw(), group.rank() % 2 == 1
    local = whole._replace(weight=shard(whole.weight, group))
    for call, options, message in _unlike(local, group, odd):
        with pytest.raises(ValueError, match=f"the ranks of tp_group make different calls: .*{message}"):
            call(tp_group=_new(group), **options)
    other, want = _new(group), p.stored(*whole)
    new_to_all: Any = (dict(stats=odd), {}), (dict(mean_logit=odd, stats=not odd), dict(stats=True))
    for unlike, alike in new_to_all:
        with pytest.raises(ValueError, match="make different calls"):
            linear_logprobs(*local, tp_group=other, **unlike)
        out = linear_logprobs(*local, tp_group=other, **alike)
        assert max(map(p.value_error, out[:3], want[:3])) < 2e-6  # as in test_parity


def _new(group: dist.ProcessGroup) -> dist.ProcessGroup:
    made = dist.new_group(list(range(group.size())))
    assert isinstance(made, dist.ProcessGroup)
    return made


def _unlike(local: p.Problem, group: dist.ProcessGroup, odd: bool) -> Iterator[Unlike]:
    hidden, weight, labels = local.leaves()
    teacher = draw(H=16, seed=1)
    teachers = shard(teacher.weight, group)

    def logprobs(**told: Any) -> Any:
        return linear_logprobs(hidden, weight, labels, **told)

    def frozen(**told: Any) -> Any:
        return linear_logprobs(hidden.detach() if odd else hidden, weight, labels, reduce_grad_hidden=True, **told)

    def mean(**told: Any) -> Any:
        return linear_cross_entropy(hidden, weight, labels, **told)

    def loss(**told: Any) -> Any:
        return linear_loss(lambda logprobs, *_: -logprobs, hidden, weight, labels, **told)

    def kl(**told: Any) -> Any:
        return linear_kl(hidden, weight, teacher.hidden, teachers, **told)

    def topk(**told: Any) -> Any:
        return linear_topk(hidden, weight, **told)

    ids, one_pass, number = (
        p.candidates_like(labels) if odd else None,
        "one pass for the loss .*",
        r"\(their number\)",
    )
    yield Unlike(logprobs, dict(stats=odd), r"stats is False on ranks \[0.* and True on ranks \[1")
    yield Unlike(logprobs, dict(entropy="metric" if odd else True), 'entropy="metric" is False on ranks .* and True')
    yield Unlike(logprobs, dict(candidates=ids), rf"candidates {number} is 0 on ranks .* and 5 on")
    yield Unlike(logprobs, dict(reduce_grad_hidden=odd), "reduce_grad_hidden is False on ranks .* and True on")
    yield Unlike(logprobs, dict(logit_scale=1.0 + odd), "logit_scale is 1.0 on ranks .* and 2.0 on")
    yield Unlike(logprobs, dict(out_of_vocab="megatron" if odd else "zero"), '"megatron" is False on ranks .* and True')
    yield Unlike(frozen, {}, "hidden.requires_grad is True on ranks .* and False on")
    yield Unlike(mean, dict(label_smoothing=0.1 * odd), r"mean_logit \(which label_smoothing needs\) is False on ranks")
    yield Unlike(mean, dict(reduction="none" if odd else "mean"), f"{one_pass} is True on ranks .* and False on")
    yield Unlike(mean, dict(cache_bytes=0 if odd else None), f"{one_pass} is True on ranks .* and False on")
    yield Unlike(loss, dict(chunk_bytes=2 << 20 >> odd), "chunk_bytes is 2097152 on ranks .* and 1048576 on")
    yield Unlike(
        kl, dict(direction="reverse" if odd else "forward"), "direction is 'forward' on ranks .* and 'reverse'"
    )
    yield Unlike(topk, dict(k=2 + odd), "k is 2 on ranks .* and 3 on")
    yield Unlike(kl if odd else logprobs, {}, "function is 'linear_logprobs' on ranks .* and 'linear_kl' on")
