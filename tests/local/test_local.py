"""Shards computed apart and merged by hand equal the whole."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lce_jax import LogprobOutput, local
from tests import cases, oracle

NAMES = ("plain", "padded vocabulary", "everything", "where hides NaN", "no entropy", "stats", "no tokens")


@pytest.mark.parametrize("test", [t for t in cases.MATRIX if t.name in NAMES], ids=str)
def test_four_shards(test: cases.TestCase) -> None:
    hidden, weight, labels, options, seeds = cases.draw(test)
    vocab_dim = options.get("weight_layout", "vh").index("v")
    hidden, labels, seeds = hidden.reshape(-1, test.H), labels.reshape(-1), [seed.reshape(-1) for seed in seeds]
    for key in ("where", "temperature"):
        if key in options:
            options[key] = jnp.broadcast_to(options[key], test.leading).reshape(-1)
    width = test.V // 4
    shards = [(i * width, weight.take(jnp.arange(i * width, (i + 1) * width), axis=vocab_dim)) for i in range(4)]
    common = {**options, "precision": "highest"}
    factors = {name: options[name] for name in ("temperature", "logit_softcap", "logit_scale") if name in options}

    @jax.jit
    def statistics(shard, start):
        return local.statistics(hidden, shard, labels, vocab_start=start, keep_cache=True, **common)

    results = [statistics(shard, jnp.int32(start)) for start, shard in shards]
    merged = local.merge(jax.tree.map(lambda *x: jnp.stack(x), *(stats for stats, _ in results)), **factors)
    vocab_size = options.get("vocab_size", test.V)
    out = local.finish(merged, labels, vocab_size=vocab_size, where=options.get("where"), **factors)
    want = oracle.logprobs(hidden, weight, labels, **options)
    for name, true in want._asdict().items():
        got = getattr(out, name)
        assert got is None or oracle.value_error(got, true) < 2e-6, name

    entropy = seeds[1] if options.get("entropy", True) else None
    cotangent = LogprobOutput(seeds[0], entropy, seeds[2])
    parts = [
        local.gradients(hidden, shard, labels, merged, cotangent, vocab_start=start, cache=cache, **common)
        for (start, shard), (_, cache) in zip(shards, results, strict=True)
    ]
    for (start, shard), (_, cache), part in zip(shards[:1], results, parts, strict=False):
        before = jnp.full(shard.shape, 0.5, jnp.float32)
        told = dict(vocab_start=start, cache=cache, dweight=before)
        after = local.gradients(hidden, shard, labels, merged, cotangent, **told, **common)[1]
        assert oracle.relative_norm(after - before, part[1]) < 1e-6
    dhidden = sum(part[0] for part in parts)
    dweight = jnp.concatenate([part[1] for part in parts], axis=vocab_dim)
    seeds[1] = seeds[1] if entropy is not None else 0 * seeds[1]
    wanted = oracle.gradients(hidden, weight, labels, seeds, **options)
    assert dhidden.dtype == jnp.float32
    assert oracle.relative_norm(dhidden, wanted[0]) < 1e-5
    assert oracle.relative_norm(dweight, wanted[1]) < 1e-5


@pytest.mark.parametrize(("shape", "dtype"), [((8, 4), jnp.bfloat16), ((4, 8), jnp.float32)])
def test_a_sum_that_dweight_cannot_be_added_to(shape: tuple[int, ...], dtype: Any) -> None:
    hidden, weight, labels = jnp.ones((2, 4)), jnp.ones((8, 4)), jnp.zeros(2, jnp.int32)
    stats, _ = local.statistics(hidden, weight, labels)
    seed = LogprobOutput(jnp.ones(2), None, None)
    with pytest.raises(ValueError, match=r"dweight \(.*\) of .* must have the shape of weight \(8, 4\), in float32"):
        local.gradients(hidden, weight, labels, stats, seed, dweight=jnp.zeros(shape, dtype))


@pytest.mark.parametrize("padded", [False, True])
def test_the_mean_logit_of_two_shards(padded: bool) -> None:
    """From ``total``, and its gradients from ``dtotal``, whether the shards know the vocabulary's size or not."""
    hidden, weight, labels, _, (seed, *_) = cases.draw(cases.MATRIX[0])
    size = 97 if padded else 104
    common: dict[str, Any] = {"precision": "highest", "logit_scale": 1.3}
    common |= {"vocab_size": size} if padded else {}
    shards = [(0, weight[:52]), (52, weight[52:])]
    parts = [local.statistics(hidden, w, labels, vocab_start=start, total=True, **common)[0] for start, w in shards]
    packed = jnp.stack([local.pack(part) for part in parts])
    merged = local.merge(local.unpack(packed, local.fields(total=True)), logit_scale=1.3)
    raw = 1.3 * np.asarray(hidden, np.float64) @ np.asarray(weight, np.float64)[:size].T
    mean = local.mean_logit(merged, vocab_size=size, logit_scale=1.3)
    assert oracle.value_error(mean, raw.mean(1)) < 2e-6
    nothing = LogprobOutput(None, None, None)
    grads = [
        local.gradients(hidden, w, labels, merged, nothing, vocab_start=start, dtotal=seed / size, **common)
        for start, w in shards
    ]
    column = 1.3 * np.asarray(seed, np.float64) @ np.asarray(hidden, np.float64) / size
    dweight = np.where(np.arange(104)[:, None] < size, column, 0.0)
    dhidden = 1.3 * np.outer(seed, np.asarray(weight, np.float64)[:size].mean(0))
    assert oracle.relative_norm(grads[0][0] + grads[1][0], dhidden) < 1e-6
    assert oracle.relative_norm(jnp.concatenate([grads[0][1], grads[1][1]]), dweight) < 1e-6
    with pytest.raises(TypeError, match="total must be True or False, got 1"):
        local.statistics(hidden, weight, labels, total=1)
    with pytest.raises(ValueError, match="stats without total: give total=True"):
        local.mean_logit(merged._replace(total=None), vocab_size=size)


@pytest.mark.parametrize("num_rows", [0, 1, 300, 777])
def test_a_number_of_rows_is_where_without_moving_them(num_rows: int) -> None:
    hidden, weight, labels, _, seeds = cases.draw(cases.case("rows", leading=(777,)))
    temperature = jnp.linspace(0.5, 2.0, 777)
    common = {"temperature": temperature}
    where = jnp.arange(777) < num_rows

    @jax.jit
    def step(hidden, **rows):
        stats, cache = local.statistics(hidden, weight, labels, keep_cache=True, **rows, **common)
        out = local.finish(stats, labels, vocab_size=104, where=where, temperature=temperature)
        return out, local.gradients(hidden, weight, labels, stats, LogprobOutput(*seeds), cache=cache, **rows, **common)

    loud = jnp.where(where[:, None], hidden, jnp.nan)
    for got, want in zip(
        *map(jax.tree.leaves, (step(loud, num_rows=num_rows), step(hidden, where=where))), strict=True
    ):
        assert oracle.value_error(got, want) < 1e-5


@pytest.mark.parametrize(
    ("num_rows", "error"), [(-1, ValueError), (25, ValueError), (2.5, TypeError), (True, TypeError), ([1], TypeError),
     (np.int32(25), ValueError), (np.array(-1), ValueError), (jnp.int32(25), ValueError), (jnp.array([1]), TypeError)],
)  # fmt: skip
def test_a_number_of_rows_that_is_none(num_rows: Any, error: type[Exception]) -> None:
    hidden, weight, labels, *_ = cases.draw(cases.MATRIX[0])
    with pytest.raises(error, match="num_rows must"):
        local.statistics(hidden, weight, labels, num_rows=num_rows)


@pytest.mark.parametrize("start", [-1, 1.5, np.int32(-1), jnp.int32(-1), jnp.float32(0), jnp.zeros(1, int)])
def test_a_first_column_that_is_none(start: Any) -> None:
    hidden, weight, labels, *_ = cases.draw(cases.MATRIX[0])
    with pytest.raises((ValueError, TypeError), match="vocab_start must"):
        local.statistics(hidden, weight, labels, vocab_start=start)


def test_where_and_a_number_of_rows_exclude_each_other() -> None:
    hidden, weight, labels, *_ = cases.draw(cases.MATRIX[0])
    with pytest.raises(ValueError, match="where and num_rows"):
        local.statistics(hidden, weight, labels, where=labels >= 0, num_rows=3)


def test_absent_cotangents_are_zeros() -> None:
    hidden, weight, labels, _, seeds = cases.draw(cases.MATRIX[0])
    stats, _ = local.statistics(hidden, weight, labels)
    zero = jnp.zeros_like(seeds[0])
    some = local.gradients(hidden, weight, labels, stats, LogprobOutput(seeds[0], None, None))
    full = local.gradients(hidden, weight, labels, stats, LogprobOutput(seeds[0], zero, zero))
    assert all(np.array_equal(a, b) for a, b in zip(some, full, strict=True))


def test_a_shard_of_padding_alone_merges_to_nothing() -> None:
    hidden, weight, labels, *_ = cases.draw(cases.MATRIX[0])
    whole, _ = local.statistics(hidden, weight, labels, vocab_size=104)
    beyond, _ = local.statistics(hidden, weight, labels, vocab_size=104, vocab_start=104)
    merged = local.merge(jax.tree.map(lambda a, b: jnp.stack([a, b]), whole, beyond))
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(merged), jax.tree.leaves(whole), strict=True))
