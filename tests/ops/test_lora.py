"""An adapter on a frozen head, against the merged weight with stored logits in float64."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lce_jax import explain, linear_cross_entropy, linear_logprobs, linear_loss, sharded_linear_cross_entropy
from tests import cases, oracle
from tests.sharding_cases import mesh_of

SCALE = 1.75
CASES = {
    "rank 1": (1, cases.case("rank 1")),
    "rank 100, a cache": (100, cases.case("", cache_bytes=1 << 20, H=120)),
    "no tokens": (4, cases.case("", leading=(2, 0))),
    "everything": (8, cases.case(
        "", leading=(4, 6), V=1128, vocab_size=1113, temperature="token", where="nan", labels="foreign", spread=3.0,
        logit_softcap=4.0, logit_scale=-1.3, stats=True, weight_layout="hv", K=3,
    )),
    "floor, a part of a cache": (8, cases.case("", H=31, V=5128, vocab_size=5113, floor=30, cache_bytes=1 << 17)),
    "ragged bfloat16": (8, cases.case("", dtype="bfloat16", leading=(2, 150), H=128, V=50257 % 4096, where="some")),
    "float16": (64, cases.case("", dtype="float16", leading=(64,), H=128, V=512)),
    "float32 hidden, bfloat16 weight": (8, cases.case("", dtype="bfloat16", hidden_dtype="float32", H=128, V=512)),
    "bfloat16 hidden, float32 weight": (8, cases.case("", hidden_dtype="bfloat16")),
}  # fmt: skip


def adapter(test: cases.TestCase, rank: int) -> tuple[jax.Array, jax.Array]:
    """A and B in float32, PEFT's default. B's rows of padding hold NaN."""
    rng = np.random.default_rng(7)
    a, b = rng.standard_normal((rank, test.H)) / np.sqrt(test.H), rng.standard_normal((test.V, rank)) / np.sqrt(rank)
    b[dict(test.options).get("vocab_size", test.V) :] = np.nan
    return jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32)


def merged(weight: Any, a: Any, b: Any, options: dict[str, Any]) -> tuple[np.ndarray, Any]:
    """The weight with the adapter in it, and what its gradient makes of those of A and B."""
    a, b = np.asarray(a, np.float64), np.nan_to_num(np.asarray(b, np.float64))
    is_vh = options.get("weight_layout", "vh") == "vh"
    whole = np.asarray(weight, np.float64) + SCALE * (b @ a if is_vh else (b @ a).T)

    def factor_gradients(dweight: Any) -> tuple[np.ndarray, np.ndarray]:
        dweight = dweight if is_vh else dweight.T
        return SCALE * b.T @ dweight, SCALE * dweight @ a.T

    return whole, factor_gradients


@pytest.mark.fast("everything", "bfloat16 weight")
@pytest.mark.parametrize("name", CASES)
def test_matches_float64(name: str) -> None:
    rank, test = CASES[name]
    hidden, weight, labels, options, seeds = cases.draw(test)
    a, b = adapter(test, rank)
    whole, factor_gradients = merged(weight, a, b, options)
    if test.floor:
        options["logit_floor"] = cases.draw_floor(test, (hidden, jnp.asarray(whole), labels), {})
    options = {"precision": "highest"} | options

    @functools.partial(jax.value_and_grad, argnums=(0, 1, 2), has_aux=True)
    def run(hidden: Any, a: Any, b: Any) -> Any:
        out = linear_logprobs(hidden, weight, labels, lora=(a, b, SCALE), **options)
        return cases.objective(out, seeds), out

    (_, out), grads = jax.jit(run)(hidden, a, b)
    want = oracle.logprobs(hidden, whole, labels, **options)
    is_16_bit = weight.dtype.itemsize == 2
    # u, scale · A and B are rounded to eight bits, each of which moves a logit of size 1 by up to 2^-9.
    bound = 3e-2 if is_16_bit else 1e-5
    for field in ("logprobs", "entropy", "lse"):
        assert oracle.value_error(getattr(out, field), getattr(want, field)) < bound, field
    dhidden, dweight = oracle.gradients(hidden, whole, labels, seeds, **options)
    for got, operand, exact in zip(grads, (hidden, a, b), (dhidden, *factor_gradients(dweight)), strict=True):
        assert got.dtype == operand.dtype
        assert oracle.relative_norm(got, exact) < (1e-2 if is_16_bit or test.hidden_dtype else 2e-5)


def losses(hidden: Any, weight: Any, labels: Any, **options: Any) -> Any:
    ignored = {"ignore_index": 3, "precision": "highest"}
    first = linear_cross_entropy(hidden, weight, labels, z_loss=0.1, **ignored, **options)
    chunked = linear_cross_entropy(
        hidden, weight, labels, label_smoothing=0.1, reduction="sum", chunk_bytes=1, **ignored, **options
    )
    any_loss = linear_loss(lambda x, entropy, _: x * entropy, hidden, weight, labels, chunk_bytes=1, **options)[0]
    return first + chunked + any_loss


PLAIN = cases.case("plain", leading=(4, 64), H=16, V=600)
WEIGHTS = ("in the forward", "checkpointed", "traced scale", "outside jit", "batched")


@pytest.mark.fast("traced scale")
@pytest.mark.parametrize("way", WEIGHTS)
def test_losses_are_those_of_the_merged_weight(way: str) -> None:
    hidden, weight, labels, _, _ = cases.draw(PLAIN)
    factors = adapter(PLAIN, 5)
    scale = jnp.float32(SCALE) if way == "traced scale" else SCALE

    def adapter_losses(hidden: Any, a: Any, b: Any) -> Any:
        return losses(hidden, weight, labels, lora=(a, b, scale))

    def merged_losses(hidden: Any, a: Any, b: Any) -> Any:
        return losses(hidden, weight + SCALE * jnp.matmul(b, a, precision="highest"), labels)

    with_adapter = jax.checkpoint(adapter_losses) if way == "checkpointed" else adapter_losses
    both = [jax.value_and_grad(one, (0, 1, 2)) for one in (with_adapter, merged_losses)]
    if way == "batched":  # over examples of hidden and of A
        both = [jax.vmap(one, in_axes=(0, 0, None)) for one in both]
        given = hidden[None] * jnp.ones((2, 1, 1, 1)), jnp.stack([factors[0], -factors[0]]), factors[1]
    else:
        given = hidden, *factors
    (got, found), (want, exact) = (one(*given) if way == "outside jit" else jax.jit(one)(*given) for one in both)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    for x, y in zip(found, exact, strict=True):
        assert oracle.relative_norm(x, y) < 2e-5


@pytest.mark.slow  # as where hidden and labels are split otherwise
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit, "split", "shard_map"], ids=str)
def test_on_a_mesh(kind: Any) -> None:
    hidden, weight, labels, _, _ = cases.draw(PLAIN)
    given = hidden, *adapter(PLAIN, 8), weight, labels

    def run(hidden: Any, a: Any, b: Any, weight: Any, labels: Any, **options: Any) -> Any:
        return linear_cross_entropy(hidden, weight, labels, lora=(a, b, SCALE), reduction="sum", **options)

    want = jax.jit(jax.grad(run, (0, 1, 2)))(*given)
    mesh = mesh_of("data 2, tensor 4", {"shard_map": AxisType.Auto, "split": AxisType.Explicit}.get(kind, kind))
    specs = P("data"), P(), P("tensor"), P("tensor"), P("data")
    if kind == "split":  # as parameters often are, and hidden states between layers
        specs = P("data", None, "tensor"), P("data"), P("tensor", "data"), P("tensor", "data"), P("data")
    over_mesh = run
    if kind == "shard_map":

        def own(*operands: Any) -> Any:
            return jax.lax.psum(run(*operands, axis_name="tensor"), "data")

        over_mesh = jax.shard_map(own, mesh=mesh, in_specs=specs, out_specs=P())
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(given, specs, strict=True)]
        found = jax.jit(jax.grad(over_mesh, (0, 1, 2)))(*placed)
    for x, y in zip(found, want, strict=True):
        assert oracle.relative_norm(x, y) < 2e-5


SPLITS = {  # of hidden, weight, A, B and labels: the tokens of hidden are split as those of labels are, or otherwise
    "labels alone": (P(), P("tensor"), P(), P("tensor"), P("data")),
    "hidden dimension": (P(None, None, "tensor"), P("tensor"), P(None, "tensor"), P("tensor"), P("data")),
    "hidden dimension over the axis of labels": (P(None, None, "data"), P("data"), P(), P("data"), P("data")),
    "other axes": (P("tensor"), P("tensor"), P("tensor"), P(None, "tensor"), P("data")),
    "sequence": (P(None, "tensor"), P(), P(), P(), P("data")),
    "more axes": (P("data", "tensor"), P("tensor"), P(), P("tensor"), P("data")),
    "hidden alone": (P("data"), P("tensor"), P(), P("tensor"), P()),
}


@pytest.mark.fast("hidden dimension over the axis of labels-AxisType.Explicit", "sequence-AxisType.Auto")
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=str)
@pytest.mark.parametrize("split", SPLITS)
def test_hidden_and_labels_split_otherwise(split: str, kind: Any) -> None:
    """Rows that are left out hold NaN. By types or by XLA, and by name."""
    hidden, weight, labels, _, _ = cases.draw(PLAIN)
    labels = labels.at[1, 3].set(-100)
    given = hidden.at[1, 3].set(jnp.nan), weight, *adapter(PLAIN, 8), labels

    def run(hidden: Any, weight: Any, a: Any, b: Any, labels: Any, function: Any = linear_cross_entropy) -> Any:
        named = {"batch_axes": "data"} if function is sharded_linear_cross_entropy else {}
        return function(hidden, weight, labels, lora=(a, b, SCALE), precision="highest", **named)

    gradients = jax.value_and_grad(run, (0, 2, 3))
    want, mesh = jax.jit(gradients)(*given), mesh_of("data 2, tensor 4", kind)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(given, SPLITS[split], strict=True)]
        functions = linear_cross_entropy, sharded_linear_cross_entropy
        found = jax.jit(lambda *x: [gradients(*x, function) for function in functions])(*placed)
    for each in found:
        for x, y in zip(jax.tree.leaves(each), jax.tree.leaves(want), strict=True):
            assert oracle.relative_norm(x, y) < 2e-5


def test_the_weight_is_not_copied() -> None:
    """Nor the adapter merged: the program holds less than a copy of the weight."""
    hidden, weight, labels = jnp.zeros((64, 512)), jnp.zeros((16384, 512)), jnp.zeros((64,), int)
    a, b = jnp.zeros((4, 512)), jnp.zeros((16384, 4))

    def loss(hidden: Any, a: Any, b: Any, weight: Any) -> Any:
        return linear_cross_entropy(hidden, weight, labels, lora=(a, b, 1.0))

    memory = jax.jit(jax.grad(loss, (0, 1, 2))).lower(hidden, a, b, weight).compile().memory_analysis()
    assert memory.temp_size_in_bytes < weight.nbytes / 2


STRUCT = jax.ShapeDtypeStruct
SHAPES = STRUCT((512, 256), jnp.bfloat16), STRUCT((1024, 256), jnp.bfloat16), STRUCT((512,), jnp.int32)
PAIR = STRUCT((8, 256), jnp.float32), STRUCT((1024, 8), jnp.float32)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"weight_layout": "hv"}, 'lora with weight_layout="hv": the kernels do not support both'),
        ({"candidates": STRUCT((512, 3), jnp.int32)}, "lora with candidates"),
        ({"gradient_threshold": 0.1}, "lora with gradient_threshold"),
        ({"vocab_part_size": 512}, "lora with vocab_part_size"),
        ({"label_smoothing": 0.1}, "lora with label smoothing"),
    ],
)
def test_what_the_kernels_refuse(options: dict[str, Any], reason: str) -> None:
    weight = STRUCT((256, 1024), jnp.bfloat16) if "weight_layout" in options else SHAPES[1]
    plan = explain(SHAPES[0], weight, SHAPES[2], lora=(*PAIR, 1.0), **options)
    assert plan.implementation == "xla"
    assert reason in plan.refused["mosaic_gpu"]
    alone = explain(*SHAPES, lora=(*PAIR, 1.0))
    assert alone.implementation == "mosaic_gpu"
    copies = 512 * (256 + 64) * 2 + 1024 * 64 * 2  # hidden and u, and B of whole 64 columns
    assert alone.forward_bytes == explain(*SHAPES).forward_bytes + copies


def test_what_has_no_adapter_says_so() -> None:
    hidden, weight, labels, _, _ = cases.draw(PLAIN)
    lora = (*adapter(PLAIN, 5), 1.0)
    with pytest.raises(ValueError, match=r"lora and bias .*weight \+ scale \* B @ A"):
        linear_logprobs(hidden, weight, labels, lora=lora, bias=jnp.zeros((600,)))
    with pytest.raises(ValueError, match=r"pass jax.lax.stop_gradient\(weight\)"):
        jax.grad(lambda weight: linear_cross_entropy(hidden, weight, labels, lora=lora))(weight)
    with pytest.raises(ValueError, match=r"pass jax.lax.stop_gradient\(weight\)"):
        jax.grad(lambda weight: linear_logprobs(hidden, weight, labels, lora=lora).lse.sum())(weight)
    with pytest.raises(TypeError, match="has no option lora"):
        explain(*SHAPES, lora=(*PAIR, 1.0), k=3)
