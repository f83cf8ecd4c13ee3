"""Two or four processes over gloo, each with its part of the vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lce_torch_bridge import linear_logprobs
from lce_torch_bridge.tensors import _tensor_parallel
from tests.torch import problem as p
from tests.torch.processes import ranks

WORKER = ["-m", "tests.torch.shards_worker"]
CHECKS = (
    "foreign_labels", "negative_controls", "collectives", "kept_rows", "empty_and_compiled", "uneven", "rounding",
    "every_function",
    "of_dtensors", "chosen_on_one_rank", "loss_in_forward",
)  # fmt: skip


def test_two_ranks(tmp_path: Path) -> None:
    for said in ranks(2, [*WORKER, *CHECKS], tmp_path / "logs"):
        assert [line for line in said.splitlines() if line.startswith("done")] == [f"done {name}" for name in CHECKS]


OF_GROUPS = ("rows_that_differ", "in_16_bits", "other_tokens", "whole_weights", "right_groups")


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_groups_that_hold_something_else(size: int, tmp_path: Path) -> None:
    for said in ranks(size, [*WORKER, *OF_GROUPS], tmp_path / "logs"):
        assert said.count("done ") == len(OF_GROUPS)


@pytest.mark.slow
def test_four_ranks(tmp_path: Path) -> None:
    checks = ("every_function", "of_dtensors", "loss_in_forward")
    for said in ranks(4, [*WORKER, *checks], tmp_path / "logs"):
        assert said.count("done ") == len(checks)


def test_a_group_of_one_is_no_group() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        group = torch.distributed.group.WORLD
        assert _tensor_parallel.name_of(group) == _tensor_parallel.NO_GROUP
        problem = p.draw()
        alone, grads = p.gradients(problem, p.seeds_like(problem.labels))
        out, with_group = p.gradients(problem, p.seeds_like(problem.labels), tp_group=group, reduce_grad_hidden=True)
        assert all(map(torch.equal, (*alone[:3], *grads), (*out[:3], *with_group)))
        with pytest.raises(TypeError, match=r"must be a torch\.distributed\.ProcessGroup with this rank in it"):
            linear_logprobs(*problem, tp_group=torch.distributed.GroupMember.NON_GROUP_MEMBER)
    finally:
        torch.distributed.destroy_process_group()
