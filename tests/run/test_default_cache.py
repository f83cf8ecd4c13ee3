"""``cache_bytes=None``: up to 1 GiB of the forward's tiles on a GPU, where a gradient is asked for."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from lce_jax import explain, linear_kl, linear_logprobs
from lce_jax.types._types import Call
from tests import cases, oracle
from tests.pairs import values_of

GIB = 1 << 30
ONE_DEVICE = jax.sharding.Mesh(jax.devices()[:1], ("device",))
STRUCTS = tuple(map(jax.ShapeDtypeStruct, ((8192, 256), (151936, 256), (8192,)), ("bfloat16", "bfloat16", "int32")))


def logprobs(hidden: Any, weight: Any, labels: Any, **options: Any) -> Any:
    return jnp.sum(linear_logprobs(hidden, weight, labels, **options).logprobs)


def divergence(hidden: Any, weight: Any, labels: Any, **options: Any) -> Any:
    del labels
    return jnp.sum(linear_kl(hidden, weight, hidden[::-1], weight[::-1], **options))


@pytest.mark.usefixtures("hopper")
@values_of("function", [logprobs, divergence], slow=[divergence])
def test_on_a_gpu(function: Any) -> None:
    """A gradient keeps some; a forward, 0 and a vocabulary in parts keep nothing."""

    def keeps(run: Any) -> bool:
        with jax.set_mesh(ONE_DEVICE):
            return "statistics_cached" in str(jax.make_jaxpr(run)(*STRUCTS))

    assert keeps(jax.grad(function, (0, 1)))
    assert "statistics_cached" not in str(jax.make_jaxpr(jax.grad(function, (0, 1)))(*STRUCTS))  # of several, no mesh
    assert not keeps(function)
    assert not keeps(jax.grad(functools.partial(function, cache_bytes=0), (0, 1)))
    if function is logprobs:
        assert not keeps(jax.grad(functools.partial(function, vocab_part_size=75968), (0, 1)))


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("implementation", ["mosaic_gpu", "xla"])
def test_what_explain_says(implementation: str) -> None:
    plan, none = (explain(*STRUCTS, implementation=implementation, **x) for x in ({}, {"cache_bytes": 0}))
    kept = plan.kept_bytes - none.kept_bytes
    assert 0.9 * GIB < kept <= GIB
    assert "cache_bytes=None is up to 1.0 GiB on a GPU" in str(plan)
    assert plan.full_cache_bytes == none.full_cache_bytes > kept


def test_nothing_on_a_cpu() -> None:
    assert explain(*STRUCTS).kept_bytes == explain(*STRUCTS, cache_bytes=0).kept_bytes


@pytest.fixture
def by_default(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What this device keeps by default; each program is traced anew."""

    def keep(num_bytes: int) -> None:
        budget = property(lambda call: num_bytes if call.cache_bytes is None else call.cache_bytes)
        monkeypatch.setattr(Call, "cache_budget", budget)
        jax.clear_caches()

    return keep


@pytest.mark.fast("under-logprobs", "of a pullback alone-logprobs")
@pytest.mark.parametrize("function", [logprobs, divergence])
@pytest.mark.parametrize("batch", ["under", "over", "of a pullback alone"])
def test_a_batch_of_calls_keeps_nothing(batch: str, function: Any, by_default: Any) -> None:
    """vmap under and over the gradient, and of a pullback alone, whose forward is no batch."""
    hidden, weight, labels, _, _ = cases.draw(cases.case("batch", leading=(4, 40), H=16, V=600))
    one = functools.partial(function, precision="highest")
    each = jax.vmap(one, (0, None, 0))

    def of_pullbacks(hidden: Any, weight: Any, labels: Any) -> Any:
        _, pull = jax.vjp(lambda hidden: jnp.stack([one(*x, weight, y) for *x, y in zip(hidden, labels)]), hidden)  # noqa: B905
        return jax.vmap(pull)(jnp.eye(4))

    under = jax.grad(lambda *x: jnp.sum(each(*x)), (0, 1))
    over = jax.vmap(jax.grad(one), (0, None, 0))
    run = {"under": under, "over": over, "of a pullback alone": of_pullbacks}[batch]
    found, sizes = [], []
    with jax.set_mesh(ONE_DEVICE):
        for num_bytes in (0, 1 << 40):
            by_default(num_bytes)
            compiled = jax.jit(run).lower(hidden, weight, labels).compile()
            found.append(compiled(hidden, weight, labels))
            sizes.append(compiled.memory_analysis().temp_size_in_bytes)
    assert batch != "under" or sizes[0] == sizes[1]
    assert all(oracle.relative_norm(a, b) < 1e-6 for a, b in zip(*map(jax.tree.leaves, found), strict=True))
