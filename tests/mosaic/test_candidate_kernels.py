"""The kernels of candidates, interpreted, against float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lce_jax import mosaic
from lce_jax._types import Case, LogprobOutput, Operands, Results
from lce_jax.mathematics import _logprobs
from lce_jax.mosaic import _generations
from lce_jax.mosaic._pallas import interpreting, plgpu
from lce_jax.mosaic.common._candidates import candidate_logits, candidate_values
from lce_jax.mosaic.common._put_candidates import put_candidates
from tests.mosaic.test_interpret import kernels_of
from tests.mosaic_calls import Oracle, call, case_of
from tests.mosaic_interpreter import races_found


def run(kernel: Any, case: Case, *arrays: Any, **more: Any) -> np.ndarray:
    with interpreting(plgpu.InterpretGPUParams(detect_races=True)):
        found = jax.jit(lambda *arrays: kernel(case, *arrays, *more.values()))(*arrays)
    assert not races_found()
    return np.asarray(found)


def numbers(*given: int) -> jax.Array:
    return jnp.asarray(given, jnp.int32)


@pytest.mark.parametrize(
    ("H", "K", "options"),
    [
        (128, 1, {}),
        (192, 17, {"logit_softcap": 3.0, "logit_scale": 0.5}),  # a piece and a half
        (576, 5, {"dtype": "float16"}),
        (1088, 3, {}),  # the widest loads, and a part of a piece
    ],
)
def test_logits(H: int, K: int, options: dict[str, Any]) -> None:
    """Of rows that count and columns that the shard owns and that are no padding, in their fields."""
    T, V, start, count, columns = 4, 300, 40, 3, 290
    case = case_of(call("logits", T=T, H=H, V=V, num_candidates=K, **options))
    rng = np.random.default_rng(0)
    hidden, weight = (jnp.asarray(rng.normal(size=(n, H)), case.dtype) for n in (T, V))
    weight = weight.at[columns:].set(jnp.nan)
    ids = rng.integers(start, start + columns, (K, T)).astype(np.int32)
    ids[-1] = -1, start - 1, start + columns, start + columns - 1
    kept, memory = np.zeros((2 + K, T), np.int32), jnp.full(((1 + K) * (T + 2),), jnp.nan)
    kept[2:] = ids
    given = hidden, weight, kept.reshape(-1), memory, numbers(count, T, T + 2, start, columns)
    found = run(candidate_logits, case, *given, first=(2, 1)).reshape(1 + K, T + 2)
    at = np.clip(ids - start, 0, columns - 1)
    raw = np.einsum("th,kth->kt", np.float64(hidden), np.float64(weight)[at])
    x = np.tanh(raw / 6) if case.options.logit_softcap else raw
    owned = (ids >= start) & (ids < start + columns)
    np.testing.assert_allclose(found[1:, :count], np.where(owned, x, -np.inf)[:, :count], rtol=1e-5, atol=1e-4)
    assert np.isnan(found[0]).all()
    assert np.isnan(found[:, count:]).all()


@pytest.mark.parametrize(("K", "options"), [(1, {}), (9, {"entropy": False}), (20, {"logit_softcap": 3.0})])
def test_values(K: int, options: dict[str, Any]) -> None:
    """All that stands at a place: the label's factor or the probability's, and the terms of every repeat."""
    T, start = 256, 40
    case = case_of(call("values", T=T, num_candidates=K, **options))
    rng = np.random.default_rng(0)
    ids = rng.integers(start, start + 8, (K, T)).astype(np.int32)  # often the same
    targets = rng.integers(-1, 8, T).astype(np.int32)
    x, terms = (rng.normal(size=(K, T)).astype(np.float32) for _ in range(2))
    scale = rng.uniform(0.5, 2.0, T).astype(np.float32)
    factors = rng.normal(size=(3 + case.options.entropy, T)).astype(np.float32)
    flat = [jnp.asarray(y.reshape(-1)) for y in (ids, x, terms)]
    given = *flat, jnp.asarray(targets), jnp.asarray(scale), jnp.asarray(factors), numbers(T, T, start)
    found = run(candidate_values, case, *given, first=(0, 0)).reshape(K, T)
    highest, target, constant, slope = [*np.float64(factors), 0.0][:4]
    u = np.minimum((x - highest) * np.float64(scale), 0.0)
    d = np.exp2(u) * (constant + slope * u) * (1.0 - np.float64(x) ** 2 if case.options.logit_softcap else 1.0)
    added = np.sum(np.where(ids[:, None] == ids, np.float64(terms), 0.0), axis=1)
    np.testing.assert_allclose(found, np.where(ids - start == targets, target, d) + added, rtol=1e-5, atol=1e-5)


def test_put() -> None:
    """The columns of the chunk, in rows that count; nothing else is touched."""
    T, K, width, start, begin, count = 5, 18, 16, 40, 256, 4
    case = case_of(call("put", T=T, num_candidates=K))
    rng = np.random.default_rng(0)
    d = jnp.asarray(rng.normal(size=(T + 3, width)), jnp.bfloat16)
    ids = rng.integers(start + begin - 4, start + begin + width + 4, (K, T)).astype(np.int32)
    ids[0] = -1
    values = rng.normal(size=(start + begin + width + 4, T)).astype(np.float32)  # equal ids have equal values
    at_ids = np.take_along_axis(values, ids, axis=0)
    given = d, ids.reshape(-1), at_ids.reshape(-1), numbers(count, T, start, begin, begin + width)
    found = run(put_candidates, case, *given, first=0)
    want = np.array(d)
    for t in range(count):
        for c in ids[:, t] - start - begin:
            if 0 <= c < width:
                want[t, c] = values[c + start + begin, t].astype(want.dtype)
    assert np.array_equal(found, want)


def test_a_candidate_that_is_nearly_certain() -> None:
    """Its g (1 - p) has the digits of a small number: it is no difference of rounded large ones."""
    T, H, V = 8, 128, 512
    test = call("certain", T=T, H=H, V=V, num_candidates=2)
    case = dataclasses.replace(case_of(test), num_tokens=T)
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(V, H)) / np.sqrt(H)
    ids = rng.integers(0, V, (T, 2)).astype(np.int32)
    hidden = weight[ids[:, 0]] * 18 * np.sqrt(np.linspace(0.8, 1.2, T))[:, None]
    operands = Operands(
        jnp.asarray(hidden, case.dtype), jnp.asarray(weight, case.dtype), jnp.full((T,), -1, jnp.int32), None, None,
        None, candidates=jnp.asarray(ids),
    )  # fmt: skip
    oracle = Oracle(operands, case.options)
    stats = oracle.statistics()
    certain = np.exp(np.asarray(stats.candidates[:, 0] - stats.max)) / np.asarray(stats.sumexp)
    assert certain.min() > 0.99
    seed = jnp.asarray(np.stack([rng.normal(size=T), np.zeros(T)], 1), jnp.float32)
    zero = jnp.zeros((T,))
    cotangent = Results(LogprobOutput(zero, zero, zero, candidate_logprobs=seed))
    rows = _logprobs.row_coefficients(stats, cotangent, 1.0, 1.0, None, case.options, V)
    want, _ = oracle.gradients(rows)
    with _generations.using(kernels_of(test)), interpreting(plgpu.InterpretGPUParams()):
        found = jax.jit(lambda operands, rows: mosaic.gradients(operands, case, rows).hidden)(operands, rows)
    error = np.linalg.norm(np.asarray(found) - want, axis=1) / np.linalg.norm(want, axis=1)
    assert error.max() < 4e-3
