"""The plan, the choice and what is said about it."""

from __future__ import annotations

import contextlib
import logging
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lce_jax import UnsupportedError, explain, linear_kl, linear_logprobs, linear_topk
from lce_jax.call import _dispatch
from tests import cases
from tests.devices import B200, H200

CALL = (jnp.ones((4, 8)), jnp.ones((32, 8)), jnp.zeros((4,), jnp.int32))


@pytest.mark.parametrize("abstract", [False, True], ids=["arrays", "structs"])
@pytest.mark.parametrize("test", cases.MATRIX, ids=str)
def test_explains_whatever_is_accepted(test: cases.TestCase, abstract: bool) -> None:
    hidden, weight, labels, options, _ = cases.draw(test)
    if abstract:
        hidden, weight, labels = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (hidden, weight, labels))
        options = {k: jax.eval_shape(lambda x=v: x) if isinstance(v, jax.Array) else v for k, v in options.items()}
    plan = explain(hidden, weight, labels, **options)
    assert plan.implementation in _dispatch.IMPLEMENTATIONS
    assert plan.logits_bytes == labels.size * test.V * 4
    assert min(plan.forward_bytes, plan.backward_bytes, plan.kept_bytes) >= 0
    assert 1 <= plan.tiles["tokens"] <= max(labels.size, 1)
    assert 1 <= plan.tiles["vocabulary"] <= test.V
    assert all(isinstance(reason, str) and reason for reason in plan.refused.values())


def test_reads_well() -> None:
    struct = jax.ShapeDtypeStruct
    args = struct((4096, 512), jnp.float32), struct((65536, 512), jnp.float32), struct((4096,), jnp.int32)
    text = str(explain(*args, implementation="xla", cache_bytes=1 << 30))
    first, *lines = text.splitlines()
    assert all(x in first for x in ("xla", "4,096 tokens", "hidden size 512", "65,536", "float32", "cpu"))
    assert [line.split()[0] for line in lines] == ["tiles", "forward", "backward", "kept", "logits", "note"]
    assert all(re.search(r" [\d,]+\.\d [MG]iB", line) for line in lines[1:])


def kept_and_said(**options: Any) -> tuple[int, int]:
    """Bytes that a jitted call keeps from forward to backward beside its operands, and those of the plan."""
    struct = jax.ShapeDtypeStruct
    hidden, weight, labels = struct((64, 16), "float32"), struct((4096, 16), "float32"), struct((64,), "int32")

    def total(hidden: Any, weight: Any, labels: Any) -> Any:
        if "teacher" in options:
            return jnp.sum(linear_kl(hidden, weight, hidden, weight, cache_bytes=1 << 28, direction="reverse"))
        return jnp.sum(linear_logprobs(hidden, weight, labels, cache_bytes=1 << 28).logprobs)

    def kept(hidden: Any, weight: Any, labels: Any) -> Any:
        return jax.vjp(lambda *x: total(*x, labels), hidden, weight)[1]

    arrays = jax.tree.leaves(jax.eval_shape(jax.jit(kept), hidden, weight, labels))
    held = sum(x.size * x.dtype.itemsize for x in arrays if x.shape not in (hidden.shape, weight.shape))
    if "teacher" in options:
        options |= {"teacher": (hidden, weight)}
    return held, explain(hidden, weight, labels, cache_bytes=1 << 28, **options).kept_bytes


@pytest.mark.parametrize("options", [{}, {"teacher": True, "direction": "reverse"}], ids=["logprobs", "kl"])
@pytest.mark.parametrize("axis_type", [None, AxisType.Auto, AxisType.Explicit], ids=str)
def test_what_is_kept_is_what_the_plan_says(axis_type: AxisType | None, options: dict[str, Any]) -> None:
    """On a CPU, without a mesh and under one of one device."""
    one = np.array(jax.devices()[:1])
    mesh = None if axis_type is None else jax.sharding.Mesh(one, ("device",), axis_types=(axis_type,))
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        held, said = kept_and_said(**options)
    assert 64 * 4096 * 4 <= said <= held < 1.1 * said


def test_with_an_axis_that_is_not_bound() -> None:
    plan = explain(jnp.ones((4, 8)), jnp.ones((32, 8)), jnp.zeros((4,), int), axis_name="tensor", vocab_size=60)
    assert plan.call.columns == 32


def test_of_a_loss() -> None:
    """Options of a loss are validated as in the loss, and the plan is that of the call the loss makes."""
    smoothed = explain(*CALL, label_smoothing=0.1).call
    assert smoothed.mean_logit
    assert not smoothed.entropy
    assert explain(*CALL, reduction="mean").call.partial_rows  # labels of -100 may not count
    assert explain(*CALL, ignore_index=7).call.partial_rows
    assert not explain(*CALL, reduction="mean", ignore_index=None).call.partial_rows
    assert not explain(*CALL, reduction="sum").call.entropy
    assert explain(*CALL).call.entropy
    for wrong in (dict(label_smoothing=1.5), dict(z_loss=-1.0), dict(reduction="batchmean"), dict(ignore_index=0.5)):
        with pytest.raises((TypeError, ValueError), match=next(iter(wrong))):
            explain(*CALL, **wrong)


MESH = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("concrete", [True, False])
def test_of_arrays_as_they_lie(kind: AxisType, concrete: bool) -> None:
    """The plan is of one device's share, as the call runs it."""
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(kind,) * 2)

    def array(shape: tuple[int, ...], dtype: Any, *axes: Any) -> Any:
        struct = jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*axes)))
        return jax.device_put(jnp.zeros(shape, dtype), struct.sharding) if concrete else struct

    call = array((8, 16, 64), "float32", "data"), array((512, 64), "float32", "tensor"), array((8, 16), "int32", "data")
    plan = explain(*call, implementation="xla")
    assert (plan.call.num_tokens, plan.call.columns) == (64, 128)
    named = explain(*call, implementation="xla", mesh=mesh, vocab_axis="tensor", batch_axes="data")
    assert (plan.forward_bytes, plan.backward_bytes) == (named.forward_bytes, named.backward_bytes)
    in_forward = explain(*call, implementation="xla", gradients_in_forward=True)
    assert (in_forward.call.num_tokens, in_forward.call.columns) == (64, 128)
    noted = explain(*call, implementation="xla", cache_bytes=1 << 20).notes
    assert any("keeps nothing over Auto axes" in note for note in noted) == (kind == AxisType.Auto)
    assert explain(*CALL).call.num_tokens == CALL[2].size


def test_on_a_mesh_the_mistakes_are_those_of_the_sharded_functions() -> None:
    mistakes = [
        (dict(vocab_axis="model"), "vocab_axis 'model' is not an axis"),
        (dict(vocab_axis="tensor", batch_axes="tensor"), "overlap"),
        (dict(vocab_axis="tensor", axis_name="tensor"), "axis_name='tensor' is for callers inside shard_map"),
        (dict(batch_axes=("data", "tensor")), r"dimension 0 of hidden \(4, 8\) must divide by the 8"),
    ]
    for mistake, message in mistakes:
        with pytest.raises(ValueError, match=message):
            explain(*CALL, mesh=MESH, **mistake)
    with pytest.raises(ValueError, match="no mesh: pass mesh="):
        explain(*CALL, vocab_axis="tensor")


@pytest.fixture
def picky(monkeypatch: pytest.MonkeyPatch) -> str:
    """An implementation that declines everything, first in the automatic order."""

    class Picky:
        NAME = "picky"

        @staticmethod
        def supports(case):
            return f"hidden size {case.hidden_size} is not to its taste"

    monkeypatch.setattr(_dispatch, "IMPLEMENTATIONS", {"picky": Picky, **_dispatch.IMPLEMENTATIONS})
    _dispatch._log_choice.cache_clear()
    return "picky"


def test_an_implementation_asked_for_by_name_is_used_or_refuses(picky: str) -> None:
    with pytest.raises(UnsupportedError, match='implementation "picky": hidden size 8 is not to its taste'):
        linear_logprobs(*CALL, implementation=picky)
    with pytest.raises(UnsupportedError, match="picky"):
        explain(*CALL, implementation=picky)


def test_a_tuple_is_tried_in_order(picky: str) -> None:
    plan = explain(*CALL, implementation=(picky, "xla"))
    assert plan.implementation == "xla"
    assert plan.refused == {"picky": "hidden size 8 is not to its taste"}
    assert "not used   picky: hidden size 8 is not to its taste" in str(plan)
    assert linear_logprobs(*CALL, implementation=(picky, "xla")).logprobs.shape == (4,)


@pytest.mark.usefixtures("picky")
def test_the_automatic_choice_is_logged_once_with_its_reasons(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="lce_jax"):
        for _ in range(3):
            linear_logprobs(*CALL)
    messages = [record.getMessage() for record in caplog.records if record.name == "lce_jax"]
    assert len(messages) == 1
    assert "xla; not picky: hidden size 8 is not to its taste" in messages[0]


def test_a_call_that_misses_the_kernels_of_its_gpu_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    def chosen(dtype: str, device: Any = H200, function: Any = linear_logprobs) -> list[int]:
        caplog.clear()
        struct = jax.ShapeDtypeStruct
        for _ in range(2):
            with _dispatch.trace_for_device(device):
                jax.eval_shape(
                    lambda *x: function(*x),
                    struct((128, 128), dtype),
                    struct((512, 128), dtype),
                    struct((128,), "int32"),
                )
        return [record.levelno for record in caplog.records]

    _dispatch._log_choice.cache_clear()
    with caplog.at_level(logging.INFO, logger="lce_jax"):
        assert chosen("bfloat16") == [logging.INFO]
        assert chosen("float32") == [logging.WARNING]
        assert "xla; not mosaic_gpu: needs a bfloat16 or float16 weight" in caplog.text
        assert chosen("float32", B200) == [logging.INFO]
        assert chosen("float32", function=lambda h, w, _: linear_topk(h, w, 2)) == [logging.INFO]
