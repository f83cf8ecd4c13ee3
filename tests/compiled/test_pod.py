"""Whole pods on paper: memory a device and collectives of programs for up to 512 H200s, as XLA has compiled them."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import pytest

from lce_jax.explain import __main__ as command
from lce_jax.explain import _pod
from lce_jax.explain._compile_targets import TARGETS
from lce_jax.explain._models import model_head
from lce_jax.explain._pod import DIFFERENTIABLE, NUM_LARGEST, SPLITS, Pod, PodProgram, Split
from tests.compiled import needs_wheels

pytestmark = [needs_wheels, pytest.mark.usefixtures("optimized")]
HEAD, TENSOR = model_head("qwen3-8b"), 8
MANY = 65536  # tokens of a replica, for linear_loss: several chunks, each of which keeps its exponentials
PODS = [Pod(1, TENSOR), Pod(8, TENSOR), Pod(64, TENSOR)]
NUMBERS = 32  # of a token that its shards exchange: the statistics of each group of tiles
WHOLE = Split(fsdp=True, sequence=True)


class Compiled(NamedTuple):
    """What a program holds and sends, per device."""

    temporaries: int  # bytes
    collectives: list[_pod.Collective]
    largest: int  # elements of an array
    has_kernels: bool


@functools.cache
def compiled(pod: Pod, function: str, sharded: bool, split: Split) -> Compiled:
    call = {"head": HEAD, "tokens": tokens_of(function), "target": TARGETS["h200"]}
    program = PodProgram(pod=pod, function=function, sharded=sharded, split=split, **call)
    found = program.compiled()
    text = found.as_text()
    return Compiled(
        found.memory_analysis().temp_size_in_bytes,
        _pod.collectives(text, pod.data * pod.tensor),
        _pod.largest_array(text),
        "mosaic_gpu" in text,
    )


def tokens_of(function: str) -> int:
    return MANY if function == "linear_loss" else 8192


def check(pod: Pod, function: str, sharded: bool, split: Split) -> None:
    """No logits of all tokens, and no collective larger than a gradient and a few numbers per token of each shard."""
    found, columns, tokens = compiled(pod, function, sharded, split), HEAD.vocab_size // TENSOR, tokens_of(function)
    assert found.has_kernels == (function != "linear_topk")
    assert found.largest < tokens * columns
    numbers = 2 * NUM_LARGEST if function == "linear_topk" else NUMBERS
    gradient = max(4 * tokens * HEAD.hidden_size, 2 * columns * HEAD.hidden_size)
    assert found.collectives[0].num_bytes <= gradient + 4 * numbers * tokens * TENSOR, found.collectives
    groups = {one.devices for one in found.collectives}
    assert groups <= {pod.data, pod.tensor, pod.data * pod.tensor}


CALLS = [
    ("linear_logprobs", False),
    ("linear_logprobs", True),
    ("linear_loss", False),
    ("linear_loss", True),
    ("linear_topk", False),
    ("linear_topk", True),
    ("linear_kl", False),
    ("linear_kl", True),
]


@pytest.mark.parametrize(("function", "sharded"), CALLS)
def test_memory_does_not_grow_with_the_pod(function: str, sharded: bool) -> None:
    found = []
    for pod in PODS:
        check(pod, function, sharded, WHOLE)
        found.append(compiled(pod, function, sharded, WHOLE).temporaries)
    one, eight, most = found
    gathered = 2 * HEAD.hidden_size * HEAD.vocab_size // TENSOR  # the weight, which one replica does not split
    assert one <= eight + 1 <= one + gathered * (3 if function in DIFFERENTIABLE else 2)
    assert most <= eight + gathered // 8  # the part that one of eight replicas has, and need not gather


@pytest.mark.parametrize("split", SPLITS[:2], ids=str)
@pytest.mark.parametrize("sharded", [False, True])
def test_other_splits(sharded: bool, split: Split) -> None:
    check(PODS[1], "linear_logprobs", sharded, split)


def test_jit_and_sharded_hold_the_same() -> None:
    by_xla, by_name = (compiled(PODS[2], "linear_logprobs", sharded, WHOLE) for sharded in (False, True))
    assert by_xla.temporaries == pytest.approx(by_name.temporaries, rel=0.05)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    given: Any = ("--pod", "2x4", "--hidden", "256", "--vocab", "32003", "--tokens", "512")
    assert command.main([*given, "--function", "linear_loss"]) == 0
    text = capsys.readouterr().out
    assert "8 of NVIDIA H200, 2x4 (data x tensor)" in text
    assert text.count("(kernels, ") == 2 * len(SPLITS)
    assert "reduce-scatter over   4" in text
    assert command.main([*given, "--function", "linear_kl", "--device", "a100"]) == 0
    text = capsys.readouterr().out
    assert text.count("(xla, ") == 2 * len(SPLITS)


def test_the_table_of_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    """XLA's temporaries beside what the launches ask for: the same, but for numbers per token."""
    given = ("--compile", "--hidden", "4096", "--vocab", "151936", "--tokens", "4096", "--device", "h100")
    assert command.main([*given]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("linear_logprobs  ")]
    _, forward, unit, both, unit_of_both, *compiled, _ = line.split()
    assert compiled == [forward, unit, both, unit_of_both]
