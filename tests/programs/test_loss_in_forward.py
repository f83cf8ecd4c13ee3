"""`linear_cross_entropy` whose gradients are computed in the forward: when, what it is then, and by which kernels."""

from __future__ import annotations

import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lce_jax import explain, linear_cross_entropy, sharded_linear_cross_entropy
from lce_jax.programs import _token_chunks
from tests.mesh.test_linear_loss import BIAS, HIDDEN, LABELS, WEIGHT, WHERE, assert_same, mesh_of
from tests.pairs import combined, values_of

GIB = 1 << 30
T, H, V = 32768, 4096, 151936  # a full cache has 9.3 GiB, dweight in float32 2.3
STRUCTS = tuple(map(jax.ShapeDtypeStruct, ((T, H), (V, H), (T,)), ("bfloat16", "bfloat16", "int32")))


@pytest.mark.fast(
    "True-4294967296-options1", "options2", "options3", "options4", "options6", "options7", "options8", "options9"
)
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("expected", "cache_bytes", "options"),
    [
        (True, 4 * GIB, {}),
        (True, 4 * GIB, {"reduction": "sum", "z_loss": 1e-4, "ignore_index": 7}),
        (True, 7 * GIB, {"ignore_index": None}),  # every row counts, so none is moved
        (False, 8 * GIB, {}),  # so many exponentials that a backward from them is faster
        (False, 2 * GIB, {}),  # less than the sum of dweight
        (False, 0, {}),
        (False, 4 * GIB, {"reduction": "none"}),
        (False, 4 * GIB, {"label_smoothing": 0.1}),
        (False, 4 * GIB, {"gradient_threshold": 2**-12}),
        (True, 4 * GIB, {"implementation": "xla"}),
    ],
)
def test_when(expected: bool, cache_bytes: int, options: dict[str, Any]) -> None:
    """`explain` says what the traced call does."""
    options = {"reduction": "mean", "cache_bytes": cache_bytes} | options
    plan = explain(*STRUCTS, **options)
    assert ("chunk of tokens" in plan.tiles) == expected
    if expected:
        # A tile of xla has a quarter of the chunk's tokens and takes 0.5 GiB, which the plan counts more than once.
        assert plan.most_bytes < (1.35 if "implementation" in options else 1.1) * cache_bytes
    call = functools.partial(linear_cross_entropy, **options)
    jaxpr = str(jax.make_jaxpr(jax.grad(lambda h, w, y: jnp.sum(call(h, w, y)), (0, 1)))(*STRUCTS))
    # Every exponential is kept, and no tile of logits computed twice.
    if "implementation" in options:
        assert (jaxpr.count("dot_general") == 2 * 3) == expected  # of a tile of the remainder, and of all others
    else:
        assert ("lce_cached_dlogits" in jaxpr and "lce_dlogits" not in jaxpr) == expected


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])
@pytest.mark.parametrize("cache_bytes", [1 * GIB, 4 * GIB])
def test_explain_on_a_mesh(kind: AxisType, cache_bytes: int) -> None:
    """It knows how the arrays are split; over Auto axes the traced call does not."""
    mesh, specs = mesh_of((4, 2), kind), (P("data"), P("tensor"), P("data"))
    with jax.set_mesh(mesh):
        structs = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
            for x, spec in zip(STRUCTS, specs, strict=True)
        ]
        plan = explain(*structs, reduction="mean", cache_bytes=cache_bytes)
        call = functools.partial(linear_cross_entropy, cache_bytes=cache_bytes)
        jaxpr = str(jax.jit(jax.grad(call, argnums=(0, 1))).trace(*structs).jaxpr)
    expected = kind == AxisType.Auto and cache_bytes == 4 * GIB  # of 9.3 GiB in all, 1.2 on a device
    assert ("chunk of tokens" in plan.tiles) == expected
    assert ("linear_loss" in jaxpr) == expected


@pytest.mark.usefixtures("hopper")
def test_not_in_float16() -> None:
    structs = [jax.ShapeDtypeStruct(x.shape, "float16" if x.dtype == jnp.bfloat16 else x.dtype) for x in STRUCTS]
    assert "chunk of tokens" not in explain(*structs, reduction="sum", cache_bytes=4 * GIB).tiles


@pytest.mark.usefixtures("hopper")
def test_lowering() -> None:
    loss = functools.partial(linear_cross_entropy, cache_bytes=4 * GIB)
    traced = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).trace(*STRUCTS)
    assert "lce_cached_dlogits" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Turns the gradients in the forward on, a chunk of 128 tokens at a time, and off."""

    def turn(on: bool) -> None:
        monkeypatch.setattr(_token_chunks, "instead_of_cache", lambda *_: 1 if on else None)

    return turn


def step(function: Any, **options: Any) -> Any:
    """Value and gradients: of hidden, weight, bias, the penalty's weight, and the divisor if there is one."""
    divided = options.get("reduction", "mean") == "mean" and options.pop("divided", True)

    def loss(hidden: Any, weight: Any, bias: Any, z_loss: Any, divisor: Any, labels: Any, where: Any) -> Any:
        own = {"normalizer": divisor} if divided else {}
        told = {"where": where, "cache_bytes": 1, "precision": "highest", "ignore_index": 3} | own | options
        return 0.3 * function(hidden, weight, labels, bias=bias, z_loss=z_loss, **told)

    return jax.value_and_grad(loss, argnums=(0, 1, 2, 3, 4) if divided else (0, 1, 2, 3))


GIVEN = HIDDEN, WEIGHT, BIAS, jnp.float32(1e-2), jnp.float32(77.0), LABELS, WHERE


@pytest.mark.fast("divided")
@values_of(
    "options",
    [{}, {"divided": False}, {"reduction": "sum", "temperature": 0.7}, {"divided": False, "logit_softcap": 2.0}],
    slow=[{}, {"divided": False}],
)
def test_the_same_loss(options: dict[str, Any], forced: Any) -> None:
    found = []
    for on in (False, True):
        forced(on)
        found.append(jax.jit(step(linear_cross_entropy, **options))(*GIVEN))
    assert_same(*found)


@pytest.mark.slow
def test_calls_outside_jit_compile_once(forced: Any) -> None:
    forced(True)
    run, compiled = step(linear_cross_entropy, divided=False), []
    first = run(*GIVEN)
    with jax.log_compiles(), pytest.MonkeyPatch.context() as patch:
        logger = logging.getLogger("jax._src.interpreters.pxla")
        patch.setattr(logger, "handle", lambda record: compiled.append(record.getMessage()))
        again = run(*GIVEN)
    assert compiled == []
    assert all(jax.tree.leaves(jax.tree.map(jnp.array_equal, first, again)))


@pytest.mark.slow
def test_labels_of_64_bits_are_clamped(forced: Any) -> None:
    """JAX would wrap NumPy's: 2³² + 3 would become 3."""
    found = []
    for on in (False, True):
        forced(on)
        far = np.asarray(LABELS, np.int64) + 2**32
        found.append(linear_cross_entropy(HIDDEN, WEIGHT, far, cache_bytes=1, precision="highest"))
    assert float(found[0]) == pytest.approx(float(found[1]))


@pytest.mark.fast("Explicit-False")
@combined(kind=[AxisType.Auto, AxisType.Explicit], divided=[True, False])
def test_on_a_mesh(kind: AxisType, divided: bool, forced: Any) -> None:
    """By types or by XLA, and by names."""
    forced(False)
    want = jax.jit(step(linear_cross_entropy, divided=divided))(*GIVEN)
    forced(True)
    mesh = mesh_of((4, 2), kind)
    specs = P("data"), P("tensor"), P("tensor"), P(), P(), P("data"), P("data")
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(GIVEN, specs, strict=True)]
        assert_same(jax.jit(step(linear_cross_entropy, divided=divided))(*placed), want)
        by_name = functools.partial(sharded_linear_cross_entropy, vocab_axis=["tensor"], batch_axes=["data"])
        assert_same(jax.jit(step(by_name, divided=divided))(*placed), want)


@values_of("checked", [True, False], slow=[False])
def test_inside_shard_map(checked: bool, forced: Any) -> None:
    forced(False)
    want = jax.jit(step(linear_cross_entropy))(*GIVEN)
    forced(True)
    specs = P("data"), P("tensor"), P("tensor"), P(), P(), P("data"), P("data")

    def total(*given: Any) -> Any:
        @functools.partial(jax.shard_map, mesh=mesh_of((4, 2)), in_specs=specs, out_specs=P(), check_vma=checked)
        def own(hidden: Any, weight: Any, bias: Any, z_loss: Any, divisor: Any, labels: Any, where: Any) -> Any:
            loss = linear_cross_entropy(
                hidden, weight, labels, where=where, bias=bias, z_loss=z_loss, normalizer=divisor,
                ignore_index=3, axis_name="tensor", cache_bytes=1, precision="highest",
            )  # fmt: skip
            return 0.3 * jax.lax.psum(loss, "data")

        return own(*given)

    assert_same(jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2, 3, 4)))(*GIVEN), want)
