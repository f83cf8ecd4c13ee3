"""The programs of ``examples/`` for FSDP2, Megatron and RL frameworks on two ranks, compared with stored logits."""

from __future__ import annotations

import importlib.util
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lce_torch_bridge import nemo_rl, skyrl, trl
from tests.torch import framework_doubles as doubles
from tests.torch.processes import ranks, torchrun

pytestmark = [
    pytest.mark.site,
    pytest.mark.skipif(not importlib.util.find_spec("megatron.core"), reason="needs torch and megatron-core"),
]
NEAR = 1e-6  # float32 sums in another order, after three steps


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    logs = tmp_path_factory.mktemp("ranks") / "logs"
    outputs = ranks(2, ["-m", "tests.recipes.torch_worker"], logs, JAX_PLATFORMS="cpu")
    return [json.loads(text.splitlines()[-1]) for text in outputs]


@pytest.mark.parametrize("name", ["FSDP2", "Megatron"])
def test_trains_as_with_logits(results: list[dict[str, Any]], name: str) -> None:
    for rank in results:
        assert rank[name]["losses"] <= NEAR
        assert rank[name]["parameters"] <= NEAR
        assert rank[name]["fell"] > 0.01


def test_the_program_of_megatron_runs_as_its_first_lines_say(tmp_path: Path) -> None:
    outputs = ranks(2, ["examples/megatron_grpo.py"], tmp_path / "logs", launcher=torchrun, JAX_PLATFORMS="cpu")
    printed = [line for text in outputs for line in text.splitlines() if line.startswith("loss ")]
    losses = [float(x) for x in printed[0].split()[1:]]
    assert len(printed) == 1
    assert len(losses) == 3
    assert losses[0] > losses[-1]


@pytest.mark.parametrize("name", ["skyrl", "nemo_rl", "nemo_rl_context_parallel", "nemo_rl_packed"])
def test_functions_of_frameworks(results: list[dict[str, Any]], name: str) -> None:
    for rank in results:
        assert rank[name]["values"] <= NEAR
        assert rank[name]["gradients"] <= NEAR


@pytest.mark.parametrize(
    ("ours", "published"),
    [(skyrl._logprobs, doubles.SkyRL), (nemo_rl._logprobs, doubles.NeMoRL), (trl._Logprobs.apply, doubles.TRL)],
)
def test_arguments_are_the_published_ones(ours: Any, published: Any) -> None:
    assert tuple(inspect.signature(ours).parameters) == published.arguments


def test_arguments_of_packed_sequences_are_the_published_ones_after_the_hidden_states() -> None:
    ours = tuple(inspect.signature(nemo_rl.packed_logprobs).parameters)
    assert ours[2:] == doubles.NeMoRL.packed_arguments


def test_a_shard_of_another_size_is_refused() -> None:
    tensors = torch.ones(1, 2, 4), torch.ones(8, 4), torch.zeros(1, 2, dtype=int)
    with pytest.raises(ValueError, match=r"vocab_end_index=16 do not fit weight \(8, 4\)"):
        skyrl._logprobs("torch", *tensors, 0, 16, 4, None, False)


@pytest.mark.parametrize("options", [(0.7, 64), (0.7, 64, 5.0, 0.5)])
def test_trl(options: tuple[Any, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(shape, generator=generator) for shape in ((12, 32), (128, 32), (128,)))
    weight, targets = weight / 4, torch.randint(0, 128, (12,), generator=generator)
    targets[:6] = (hidden @ weight.t() + bias).argmax(-1)[:6]
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    outputs = (
        *options,
        *((None, 1.0)[len(options) - 2 :] if len(options) < 4 else ()),
        ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1"),
    )
    got, want = (function.apply(*leaves, targets, *outputs) for function in (trl._Logprobs, doubles.TRL))
    for x, y in zip(got[:4], want[:4], strict=True):
        torch.testing.assert_close(x.double(), y, rtol=2e-6, atol=2e-6)
    assert torch.equal(got[4], want[4])
    assert 6 <= got[4].sum() < 12
    grads = [torch.autograd.grad(x[0].sum() + 0.1 * x[1].sum(), leaves) for x in (got, want)]
    for x, y in zip(*grads, strict=True):
        assert (x - y).norm() <= NEAR * y.norm()
    only_squares = trl._Logprobs.apply(*leaves, targets, 1.0, 64, outputs=("log_sum_sq_probs",))
    assert [x is None for x in only_squares] == [False, True, False, True, True]
