"""Shards computed apart and merged by hand equal the whole."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lce_jax import LogprobOutput, local
from tests import cases, oracle
from tests.pairs import values_of

NAMES = (
    "plain", "padded vocabulary", "everything", "where hides NaN", "no entropy", "stats", "no tokens",
    "bias and everything", "candidates and everything", "floor and everything",
)  # fmt: skip
CALLS = [test for test in cases.MATRIX + cases.BIASED + cases.CANDIDATES + cases.FLOORS if test.name in NAMES]


def of_shards(
    test: cases.TestCase, options: dict[str, Any], hidden: Any, labels: Any, shards: Any, rows: Any, seeds: Any
) -> Any:
    """Results and gradients, and a shard's dweight that is added to a sum, less the sum, and alone."""

    def told(start: int, shard: Any) -> dict[str, Any]:
        own = {**shard, "weight": shard["weight"].T if options.get("weight_layout") == "hv" else shard["weight"]}
        return {**options, **rows, **own, "vocab_start": start, "precision": "highest", "labels": labels}

    found = [local.statistics(hidden, **told(*shard), keep_cache=True) for shard in shards]
    asked = {name: options[name] for name in ("entropy", "stats") if name in options}
    widths = local.fields(**asked, num_candidates=test.K, has_floor=test.floor > 0)
    factors = {name: options[name] for name in ("logit_softcap", "logit_scale") if name in options}
    factors |= {name: rows[name] for name in ("temperature",) if name in rows}
    merged = local.merge(local.unpack(jnp.stack([local.pack(stats) for stats, _ in found]), widths), **factors)
    size = options.get("vocab_size", test.V)
    out = local.finish(merged, labels, vocab_size=size, where=rows.get("where"), **factors)
    cotangent = LogprobOutput(seeds[0], seeds[1] if options.get("entropy", True) else None, seeds[2])
    given = {"merged": merged, "cotangent": cotangent._replace(candidate_logprobs=seeds[3] if test.K else None)}
    each = zip(shards, found, strict=True)
    parts = [local.gradients(hidden, **told(*shard), **given, cache=cache) for shard, (_, cache) in each]
    first, before = told(*shards[0]), jnp.full(parts[0][1].shape, 0.5, jnp.float32)
    added = local.gradients(hidden, **first, **given, cache=found[0][1], dweight=before)[1] - before
    axis = options.get("weight_layout", "vh").index("v")
    of_head = [jnp.concatenate(x, axis=axis if x[0].ndim == 2 else 0) for x in list(zip(*parts, strict=True))[1:]]
    return out, (sum(part[0] for part in parts), *of_head), (added, parts[0][1])


@pytest.mark.parametrize("test", CALLS, ids=str)
def test_four_shards(test: cases.TestCase) -> None:
    hidden, weight, labels, options, seeds = cases.draw(test)
    per_token = [name for name in ("where", "candidates", "temperature", "logit_floor") if name in options]
    rows = {"hidden": hidden, "labels": labels, "seeds": seeds, **{name: options.pop(name) for name in per_token}}
    rows = jax.tree.map(lambda x: np.reshape(x, (-1, *x.shape[labels.ndim :])), rows)
    hidden, labels, seeds = (rows.pop(name) for name in ("hidden", "labels", "seeds"))
    seeds = seeds if options.get("entropy", True) else [seeds[0], 0 * seeds[1], *seeds[2:]]
    head = {"weight": np.moveaxis(weight, options.get("weight_layout", "vh").index("v"), 0)}
    head |= {"bias": np.asarray(options.pop("bias"))} if test.bias else {}
    starts = range(0, test.V, test.V // 4)
    shards = [(start, {name: x[start : start + test.V // 4] for name, x in head.items()}) for start in starts]

    run = jax.jit(functools.partial(of_shards, test, options))
    out, gradients, (added, alone) = run(hidden, labels, shards, rows, seeds)
    assert oracle.relative_norm(added, np.asarray(alone)) < 1e-6
    whole = {**options, **rows, **({"bias": head["bias"]} if test.bias else {})}
    for name, true in oracle.logprobs(hidden, weight, labels, **whole)._asdict().items():
        got = getattr(out, name)
        assert got is None or oracle.value_error(got, true) < 2e-6, name
    assert gradients[0].dtype == jnp.float32
    for got, true in zip(gradients, oracle.gradients(hidden, weight, labels, seeds, **whole), strict=True):
        assert oracle.relative_norm(got, true) < 1e-5


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


@values_of("num_rows", [0, 1, 300, 777], slow=[1, 777])
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
