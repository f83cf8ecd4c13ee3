"""`Plan.memory` against what is compiled, and ``lce-jax explain``."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import lce_jax
from lce_jax import explain
from lce_jax.explain import __main__ as command
from lce_jax.explain._models import MODELS

FAR = 0.1  # of the logits: what the copies are counted in; hidden states and columns come to less


def stored(entropy: bool, softcap: float | None) -> Any:
    """Plain JAX code: log-probabilities, and entropy, of stored logits."""

    def function(hidden: Any, weight: Any, labels: Any) -> Any:
        z = jax.lax.dot_general(hidden, weight, (((1,), (1,)), ((), ()))).astype(jnp.float32)
        if softcap is not None:
            z = softcap * jnp.tanh(z / softcap)
        if not entropy:
            logprobs = jnp.take_along_axis(jax.nn.log_softmax(z), labels[:, None], axis=-1)[:, 0]
            return logprobs, logprobs
        lse = jax.nn.logsumexp(z, axis=-1)
        logprobs = jnp.take_along_axis(z, labels[:, None], axis=-1)[:, 0] - lse
        return logprobs, lse - jnp.sum(jnp.exp(z - lse[:, None]) * z, axis=-1)

    return function


def both_passes(function: Any) -> Any:
    """A program of ``stored``'s results and the gradients of both, weighted."""

    def both(hidden: Any, weight: Any, labels: Any, a: Any, b: Any) -> Any:
        def loss(hidden: Any, weight: Any) -> Any:
            out = function(hidden, weight, labels)
            return jnp.sum(a * out[0] + b * out[1]), out

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(hidden, weight)

    return both


@pytest.mark.parametrize(
    ("H", "dtype", "entropy", "softcap"),
    [
        (256, "float32", True, None),
        (256, "float32", False, None),
        (256, "float32", True, 30.0),
        (256, "bfloat16", True, None),
        (256, "bfloat16", False, None),
        (256, "bfloat16", True, 30.0),
        (1024, "float32", True, None),  # dweight holds a copy of the logits
    ],
)
def test_foretells_stored_logits(H: int, dtype: str, entropy: bool, softcap: float | None) -> None:
    T, V, struct = 512, 16384, jax.ShapeDtypeStruct
    call = struct((T, H), dtype), struct((V, H), dtype), struct((T,), jnp.int32)
    seeds = struct((T,), jnp.float32)
    function = stored(entropy, softcap)
    both = both_passes(function)
    said, fused = explain(*call, entropy=entropy, logit_softcap=softcap, implementation="xla").memory
    for program, arguments, foretold in ((function, call, said.forward), (both, (*call, seeds, seeds), said.backward)):
        held = jax.jit(program).lower(*arguments).compile().memory_analysis().temp_size_in_bytes
        assert abs(foretold - held) <= FAR * 4 * T * V, (foretold / T / V, held / T / V)
    assert fused.backward < said.backward / 4


@pytest.mark.parametrize("device", ["h200", "a100"])
def test_full_cache_bytes_is_the_least_that_spares_all(device: str) -> None:
    arguments = ["--model", "olmo3-7b", "--tensor-parallel", "4", "--tokens", "4096", "--device", device]
    call, _ = command.read(arguments)
    full = call.plan().full_cache_bytes

    def kept(cache_bytes: int) -> int:
        return call.plan(cache_bytes=cache_bytes).kept_bytes - call.plan().kept_bytes

    assert kept(full) == kept(1 << 62) == full
    assert kept(full - 1) < full
    assert call.plan(cache_bytes=full).memory.fused.backward >= full


def run(*arguments: str) -> str:
    return "\n".join(command.report(*command.read(list(arguments))))


def test_the_recommended_cache_is_what_the_call_would_keep() -> None:
    """The number that is printed, passed on, keeps that many bytes; a full one recomputes nothing."""
    for spare in ("4", "0.5"):
        arguments = ("--model", "qwen3-8b", "--tensor-parallel", "4", "--tokens", "32768", "--spare-gib", spare)
        text = run(*arguments)
        found = re.search(r"^else: cache_bytes=(\d+) (recomputes nothing|spares \d+%)", text, re.MULTILINE)
        assert found
        cache = int(found[1])
        assert cache <= float(spare) * (1 << 30)
        call, _ = command.read(list(arguments))
        plan = call.plan(cache_bytes=cache)
        assert plan.kept_bytes - call.plan().kept_bytes == cache
        assert (found[2] == "recomputes nothing") == (cache == plan.full_cache_bytes) == (spare == "4")
        assert f"cache_bytes={cache}" in text.split("matrix products")[1].split("else:")[0]
    assert "leave cache_bytes out" in run(*arguments[:-1], "0")


def test_every_model_on_every_device() -> None:
    for name in MODELS:
        for device in command.DEVICES:
            text = run("--model", name, "--tokens", "8192", "--tensor-parallel", "8", "--device", device)
            assert name in text
            assert "logits stored" in text
            assert "linear_loss recomputes nothing" in text
    assert "6 of padding: pass vocab_size=100278" in run(
        "--model", "olmo3-7b", "--tokens", "64", "--tensor-parallel", "12"
    )


def test_as_a_command() -> None:
    """And `lce_jax.explain` stays the function, however it is imported."""
    arguments = ["--hidden", "4096", "--vocab", "131072", "--tokens", "8192"]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "lce_jax.explain", *arguments],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert lines[0] == "H 4,096, V 131,072; bfloat16 on NVIDIA H200, implementation mosaic_gpu"
    assert lines[4].split() == ["logits", "stored", "2.0", "GiB", "6.0", "GiB", "3.00"]
    import lce_jax.explain as imported
    from lce_jax.explain import explain as inner

    assert lce_jax.explain is imported is inner is explain


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --model, or --hidden and --vocab"),
        (["--hidden", "64"], "give --model, or --hidden and --vocab"),
        (["--model", "qwen3-8b", "--hidden", "64"], "give --model, or --hidden and --vocab"),
        (["--model", "gemma2-2b", "--softcap", "3"], "gemma2-2b brings its own"),
        (["--model", "qwen3-8b", "--tensor-parallel", "0"], "0 is not between 1 and 2147483646"),
        (["--model", "qwen3-8b", "--tokens", str(10**20)], "100000000000000000000 is not between 1 and"),
        (["--hidden", "64", "--vocab", "1000", "--softcap", "0"], "got 0.0; leave --softcap out for no cap"),
        (["--hidden", "64", "--vocab", "1000", "--softcap", "nan"], "got nan; leave --softcap out for no cap"),
        (["--hidden", "64", "--vocab", "1000", "--softcap", "thirty"], "could not convert"),
        (["--model", "qwen3-8b", "--spare-gib", "-1"], "-1 must be a number of GiB"),
        (["--model", "qwen3-8b", "--spare-gib", "much"], "much must be a number of GiB, at least 0, such as 4"),
        (["--model", "qwen3-8b", "--hidden", "4k"], "'4k' is no whole number: write all its digits, such as 8192"),
        (["--model", "qwen3-8b", "--sequence-parallel", "--tensor-parallel", "3"], "--tokens 64 must divide by"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main([*arguments, "--tokens", "64"])
    assert message in capsys.readouterr().err
