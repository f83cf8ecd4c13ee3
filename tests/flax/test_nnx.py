"""The NNX head against the logits it would have stored: results, gradients, options, a tied weight."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from lce_jax import UnsupportedError, linear_cross_entropy, losses
from lce_jax.flax.nnx import LMHead
from tests.flax_cases import (
    BATCH,
    HEADS,
    HIDDEN,
    PADDED,
    ROWS,
    SEQUENCE,
    TEACHER,
    VOCAB,
    assert_same_results,
    assert_trees_close,
    batch,
    data_by_tensor,
    kl_of_logits,
    loss_from_logits,
    refuse_wrong_names,
    results,
    teacher_batch,
    token_batch,
)
from tests.nnx_heads import Model, functional, fused_loss, make_head, stored_loss
from tests.pairs import values_of

BIASED = HEADS["bias, scale, softcap"]


@pytest.mark.parametrize("options", [BIASED, {"dtype": jnp.bfloat16, **PADDED}], ids=["bias", "bfloat16 products"])
def test_logits_are_float32_over_the_true_vocabulary(options):
    head = make_head(**options)
    hidden, _ = batch()
    logits = head(hidden)
    assert logits.shape == (BATCH, SEQUENCE, VOCAB)
    assert logits.dtype == jnp.float32
    dtype = options.get("dtype", jnp.float32)
    rounded, weight = (np.asarray(x.astype(dtype), np.float64) for x in (hidden, head.weight[:VOCAB]))
    raw = rounded @ weight.T + (head.bias[:VOCAB] if "use_bias" in options else 0.0)
    expected = options.get("logit_scale", 1.0) * raw
    if cap := options.get("logit_softcap"):
        expected = cap * np.tanh(expected / cap)
    assert_trees_close(logits, expected)


@pytest.mark.fast("bias")
@values_of("name", HEADS, slow=["scale"])
def test_results_are_those_of_its_logits(name):
    head, given = functional(make_head(**HEADS[name])), batch()
    got = results(head, *given)
    assert_same_results(got, results(head, *given, stored=True))
    (of_head, _), _ = got[0]
    for gradient in jax.tree.leaves(of_head):
        assert np.any(gradient[:VOCAB])
        assert not np.any(gradient[VOCAB:])


def test_kl_is_that_of_the_logits_of_both_heads():
    """Each head has its own scale, cap, bias, padding and hidden size."""
    head, teacher = make_head(**BIASED), LMHead(2 * HIDDEN, VOCAB, rngs=nnx.Rngs(1), **TEACHER)
    (hidden, _), teacher_hidden = batch(), teacher_batch()
    want = kl_of_logits(head(hidden) / 0.5, teacher(teacher_hidden) / 2.0)
    got = head.kl(hidden, teacher, teacher_hidden, temperature=0.5, teacher_temperature=2.0)
    assert_trees_close(got, want)
    axes = {"mesh": data_by_tensor(), "vocab_axis": "tensor", "batch_axes": "data"}
    over_mesh = make_head(**BIASED, **axes)
    padded = LMHead(2 * HIDDEN, VOCAB, rngs=nnx.Rngs(1), **{**TEACHER, **PADDED}, **axes)
    padded.weight[...] = jnp.pad(teacher.weight[...], ((0, 4), (0, 0)))
    got = over_mesh.kl(hidden, padded, teacher_hidden, direction="reverse")
    assert_trees_close(got, kl_of_logits(teacher(teacher_hidden), head(hidden)))
    with pytest.raises(ValueError, match=r"vocab_size=51, .* teacher's is 50"):
        head.kl(hidden, LMHead(HIDDEN, VOCAB - 1, rngs=nnx.Rngs(1)), hidden)


def test_an_adapter_on_the_head_is_refused():
    """As qwix leaves a head, for which `Model.__call__` alone has the adapter; merged into the weight, it counts."""
    (hidden, labels), head, plain = batch(), make_head(), make_head()
    a, b = jax.random.normal(jax.random.key(1), (HIDDEN, 2)), jax.random.normal(jax.random.key(2), (2, VOCAB))
    head.weight_lora_a, head.weight_lora_b = nnx.LoRAParam(a), nnx.LoRAParam(b)
    for call in (
        lambda: head.loss(hidden, labels),
        lambda: head.linear_loss(losses.cross_entropy, hidden, labels),
        lambda: head.logprobs(hidden, labels),
        lambda: head.topk(hidden, 3),
        lambda: head.kl(hidden, plain, hidden),
        lambda: plain.kl(hidden, head, hidden),
    ):
        with pytest.raises(NotImplementedError, match="weight_lora_a and weight_lora_b"):
            call()
    logits = head(hidden) + 0.5 * hidden @ a @ b
    plain.weight[...] += 0.5 * (a @ b).T
    assert_trees_close(plain.loss(hidden, labels), loss_from_logits(logits, labels))
    beside = linear_cross_entropy(hidden, head.weight[...], labels, lora=(a.T, b.T, 0.5))
    assert_trees_close(beside, loss_from_logits(logits, labels))


def test_an_option_of_the_call_reaches_the_function():
    head = make_head()
    hidden, labels = batch()
    assert head.logprobs(hidden, labels, entropy=False).entropy is None
    assert head.logprobs(hidden, labels, stats=True).max_logit.shape == labels.shape
    with pytest.raises(ValueError, match="unknown implementation 'none such'"):
        head.loss(hidden, labels, implementation="none such")


@pytest.mark.slow
def test_parameter_dtype_and_product_dtype_are_apart():
    head = make_head(dtype=jnp.bfloat16)
    assert head.weight.dtype == jnp.float32
    grads = nnx.grad(lambda head: head.loss(*batch()))(head)
    assert grads["weight"].dtype == jnp.float32
    assert make_head(param_dtype=jnp.bfloat16).weight.dtype == jnp.bfloat16


@pytest.mark.usefixtures("hopper")
def test_kernels_serve_a_bfloat16_head_with_float32_parameters():
    """Every method that has kernels, and the gradient is the parameter's."""
    hidden, labels = jnp.zeros((4, 32, 128)), jnp.zeros((4, 32), jnp.int32)
    own = {"old_logprob": jnp.zeros((4, 32)), "advantage": jnp.zeros((4, 1))}

    kernels = {"implementation": "mosaic_gpu"}
    calls = (
        lambda head: jnp.sum(head.logprobs(hidden, labels, **kernels).logprobs),
        lambda head: head.loss(hidden, labels, **kernels),
        lambda head: head.linear_loss(losses.ppo_clip, hidden, labels, **own, **kernels)[0],
        lambda head: jnp.sum(head.kl(hidden, head, hidden)),
    )

    def gradient(call, **options):
        graph, state = nnx.split(LMHead(128, 1024, rngs=nnx.Rngs(0), **options))
        return jax.make_jaxpr(jax.grad(lambda state: call(nnx.merge(graph, state))))(state)

    for call in calls:
        found = gradient(call, dtype=jnp.bfloat16)
        assert [x.dtype for x in found.out_avals] == [jnp.float32]
        assert "mosaic_gpu" in str(found)
    with pytest.raises(UnsupportedError, match="float32"):  # products
        gradient(calls[0])


def test_tied_weight_is_one_parameter():
    model = Model(tied=True, rngs=nnx.Rngs(0))
    assert model.head.weight is model.embed.embedding
    shapes = {path: x.shape for path, x in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    assert shapes == {
        ("embed", "embedding"): (ROWS, HIDDEN),
        ("layer", "bias"): (HIDDEN,),
        ("layer", "kernel"): (HIDDEN, HIDDEN),
    }
    merged = nnx.merge(*nnx.split(model))
    assert merged.head.weight is merged.embed.embedding


def test_tied_gradient_is_that_of_both_uses():
    model = Model(tied=True, rngs=nnx.Rngs(0))
    tokens, labels = token_batch()
    got, want = (nnx.jit(nnx.grad(loss))(model, tokens, labels) for loss in (fused_loss, stored_loss))
    assert_trees_close(got, want)
    as_head = nnx.grad(lambda head, hidden: head.loss(hidden, labels, ignore_index=-100))(model.head, model(tokens))
    as_look_up = got["embed"]["embedding"] - as_head["weight"]
    assert np.abs(as_look_up).max() > 1e-3


def test_tied_products_run_in_the_embedding_dtype():
    embed = nnx.Embed(VOCAB, HIDDEN, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    hidden, _ = batch()
    in_bfloat16, in_float32 = LMHead.tied(embed)(hidden), LMHead.tied(embed, dtype=jnp.float32)(hidden)
    np.testing.assert_array_equal(in_bfloat16, LMHead.tied(embed, dtype=jnp.bfloat16)(hidden))
    assert np.any(in_bfloat16 != in_float32)


def mistakes():
    def own(**options):
        return LMHead(**{"hidden_size": HIDDEN, "vocab_size": VOCAB, "rngs": nnx.Rngs(0), **options})

    def tied(**options):
        embed = nnx.Embed(VOCAB, HIDDEN, rngs=nnx.Rngs(0))
        return LMHead(**{"hidden_size": HIDDEN, "vocab_size": VOCAB, "embed": embed, **options})

    def option_of_the_head():
        return own().loss(*batch(), logit_scale=2.0)

    def parameter():
        hidden, labels = batch()
        return linear_cross_entropy(hidden, own().weight, labels)

    yield "no rngs", lambda: own(rngs=None), TypeError, "rngs="
    yield "empty", lambda: own(vocab_size=0), ValueError, "vocab_size must be at least 1, got 0"
    yield "cap", lambda: own(logit_softcap=-30.0), ValueError, "logit_softcap must be positive in float32, got -30.0"
    yield "precision", lambda: own(precision="exact"), ValueError, "precision 'exact'"
    for name in ("dtype", "param_dtype"):
        for value, shown in (("bf16", "'bf16'"), (torch.bfloat16, "torch.bfloat16"), (jnp.int32, "<class .*int32'>")):
            message = f"^{name} must be a floating-point dtype of JAX, such as jnp.bfloat16, got {shown}"
            yield f"{name} {shown}", functools.partial(own, **{name: value}), TypeError, message
    yield "no padding", lambda: own(pad_to_multiple=0), ValueError, "pad_to_multiple .* 0"

    yield "mesh without axes", lambda: own(mesh=jax.make_mesh((8,), ("data",))), ValueError, "mesh without an axis"
    yield "an axis as mesh", lambda: own(mesh="tensor", vocab_axis="tensor"), TypeError, "mesh must be .* got 'tensor'"
    yield "the head's own option in a call", option_of_the_head, TypeError, "logit_scale"
    yield "tied to a parameter", lambda: LMHead.tied(nnx.Param(1.0)), TypeError, r"takes an nnx\.Embed, and not Param"
    yield (
        "a parameter",
        parameter,
        TypeError,
        r"got Param, .*: pass weight\[\.\.\.\]",
    )
    yield "tied, padded", lambda: tied(pad_to_multiple=8), ValueError, r"tied embedding \(51, 16\)"
    yield "tied, other H", lambda: tied(hidden_size=8), ValueError, r"hidden_size=8 .* \(51, 16\)"
    yield "tied, more V", lambda: tied(vocab_size=52), ValueError, r"\[1, 51\].*52"


def swapped_sizes():
    def head(**sizes):
        return LMHead(**{"hidden_size": HIDDEN, "vocab_size": HIDDEN, "rngs": nnx.Rngs(0), **sizes})

    calls = {
        "logits": lambda head, hidden, _: head(hidden),
        "logprobs": lambda head, hidden, labels: head.logprobs(hidden, labels),
        "loss": lambda head, hidden, labels: head.loss(hidden, labels),
        "kl": lambda teacher, hidden, _: head().kl(hidden, teacher, hidden),
    }
    for name, call in calls.items():
        match = rf"hidden_size={VOCAB}: did you swap the sizes, and mean LMHead\({HIDDEN}, {VOCAB}\)"
        yield f"{name} of swapped sizes", lambda call=call: call(head(hidden_size=VOCAB), *batch()), ValueError, match


@pytest.mark.parametrize(
    ("call", "error", "match"), [pytest.param(*m[1:], id=m[0]) for m in (*mistakes(), *swapped_sizes())]
)
def test_mistakes_name_the_values(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_a_wrong_name_in_a_call_names_the_method_and_the_option():
    refuse_wrong_names(LMHead(HIDDEN, VOCAB, rngs=nnx.Rngs(0)))
