"""Several processes: models in PyTorch's wrappers, and a vocabulary that is split over them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lce_torch_bridge import linear_logprobs
from tests.torch import problem as p
from tests.torch.processes import ranks

MODELS = (
    "fsdp", "freed", "other_reductions", "tensor_parallel", "placements", "further_functions", "biases", "ddp",
)  # fmt: skip
DEFERRED = ("ddp", "fsdp2", "fsdp")
SHARDS = (
    "class_weights", "foreign_labels", "collectives", "empty", "uneven", "rounding", "every_function", "of_dtensors",
    "loss_in_forward", "common_offset", "segment_sums",
)  # fmt: skip
GROUPS = ("other_options", "rows_that_differ", "other_tokens", "whole_weights")
MORE = ("negative_controls", "kept_rows", "chosen_on_one_rank", "in_16_bits", "more_of_every_function", "right_groups")
# "right_first_calls" makes the first calls of "right_groups", of two functions.
RUNS = {
    "models": (4, "wrapped_worker", MODELS),
    "two parts": (2, "shards_worker", (*SHARDS, *GROUPS, "right_first_calls")),
    "deferred": (2, "deferred_worker", DEFERRED),
    "four parts": (
        4,
        "shards_worker",
        ("every_function", "of_dtensors", "loss_in_forward", "in_16_bits", "segment_sums", "right_groups", *GROUPS),
    ),
    "more": (2, "shards_worker", MORE),
}

SLOW = [pytest.param(x, marks=pytest.mark.slow) for x in list(RUNS)[3:]]


@pytest.mark.parametrize("name", [*list(RUNS)[:3], *SLOW])
def test_on_ranks(name: str, tmp_path: Path) -> None:
    size, worker, checks = RUNS[name]
    for said in ranks(size, ["-m", f"tests.torch.{worker}", *checks], tmp_path / "logs"):
        assert [line for line in said.splitlines() if line.startswith("done")] == [f"done {name}" for name in checks]


@pytest.fixture
def alone() -> Iterator[DeviceMesh]:
    """The mesh of a group of one."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_a_weight_may_be_cast_before_it_is_gathered(alone: DeviceMesh) -> None:
    """As in FSDP2's mixed precision: the products and the reduction in 16 bits, the gradient in 32."""
    problem = p.draw()
    seeds = p.seeds_like(problem.labels)
    want, (dhidden, dweight) = p.gradients(problem._replace(weight=problem.weight.bfloat16()), seeds)
    weight = distribute_tensor(problem.weight, alone, [Shard(0)]).requires_grad_()
    hidden = problem.hidden.requires_grad_()
    out = linear_logprobs(hidden, weight.to(torch.bfloat16), problem.labels)
    p.objective(out, seeds).backward()
    assert isinstance(weight.grad, DTensor)
    assert weight.grad.dtype == torch.float32
    got = (*out[:3], hidden.grad, weight.grad.full_tensor())
    assert all(map(torch.equal, got, (*want[:3], dhidden, dweight.float())))


def test_under_torch_compile_a_dtensor_breaks_the_graph(alone: DeviceMesh) -> None:
    def call(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return linear_logprobs(hidden * 1, weight, labels).logprobs * 1

    torch._dynamo.reset()
    problem = p.draw()
    weight = distribute_tensor(problem.weight, alone, [Shard(0)])
    got = torch.compile(call, backend="aot_eager")(problem.hidden, weight, problem.labels)
    assert torch.equal(got, call(*problem))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="compares the mesh of a DTensor with tp_group as it runs"):
        torch.compile(call, backend="aot_eager", fullgraph=True)(problem.hidden, weight, problem.labels)


@pytest.mark.usefixtures("alone")
def test_a_group_of_one_is_no_group() -> None:
    group, problem = torch.distributed.group.WORLD, p.draw()
    want, grads = p.gradients(problem, p.seeds_like(problem.labels))
    out, with_group = p.gradients(problem, p.seeds_like(problem.labels), tp_group=group, reduce_grad_hidden=True)
    assert all(map(torch.equal, (*want[:3], *grads), (*out[:3], *with_group)))
    with pytest.raises(TypeError, match=r"must be a torch\.distributed\.ProcessGroup with this rank in it"):
        linear_logprobs(*problem, tp_group=torch.distributed.GroupMember.NON_GROUP_MEMBER)
