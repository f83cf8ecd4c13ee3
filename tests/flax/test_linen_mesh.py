"""The Linen head over a mesh against one device."""

from __future__ import annotations

import contextlib
import functools

import flax.linen as nn
import jax
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.flax.test_linen import functional, initialise, make_head
from tests.flax_cases import HEADS, MESHES, PADDED, assert_same_results, batch, data_by_tensor, optimizer, results
from tests.pairs import values_of


@pytest.mark.fast("explicit, sequence")
@values_of("name", HEADS, slow=["plain", "scale"])
@pytest.mark.parametrize("mesh_is_given", [pytest.param(False, marks=pytest.mark.slow), True])
@values_of("kind", MESHES, slow=["explicit", "auto, sequence parallel"])
def test_over_a_mesh_it_equals_one_device(kind, mesh_is_given, name):
    options = {**HEADS[name], **PADDED}
    axis_type, sequence_axis = MESHES[kind]
    mesh = data_by_tensor(axis_type)
    single, (hidden, labels) = make_head(**options), batch()
    axes = {"vocab_axis": "tensor", "batch_axes": "data", "sequence_axis": sequence_axis}
    split = jax.device_put(hidden, NamedSharding(mesh, P("data", sequence_axis, None)))
    targets = jax.device_put(labels, NamedSharding(mesh, P("data", None)))
    with contextlib.nullcontext() if mesh_is_given else jax.set_mesh(mesh):
        head = make_head(**options, **axes, **({"mesh": mesh} if mesh_is_given else {}))
        own = functional(head, born_split(head, mesh, split))
        if head.use_bias:
            assert jax.tree.leaves(own.params["params"]["bias"])[0].sharding.spec == P("tensor")
        got = results(own, split, targets)
    assert_same_results(jax.device_get(got), results(functional(single, initialise(single)), hidden, labels))


def born_split(model, mesh, example):
    """Variables created by jit in the shardings that their annotations name."""
    init = functools.partial(model.init, jax.random.key(0), example)
    return jax.jit(init, out_shardings=nn.get_sharding(jax.eval_shape(init), mesh))()


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
