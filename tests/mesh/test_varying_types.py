"""Operands that are typed as varying over the vocabulary's axis, but are the same on every shard.

``lax.all_gather`` types its results so. Under ``check_vma=True`` results stay typed as equal, and gradients that are
taken inside ``shard_map`` are those of one device, not as many times larger as there are shards.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from lce_jax import linear_cross_entropy, linear_kl, linear_logits, linear_logprobs, linear_loss, linear_topk, losses
from tests import oracle
from tests.draws import Draws

B, H, V, K = 4, 8, 32, 3
DRAWS = Draws()
OPERANDS: dict[str, jax.Array] = {
    "hidden": DRAWS.normal(B, H),
    "weight": DRAWS.normal(V, H),
    "bias": DRAWS.normal(V),
    "labels": DRAWS.integers(0, V, B).at[1].set(-100),
    "where": jnp.asarray([True, True, False, True]),
    "temperature": jnp.asarray([0.5, 1.0, 2.0, 1.5]),
    "scale": jnp.float32(1.3),
    "softcap": jnp.float32(4.0),
    "ids": DRAWS.integers(0, V, B, K).at[0, 0].set(-1),
    "z_loss": jnp.float32(1e-2),
    "normalizer": jnp.float32(3.0),
    "own": DRAWS.normal(B, 2),
    "beta": jnp.float32(0.3),
    "teacher_hidden": DRAWS.normal(B, H),
    "teacher_weight": DRAWS.normal(V, H),
    "teacher_temperature": jnp.asarray([0.7, 1.1, 1.0, 0.5]),
}
SPLIT = ("weight", "bias", "teacher_weight")  # over the vocabulary
PER_TOKEN = ("hidden", "labels", "where", "temperature", "ids", "own", "teacher_hidden", "teacher_temperature")
DIFFERENTIABLE = ("hidden", "weight", "bias", "z_loss", "own")


def options_of(x: dict[str, Any]) -> dict[str, Any]:
    names = {"where": "where", "temperature": "temperature", "scale": "logit_scale", "softcap": "logit_softcap"}
    return {"bias": x["bias"], "precision": "highest", **{names[name]: x[name] for name in names}}


def logprobs(x: dict[str, Any], axis_name: Any) -> Any:
    out = linear_logprobs(
        x["hidden"], x["weight"], x["labels"], candidates=x["ids"], axis_name=axis_name, **options_of(x)
    )
    return jnp.sum(out.logprobs + 0.3 * out.entropy + 0.1 * out.lse + out.candidate_logprobs.sum(-1))


def cross_entropy(x: dict[str, Any], axis_name: Any, **more: Any) -> Any:
    more |= {"z_loss": x["z_loss"], "ignore_index": -100, "axis_name": axis_name}
    return jnp.sum(linear_cross_entropy(x["hidden"], x["weight"], x["labels"], **options_of(x), **more))


def normalized_cross_entropy(x: dict[str, Any], axis_name: Any) -> Any:
    return cross_entropy(x, axis_name, normalizer=x["normalizer"])


def loss(x: dict[str, Any], axis_name: Any) -> Any:
    def token_loss(logprob: Any, entropy: Any, lse: Any, own: Any) -> Any:
        return losses.ppo_clip(logprob, entropy, lse, own[0] - 4.0, own[1]) + 0.1 * entropy

    operands = x["hidden"], x["weight"], x["labels"], x["own"]
    return linear_loss(token_loss, *operands, axis_name=axis_name, **options_of(x))[0]


def kl(x: dict[str, Any], axis_name: Any, **more: Any) -> Any:
    operands = (x[name] for name in ("hidden", "weight", "teacher_hidden", "teacher_weight"))
    more |= {"teacher_temperature": x["teacher_temperature"], "axis_name": axis_name}
    more |= {"teacher_logit_scale": "same", "teacher_logit_softcap": "same"}
    return jnp.sum(linear_kl(*operands, **options_of(x), **more))


def jsd(x: dict[str, Any], axis_name: Any) -> Any:
    return kl(x, axis_name, direction="jsd", beta=x["beta"])


def logits(x: dict[str, Any], axis_name: Any) -> Any:
    options = options_of(x)
    del options["precision"]
    return jnp.sum(jnp.sin(linear_logits(x["hidden"], x["weight"], x["ids"], axis_name=axis_name, **options)))


def topk(x: dict[str, Any], axis_name: Any) -> Any:
    x = lax.stop_gradient(x)
    return jnp.sum(linear_topk(x["hidden"], x["weight"], K, axis_name=axis_name, **options_of(x)).logprobs)


ALL = ("hidden", "where", "temperature", "scale", "softcap")
FUNCTIONS: dict[Any, tuple[str, ...]] = {  # and the operands that may be typed as varying
    logprobs: (*ALL, "labels", "ids"),
    cross_entropy: (*ALL, "labels", "z_loss"),
    functools.partial(cross_entropy, reduction="sum"): ("where", "labels", "z_loss"),
    functools.partial(cross_entropy, reduction="none"): ("where", "labels", "z_loss"),
    functools.partial(cross_entropy, label_smoothing=0.1): ("where", "labels", "z_loss"),
    normalized_cross_entropy: ("normalizer", "where", "z_loss"),
    loss: (*ALL, "labels", "own"),
    kl: (*ALL, "teacher_hidden", "teacher_temperature"),
    jsd: (*ALL, "beta", "teacher_hidden"),
    logits: (*ALL, "ids"),
    topk: ALL,
}
MESHES: dict[str, tuple[dict[str, int], Any, tuple[str, ...]]] = {  # axes, the vocabulary's, those of the type
    "tensor": ({"tensor": 4}, "tensor", ("tensor",)),
    "data and tensor": ({"data": 2, "tensor": 2}, "tensor", ("tensor",)),
    "one of two": ({"a": 2, "b": 2}, ("a", "b"), ("b",)),
}


def name_of(function: Any) -> str:
    if isinstance(function, functools.partial):
        return f"{function.func.__name__} {function.keywords}"
    return function.__name__


def run_on_shards(calls: list[tuple[Any, tuple[str, ...]]], mesh_name: str) -> Any:
    """Of each function in one program, its sum and gradients with these operands typed as varying."""
    sizes, axis_name, typed = MESHES[mesh_name]
    kinds = (AxisType.Auto,) * len(sizes)
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds, devices=jax.devices("cpu")[:4])
    data = tuple(axis for axis in sizes if axis == "data")
    specs = {name: P(axis_name) if name in SPLIT else P(data) if name in PER_TOKEN else P() for name in OPERANDS}

    def differentiate_call(function: Any, varying: tuple[str, ...], x: dict[str, Any]) -> Any:
        x = x | {name: lax.pcast(x[name], typed, to="varying") for name in varying}

        def total(floats: dict[str, Any]) -> Any:
            return function(x | floats, axis_name)

        value, grads = jax.value_and_grad(total)({name: x[name] for name in DIFFERENTIABLE})
        grads |= {name: lax.psum(grads[name], typed) for name in varying if name in grads}  # of each shard's own copy
        return lax.pmean(lax.psum(value, data), axis_name), grads

    def body(x: dict[str, Any]) -> Any:
        return [differentiate_call(*call, x) for call in calls]

    out_specs = [(P(), {name: specs[name] for name in DIFFERENTIABLE})] * len(calls)
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(specs,), out_specs=out_specs))(OPERANDS)


@functools.cache
def run_on_one_device(functions: tuple[Any, ...], parts: int) -> Any:
    """Of each function, the sum over as many parts of the tokens."""

    def total(floats: dict[str, Any], function: Any) -> Any:
        x = OPERANDS | floats
        size = B // parts
        each = [{k: v[i * size : (i + 1) * size] if k in PER_TOKEN else v for k, v in x.items()} for i in range(parts)]
        return sum(function(part, None) for part in each)

    def every(floats: dict[str, Any]) -> Any:
        return [jax.value_and_grad(total)(floats, function) for function in functions]

    found = jax.jit(every)({name: OPERANDS[name] for name in DIFFERENTIABLE})
    return dict(zip(functions, found, strict=True))


CALLS = {  # every function with all operands typed so, and with each of them
    "all": list(FUNCTIONS.items()),
    "each": [(function, (name,)) for function, operands in FUNCTIONS.items() for name in operands],
}
SOME = {
    "most": [(function, FUNCTIONS[function]) for function in (logprobs, cross_entropy, jsd)],
    "normalizer": [call for call in CALLS["each"] if call[0] in (normalized_cross_entropy, cross_entropy)],
    "logprobs": CALLS["all"][:1],
}
WAYS = [("most", "one of two"), ("normalizer", "tensor"), ("logprobs", "data and tensor")]
WAYS += itertools.product(CALLS, MESHES)


@pytest.mark.fast("most")
@pytest.mark.parametrize(("varying", "mesh"), WAYS)
def test_as_on_one_device(varying: str, mesh: str) -> None:
    calls = (CALLS | SOME)[varying]
    functions = tuple(dict.fromkeys(function for function, _ in calls))
    want = run_on_one_device(functions, MESHES[mesh][0].get("data", 1))
    for (function, operands), (value, grads) in zip(calls, run_on_shards(calls, mesh), strict=True):
        named = f"{name_of(function)}: {' '.join(operands)}"
        assert oracle.value_error(value, want[function][0]) < 2e-6, named
        for name in DIFFERENTIABLE:
            assert oracle.relative_norm(grads[name], want[function][1][name]) < 5e-6, (named, name)


@pytest.mark.fast("none-True", "mean-False")
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_loss_of_what_differs_is_nan(reduction: str, check_vma: bool) -> None:
    """That of the row if the row differs, and of all if a number does, on every shard; with and without types."""
    x, mesh = OPERANDS, jax.make_mesh((4,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:4])

    def both(x: dict[str, Any], own: Any, axis_name: Any) -> tuple[Any, Any]:
        """The loss, and a `linear_loss` with an argument ``own`` for each token."""
        more = {"normalizer": x["normalizer"]} if reduction == "mean" else {}
        operands, where = (x["hidden"], x["weight"], x["labels"]), x["where"]
        loss = linear_cross_entropy(
            *operands, where=where, z_loss=x["z_loss"], reduction=reduction, axis_name=axis_name, **more
        )

        def weighted(logprob: Any, entropy: Any, lse: Any, own: Any) -> Any:
            del entropy, lse
            return own * logprob

        return loss, linear_loss(weighted, *operands, own, where=where, axis_name=axis_name)[0]

    def body(x: dict[str, Any], differs: Any) -> Any:
        shard = lax.axis_index("tensor")
        own = x["own"][:, 0].at[0].add(jnp.where(differs["own"], shard, 0))
        x = x | {name: x[name] + jnp.where(differs[name], shard, 0) for name in ("z_loss", "normalizer")}
        x |= {
            "labels": x["labels"].at[0].set(jnp.where(differs["labels"], shard, x["labels"][0])),
            "where": shard < 4 * x["where"],
        }
        found = both(x, own, "tensor")
        return jax.tree.map(lambda y: (lax.pcast(y, "tensor", to="varying") if check_vma else y)[None], found)

    specs = {name: P("tensor") if name in SPLIT else P() for name in x}, P()
    mapped = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("tensor"), check_vma=check_vma))
    want = jax.tree.map(np.asarray, jax.jit(functools.partial(both, axis_name=None))(x, x["own"][:, 0]))
    every = [0, 1, 2, 3] if check_vma else [0, 3]  # without types, of the rows that count
    cases = {None: ([], False), "labels": ([0], True), "z_loss": (every, False), "own": ([], True)}
    cases |= {"normalizer": (every, False)} if reduction == "mean" else {}
    for differs, (wrong, is_nan) in cases.items():
        loss, weighted = mapped(x, {name: name == differs for name in ("labels", "z_loss", "normalizer", "own")})
        is_wrong = np.isin(np.arange(B), wrong) if want[0].ndim else bool(wrong)
        expected = np.where(is_wrong, np.nan, want[0])
        for shard in range(4):
            np.testing.assert_allclose(loss[shard], expected, rtol=5e-6, err_msg=str(differs))
            np.testing.assert_allclose(weighted[shard], jnp.nan if is_nan else want[1], rtol=5e-6, err_msg=str(differs))
