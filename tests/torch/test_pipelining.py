"""The head as the last stage of torch.distributed.pipelining, which passes tensors alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from lce_torch_bridge import LogprobOutput, linear_logprobs
from tests.torch import problem as p

pytestmark = pytest.mark.usefixtures("in_float64")

PROBLEM = p.draw(T=24, H=8, V=50)


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Head(torch.nn.Module):
    def __init__(self, select: Callable[[LogprobOutput], Any], **options: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(PROBLEM.weight.clone())
        self.select, self.options = select, options

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.select(linear_logprobs(hidden, self.weight, labels, where=labels % 2 == 0, **self.options))


def loss(out: tuple[torch.Tensor, ...], _target: torch.Tensor) -> torch.Tensor:
    return -(out[0] + 0.1 * out[1]).sum()


@pytest.mark.parametrize(
    ("select", "options"),
    [
        (lambda out: out[:3], {}),
        (lambda out: (out.logprobs, out.lse), dict(entropy=False)),
        (lambda out: out[:6], dict(stats=True, mean_logit=True)),
    ],
)
def test_a_last_stage(select: Callable[[LogprobOutput], Any], options: dict[str, Any]) -> None:
    """A tuple without None fields goes through, with the gradient that one batch has."""
    stage = PipelineStage(Head(select, **options), 0, 1, torch.device("cpu"))
    hidden, labels = PROBLEM.hidden.view(4, 6, -1), PROBLEM.labels.view(4, 6)
    schedule = ScheduleGPipe(stage, 2, loss_fn=loss, scale_grads=False)
    schedule.step(hidden, labels, target=torch.zeros(4))
    whole = Head(select, **options)
    loss(whole(hidden, labels), hidden).backward()
    assert p.relative_norm(stage.submod.weight.grad, whole.weight.grad) < 1e-6


def test_what_pipelining_says_of_none() -> None:
    """The control: if this passes one day, `LogprobOutput` need not say what to return."""
    stage = PipelineStage(Head(lambda out: out), 0, 1, torch.device("cpu"))
    with pytest.raises(Exception, match="is None"):
        ScheduleGPipe(stage, 2, loss_fn=loss).step(PROBLEM.hidden, PROBLEM.labels, target=torch.zeros(24))
