"""The bits of a token's results are the same in every call (docs/bits.md), from JAX, from lists, over any shards."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lce_jax import linear_logprobs
from lce_jax.mosaic._chunks import GROUP
from lce_jax.mosaic.sm90 import HOPPER
from tests import one_device_shards

pytestmark = pytest.mark.gpu
H, V, T = 1024, 32000, 5000
COLUMNS = GROUP * HOPPER.tiling.tile  # of a group


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


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "stats": True}, {"logit_softcap": 30.0}], ids=str)
@pytest.mark.parametrize("tokens", [7, 1000, 4096])
def test_jax_and_lists_of_kernels(tokens: int, options: dict[str, Any]) -> None:
    """Every field that there is, 100 % of the rows."""
    torch = pytest.importorskip("torch")
    import lce_torch_bridge as lb

    given = [x[:tokens] if len(x) == T else x for x in drawn()]
    told = dict(options)
    if "temperature" in told:
        told["temperature"] = jax.random.uniform(jax.random.key(4), (tokens,), minval=0.3, maxval=3.0)
    of_jax = jax.jit(lambda *x, **more: linear_logprobs(*x, **more, implementation="mosaic_gpu", **fixed(options)))
    wanted = of_jax(*given, **{name: x for name, x in told.items() if name == "temperature"})
    lb.launch_with("direct")
    try:
        tensors = [torch.from_dlpack(x).clone() for x in given]
        told = {name: torch.from_dlpack(x).clone() if isinstance(x, jax.Array) else x for name, x in told.items()}
        found = lb.linear_logprobs(*tensors, **told)
    finally:
        lb.launch_with(None)
    for name in ("logprobs", "entropy", "lse", "max_logit", "min_logit", "sum_p_squared"):
        if getattr(wanted, name) is not None:
            assert np.array_equal(getattr(wanted, name), getattr(found, name).cpu().numpy()), name


def fixed(options: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in options.items() if name != "temperature"}


@pytest.mark.parametrize("padding", [0, 5000])
def test_shards_of_whole_groups(padding: int) -> None:
    """As over one device, over 2, 4 and 8 shards, each computed on this one."""
    hidden, weight, labels = drawn()
    size = 8 * COLUMNS
    weight = jnp.pad(weight, ((0, size - V), (0, 0)), constant_values=1.0)
    vocab_size = size - padding
    where = jax.random.uniform(jax.random.key(3), (T,)) < 0.7

    def of(shards: int) -> Any:
        given = {"where": where, "vocab_size": vocab_size}
        return one_device_shards.linear_logprobs(shards, hidden, weight, labels, **given)[:3]

    whole = of(1)
    for shards in (2, 4, 8):
        for x, y in zip(whole, of(shards), strict=True):
            assert np.array_equal(x, y), shards
    run = jax.jit(lambda *x: linear_logprobs(*x, where=where, vocab_size=vocab_size, implementation="mosaic_gpu"))
    for x, y in zip(whole, run(hidden, weight, labels)[:3], strict=True):
        assert np.array_equal(x, y)
