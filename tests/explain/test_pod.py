"""`python -m lce_jax.explain --pod` without the wheels that it compiles with: its errors, and how programs are read."""

from __future__ import annotations

import importlib.util

import jax
import pytest

from lce_jax.explain import __main__ as command
from lce_jax.explain import _pod
from lce_jax.explain._pod import Pod

PROGRAM = """
  %ag = ((f32[1,4096]{1,0}, bf16[256,256]{1,0}), (f32[4,4096]{1,0}, bf16[1024,256]{1,0})) all-gather-start(%a, %b), \
channel_id=3, replica_groups=mesh['data'=2,'tensor'=4] {'tensor'}, dimensions={0}
  %agd = (f32[4,4096]{1,0}, bf16[1024,256]{1,0}) all-gather-done(%ag)
  %rs = bf16[1024,128]{0,1} reduce-scatter(%c), channel_id=14, replica_groups=[4,2]<=[2,4]T(1,0), dimensions={1}
  %ar = f32[] all-reduce(%d), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  %ar2 = f32[] all-reduce(%e), channel_id=2, replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  %all = s32[16]{0} all-reduce(%f), channel_id=5, to_apply=%add
  ROOT %sum = f32[1024,512]{1,0} add(%g, %h)
"""


def test_collectives_of_a_program() -> None:
    assert _pod.collectives(PROGRAM, 8) == [
        _pod.Collective("all-gather", 4, "f32[4,4096], bf16[1024,256]", 4 * 4096 * 4 + 1024 * 256 * 2),
        _pod.Collective("reduce-scatter", 2, "bf16[1024,128]", 1024 * 128 * 2 * 2),
        _pod.Collective("all-reduce", 8, "s32[16]", 64),
        _pod.Collective("all-reduce", 8, "f32[]", 4, 2),
    ]
    assert _pod.largest_array(PROGRAM) == 1024 * 512


@pytest.mark.parametrize("text", ["64", "0x8", "8x-1", "2x2x2", "x8", "eightx8", "²x8"])
def test_a_pod_that_is_none(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="must be DATAxTENSOR, two positive numbers of devices, such as 64x8"):
        Pod.of(text)
    with pytest.raises(SystemExit):
        command.main(["--model", "qwen3-32b", "--tokens", "64", "--pod", text])
    assert f"{text!r} must be DATAxTENSOR" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--pod", "64x8", "--tokens", "4095"], "--tokens 4095 must divide by the 8 of --pod 64x8"),
        (
            ["--pod", "64x8", "--device", "cpu"],
            "not for cpu",
        ),
        (["--pod", "2x3", "--device", "v5p"], "--pod 2x3: a slice of TPU v5 has a power of 2 of devices, 4096 at most"),
        (["--pod", "64x8", "--device", "v5e"], "a power of 2 of devices, 256 at most, not 512"),
        (["--pod", "64x8", "--device", "h300"], "invalid choice: 'h300'"),
        (["--pod", "64x8", "--tensor-parallel", "8"], "--pod 64x8 says how many devices split V"),
        (["--pod", "64x8", "--function", "linear_logit"], "invalid choice: 'linear_logit'"),
        (["--function", "linear_loss"], "--function linear_loss is for --pod"),
    ],
    ids=str,
)
def test_errors_have_the_values(given: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--model", "qwen3-32b", "--tokens", "4096", *given])
    assert message in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("jax_plugins") is not None, reason="the wheels are here")
def test_without_the_wheels_it_says_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--model", "qwen3-32b", "--tokens", "4096", "--pod", "1x8"])
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"pip install --no-deps jax-cuda13-plugin=={jax.__version__} jax-cuda13-pjrt=={jax.__version__} nvi" in last


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="the wheel is here")
def test_without_libtpu_it_says_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--model", "qwen3-32b", "--tokens", "4096", "--pod", "1x8", "--device", "v5p"])
    assert "pip install --no-deps 'libtpu==0.0." in capsys.readouterr().err
