"""The NNX head over a mesh equals the head on one device, in its results and in whole training steps."""

from __future__ import annotations

import contextlib
import functools

import jax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.flax_cases import (
    HEADS,
    MESHES,
    PADDED,
    assert_same_results,
    assert_trees_close,
    batch,
    data_by_tensor,
    optimizer,
    results,
    token_batch,
)
from tests.nnx_heads import Model, functional, fused_loss, make_head, stored_loss
from tests.pairs import values_of


@pytest.mark.fast("explicit, sequence")
@values_of("name", HEADS, slow=["plain", "scale"])
@pytest.mark.parametrize("mesh_is_given", [False, pytest.param(True, marks=pytest.mark.slow)])
@values_of("kind", MESHES, slow=["explicit", "auto, sequence parallel"])
def test_over_a_mesh_it_equals_one_device(kind, mesh_is_given, name):
    options = {**HEADS[name], **PADDED}
    axis_type, sequence_axis = MESHES[kind]
    mesh = data_by_tensor(axis_type)
    hidden, labels = batch()
    axes = {"vocab_axis": "tensor", "batch_axes": "data", "sequence_axis": sequence_axis}
    split = jax.device_put(hidden, NamedSharding(mesh, P("data", sequence_axis, None)))
    targets = jax.device_put(labels, NamedSharding(mesh, P("data", None)))
    with contextlib.nullcontext() if mesh_is_given else jax.set_mesh(mesh):
        head = make_head(**options, **axes, **({"mesh": mesh} if mesh_is_given else {}))
        got = results(functional(head), split, targets)
    (of_head, _), _ = got[0]
    assert head.weight.sharding.spec == P("tensor", None)
    assert of_head["weight"].sharding.spec[0] == "tensor"
    assert_same_results(jax.device_get(got), results(functional(make_head(**options)), hidden, labels))


def test_inside_shard_map_the_caller_names_the_axis():
    head = make_head(**PADDED)
    graphdef, state = nnx.split(head)
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(AxisType.Auto,))

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("tensor"), P(), P()), out_specs=P())
    def logprobs(state, hidden, labels):
        return nnx.merge(graphdef, state).logprobs(hidden, labels, axis_name="tensor")

    assert_trees_close(logprobs(state, *batch()), head.logprobs(*batch()))


def train(model, loss_function, tokens, labels, steps=3):
    """The losses of ``steps`` jitted steps; the model is updated in place."""
    state = nnx.Optimizer(model, optimizer(), wrt=nnx.Param)

    @nnx.jit
    def step(model, state, tokens, labels):
        loss, grads = nnx.value_and_grad(loss_function)(model, tokens, labels)
        state.update(model, grads)
        return loss

    return [float(step(model, state, tokens, labels)) for _ in range(steps)]


@pytest.mark.slow
@pytest.mark.parametrize("sequence_axis", [None, "tensor"])
@pytest.mark.parametrize("tied", [False, True])
def test_training_over_a_mesh_equals_one_device_with_logits(tied, sequence_axis):
    tokens, labels = token_batch()
    single = Model(tied, nnx.Rngs(0))
    expected = train(single, stored_loss, tokens, labels)

    mesh = data_by_tensor()
    with jax.set_mesh(mesh):
        model = Model(tied, nnx.Rngs(0), "tensor", batch_axes="data", sequence_axis=sequence_axis)
        losses = train(model, fused_loss, *jax.device_put((tokens, labels), NamedSharding(mesh, P("data", None))))
    assert losses[-1] < losses[0]
    assert_trees_close(losses, expected)
    assert model.head.weight.sharding.spec == P("tensor", None)
    assert_trees_close(*(nnx.to_pure_dict(nnx.state(m, nnx.Param)) for m in (model, single)))
