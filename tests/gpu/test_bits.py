"""The bits of a token's results are the same in every call (docs/bits.md), from JAX and from lists of kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lce_jax import linear_logprobs

pytestmark = pytest.mark.gpu
H, V, T = 1024, 32000, 5000


def drawn() -> tuple[Any, Any, Any]:
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (T, H), jnp.bfloat16)
    weight = (jax.random.normal(keys[1], (V, H), jnp.bfloat16) * 3 / H**0.5).astype(jnp.bfloat16)
    return hidden, weight, jax.random.randint(keys[2], (T,), 0, V)


def subsets() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.choice(T, count, replace=False) for count in (1, 7, 128, 1000, 2048, 4096)]


@pytest.mark.parametrize("columns", [V, V - 8, V - 1])
def test_jax(columns: int) -> None:
    hidden, weight, labels = drawn()
    weight, labels = weight[:columns], labels % columns
    run = jax.jit(lambda *x, **options: linear_logprobs(*x, **options, implementation="mosaic_gpu"))
    every = run(hidden, weight, labels)
    for rows in subsets():
        for x, y in zip(run(hidden[rows], weight, labels[rows])[:3], every[:3], strict=True):
            assert np.array_equal(x, y[rows]), len(rows)
    where = jax.random.uniform(jax.random.key(3), (T,)) < 0.3
    for x, y in zip(run(hidden, weight, labels, where=where)[:3], every[:3], strict=True):
        assert np.array_equal(x[where], y[where])


def test_lists_of_kernels() -> None:
    torch = pytest.importorskip("torch")
    import lce_torch_bridge as lb

    hidden, weight, labels = (torch.from_dlpack(x).clone() for x in drawn())
    lb.launch_with("direct")
    try:
        every = lb.linear_logprobs(hidden, weight, labels)[:3]
        for rows in map(torch.as_tensor, subsets()):
            rows = rows.to(hidden.device)
            some = lb.linear_logprobs(hidden[rows], weight, labels[rows])[:3]
            assert all(torch.equal(x, y[rows]) for x, y in zip(some, every, strict=True)), len(rows)
    finally:
        lb.launch_with(None)
