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
from tests.mesh.test_linear_loss import BIAS, HIDDEN, LABELS, WEIGHT, WHERE, assert_same, mesh_of
from tests.pairs import combined, values_of

GIB = 1 << 30
T, H, V = 32768, 4096, 151936  # exponentials have 9.3 GiB, dweight in float32 2.3
STRUCTS = tuple(map(jax.ShapeDtypeStruct, ((T, H), (V, H), (T,)), ("bfloat16", "bfloat16", "int32")))


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("backward", "options"),
    [
        (None, {}),
        (None, {"reduction": "sum", "z_loss": 1e-4, "ignore_index": 7}),
        pytest.param(None, {"label_smoothing": 0.1, "ignore_index": None}, marks=pytest.mark.slow),
        (None, {"implementation": "xla"}),
        ("the gradient of each token's loss", {"reduction": "none"}),
        pytest.param("cache_bytes=0 requests it", {"cache_bytes": 0}, marks=pytest.mark.slow),
        pytest.param("cache_bytes=1073741824 requests it", {"cache_bytes": GIB}, marks=pytest.mark.slow),
        ("little to recompute", {"gradient_threshold": 2**-12}),
        pytest.param("would save a product", {"vocab_part_size": 65536}, marks=pytest.mark.slow),
        ("would save a product", {"label_smoothing": 0.1, "logit_softcap": 30.0}),
        ("float16", {"dtype": "float16"}),
    ],
)
def test_when(backward: str | None, options: dict[str, Any]) -> None:
    """`explain` says what the traced call does."""
    structs = [x if x.ndim == 1 else jax.ShapeDtypeStruct(x.shape, options.get("dtype", x.dtype)) for x in STRUCTS]
    options = {"reduction": "mean"} | {name: x for name, x in options.items() if name != "dtype"}
    plan = explain(*structs, **options)
    assert ("chunk of tokens" in plan.tiles) == (backward is None)
    assert backward is None or backward in str(plan)
    call = functools.partial(linear_cross_entropy, **options)
    jaxpr = str(jax.make_jaxpr(jax.grad(lambda h, w, y: jnp.sum(call(h, w, y)), (0, 1)))(*structs))
    # Every exponential is kept, and no tile of logits computed twice.
    if options.get("implementation") == "xla":
        assert jaxpr.count("dot_general") == 2 * 3  # of a tile of the remainder, and of all others
    elif backward is None:
        assert "lce_cached_dlogits" in jaxpr
        assert "lce_dlogits" not in jaxpr
    else:
        assert "chunk_of_tokens" not in jaxpr


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])
def test_explain_on_a_mesh(kind: AxisType) -> None:
    mesh, specs = mesh_of((4, 2), kind), (P("data"), P("tensor"), P("data"))
    with jax.set_mesh(mesh):
        structs = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
            for x, spec in zip(STRUCTS, specs, strict=True)
        ]
        plan = explain(*structs, reduction="mean")
    assert plan.tiles["chunk of tokens"] == T // 4  # 1.2 GiB of exponentials: one chunk


def test_one_way_or_the_other() -> None:
    ways: dict[str, Any] = {
        "cache_bytes=0": {"cache_bytes": 0},
        'reduction="none"': {"reduction": "none"},
        "gradient_threshold=0.25": {"gradient_threshold": 0.25},
        "vocab_part_size=8": {"vocab_part_size": 8},
        "label_smoothing and a logit_softcap": {"label_smoothing": 0.1, "logit_softcap": 3.0},
    }
    for value, options in ways.items():
        with pytest.raises(ValueError, match=f"chunk_bytes=7, but .* backward .*{value}.* leave it out"):
            linear_cross_entropy(HIDDEN, WEIGHT, LABELS, chunk_bytes=7, **options)
        with pytest.raises(ValueError, match=f"chunk_bytes=7, but .* backward .*{value}.* leave it out"):
            explain(HIDDEN, WEIGHT, LABELS, **{"reduction": "mean", "chunk_bytes": 7} | options)
    with pytest.raises(ValueError, match=r"chunk_bytes=7, but .*float16 gradients need the loss's scale"):
        linear_cross_entropy(HIDDEN, WEIGHT.astype(jnp.float16), LABELS, chunk_bytes=7)


@pytest.mark.slow
@pytest.mark.usefixtures("hopper")
def test_lowering() -> None:
    traced = jax.jit(jax.value_and_grad(linear_cross_entropy, argnums=(0, 1))).trace(*STRUCTS)
    assert "lce_cached_dlogits" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_float16_gradients_keep_their_range() -> None:
    """A mean over many tokens has gradients that float16 holds only when they are scaled."""
    tokens, scale = 4096, 2.0**14
    keys = jax.random.split(jax.random.key(0), 2)
    hidden, weight = jax.random.normal(keys[0], (tokens, 8)), jax.random.normal(keys[1], (512, 8)) / 64
    labels = jnp.arange(tokens) % 512

    def gradients(dtype: str) -> Any:
        operands = hidden.astype(dtype), weight.astype(dtype)
        return jax.jit(jax.grad(lambda *x: scale * linear_cross_entropy(*x, labels), argnums=(0, 1)))(*operands)

    for got, want in zip(gradients("float16"), gradients("float32"), strict=True):
        assert float(jnp.linalg.norm(got.astype(jnp.float32) - want) / jnp.linalg.norm(want)) < 2e-3


IN_CHUNKS, BACKWARD = {"chunk_bytes": 1}, {"cache_bytes": 0}  # of 128 tokens; gradients in the backward


def step(function: Any, **options: Any) -> Any:
    """Value and gradients: of hidden, weight, bias, the penalty's weight, and the divisor if there is one."""
    divided = options.get("reduction", "mean") == "mean" and options.pop("divided", True)

    def loss(hidden: Any, weight: Any, bias: Any, z_loss: Any, divisor: Any, labels: Any, where: Any) -> Any:
        own = {"normalizer": divisor} if divided else {}
        told = {"where": where, "precision": "highest", "ignore_index": 3} | own | options
        return 0.3 * function(hidden, weight, labels, bias=bias, z_loss=z_loss, **told)

    return jax.value_and_grad(loss, argnums=(0, 1, 2, 3, 4) if divided else (0, 1, 2, 3))


GIVEN = HIDDEN, WEIGHT, BIAS, jnp.float32(1e-2), jnp.float32(77.0), LABELS, WHERE


@values_of(
    "options",
    [
        {}, {"divided": False, "label_smoothing": 0.2},
        {"reduction": "sum", "temperature": 0.7, "label_smoothing": 0.1},
        {"divided": False, "logit_softcap": 2.0},
    ],
    slow=[{}, {"divided": False, "logit_softcap": 2.0}, {"divided": False, "label_smoothing": 0.2}],
)  # fmt: skip
def test_the_same_loss(options: dict[str, Any]) -> None:
    assert_same(*(jax.jit(step(linear_cross_entropy, **options, **way))(*GIVEN) for way in (IN_CHUNKS, BACKWARD)))


@pytest.mark.slow
def test_calls_outside_jit_compile_once() -> None:
    run, compiled = step(linear_cross_entropy, divided=False), []
    first = run(*GIVEN)
    with jax.log_compiles(), pytest.MonkeyPatch.context() as patch:
        logger = logging.getLogger("jax._src.interpreters.pxla")
        patch.setattr(logger, "handle", lambda record: compiled.append(record.getMessage()))
        again = run(*GIVEN)
    assert compiled == []
    assert all(jax.tree.leaves(jax.tree.map(jnp.array_equal, first, again)))


@pytest.mark.slow
def test_labels_of_64_bits_are_clamped() -> None:
    """JAX would wrap NumPy's: 2³² + 3 would become 3."""
    far = np.asarray(LABELS, np.int64) + 2**32
    far[..., 0] = 3  # a call without any label in the vocabulary warns
    found = [linear_cross_entropy(HIDDEN, WEIGHT, far, precision="highest", **way) for way in (IN_CHUNKS, BACKWARD)]
    assert float(found[0]) == pytest.approx(float(found[1]))


@pytest.mark.fast("Explicit-False")
@combined(kind=[AxisType.Auto, AxisType.Explicit], divided=[True, False])
def test_on_a_mesh(kind: AxisType, divided: bool) -> None:
    """By types or by XLA, and by names."""
    options = {"divided": divided, "label_smoothing": 0.2}
    want = jax.jit(step(linear_cross_entropy, **options, **BACKWARD))(*GIVEN)
    options |= IN_CHUNKS
    mesh = mesh_of((4, 2), kind)
    specs = P("data"), P("tensor"), P("tensor"), P(), P(), P("data"), P("data")
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(GIVEN, specs, strict=True)]
        assert_same(jax.jit(step(linear_cross_entropy, **options))(*placed), want)
        by_name = functools.partial(sharded_linear_cross_entropy, vocab_axis=["tensor"], batch_axes=["data"])
        assert_same(jax.jit(step(by_name, **options))(*placed), want)


@values_of("checked", [True, False], slow=[False])
def test_inside_shard_map(checked: bool) -> None:
    options = {"label_smoothing": 0.2, "precision": "highest", "ignore_index": 3}
    want = jax.jit(step(linear_cross_entropy, **options, **BACKWARD))(*GIVEN)
    specs = P("data"), P("tensor"), P("tensor"), P(), P(), P("data"), P("data")

    def total(*given: Any) -> Any:
        @functools.partial(jax.shard_map, mesh=mesh_of((4, 2)), in_specs=specs, out_specs=P(), check_vma=checked)
        def own(hidden: Any, weight: Any, bias: Any, z_loss: Any, divisor: Any, labels: Any, where: Any) -> Any:
            loss = linear_cross_entropy(
                hidden, weight, labels, where=where, bias=bias, z_loss=z_loss, normalizer=divisor,
                axis_name="tensor", **options, **IN_CHUNKS,
            )  # fmt: skip
            return 0.3 * jax.lax.psum(loss, "data")

        return own(*given)

    assert_same(jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2, 3, 4)))(*GIVEN), want)
