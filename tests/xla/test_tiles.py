"""Tilings that are forced small, so that every loop over tokens and vocabulary runs, must not change a result."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lce_jax import linear_logprobs
from lce_jax.xla import _walk
from tests import cases, oracle


@pytest.fixture(autouse=True)
def _fresh_traces():
    """Tilings are read while tracing."""
    jax.clear_caches()
    yield
    jax.clear_caches()


NAMES = ("plain", "everything", "where", "where with nothing live", "stats", "bias and everything")
TILINGS = [
    # All tilings of one call; of the others one.
    pytest.param(test, tile, marks=pytest.mark.slow if slow and test.name != "bias and everything" else ())
    for test in cases.MATRIX + cases.BIASED
    if test.name in NAMES
    for tile, slow in (((1, 1), True), ((8, 16), True), ((7, 104), True), ((24, 13), True), ((23, 50), False))
]


@pytest.mark.fast("everything-(7, 104)")
@pytest.mark.parametrize(("test", "tile"), TILINGS, ids=str)
def test_any_tiling(test: cases.TestCase, tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        _walk, "choose_tile_sizes", lambda case: (min(tile[0], case.num_tokens), min(tile[1], case.columns))
    )
    hidden, weight, labels, options, seeds = cases.draw(test)

    @jax.jit
    def value_and_grad(*operands):
        def objective(hidden, weight, bias=None):
            given = options if bias is None else options | {"bias": bias}
            out = linear_logprobs(hidden, weight, labels, precision="highest", implementation="xla", **given)
            return cases.objective(out, seeds), out

        return jax.value_and_grad(objective, argnums=tuple(range(len(operands))), has_aux=True)(*operands)

    (_, out), grads = value_and_grad(hidden, weight, *([options["bias"]] if test.bias else []))
    want = oracle.logprobs(hidden, weight, labels, **options)
    given = [(getattr(out, name), true) for name, true in want._asdict().items()]
    assert all(oracle.value_error(got, true) < 2e-6 for got, true in given if got is not None)
    wanted = oracle.gradients(hidden, weight, labels, seeds, **options)
    assert all(oracle.relative_norm(a, b) < 1e-5 for a, b in zip(grads, wanted, strict=True))


@pytest.mark.slow
def test_rows_left_out_cost_no_work() -> None:
    """The loop over token tiles stops at the last live one: counted, not timed."""
    T, H, V = 4096, 8, 64
    visited = []

    def count(_: np.ndarray) -> np.ndarray:
        visited.append(1)
        return np.zeros((), np.float32)

    original = _walk.LogitTile.products

    def counting(tile):
        tick = jax.pure_callback(count, jax.ShapeDtypeStruct((), jnp.float32), tile.tokens[0].hidden[0, 0])
        return tuple(raw + tick for raw in original(tile))

    hidden, weight = jnp.ones((T, H)), jnp.ones((V, H))
    labels = jnp.zeros((T,), jnp.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_walk.LogitTile, "products", counting)
        counts = []
        for live in (0, 1, 1000, T):
            visited.clear()
            where = jnp.arange(T)[::-1] < live
            jax.block_until_ready(linear_logprobs(hidden, weight, labels, where=where, implementation="xla"))
            counts.append(len(visited))
    assert 0 == counts[0] < counts[1] < counts[2] < counts[3] / 3


def test_rows_of_two_tiles_with_large_logits() -> None:
    """The last tile of tokens reaches back into the one before, and exp of these logits is infinite."""
    test = cases.case("large", leading=(600,), H=32, V=600, where="all", spread=200.0)
    hidden, weight, labels, options, seeds = cases.draw(test)

    def loss(hidden, weight):
        return cases.objective(linear_logprobs(hidden, weight, labels, precision="highest", **options), seeds)

    found = jax.jit(jax.grad(loss, argnums=(0, 1)))(hidden, weight)
    for got, want in zip(found, oracle.gradients(hidden, weight, labels, seeds, **options), strict=True):
        assert oracle.relative_norm(got, want) < 1e-4
