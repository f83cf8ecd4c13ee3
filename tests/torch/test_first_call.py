"""The first direct launch on a card that has not run its kernels."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
import torch

import lce_jax
from lce_jax.call import _remembered
from lce_jax.mosaic import _generations
from lce_jax.mosaic.mma import _pipeline
from lce_jax.run import kernels
from lce_torch_bridge import explain, launch_with, linear_logprobs
from lce_torch_bridge.launched_directly import _first_call, _passes
from lce_torch_bridge.launched_directly._launch_with import Way
from lce_torch_bridge.tensors import _device
from tests.devices import A100
from tests.mosaic.test_first_call import doubled_later, small_check
from tests.torch import problem as p
from tests.torch.as_gpu import Program, emulated


@pytest.fixture(autouse=True)
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Program]]:
    """This machine's CPU counts as an A100."""
    monkeypatch.setattr(_generations, "FAULTS", {})
    jax.clear_caches()  # kernels without a fault
    kernels.traced.cache_clear()
    small_check(monkeypatch, _first_call, 128, 128)
    yield from emulated(monkeypatch, A100._replace(core_count=2))


def test_right_kernels_are_launched(programs: list[Program], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "lce_jax")
    leaves = p.draw(9, 128, 1024, torch.bfloat16).leaves()
    with torch.no_grad(), torch.autocast("cpu"):  # which are not the check's
        out = linear_logprobs(*leaves)
    assert programs
    linear_logprobs(*leaves).logprobs.sum().backward()
    assert list(_generations.FAULTS.values()) == [None]
    launch_with("jax")
    assert p.value_error(out.lse, linear_logprobs(*leaves, implementation="xla").lse) < 1e-4
    assert not caplog.records


def test_what_a_direct_launch_has_compared_is_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(_remembered.VARIABLE, str(tmp_path))
    monkeypatch.setattr(_remembered, "find_driver", lambda: "580.95.05, CUDA 13.0")
    monkeypatch.setattr(_first_call, "compare", lambda *_: {"lse": 0.0})
    assert _passes.launches_kernels(Way(direct=True, required=False), torch.device("cpu"))
    (file,) = tmp_path.glob("*.json")
    assert json.loads(file.read_text())["compared_by"] == "PyTorch"
    monkeypatch.setattr(_generations, "FAULTS", {})  # as in another process
    monkeypatch.setattr(_first_call, "compare", lambda *_: pytest.fail("it is remembered"))
    assert _passes.launches_kernels(Way(direct=True, required=False), torch.device("cpu"))


def test_wrong_kernels_are_refused(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "lce_jax")
    exchanged = _pipeline._exchange
    monkeypatch.setattr(_pipeline, "_exchange", lambda own, given, *more: exchanged(given, own, *more))
    call = p.draw(9, 128, 1024, torch.bfloat16)
    told = f"its first call on {A100.kind} is off by logprobs"
    with pytest.raises(lce_jax.UnsupportedError, match=told):
        linear_logprobs(*call)
    (record,) = caplog.records
    assert told in record.getMessage()
    launch_with(None)
    monkeypatch.setattr(_first_call, "compare", lambda *_: pytest.fail("it is known"))
    how = explain(*call)
    assert how.way == "jax"
    assert told in str(how.why_not_direct)
    assert (how.plan.implementation, how.plan.refused) == ("xla", {"mosaic_gpu": how.why_not_direct})


@pytest.mark.slow  # as JAX's, in tests/mosaic
def test_tiles_after_a_blocks_first_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """On as many multiprocessors as the card has."""
    monkeypatch.setattr(_device, "describe_device", lambda _: A100)
    monkeypatch.setattr(_pipeline, "_multiply", doubled_later)
    with pytest.raises(lce_jax.UnsupportedError, match="is off by logprobs"):
        linear_logprobs(*p.draw(9, 128, 1024, torch.bfloat16))


def test_ranks_tell_each_other_what_it_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(_first_call, "compare", raising)
    assert not _passes.launches_kernels(Way(direct=True, required=False), torch.device("cpu"))
    (found,) = _generations.FAULTS.values()
    assert found is not None
    assert "raised OutOfMemoryError: no room" in found


def test_a_launch_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(*_: Any) -> Any:
        raise RuntimeError("Mosaic did not compile a kernel")

    monkeypatch.setattr(_pipeline, "_exchange", raising)
    with pytest.raises(lce_jax.UnsupportedError, match="raised RuntimeError: Mosaic did not compile a kernel"):
        linear_logprobs(*p.draw(9, 128, 1024, torch.bfloat16))
