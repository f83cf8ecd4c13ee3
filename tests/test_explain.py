"""The plan, the choice and what is said about it."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import pytest

import lce_jax
from lce_jax import UnsupportedError, _dispatch, explain, linear_logprobs
from tests import cases


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
    assert all(isinstance(reason, str) and reason for reason in plan.refused.values())


def test_reads_well() -> None:
    struct = jax.ShapeDtypeStruct
    args = struct((4096, 512), jnp.float32), struct((65536, 512), jnp.float32), struct((4096,), jnp.int32)
    text = str(explain(*args, implementation="xla", cache_bytes=1 << 30))
    assert text.splitlines() == [
        "xla: 4,096 tokens, hidden size 512, 65,536 vocabulary columns, float32, on cpu",
        "  tiles      tokens 4,096, vocabulary 1,024",
        "  forward    48.1 MiB temporary",
        "  backward   56.1 MiB temporary, gradients not counted",
        "  kept       64.0 KiB from forward to backward",
        "  logits     1.0 GiB if they were stored",
        "  note       cache_bytes=1073741824 is not used: this implementation always recomputes",
    ]


def test_with_an_axis_that_is_not_bound() -> None:
    plan = explain(jnp.ones((4, 8)), jnp.ones((32, 8)), jnp.zeros((4,), int), axis_name="tensor", vocab_size=60)
    assert plan.case.vocab_size == 32


@pytest.fixture
def picky(monkeypatch: pytest.MonkeyPatch) -> str:
    """An implementation that declines everything, first in the automatic order."""

    class Picky:
        NAME = "picky"

        @staticmethod
        def supports(case):
            return f"hidden size {case.hidden_size} is not to its taste"

    monkeypatch.setitem(_dispatch.IMPLEMENTATIONS, "picky", Picky)
    monkeypatch.setattr(_dispatch, "AUTOMATIC", ("picky", *_dispatch.AUTOMATIC))
    _dispatch._log_choice.cache_clear()
    return "picky"


CALL = (jnp.ones((4, 8)), jnp.ones((32, 8)), jnp.zeros((4,), jnp.int32))


def test_an_implementation_asked_for_by_name_is_used_or_refuses(picky: str) -> None:
    with pytest.raises(UnsupportedError, match='implementation "picky": hidden size 8 is not to its taste'):
        linear_logprobs(*CALL, implementation=picky)
    with pytest.raises(UnsupportedError, match="picky"):
        explain(*CALL, implementation=picky)


def test_a_tuple_is_tried_in_order(picky: str) -> None:
    plan = explain(*CALL, implementation=(picky, "reference"))
    assert plan.implementation == "reference"
    assert plan.refused == {"picky": "hidden size 8 is not to its taste"}
    assert "not used   picky: hidden size 8 is not to its taste" in str(plan)
    assert linear_logprobs(*CALL, implementation=(picky, "reference")).logprobs.shape == (4,)


@pytest.mark.usefixtures("picky")
def test_the_automatic_choice_is_logged_once_with_its_reasons(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="lce_jax"):
        for _ in range(3):
            linear_logprobs(*CALL)
    messages = [record.getMessage() for record in caplog.records if record.name == "lce_jax"]
    assert len(messages) == 1
    assert "xla; not picky: hidden size 8 is not to its taste" in messages[0]


def test_format_bytes() -> None:
    sizes = (0, 1023, 1024, 3 << 20, 5 << 30, 3 << 42)
    texts = ["0 B", "1023 B", "1.0 KiB", "3.0 MiB", "5.0 GiB", "12,288.0 GiB"]
    assert [lce_jax._types.format_bytes(size) for size in sizes] == texts
