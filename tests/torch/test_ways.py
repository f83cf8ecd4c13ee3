"""Two ways to run a call: which one serves what, and who says so. Kernels are planned for an H200, on any machine."""

from __future__ import annotations

import logging
import runpy
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses import FakeTensorMode

import lce_jax
import lce_torch_bridge
from lce_torch_bridge import explain, launch_with, linear_logprobs
from lce_torch_bridge.launched_directly import _host, _way
from lce_torch_bridge.tensors import _device
from tests.torch import problem as p
from tests.torch.as_gpu import H200, as_gpu

DRAWN = (300, 128, 1024)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors are described as those of an H200."""
    monkeypatch.setattr(_device, "device_of", lambda _: H200)
    monkeypatch.setattr(_device, "why_not", lambda _: None)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    launch_with(None)


def drawn(dtype: torch.dtype = torch.bfloat16) -> Any:
    return p.draw(*DRAWN, dtype)


SERVED: dict[str, dict[str, Any]] = {
    "plain": {},
    "all statistics": {"stats": True, "temperature": 0.7, "logit_scale": 0.5, "logit_softcap": 20.0},
    "no entropy": {"entropy": False, "out_of_vocab": "megatron"},
    "a full cache": {"cache_bytes": 1 << 30},
    "part of a cache": {"cache_bytes": 1 << 20},
    "padding": {"vocab_size": 1000},
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
    with pytest.MonkeyPatch.context() as patch:
        programs = as_gpu(patch)  # it launches nothing
        leaves = drawn().leaves()
        out = linear_logprobs(*leaves, **SERVED[name])
        torch.autograd.grad(out.logprobs.sum(), leaves[:2])
    assert len(programs) == 2


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("options", "dtype", "reason"),
    [
        ({}, torch.float32, "bfloat16 or float16"),
        ({"implementation": "xla"}, torch.bfloat16, "implementation='xla'"),
        ({"implementation": ("xla", "mosaic_gpu")}, torch.bfloat16, "implementation='xla,mosaic_gpu'"),
        ({"bias": torch.zeros(1024)}, torch.bfloat16, "bias"),
        ({"mean_logit": True}, torch.bfloat16, "mean_logit"),
    ],
    ids=["float32", "xla", "xla first", "a bias", "the mean logit"],
)
def test_what_is_not(options: dict[str, Any], dtype: torch.dtype, reason: str) -> None:
    how = explain(*drawn(dtype), **options)
    assert how.way == "jax"
    assert reason in (how.why_not_direct or "")
    assert str(how).startswith(f"run by JAX, not launched directly: {how.why_not_direct}")


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
    with pytest.raises(ValueError, match=r'way must be "direct" or "jax", got .xla.'):
        launch_with("xla")  # type: ignore[arg-type]


def test_the_reason_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    _way._say.cache_clear()
    with caplog.at_level(logging.INFO, "lce_torch_bridge"):
        _way._say("bias: no kernel adds it")
        _way._say("bias: no kernel adds it")
    assert len(caplog.records) == 1
    assert "not launched directly: bias: no kernel adds it" in caplog.text


def test_builds_of_torch_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wheels for CPUs lack what torch has for GPUs alone. Public functions stand in for it."""
    for name in ("_cuda_getDevice", "_cuda_getCurrentRawStream"):
        monkeypatch.delattr(torch._C, name, raising=False)
    monkeypatch.delattr(torch._C._dynamo.guards, "_empty_strided_cuda", raising=False)
    fresh = runpy.run_path(_device.__file__)
    assert fresh["current_device"] is torch.cuda.current_device
    monkeypatch.setattr(torch.cuda, "current_stream", {3: mock.Mock(cuda_stream=7)}.get)
    assert fresh["current_stream"](3) == 7
    with FakeTensorMode():
        x = fresh["empty"]((2, 3), (3, 1), torch.int32)
    assert (x.shape, x.stride(), x.dtype, x.device.type) == ((2, 3), (3, 1), torch.int32, "cuda")
    assert _device.why_not(torch.device("cpu")) == "cpu is no CUDA device of this machine"


def test_a_capture_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="make the call once before the capture"):
        _host.plan_of("new", list)
