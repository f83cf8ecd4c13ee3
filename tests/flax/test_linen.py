"""The Linen head against the logits it would have stored."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from lce_jax.flax.linen import LMHead
from tests.flax_cases import (
    BATCH,
    HEADS,
    HIDDEN,
    PADDED,
    ROWS,
    SEQUENCE,
    TEACHER,
    VOCAB,
    Head,
    assert_same_results,
    assert_trees_close,
    batch,
    kl_of_logits,
    loss_from_logits,
    refuse_wrong_names,
    results,
    spoiled_padding,
    teacher_batch,
    token_batch,
)
from tests.pairs import values_of


def make_head(**options):
    return LMHead(HIDDEN, VOCAB, weight_init=spoiled_padding, **options)


def initialise(head):
    return jax.jit(head.init)(jax.random.key(0), jnp.zeros((1, HIDDEN)))


BIASED = HEADS["bias, scale, softcap"]


def biased(variables):
    bias = jax.tree.leaves(variables["params"]["bias"])[0]
    assert bias.shape == (ROWS,)
    assert not np.any(bias)
    value = jax.device_put(spoiled_padding(jax.random.key(3), (ROWS,), jnp.float32), bias.sharding)
    return {"params": variables["params"] | {"bias": jax.tree.map(lambda _: value, variables["params"]["bias"])}}


def functional(head, variables):
    """The head as a function of its variables."""

    def call(variables, name, *args, **options):
        return head.apply(variables, *args, method=name, **options)

    return Head(call, biased(variables) if head.use_bias else variables)


@values_of("name", HEADS, slow=["plain", "scale"])
def test_results_are_those_of_its_logits(name):
    module, (hidden, labels) = make_head(**HEADS[name]), batch()
    head = functional(module, initialise(module))
    got = results(head, hidden, labels)
    assert_same_results(got, results(head, hidden, labels, stored=True))
    (of_head, _), _ = got[0]
    for gradient in jax.tree.leaves(of_head):
        assert np.any(gradient[:VOCAB])
        assert not np.any(gradient[VOCAB:])
    _, logits, _ = got
    assert logits.shape == (BATCH, SEQUENCE, VOCAB)
    raw = hidden @ head.params["params"]["weight"][:VOCAB].T
    if module.use_bias:
        assert_trees_close(logits, 3 * jnp.tanh(0.5 * (raw + head.params["params"]["bias"][:VOCAB]) / 3))


def test_kl_is_that_of_the_logits_of_both_heads():
    head, teacher = make_head(**BIASED), LMHead(2 * HIDDEN, VOCAB, **TEACHER)
    (hidden, _), teacher_hidden = batch(), teacher_batch()
    variables = biased(initialise(head))
    teacher = teacher.bind(teacher.init(jax.random.key(1), teacher_hidden))
    want = kl_of_logits(head.apply(variables, hidden), teacher(teacher_hidden))
    assert_trees_close(head.apply(variables, hidden, teacher, teacher_hidden, method="kl"), want)


def test_own_weight_has_padded_rows_in_its_own_dtype():
    head = LMHead(HIDDEN, VOCAB, param_dtype=jnp.bfloat16, **PADDED)
    weight = initialise(head)["params"]["weight"]
    assert (weight.shape, weight.dtype) == ((ROWS, HIDDEN), jnp.bfloat16)


class Model(nn.Module):
    """Embed, a layer, a head of its own or the embedding's."""

    tied: bool = True
    vocab_axis: Any = None
    batch_axes: Any = None
    sequence_axis: Any = None
    dtype: Any = None

    def setup(self):
        embedding_init = nn.initializers.normal(1.0)
        if self.vocab_axis is not None:
            embedding_init = nn.with_partitioning(embedding_init, (self.vocab_axis, None))
        self.embed = nn.Embed(ROWS, HIDDEN, embedding_init=embedding_init, dtype=self.dtype)
        self.layer = nn.Dense(HIDDEN)
        split = {name: getattr(self, name) for name in ("vocab_axis", "batch_axes", "sequence_axis")}
        if self.tied:
            self.head = LMHead.tied(self.embed, vocab_size=VOCAB, **split)
        else:
            self.head = LMHead(HIDDEN, VOCAB, **PADDED, **split)

    def hidden(self, tokens):
        return jnp.tanh(self.layer(self.embed(tokens)))

    def __call__(self, tokens):
        return self.head(self.hidden(tokens))

    def loss(self, tokens, labels):
        return self.head.loss(self.hidden(tokens), labels, ignore_index=-100)


def losses_of(model):
    """The loss of a model without the logits and with them, as functions of its variables and a batch."""

    def stored(variables, tokens, labels):
        return loss_from_logits(model.apply(variables, tokens), labels)

    return functools.partial(model.apply, method="loss"), stored


@pytest.mark.slow
def test_tied_weight_is_one_parameter_with_the_gradient_of_both_uses():
    model = Model()
    tokens, labels = token_batch()
    variables = model.init(jax.random.key(0), tokens)
    shapes = jax.tree.map(jnp.shape, variables)["params"]
    assert shapes == {"embed": {"embedding": (ROWS, HIDDEN)}, "layer": {"bias": (HIDDEN,), "kernel": (HIDDEN, HIDDEN)}}
    got, expected = (jax.jit(jax.grad(loss))(variables, tokens, labels) for loss in losses_of(model))
    assert_trees_close(got, expected)


def test_tied_products_run_in_the_embedding_dtype():
    in_float32, in_bfloat16 = Model(), Model(dtype=jnp.bfloat16)
    tokens, _ = token_batch()
    variables = in_float32.init(jax.random.key(0), tokens)
    assert in_bfloat16.bind(variables).head.dtype == jnp.bfloat16
    difference = np.abs(in_float32.apply(variables, tokens) - in_bfloat16.apply(variables, tokens)).max()
    assert 1e-4 < difference < 0.2  # 8 bits of mantissa in 16 products of order one


class Tied(nn.Module):
    """An embedding and a head, tied with ``options``."""

    options: Any

    def setup(self):
        self.embed = nn.Embed(VOCAB, HIDDEN)
        self.head = LMHead(embed=self.embed, **{"hidden_size": HIDDEN, "vocab_size": VOCAB, **self.options})

    def __call__(self, tokens):
        return self.head(self.embed(tokens))


def mistakes():
    def own(**options):
        return initialise(LMHead(**{"hidden_size": HIDDEN, "vocab_size": VOCAB, **options}))

    def tied(**options):
        return Tied(options).init(jax.random.key(0), jnp.zeros((2,), jnp.int32))

    def option_of_the_head():
        head = make_head()
        return head.apply(initialise(head), *batch(), logit_scale=2.0, method="loss")

    yield "empty", lambda: own(vocab_size=0), ValueError, "vocab_size must be at least 1, got 0"
    yield "cap", lambda: own(logit_softcap=-30.0), ValueError, "logit_softcap must be positive in float32, got -30.0"
    for name in ("dtype", "param_dtype"):
        for value, shown in (("bf16", "'bf16'"), (torch.bfloat16, "torch.bfloat16"), (jnp.int32, "<class .*int32'>")):
            message = f"^{name} must be a floating-point dtype of JAX, such as jnp.bfloat16, got {shown}"
            yield f"{name} {shown}", functools.partial(own, **{name: value}), TypeError, message
    yield "no padding", lambda: own(pad_to_multiple=0), ValueError, "pad_to_multiple .* 0"

    def swapped(method, *labels):
        head = LMHead(hidden_size=VOCAB, vocab_size=HIDDEN)
        return head.apply(head.init(jax.random.key(0), jnp.zeros((1, VOCAB))), batch()[0], *labels, method=method)

    for name, given in {"__call__": (), "logprobs": batch()[1:], "loss": batch()[1:]}.items():
        match = rf"hidden_size={VOCAB}: did you swap the sizes, and mean LMHead\({HIDDEN}, {VOCAB}\)"
        yield f"{name} of swapped sizes", functools.partial(swapped, name, *given), ValueError, match
    yield "mesh without axes", lambda: own(mesh=jax.make_mesh((8,), ("data",))), ValueError, "mesh without an axis"
    yield "an axis as mesh", lambda: own(mesh="tensor", vocab_axis="tensor"), TypeError, "mesh must be .* got 'tensor'"
    yield "the head's own option in a call", option_of_the_head, TypeError, "logit_scale"
    yield "tied to a layer", lambda: LMHead.tied(nn.Dense(3)), TypeError, r"takes an nn\.Embed, and not Dense"
    yield "tied, padded", lambda: tied(pad_to_multiple=8), ValueError, r"tied embedding \(51, 16\)"
    yield "tied, other H", lambda: tied(hidden_size=8), ValueError, r"hidden_size=8 .* \(51, 16\)"
    yield "tied, more V", lambda: tied(vocab_size=52), ValueError, r"\[1, 51\].*52"


@pytest.mark.parametrize(("call", "error", "match"), [pytest.param(*m[1:], id=m[0]) for m in mistakes()])
def test_mistakes_name_the_values(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_a_wrong_name_in_a_call_names_the_method_and_the_option():
    head = make_head()
    refuse_wrong_names(head.bind(initialise(head)))
