"""The first call on a card that has not run its kernels: they are compared with `xla`, and refused if wrong."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from lce_jax import UnsupportedError, explain, linear_kl, linear_logprobs
from lce_jax.call import _dispatch, _first_call
from lce_jax.mosaic import _generations, mma
from lce_jax.mosaic._pallas import interpreting, plgpu
from lce_jax.mosaic.common import _cached_dlogits
from lce_jax.mosaic.mma import _pipeline
from lce_jax.run.kernels import trace_for_device
from tests.devices import A100
from tests.mosaic_interpreter import afresh
from tests.pairs import values_of

COMPARED = f"{mma.RAN_ON}, not on {A100.kind}: this process compares a small call with xla"
DEVICE = A100  # the check takes few of its multiprocessors
CALL = jnp.ones((8, 64), jnp.bfloat16), jnp.ones((512, 64), jnp.bfloat16), jnp.arange(8)


@pytest.fixture(autouse=True)
def a100(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's CPU counts as an A100."""
    monkeypatch.setattr(_generations, "FAULTS", {})
    monkeypatch.setattr(_dispatch, "current_device", lambda *_, **__: DEVICE)
    monkeypatch.setattr(_first_call, "list_devices", lambda _: jax.local_devices())


@pytest.fixture
def interpreted() -> Iterator[None]:
    afresh()
    jax.clear_caches()
    with interpreting(plgpu.InterpretGPUParams()):
        yield


@pytest.fixture
def by_xla(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The check runs `xla` in place of the kernels. Returns what it was asked for."""
    answers, asked = _first_call._run_head, list[Any]()
    monkeypatch.setattr(_first_call, "_run_head", lambda one, *x: asked.append(one) or answers(_first_call.xla, *x))
    return asked


@pytest.mark.slow  # tests/torch/test_first_call.py compares right kernels
@pytest.mark.usefixtures("interpreted")
def test_right_kernels_are_used(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "lce_jax")
    plan = explain(*CALL)
    assert plan.implementation == "mosaic_gpu"
    assert plan.notes[-1].endswith(COMPARED)
    assert list(_generations.FAULTS.values()) == [None]
    assert not caplog.records


def small_check(
    monkeypatch: pytest.MonkeyPatch, module: Any = _first_call, tokens: int = 40, hidden_size: int = 64
) -> None:
    """Of fewer tokens and a smaller hidden size; a block still walks over several tiles of the vocabulary."""
    monkeypatch.setattr(module, "T", tokens)
    monkeypatch.setattr(module, "H", hidden_size)


def swapped(own: Any, given: Any, exchange: Any, exchanged: Callable[..., Any] = _pipeline._exchange) -> Any:
    return exchanged(given, own, exchange)


def doubled_later(*given: Any, multiply: Callable[..., Any] = _pipeline._multiply) -> Any:
    """A block's first tile is right."""
    first, second = multiply(*given)
    factor = jnp.where(given[-1] > 0, 2.0, 1.0)
    return first * factor, second * factor


def raising(*_: Any) -> Any:
    raise RuntimeError("no such instruction\nat 0x3")


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("name", "fault", "told"),
    [
        ("_exchange", swapped, "is off by dhidden"),
        ("_exchange", raising, "raised RuntimeError: no"),
        ("_multiply", doubled_later, "is off by "),
    ],
)
def test_wrong_kernels_are_refused(
    name: str, fault: Any, told: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "lce_jax")
    small_check(monkeypatch)
    monkeypatch.setattr(_pipeline, name, fault)
    for _ in range(2):
        plan = explain(*CALL)
        assert plan.implementation == "xla"
        assert f"its first call on {A100.kind} {told}" in plan.refused["mosaic_gpu"]
        with pytest.raises(UnsupportedError, match=told):
            linear_logprobs(*CALL, implementation="mosaic_gpu")
    (record,) = caplog.records
    assert told in record.getMessage()


HEADS = jnp.ones((8, 64), jnp.bfloat16), jnp.ones((512, 64), jnp.bfloat16)


def divergence() -> Any:
    return jax.eval_shape(lambda *heads: linear_kl(*heads, implementation="mosaic_gpu"), *HEADS, *HEADS)


def louder(x: Any, *where: Any, held: Callable[..., Any] = _pipeline.HeldTile.of) -> Any:
    return held(1.25 * x, *where)


def doubled(*given: Any, gradient: Callable[..., Any] = _cached_dlogits._kl_block_gradient) -> Any:
    return 2.0 * gradient(*given)


@pytest.mark.slow  # the comparison of one head's kernels finds faults in the same way
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("owner", "name", "fault", "told"),
    [
        pytest.param(_pipeline.HeldTile, "of", louder, ".*kl", id="the tile that waits"),
        pytest.param(_cached_dlogits, "_kl_block_gradient", doubled, "dhidden", id="what is kept"),
    ],
)
def test_two_heads_are_compared_when_a_call_has_them(
    owner: Any, name: str, fault: Any, told: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Right kernels are used. What is wrong with those of two heads alone refuses no other call."""
    caplog.set_level(logging.WARNING, "lce_jax")
    small_check(monkeypatch)
    monkeypatch.setattr(_first_call, "V", 640)
    monkeypatch.setattr(_first_call, "CACHE_BYTES", (300_000, 500_000))  # one of three tiles
    divergence()
    assert [(heads, reason) for (_, _, heads), reason in _generations.FAULTS.items()] == [(1, None), (2, None)]
    assert explain(*CALL).notes[-1].endswith(COMPARED)
    assert not caplog.records
    for key in [key for key in _generations.FAULTS if key[2] == 2]:
        del _generations.FAULTS[key]
    jax.clear_caches()
    monkeypatch.setattr(owner, name, fault)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=rf"its first call on {A100.kind} is off by {told}"):
            divergence()
    assert explain(*CALL).implementation == "mosaic_gpu"
    assert _generations.device_refusal(DEVICE) is None


@pytest.mark.usefixtures("by_xla")
@pytest.mark.parametrize("name", ["kl", "dhidden", "dweight"])
def test_a_call_with_two_heads_has_their_results_compared(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call with one head does not compare them. Here `xla` stands for the kernels; one of its results is wrong."""
    answers, wrong = _first_call._run_two_heads, {name: 1.05}

    def run(one: Any, *given: Any) -> dict[str, Any]:
        factors = wrong if one is _first_call.mosaic else {}
        return {key: factors.get(key, 1.0) * x for key, x in answers(_first_call.xla, *given).items()}

    small_check(monkeypatch)
    monkeypatch.setattr(_first_call, "_run_two_heads", run)
    jax.clear_caches()
    assert explain(*CALL).implementation == "mosaic_gpu"
    assert [(heads, reason) for (_, _, heads), reason in _generations.FAULTS.items()] == [(1, None)]
    with pytest.raises(UnsupportedError, match=rf"its first call on {A100.kind} is off by {name} "):
        divergence()
    assert explain(*CALL).implementation == "mosaic_gpu"


def in_shard_map(hidden: Any, weight: Any, labels: Any) -> Any:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    step = jax.shard_map(logprobs, mesh=mesh, in_specs=(P("data"), P(), P("data")), out_specs=P("data"))
    return jax.jit(step)(hidden, weight, labels)


def logprobs(*operands: Any) -> Any:
    return linear_logprobs(*operands, cache_bytes=0).logprobs


AROUND: dict[str, Callable[..., Any]] = {
    "eager": logprobs,
    "jit": jax.jit(logprobs),
    "gradient": lambda *x: jax.jit(jax.grad(lambda *x: logprobs(*x).sum()))(*x),
    "vmap": lambda hidden, *x: jax.vmap(logprobs, (0, None, None))(hidden[None], *x),
    "shard_map": in_shard_map,
    "x64": lambda *x: jax.enable_x64(True)(jax.jit(logprobs))(*x),
}


@values_of("name", AROUND, slow=["eager", "jit"])
def test_whatever_is_around_the_call(name: str, by_xla: list[Any]) -> None:
    """The check compiles and runs its own programs. What the call is traced for is not run here."""
    jax.clear_caches()
    jax.eval_shape(AROUND[name], *CALL)
    compared = len(by_xla)
    jax.eval_shape(AROUND[name], *CALL)
    assert len(by_xla) == compared > 0
    assert list(_generations.FAULTS.values()) == [None]


def test_devices_of_others_are_not_checked(monkeypatch: pytest.MonkeyPatch, by_xla: list[Any]) -> None:
    with trace_for_device(DEVICE):
        assert explain(*CALL).implementation == "mosaic_gpu"
    monkeypatch.setattr(_first_call, "list_devices", lambda _: [])
    plan = explain(*CALL)
    assert plan.implementation == "mosaic_gpu"
    assert plan.notes[-1].endswith(f"not on {A100.kind}: the first call compares a small call with xla")
    assert not by_xla
