"""Candidates, logits at chosen ids and the KL of two heads over real GPUs: as on one, and the same bits on each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lce_jax import (
    linear_kl,
    linear_logits,
    linear_logprobs,
    sharded_linear_kl,
    sharded_linear_logits,
    sharded_linear_logprobs,
)
from tests import cases, oracle

pytestmark = pytest.mark.multi_gpu

CASE = cases.case(
    "chosen", leading=(512,), H=512, V=8192, dtype="bfloat16", labels="foreign", vocab_size=8000, temperature="token",
    logit_softcap=4.0, K=8,
)  # fmt: skip
WEIGHTS = (1, 3)  # of the operands hidden, weight, and those of a teacher


def operands_of(name: str) -> tuple[list[Any], dict[str, Any], Any]:
    """The arrays, what else the call is given, and a cotangent."""
    hidden, weight, labels, options, seeds = cases.draw(CASE)
    ids = options.pop("candidates")
    if name == "linear_kl":
        teacher, teachers_weight, *_ = cases.draw(CASE, seed=1)
        return [hidden, weight, teacher, teachers_weight], options | {"teacher_logit_softcap": "same"}, seeds[0]
    if name == "candidates":
        options |= {"labels": labels, "implementation": "mosaic_gpu"}
    return [hidden, weight], options | {"ids": ids}, seeds[3]


def of_name(name: str, sharded: bool) -> Callable[..., Any]:
    """The function of hidden, weight, a teacher's if there is one, and options: one array of results."""
    if name == "linear_kl":
        return sharded_linear_kl if sharded else linear_kl
    if name == "linear_logits":
        logits = sharded_linear_logits if sharded else linear_logits
        return lambda *x, ids, **more: logits(*x, ids, **more)
    logprobs = sharded_linear_logprobs if sharded else linear_logprobs
    return lambda *x, ids, labels, **more: logprobs(*x, labels, candidates=ids, **more).candidate_logprobs


def evaluate(function: Callable[..., Any], operands: list[Any], options: dict[str, Any], seed: Any) -> Any:
    """The results, and the gradients in hidden and weight."""

    def objective(hidden: Any, weight: Any, *others: Any) -> Any:
        out = function(hidden, weight, *others, **options)
        return jnp.sum(seed * (out if out.ndim == seed.ndim else out[0])), out

    run = jax.jit(jax.grad(objective, argnums=(0, 1), has_aux=True))
    gradients, out = run(*operands)
    return out, gradients


def assert_as_on_one(got: Any, want: Any) -> None:
    """Partial sums of bfloat16 gradients round anew, as in `test_mesh`."""
    assert oracle.value_error(got[0], want[0]) < 1e-5
    assert all(oracle.relative_norm(a, b) < 4e-3 for a, b in zip(got[1], want[1], strict=True))


@pytest.mark.parametrize("name", ["candidates", "linear_logits", "linear_kl"])
def test_every_gpu_has_the_same_bits(name: str) -> None:
    operands, options, seed = operands_of(name)
    mesh = jax.make_mesh((len(jax.devices()),), ("tensor",), axis_types=(AxisType.Auto,))
    specs = tuple(P("tensor") if i in WEIGHTS else P() for i in range(len(operands)))
    function = of_name(name, sharded=False)

    def mapped(*operands: Any, **options: Any) -> Any:
        def body(*operands: Any) -> Any:
            return function(*operands, axis_name="tensor", **options)[None]

        # Stacked over the GPUs. Without check_vma the cotangent of each copy is its own.
        return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("tensor"), check_vma=False)(*operands)

    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(operands, specs, strict=True)]
    out, gradients = evaluate(mapped, placed, options, seed)
    of_hidden = [np.asarray(one.data.astype("float32")) for one in gradients[0].addressable_shards]
    for every in (np.asarray(out), of_hidden):
        assert len(every) == len(jax.devices())
        assert all(one.tobytes() == every[0].tobytes() for one in every)
    assert of_hidden[0].shape == operands[0].shape
    assert_as_on_one((out[0], gradients), evaluate(function, operands, options, seed))


@pytest.mark.parametrize("name", ["candidates", "linear_logits", "linear_kl"])
def test_from_outside(name: str) -> None:
    """The sequence is split over the vocabulary's axis."""
    operands, options, seed = operands_of(name)
    mesh = jax.make_mesh((len(jax.devices()),), ("tensor",), axis_types=(AxisType.Auto,))
    axes = {"mesh": mesh, "sequence_axis": "tensor"}
    got = evaluate(of_name(name, sharded=True), operands, options | axes, seed)
    assert_as_on_one(got, evaluate(of_name(name, sharded=False), operands, options, seed))
