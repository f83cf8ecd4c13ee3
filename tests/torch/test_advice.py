"""What a message tells to write is code: it is run here, and gives right numbers."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from lce_torch_bridge import (
    explain,
    linear_cross_entropy,
    linear_entropy,
    linear_kl,
    linear_logits,
    linear_logprobs,
    linear_loss,
    linear_topk,
    losses,
    verl,
)
from tests.torch import executor
from tests.torch import problem as p

V = 64
HIDDEN, WEIGHT, _ = p.draw(T=6, H=8, V=V)
HIDDEN, LABELS = HIDDEN.view(2, 3, 8), torch.tensor([[3, 60, 5], [7, 63, 9]])
LOGITS = HIDDEN @ WEIGHT.T
CALL = HIDDEN, WEIGHT, LABELS


@pytest.fixture(autouse=True)
def programs() -> Iterator[None]:
    with executor.in_float64():
        yield


def said(error: type[Exception], call: Any) -> str:
    with pytest.raises(error) as refusal:
        call()
    return str(refusal.value)


def written(pattern: str, message: str, **names: Any) -> Any:
    """The value of the code that the message tells to write."""
    (code,) = re.findall(pattern, message)
    return eval(code, {"torch": torch, "hidden": HIDDEN}, names)


def logprobs(logits: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(-1, LABELS.unsqueeze(-1)).squeeze(-1)


def test_logits_in_place_of_hidden_and_a_weight_the_other_way_round() -> None:
    message = said(ValueError, lambda: linear_logprobs(LOGITS, WEIGHT, LABELS))
    assert "hidden has V = 64 columns: did you pass logits? Pass the hidden states" in message
    turned = WEIGHT.T.contiguous()
    message = said(ValueError, lambda: linear_logprobs(HIDDEN, turned, LABELS))
    found = written(r": if hidden is right, .*: write (weight\.T)\. Or did you pass", message, weight=turned)
    torch.testing.assert_close(linear_logprobs(HIDDEN, found, LABELS).logprobs, logprobs(LOGITS))
    message = said(ValueError, lambda: linear_kl(HIDDEN, WEIGHT, HIDDEN, turned))
    found = written(r": write (teacher_weight\.T)\. Or did you pass", message, teacher_weight=turned)
    assert linear_kl(HIDDEN, WEIGHT, HIDDEN, found).abs().max() < 1e-6
    message = said(TypeError, lambda: linear_logprobs(HIDDEN, turned, LABELS, weight_layout="hv"))
    found = written(r"pass (weight\.T) if yours", message, weight=turned)
    assert torch.equal(found, WEIGHT)


def test_names_of_other_packages() -> None:
    """In functions that name all their options, and in those that take them as ``**options``."""
    calls = {
        "linear_logprobs": lambda **x: linear_logprobs(*CALL, **x),
        "linear_cross_entropy": lambda **x: linear_cross_entropy(*CALL, **x),
        "linear_topk": lambda **x: linear_topk(*CALL[:2], 3, **x),
        "linear_logits": lambda **x: linear_logits(*CALL[:2], LABELS[..., None], **x),
        "linear_kl": lambda **x: linear_kl(*CALL[:2], *CALL[:2], **x),
    }
    for name, call in calls.items():
        message = said(TypeError, lambda call=call: call(softcap=3.0))
        assert message.startswith(f"{name}: unknown option softcap (did you mean logit_softcap?); known: ")
        for mask in ("mask", "loss_mask", "attention_mask"):
            message = said(TypeError, lambda call=call, mask=mask: call(**{mask: LABELS > 5}))
            assert message.startswith(f"{name}: unknown option {mask} (did you mean where?); known: ")
        message = said(TypeError, lambda call=call: call(precision="highest"))
        assert f'{name}: unknown option precision: call torch.set_float32_matmul_precision("highest")' in message
    assert said(TypeError, lambda: linear_topk(*CALL[:2], 3, stats=True)).startswith(
        "stats=True: linear_topk has no such"
    )


@pytest.mark.parametrize("name", ["temperature", "logit_floor"])
def test_one_number_per_sequence(name: str) -> None:
    per_sequence = torch.tensor([0.5, 2.0])
    want = linear_logprobs(*CALL, **{name: per_sequence[:, None]}).logprobs
    message = said(ValueError, lambda: linear_logprobs(*CALL, **{name: per_sequence}))
    found = written(r"write (.*) for one number", message, **{name: per_sequence})
    assert torch.equal(linear_logprobs(*CALL, **{name: found}).logprobs, want)
    for value in ([[0.5], [2.0]], np.array([[0.5], [2.0]])):
        message = said(TypeError, lambda value=value: linear_logprobs(*CALL, **{name: value}))
        assert f"{name} must be a number or a torch.Tensor, got {type(value).__name__}: pass" in message
        found = written(r"pass (.*)$", message, **{name: value})
        assert torch.equal(linear_logprobs(*CALL, **{name: found}).logprobs, want)


def test_a_where_that_broadcasts() -> None:
    for where, want in (
        (torch.tensor([[True, False, True]]), torch.tensor([[True, False, True]] * 2)),
        (torch.tensor([True, False]), torch.tensor([[True] * 3, [False] * 3])),
    ):
        message = said(ValueError, lambda where=where: linear_logprobs(*CALL, where=where))
        found = written(r"write (where.*)$", message, where=where)
        assert torch.equal(found, want)
        out, masked = linear_logprobs(*CALL, where=found), linear_logprobs(*CALL, where=want)
        assert torch.equal(out.logprobs, masked.logprobs)


def test_losses_and_their_arguments() -> None:
    zeros = torch.zeros(2, 3)
    message = said(TypeError, lambda: linear_loss(lambda x: -x, *CALL))
    assert re.fullmatch(r"loss_fn takes \(x\), .*: write lambda logprob, entropy, lse: \.\.\., .*", message)
    assert said(TypeError, lambda: linear_loss(losses.dapo, *CALL)).endswith(": give old_logprob=..., advantage=...")
    bonus = losses.with_entropy_bonus(losses.ppo_clip, 0.1)
    assert said(TypeError, lambda: linear_loss(bonus, *CALL, old_logprob=zeros)).endswith(": give advantage=...")
    for none in ("old_logprob", "advantage", "reference_logprob"):
        given = dict.fromkeys(("old_logprob", "advantage", "reference_logprob"), zeros) | {none: None}
        for call in (lambda x: linear_loss(losses.grpo, *CALL, **x), lambda x: losses.grpo(zeros, None, zeros, **x)):
            message = said(TypeError, lambda call=call, given=given: call(given))
            assert message.startswith(f"{none} is None: give one number per token")


def test_one_tensor_without_numbers() -> None:
    for name, given in {
        "weight": (HIDDEN, WEIGHT.to("meta"), LABELS),
        "labels": (*CALL[:2], LABELS.to("meta")),
    }.items():
        message = said(ValueError, lambda given=given: linear_logprobs(*given))
        assert f"{name} is on meta, hidden on cpu: a meta tensor has no numbers. Call model.to_empty(" in message


def test_chunks_of_no_use_are_refused() -> None:
    for told in ({"vocab_part_size": 8}, {"gradient_threshold": 0.1}, {"label_smoothing": 0.1, "logit_softcap": 3.0}):
        values = " and ".join(f"{name}={value}" for name, value in told.items())
        message = said(ValueError, lambda told=told: linear_cross_entropy(*CALL, chunk_bytes=7, **told))
        assert message.startswith(f"chunk_bytes=7 with {values}, where the gradients are computed in the backward")
        assert message.endswith("Leave chunk_bytes out")
        assert linear_cross_entropy(*CALL, **told).isfinite()
    for told in ({"label_smoothing": 0.1}, {"logit_softcap": 3.0}):
        assert linear_cross_entropy(*CALL, chunk_bytes=7, **told).isfinite()


FUNCTIONS: dict[str, Any] = {
    "linear_logprobs": linear_logprobs,
    "linear_cross_entropy": linear_cross_entropy,
    "linear_loss": lambda *x, **told: linear_loss(losses.cross_entropy, *x, **told),
    "explain": explain,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_labels(name: str) -> None:
    message = said(TypeError, lambda: FUNCTIONS[name](HIDDEN, WEIGHT, None))
    assert message.startswith("labels is None: give a vocabulary id for each token")
    entropy, _ = written(r"; (\w+) serves", message, linear_entropy=linear_entropy)(HIDDEN, WEIGHT)
    assert torch.equal(entropy, linear_logprobs(*CALL).entropy)
    with pytest.raises(TypeError, match="labels"):
        verl.linear_cross_entropy(HIDDEN, WEIGHT, None)


@pytest.mark.parametrize("name", list(FUNCTIONS)[:3])
def test_labels_that_are_all_outside(name: str) -> None:
    """One warning, about the caller's line, and never of values that would be waited for."""
    function, outside = FUNCTIONS[name], torch.full((2, 3), V)
    mixed = outside.clone()
    mixed[0] = -100
    for labels in (outside, outside - V - 7, mixed):
        with pytest.warns(RuntimeWarning, match=r"(\d) of the \1 labels that count .* \[0, 64\)") as found:
            function(HIDDEN, WEIGHT, labels)
        assert [x.filename for x in found] == [__file__]
    with pytest.warns(RuntimeWarning, match=r"2 of the 2 labels .* \[0, 60\), from 60 to 63"):
        function(HIDDEN, WEIGHT, LABELS.new_tensor([[60, 3, 3], [3, 3, 63]]), vocab_size=60, ignore_index=3)
    with pytest.warns(RuntimeWarning, match="1 of the 1 labels"):
        function(HIDDEN, WEIGHT, LABELS.new_tensor([[60, 3, 3], [3, 3, 64]]), where=torch.tensor([5]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if name != "linear_cross_entropy":  # no mean of this package counts them
            function(HIDDEN, WEIGHT, outside.index_fill(1, torch.tensor([2]), 3))  # some are inside
        function(HIDDEN, WEIGHT, outside.fill_(-100))  # padding
        function(HIDDEN, WEIGHT, torch.full((2, 3), V), ignore_index=V)
        function(HIDDEN, WEIGHT, torch.full((2, 3), V), where=torch.zeros(2, 3, dtype=torch.bool))
        function(HIDDEN, WEIGHT, torch.full((2, 3), 3, dtype=torch.uint8))
        if name != "linear_loss":
            function(*(x.to("meta") for x in CALL[:2]), torch.full((2, 3), V, device="meta"))
        linear_entropy(HIDDEN, WEIGHT)
        linear_topk(HIDDEN, WEIGHT, 2)
