"""The Linen head over a mesh, and in whole training steps, against one device and stored logits."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.flax.test_linen import BIASED, Model, biased, initialise, losses_of, make_head
from tests.flax_cases import MESHES, PADDED, assert_trees_close, batch, data_by_tensor, optimizer, token_batch
from tests.pairs import values_of


@pytest.mark.parametrize("mesh_is_given", [pytest.param(False, marks=pytest.mark.slow), True])
@values_of("kind", MESHES, slow=["explicit", "auto, sequence parallel"])
def test_over_a_mesh_it_equals_one_device(kind, mesh_is_given):
    axis_type, sequence_axis = MESHES[kind]
    mesh = data_by_tensor(axis_type)
    single = make_head(**PADDED)
    hidden, labels = batch()
    options = {"vocab_axis": "tensor", "batch_axes": "data", "sequence_axis": sequence_axis, **PADDED}
    split = jax.device_put(hidden, NamedSharding(mesh, P("data", sequence_axis, None)))
    targets = jax.device_put(labels, NamedSharding(mesh, P("data", None)))
    if mesh_is_given:
        head = make_head(mesh=mesh, **options)
        got = every_result(head, born_split(head, mesh, split), split, targets)
    else:
        with jax.set_mesh(mesh):
            head = make_head(**options)
            got = every_result(head, born_split(head, mesh, split), split, targets)
    for a, b in zip(got, every_result(single, initialise(single), hidden, labels), strict=True):
        assert_trees_close(jax.tree.leaves(a), jax.tree.leaves(b))


@values_of("axis_type", [AxisType.Auto, AxisType.Explicit], slow=[AxisType.Auto])
def test_a_bias_over_a_mesh(axis_type):
    mesh = data_by_tensor(axis_type)
    single, (hidden, labels) = make_head(**BIASED), batch()
    want = every_result(single, biased(initialise(single)), hidden, labels)
    with jax.set_mesh(mesh):
        head = make_head(vocab_axis="tensor", batch_axes="data", **BIASED)
        split = jax.device_put(hidden, NamedSharding(mesh, P("data")))
        variables = biased(born_split(head, mesh, split))
        assert jax.tree.leaves(variables["params"]["bias"])[0].sharding.spec == P("tensor")
        got = every_result(head, variables, split, jax.device_put(labels, NamedSharding(mesh, P("data"))))
    for a, b in zip(got, want, strict=True):
        assert_trees_close(jax.tree.leaves(a), jax.tree.leaves(b))


def born_split(model, mesh, example):
    """Variables created by jit in the shardings that their annotations name."""
    init = functools.partial(model.init, jax.random.key(0), example)
    return jax.jit(init, out_shardings=nn.get_sharding(jax.eval_shape(init), mesh))()


def every_result(head, variables, hidden, labels):
    """Logits, log-probabilities, and the loss's gradients, jitted."""
    gradients = jax.grad(functools.partial(head.apply, method="loss"), argnums=(0, 1))
    return (
        jax.jit(head.apply)(variables, hidden),
        jax.jit(functools.partial(head.apply, method="logprobs"))(variables, hidden, labels),
        jax.jit(gradients)(variables, hidden, labels),
    )


def train(variables, loss_function, tokens, labels, steps=3):
    """The parameters and losses of ``steps`` jitted steps."""
    transform = optimizer()
    state = jax.jit(transform.init)(variables)

    @jax.jit
    def step(variables, state, tokens, labels):
        loss, grads = jax.value_and_grad(loss_function)(variables, tokens, labels)
        updates, state = transform.update(grads, state, variables)
        return optax.apply_updates(variables, updates), state, loss

    losses = []
    for _ in range(steps):
        variables, state, loss = step(variables, state, tokens, labels)
        losses.append(float(loss))
    return variables, losses


@values_of("sequence_axis", [None, "tensor"], slow=[None])
@values_of("tied", [False, True], slow=[False])
def test_training_over_a_mesh_equals_one_device_with_logits(tied, sequence_axis):
    tokens, labels = token_batch()
    single = Model(tied)
    _, stored_loss = losses_of(single)
    expected, expected_losses = train(single.init(jax.random.key(0), tokens), stored_loss, tokens, labels)

    mesh = data_by_tensor()
    with jax.set_mesh(mesh):
        model = Model(tied, "tensor", "data", sequence_axis)
        fused_loss, _ = losses_of(model)
        tokens, labels = jax.device_put((tokens, labels), NamedSharding(mesh, P("data", None)))
        got, losses = train(born_split(model, mesh, tokens), fused_loss, tokens, labels)
    assert losses[-1] < losses[0]
    assert_trees_close(losses, expected_losses)
    weight = got["params"]["embed"]["embedding"] if tied else got["params"]["head"]["weight"]
    assert weight.value.sharding.spec == P("tensor", None)
    assert_trees_close(nn.meta.unbox(got), expected)
