"""A frozen operand costs no product, and the gradients of the others are what they are beside its own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lce_jax import linear_cross_entropy, linear_kl, linear_logprobs, linear_loss
from lce_jax.xla import _walk
from tests import cases, oracle
from tests.pairs import values_of
from tests.sharding_cases import mesh_of


def logprobs(hidden: Any, weight: Any, bias: Any, labels: Any, **options: Any) -> Any:
    out = linear_logprobs(hidden, weight, labels, bias=bias, **options)
    return jnp.sum(out.logprobs + 0.1 * out.entropy)


def cross_entropy(hidden: Any, weight: Any, bias: Any, labels: Any, **options: Any) -> Any:
    return linear_cross_entropy(hidden, weight, labels, bias=bias, **options)


def token_loss(hidden: Any, weight: Any, bias: Any, labels: Any, **options: Any) -> Any:
    return linear_loss(lambda logprob, entropy, _: -logprob - entropy, hidden, weight, labels, bias=bias, **options)[0]


def divergence(hidden: Any, weight: Any, bias: Any, labels: Any, **options: Any) -> Any:
    del labels
    teacher = jax.lax.stop_gradient((hidden[..., ::-1], weight[..., ::-1]))
    return jnp.sum(linear_kl(hidden, weight, *teacher, bias=bias, **options))


SMOOTHED = {"label_smoothing": 0.1, "chunk_bytes": 1}
WAYS: dict[str, Callable[..., Any]] = {
    "logprobs": logprobs,
    "logprobs, part of a cache": functools.partial(logprobs, cache_bytes=1 << 18),  # one of three tiles
    "logprobs, full cache": functools.partial(logprobs, cache_bytes=1 << 40),
    "cross entropy": cross_entropy,
    "cross entropy, in chunks": functools.partial(cross_entropy, **SMOOTHED),
    "loss": token_loss,
    "KL": divergence,
    "KL, full cache": functools.partial(divergence, cache_bytes=1 << 40),
}
TEST = cases.case("frozen", leading=(4, 64), H=16, V=600)


def given() -> tuple[Any, ...]:
    hidden, weight, labels, _, _ = cases.draw(TEST)
    return hidden, weight, jnp.sin(jnp.arange(600.0)), labels


@pytest.fixture
def three_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_walk, "choose_tile_sizes", lambda call: (call.num_tokens, 200))
    jax.clear_caches()
    yield
    jax.clear_caches()


def check(function: Callable[..., Any], operands: tuple[Any, ...]) -> None:
    asked = (0, 1, 2), (0, 2), (1,)
    whole, *parts = jax.jit(lambda *x: [jax.grad(function, own)(*x) for own in asked])(*operands)
    for own, found in zip(asked[1:], parts, strict=True):
        for i, gradient in zip(own, found, strict=True):
            assert oracle.relative_norm(gradient, whole[i]) < 1e-6


@pytest.mark.usefixtures("three_tiles")
@pytest.mark.fast("part of a cache", "in chunks")
@pytest.mark.parametrize("way", WAYS)
def test_the_other_gradients(way: str) -> None:
    check(functools.partial(WAYS[way], precision="highest"), given())


@pytest.mark.fast("logprobs-Auto", "cross entropy, in chunks-Explicit")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])
@pytest.mark.parametrize("way", ["logprobs", "cross entropy, in chunks", "KL"])
def test_on_a_mesh(way: str, kind: AxisType) -> None:
    mesh, specs = mesh_of("data 2, tensor 4", kind), (P("data"), P("tensor"), P("tensor"), P("data"))
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(given(), specs, strict=True)]
        check(functools.partial(WAYS[way], precision="highest"), tuple(placed))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["logprobs", "cross entropy, in chunks", "KL"])
def test_inside_shard_map(way: str) -> None:
    specs = P("data"), P("tensor"), P("tensor"), P("data")

    def total(*operands: Any) -> Any:
        def own(*operands: Any) -> Any:
            return jax.lax.psum(WAYS[way](*operands, axis_name="tensor", precision="highest"), "data")

        mesh = mesh_of("data 2, tensor 4", AxisType.Auto)
        return jax.shard_map(own, mesh=mesh, in_specs=specs, out_specs=P())(*operands)

    check(total, given())


STRUCTS = tuple(map(jax.ShapeDtypeStruct, ((4096, 512), (8000, 512), (4096,)), ("bfloat16", "bfloat16", "int32")))
OF_KERNELS = WAYS | {
    "logprobs, a threshold": functools.partial(logprobs, gradient_threshold=2**-12),
    "logprobs, padding": functools.partial(logprobs, vocab_size=7900),
}


@pytest.mark.fast("in chunks-xla", "KL, full cache-mosaic_gpu", "logprobs-mosaic_gpu")
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("implementation", ["mosaic_gpu", "xla"])
@pytest.mark.parametrize("way", OF_KERNELS)
def test_no_product(way: str, implementation: str) -> None:
    def program(own: Any) -> str:
        function = functools.partial(OF_KERNELS[way], implementation=implementation)
        of_both = jax.grad(lambda hidden, weight, labels: function(hidden, weight, None, labels), own)
        return str(jax.make_jaxpr(of_both)(*STRUCTS))

    both, of_hidden, of_weight = map(program, ((0, 1), 0, 1))
    if implementation == "mosaic_gpu":
        names = (
            ("name=lce_dhidden", "name=lce_dweight")
            if "threshold" not in way
            else ("lce_active_dhidden", "lce_active_dweight")
        )
        assert [[text.count(name) > 0 for name in names] for text in (both, of_hidden, of_weight)] == [
            [True, True], [True, False], [False, True]
        ]  # fmt: skip
    else:
        products = [text.count("dot_general") for text in (both, of_hidden, of_weight)]
        assert products[1] == products[2] < products[0]


@values_of("way", ["logprobs", "cross entropy", "KL"], slow=["logprobs", "KL"])
def test_in_any_order(way: str) -> None:
    """JAX keeps what it has traced of a rule, and may take the residuals' tree from another trace than their values."""
    operands, orders = given()[:2], ((0, 1), (1,), (0,), (0, 1))
    function = functools.partial(WAYS[way], bias=None, labels=given()[3])
    for wrapped in (function, jax.checkpoint(function)):
        runs = [jax.grad(wrapped, own) for own in orders]
        want, *found = jax.jit(lambda *x, runs=runs: [run(*x) for run in runs])(*operands)
        for own, gradients in zip(orders[1:], found, strict=True):
            for i, gradient in zip(own, gradients, strict=True):
                assert oracle.relative_norm(gradient, want[i]) < 1e-5, own
