"""Models in PyTorch's own wrappers on four processes, each data-parallel rank with tokens of its own."""

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

CHECKS = ("fsdp", "freed", "other_reductions", "tensor_parallel", "placements", "further_functions", "biases", "ddp")


def test_four_ranks(tmp_path: Path) -> None:
    for said in ranks(4, ["-m", "tests.torch.wrapped_worker", *CHECKS], tmp_path / "logs"):
        assert [line for line in said.splitlines() if line.startswith("done")] == [f"done {name}" for name in CHECKS]


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
