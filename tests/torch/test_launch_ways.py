"""Two ways to launch: which one serves what, and who says so. The programs are planned for an H200, on any machine."""

from __future__ import annotations

import logging
import runpy
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import pytest
import torch
from torch._subclasses import FakeTensorMode

import lce_jax
import lce_torch_bridge
from lce_jax import launch
from lce_torch_bridge import (
    _direct,
    _execute,
    _launch,
    _prepared_forward,
    _programs,
    _torch,
    explain,
    launch_with,
    linear_logprobs,
)
from tests.torch import problem as p
from tests.torch.as_gpu import H200, as_gpu

DRAWN = (300, 128, 1024)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors are described as those of an H200."""
    monkeypatch.setattr(_direct, "device_of", lambda _: H200)
    monkeypatch.setattr(_direct, "why_not", lambda _: None)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    launch_with(None)


def drawn(dtype: torch.dtype = torch.bfloat16) -> Any:
    return p.draw(*DRAWN, dtype)


SERVED: dict[str, dict[str, Any]] = {
    "plain": {},
    "all statistics": {"stats": True, "temperature": 0.7, "logit_scale": 0.5, "logit_softcap": 20.0},
    "no entropy": {"entropy": "none", "out_of_vocab": "megatron"},
    "a full cache": {"cache_bytes": 1 << 30},
    "part of a cache": {"cache_bytes": 1 << 20},
    "padding and the mean logit": {"vocab_size": 1000, "mean_logit": True},
}


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    "name",
    # What others have together with more is slow.
    [pytest.param(name, marks=pytest.mark.slow if name in ("plain", "a full cache") else ()) for name in SERVED],
)
def test_what_is_launched_directly(name: str) -> None:
    how = explain(*drawn(), **SERVED[name])
    assert (how.way, how.why_not_direct) == ("direct", None)
    assert how.plan.implementation == "mosaic_gpu"
    assert str(how).startswith("launched directly, in torch's stream and memory\nmosaic_gpu: 300 tokens")
    loaded: list[launch.Program] = []
    with pytest.MonkeyPatch.context() as patch:
        as_gpu(patch, lambda program: loaded.append(program) or (lambda *_: None))  # it launches nothing
        leaves = drawn().leaves()
        out = linear_logprobs(*leaves, **SERVED[name])
        torch.autograd.grad(out.logprobs.sum(), leaves[:2])
    assert len(loaded) == 2


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("options", "dtype", "reason"),
    [
        ({}, torch.float32, "only XLA runs a loop"),
        ({"implementation": "reference"}, torch.bfloat16, "only XLA runs a gather with batches"),
        ({"implementation": "xla"}, torch.bfloat16, "only XLA runs "),
        ({"gradient_threshold": 0.001}, torch.bfloat16, "only XLA runs "),
    ],
    ids=["float32", "reference", "xla", "a threshold"],
)
def test_what_is_not(options: dict[str, Any], dtype: torch.dtype, reason: str) -> None:
    how = explain(*drawn(dtype), **options)
    assert how.way == "jax"
    assert (how.why_not_direct or "").startswith(reason)
    assert str(how).startswith(f"run by JAX, not launched directly: {reason}")


@pytest.mark.usefixtures("hopper")
def test_the_programs_of_a_split_vocabulary() -> None:
    """Statistics and their union are launched directly too; the collective between them is torch's."""
    operands = _execute.Operands(*drawn()[:2], None, drawn().labels, None, None)
    call = _execute.Call("", 4096, 1.0, None, "grad", False, False, 0, False, True, 0, 0.0, "")
    ((_, structs), _) = _execute.programs(operands, call)
    spec = _execute._spec(operands.weight, call, masked=True)._replace(vocab_start=1024, padded=False)
    statistics = launch.program(_programs.statistics(spec, False), structs, H200)
    packed, rows = statistics.outputs[0], 8192
    assert packed.shape == (5, rows)
    of_shards = type(packed)((4, *packed.shape), packed.dtype)
    results = launch.program(_programs.results(spec, call.fields, False), [structs[3], of_shards], H200)
    assert results.num_kernels == 0
    assert results.num_stages == 1


@pytest.mark.parametrize(
    ("columns", "direct", "rows"), [(104, True, [4096]), (104, False, [4096, 8192]), ((1 << 18) + 8, True, [8192])]
)
def test_a_whole_size_is_not_padded(
    columns: int, direct: bool, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only where a token has the same bits in a program of any size: launched, and with one launch."""
    seen = []

    def launched(_x: Any, _call: Any, _keep: bool, described: Any) -> Any:
        pieces, _, spec = described()
        seen.append(pieces[0].rows)
        assert spec.masked == pieces[0].masked
        return [] if direct else None

    def run(inputs: Any, spec: Any, *_: Any) -> Any:
        seen.append(inputs[0][0].shape[0])
        assert spec.masked
        return [torch.empty(8, seen[-1], dtype=torch.int32)], []

    monkeypatch.setattr(_prepared_forward, "forward", launched)
    monkeypatch.setattr(_execute, "_run_alone", run)
    labels = torch.zeros(4096, dtype=torch.int64)
    operands = _execute.Operands(torch.empty(4096, 8), torch.empty(columns, 8), None, labels, None, None)
    _execute.forward(operands, p.told(columns), keep_cache=False)
    assert seen == rows


@pytest.mark.usefixtures("hopper")
def test_the_sums_of_linear_loss_are_launched_directly() -> None:
    """dweight is added to a float32 sum where it lies."""
    operands = _execute.Operands(*drawn()[:2], None, drawn().labels, None, None)
    _, (backward, structs) = _execute.programs(operands, p.told(1024, cache_bytes=1 << 40))
    place = structs.index(None, 3)
    total = structs[place] = jax.ShapeDtypeStruct((1024, 128), "float32")
    program = launch.program(backward, structs, H200, donated=(place - 1,))  # there is no bias
    assert total in [type(total)(x.shape, x.dtype) for x in program.outputs]


def test_a_call_that_must_be_direct_is_refused() -> None:
    launch_with("direct")
    advice = r"cpu is no CUDA device; lce_torch_bridge.launch_with\(None\) lets JAX run such calls"
    with pytest.raises(lce_jax.UnsupportedError, match=advice):
        linear_logprobs(*drawn(torch.float32))
    lce_torch_bridge.launch_with(None)
    linear_logprobs(*drawn(torch.float32))


def test_asking_for_jax_is_told() -> None:
    launch_with("jax")
    assert explain(*drawn()).why_not_direct == 'launch_with("jax") asks for JAX'
    linear_logprobs(*drawn(torch.float32))


def test_another_way_is_refused() -> None:
    with pytest.raises(ValueError, match=r'way must be "direct", "jax" or "kernels", got .xla.'):
        launch_with("xla")  # type: ignore[arg-type]


def test_the_reason_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    _launch._say.cache_clear()
    with caplog.at_level(logging.INFO, "lce_torch_bridge"):
        _launch._say("only XLA runs the operation gather")
        _launch._say("only XLA runs the operation gather")
    assert len(caplog.records) == 1
    assert "not launched directly: only XLA runs the operation gather" in caplog.text


def test_builds_of_torch_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wheels for CPUs lack what torch has for GPUs alone. Public functions stand in for it."""
    for name in ("_cuda_getDevice", "_cuda_getCurrentRawStream"):
        monkeypatch.delattr(torch._C, name, raising=False)
    monkeypatch.delattr(torch._C._dynamo.guards, "_empty_strided_cuda", raising=False)
    fresh = runpy.run_path(_torch.__file__)
    assert fresh["current_device"] is torch.cuda.current_device
    monkeypatch.setattr(torch.cuda, "current_stream", {3: mock.Mock(cuda_stream=7)}.get)
    assert fresh["current_stream"](3) == 7
    with FakeTensorMode():
        x = fresh["empty"]((2, 3), (3, 1), torch.int32)
    assert (x.shape, x.stride(), x.dtype, x.device.type) == ((2, 3), (3, 1), torch.int32, "cuda")
    assert _direct.why_not(torch.device("cpu")) == "cpu is no CUDA device of this machine"


def test_a_capture_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="make the call once before the capture"):
        _direct.program(lambda x: x, [torch.zeros(3)], ())
