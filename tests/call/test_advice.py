"""What a message tells to write is code: it is run here, and gives right numbers."""

from __future__ import annotations

import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lce_jax
from lce_jax import explain, linear_cross_entropy, linear_kl, linear_logprobs, linear_loss, losses, rows
from lce_jax import sharded_linear_logprobs as sharded
from tests.draws import Draws
from tests.small_call import MESH

H, V = 8, 64
HIDDEN, WEIGHT = (jnp.asarray(x, jnp.float32) for x in (Draws(0).normal(2, 3, H), Draws(1).normal(V, H)))
LABELS = jnp.array([[3, 60, 5], [7, 63, 9]])
LOGITS = jnp.matmul(HIDDEN, WEIGHT.T, precision="highest")
EXACT: dict[str, Any] = {"precision": "highest"}


def said(error: type[Exception], call: Any) -> str:
    with pytest.raises(error) as refusal:
        call()
    return str(refusal.value)


def logprobs(logits: Any) -> Any:
    return jnp.take_along_axis(jax.nn.log_softmax(logits), LABELS[..., None], -1)[..., 0]


def written(pattern: str, message: str, **names: Any) -> Any:
    """The value of the code that the message tells to write."""
    (code,) = re.findall(pattern, message)
    return eval(code, {"jnp": jnp, "dict": dict}, names)


def test_logits_in_place_of_hidden() -> None:
    """Taken for a weight [H, V] they would make H the vocabulary, in which few labels lie."""
    message = said(ValueError, lambda: linear_logprobs(LOGITS, WEIGHT, LABELS))
    assert "hidden has V = 64 columns: did you pass logits? Pass the hidden states" in message
    message = said(ValueError, lambda: linear_logprobs(HIDDEN, WEIGHT.T, LABELS))
    (layout,) = re.findall(r'H = 64: if hidden is right, .*: write weight_layout="(\w+)"\. Or did you pass', message)
    out = linear_logprobs(HIDDEN, WEIGHT.T, LABELS, weight_layout=layout, **EXACT)
    assert np.allclose(out.logprobs, logprobs(LOGITS), atol=1e-5)


def test_a_teachers_weight_the_other_way_round() -> None:
    """What is told to write is the teacher's option: the student's would turn its own weight."""
    message = said(ValueError, lambda: linear_kl(HIDDEN, WEIGHT, HIDDEN, WEIGHT.T + 1))
    (option, layout) = re.findall(r'write (\w+)="(\w+)"', message)[0]
    assert message.startswith("the teacher's hidden (2, 3, 8)")
    found = linear_kl(HIDDEN, WEIGHT, HIDDEN, WEIGHT.T + 1, **{option: layout})
    assert np.allclose(found, 0, atol=1e-5)  # a common offset of all logits changes no distribution


@pytest.mark.parametrize("name", ["temperature", "logit_floor"])
def test_one_number_per_sequence(name: str) -> None:
    per_sequence = jnp.array([0.5, 2.0])
    want = linear_logprobs(HIDDEN, WEIGHT, LABELS, **{name: per_sequence[:, None]}).logprobs
    message = said(ValueError, lambda: linear_logprobs(HIDDEN, WEIGHT, LABELS, **{name: per_sequence}))
    found = written(r"write (.*) for one number", message, **{name: per_sequence})
    assert np.array_equal(linear_logprobs(HIDDEN, WEIGHT, LABELS, **{name: found}).logprobs, want)
    as_list = [[0.5], [2.0]]
    message = said(TypeError, lambda: linear_logprobs(HIDDEN, WEIGHT, LABELS, **{name: as_list}))
    assert f"{name} must be a number or an array, got list" in message
    found = written(r"pass (.*)$", message, **{name: as_list})
    assert np.array_equal(linear_logprobs(HIDDEN, WEIGHT, LABELS, **{name: found}).logprobs, want)


def test_a_where_that_broadcasts() -> None:
    for where in (jnp.array([[True, False, True]]), jnp.array([True, False]), jnp.array([True, False, True])):
        message = said(ValueError, lambda where=where: linear_logprobs(HIDDEN, WEIGHT, LABELS, where=where))
        found = written(r"write (jnp.*)$", message, where=where)
        per_sequence = where.shape == (2,)
        assert np.array_equal(found, jnp.broadcast_to(where[:, None] if per_sequence else where, LABELS.shape))
        linear_logprobs(HIDDEN, WEIGHT, LABELS, where=found)


def test_losses_and_their_arguments() -> None:
    def loss(loss_fn: Any, *own: Any, **named: Any) -> Any:
        return linear_loss(loss_fn, HIDDEN, WEIGHT, LABELS, *own, **named)

    message = said(TypeError, lambda: loss(lambda x: -x))
    assert re.fullmatch(r"loss_fn takes \(x\), .*: write lambda logprob, entropy, lse: \.\.\., .*", message)
    assert said(TypeError, lambda: loss(losses.dapo)).endswith(": give old_logprob=..., advantage=...")
    assert said(TypeError, lambda: loss(losses.grpo, LABELS * 0.0)).endswith(
        ": give advantage=..., reference_logprob=..."
    )
    bonus = losses.with_entropy_bonus(losses.ppo_clip, 0.1)
    assert said(TypeError, lambda: loss(bonus, old_logprob=LABELS * 0.0)).endswith(": give advantage=...")
    for none in ("old_logprob", "advantage", "reference_logprob"):
        given = dict.fromkeys(("old_logprob", "advantage", "reference_logprob"), LABELS * 0.0) | {none: None}
        assert said(TypeError, lambda given=given: loss(losses.grpo, **given)).startswith(f"{none} is None: give one")
        assert said(TypeError, lambda given=given: losses.grpo(LABELS * 0.0, None, 0.0, **given)).startswith(
            f"{none} is None"
        )


def test_a_mesh_that_is_none() -> None:
    for value in ("tensor", jax.devices()):
        for call in (
            lambda x: sharded(HIDDEN, WEIGHT, LABELS, mesh=x),
            lambda x: explain(HIDDEN, WEIGHT, LABELS, mesh=x),
        ):
            message = said(TypeError, lambda call=call, value=value: call(value))
            assert "mesh must be a jax.sharding.Mesh, got " in message
            assert "write mesh=jax.make_mesh(shape, names)" in message
            assert ("vocab_axis='tensor'" in message) == (value == "tensor")


def test_a_name_that_another_package_has() -> None:
    message = said(TypeError, lambda: linear_logprobs(HIDDEN, WEIGHT, LABELS, softcap=3.0))
    assert message.startswith("linear_logprobs: unknown option softcap (did you mean logit_softcap?); known: where, ")


WITH_LABELS = ("linear_logprobs", "linear_cross_entropy", "linear_loss")


@pytest.mark.parametrize("name", [*WITH_LABELS, *(f"sharded_{name}" for name in WITH_LABELS), "explain"])
def test_no_labels(name: str) -> None:
    first = (losses.cross_entropy,) if name.endswith("linear_loss") else ()
    told: dict[str, Any] = {"mesh": MESH} if name.startswith("sharded") else {}
    function = getattr(lce_jax, name)

    def call(hidden: Any) -> Any:
        return function(*first, hidden, WEIGHT, None, **told)

    for each in (call, jax.jit(call)):
        message = said(TypeError, lambda each=each: each(HIDDEN))
        assert message.startswith("labels is None: give a vocabulary id for each token")
    if "any ids will do" in message:
        ids = written(r"such as (.*)$", message, hidden=HIDDEN, int=int)
        want = linear_logprobs(HIDDEN, WEIGHT, LABELS)
        assert np.array_equal(linear_logprobs(HIDDEN, WEIGHT, ids).entropy, want.entropy)


OUTSIDE = np.full((2, 3), V)
LOSSES: dict[str, Any] = {
    "linear_logprobs": lambda labels, **told: linear_logprobs(HIDDEN, WEIGHT, labels, **told).logprobs,
    "linear_cross_entropy": lambda labels, **told: linear_cross_entropy(HIDDEN, WEIGHT, labels, **told),
    "none": lambda labels, **told: linear_cross_entropy(HIDDEN, WEIGHT, labels, reduction="none", **told),
    "linear_loss": lambda labels, **told: linear_loss(losses.cross_entropy, HIDDEN, WEIGHT, labels, **told)[0],
    "sharded": lambda labels, **told: sharded(HIDDEN, WEIGHT, labels, mesh=MESH, **told).logprobs,
}


@pytest.mark.parametrize("name", LOSSES)
def test_labels_that_are_all_outside(name: str) -> None:
    """One warning, about the caller's line, and never of values that only a device knows."""
    function = LOSSES[name]
    for labels in (
        OUTSIDE,
        jnp.asarray(OUTSIDE),
        OUTSIDE - V - 7,
        jax.block_until_ready(jnp.asarray(OUTSIDE).at[0].set(-100)),
    ):
        with pytest.warns(RuntimeWarning, match=r"(\d) of the \1 labels that count .* \[0, 64\)") as found:
            function(labels)
        assert [x.filename for x in found] == [__file__]
    with pytest.warns(RuntimeWarning, match=r"\[0, 60\), from 60 to 63"):
        function(np.array([[60, 61, 62], [63, 61, 60]]), vocab_size=60)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.jit(function)(OUTSIDE)  # not known
        if name in ("linear_logprobs", "linear_loss", "sharded"):  # no mean of this package counts it
            function(np.where(np.arange(6).reshape(2, 3) == 5, 3, OUTSIDE))  # one of them is inside
        function(np.full((2, 3), -100))  # padding
        function(OUTSIDE, ignore_index=V)
        function(OUTSIDE, where=np.zeros((2, 3), bool))
        function(np.where([[True], [False]], LABELS, V), where=np.array([[True] * 3, [False] * 3]))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_padding_that_counts(reduction: str) -> None:
    """It would lower the mean in silence; what the message says to write leaves it out."""
    labels = np.where(np.arange(3) < 2, LABELS, -1)

    def loss(**told: Any) -> Any:
        return linear_cross_entropy(HIDDEN, WEIGHT, labels, reduction=reduction, **told)

    with pytest.warns(RuntimeWarning, match=r"2 of the 6 labels that count .* from -1 to -1") as found:
        loss()
    (told,) = re.findall(r"is padding, write ignore_index=(-?\d+);", str(found[0].message))
    want = linear_cross_entropy(HIDDEN, WEIGHT, LABELS, reduction=reduction, where=labels >= 0)
    assert np.array_equal(loss(ignore_index=int(told)), want)


@pytest.mark.parametrize(
    ("labels", "line"),
    [
        (lambda labels: labels.reshape(-1), r"write (labels\.reshape\(2, 3\))"),
        (lambda labels: labels.T, r"Write (labels\.T)"),
        (lambda labels: jax.nn.one_hot(labels, V, dtype=int), r"in place of one-hot rows, (labels\.argmax\(-1\))"),
        (lambda labels: labels.astype(float), r"write (labels\.astype\(int\))"),
        (lambda labels: labels[:, 1:], r"labels = (rows\.next_tokens\(tokens\)) has a label for each token"),
    ],
)
def test_labels_of_another_shape(labels: Any, line: str) -> None:
    given = labels(jnp.asarray(LABELS))
    message = said((TypeError, ValueError), lambda: linear_cross_entropy(HIDDEN, WEIGHT, given))
    again = written(line, message, labels=given, int=int, rows=rows, tokens=jnp.asarray(LABELS))
    want = linear_cross_entropy(HIDDEN, WEIGHT, LABELS)
    if "tokens" in line:
        want = linear_cross_entropy(HIDDEN[:, :-1], WEIGHT, given)
    assert np.allclose(linear_cross_entropy(HIDDEN, WEIGHT, again), want, rtol=1e-6)
