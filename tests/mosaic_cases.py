"""Calls that the interpreter runs kernels for, whatever their generation, and how they are compared with the oracle."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lce_jax import mosaic
from lce_jax.mathematics import _logprobs
from lce_jax.mosaic._chunks import Budget, Cache
from lce_jax.mosaic._operands import Tiling
from lce_jax.types import _types
from lce_jax.types._types import Device, LogprobOutput, Operands, Results, RowCoefficients, ShardStatistics
from tests.devices import H200
from tests.mosaic_interpreter import afresh, races_found

MULTIPROCESSORS = 2


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    T: int = 136
    H: int = 128
    V: int = 784
    dtype: str = "bfloat16"
    num_rows: int | None = None
    num_columns: int | None = None
    traced_columns: bool = False
    temperature: bool = False
    statistics_bytes: int | None = None  # small: several launches of the forward
    shared: bool = False  # both warpgroups share every step instead of taking turns
    cluster: int = 1  # 2: two blocks share the steps of few stages
    owns_cache: bool = True
    rounds_dhidden: bool = False
    adds_dweight: bool = False  # to a sum in float32
    writes_sum: bool = False  # which holds nothing yet
    chunk: int | None = None  # tiles of a chunk of dlogits
    options: _types.Call = _types.Call()  # noqa: RUF009 - frozen

    def __str__(self) -> str:
        return self.name


def case(name: str, **fields: Any) -> Case:
    own = {field.name for field in dataclasses.fields(Case)}
    options = _types.Call(**{key: value for key, value in fields.items() if key not in own})
    return Case(name, options=options, **{key: value for key, value in fields.items() if key in own})


CASES = [
    case("ragged", T=200),
    case("five tokens, columns that are no whole atom, mean logit", shared=True, T=5, V=777, num_columns=770,
         temperature=True, mean_logit=True, entropy=False),
    case("targets in the columns that are no whole atom", T=100, V=265, stats=True),
    case("one step over H", H=64, V=512, T=264),
    case("one step over H, shared", shared=True, H=64, V=256),
    case("clusters", T=392, H=192, V=704, cluster=2),
    case("clusters, rows left out, cache", T=500, V=512, num_rows=130, cluster=2, cache_bytes=300_000),
    case("stages that do not divide, a cache that others read", H=448, V=512, T=40, owns_cache=False,
         cache_bytes=1 << 30),
    case("several launches", T=40, H=64, V=4300, statistics_bytes=11_000, stats=True),
    case("several launches, cache", T=40, H=64, V=4300, statistics_bytes=11_000, cache_bytes=1_200_000),
    case("rows left out", T=392, num_rows=100),
    case("no row left", T=264, num_rows=0, V=512),
    case("padding, stats, softcap, temperature", num_columns=600, stats=True, logit_softcap=3.0, temperature=True),
    case("padding of a traced number of columns", num_columns=200, traced_columns=True, logit_scale=0.5),
    case("nothing but padding", num_columns=0, traced_columns=True, V=512),
    case("cache", cache_bytes=1 << 30),
    case("dhidden written once, rounded", rounds_dhidden=True, num_rows=100, cache_bytes=1 << 30),
    case("chunks of a cache that others read", chunk=1, owns_cache=False, cache_bytes=1 << 30),
    case("chunks, half a cache", chunk=1, cache_bytes=160_000),
    case("chunks, columns that are no whole atom", chunk=1, V=777, cache_bytes=1 << 30, num_rows=100),
    case("a shorter last chunk", chunk=2, V=1200),
    case("a shorter last chunk, hv", chunk=2, T=40, V=1280, weight_layout="hv"),
    case("a shorter last chunk, columns that are no whole atom", chunk=2, V=1283, cache_bytes=150_000),
    case("padding up to columns that are no whole atom", V=517, num_columns=400),
    case("padding up to half an atom", V=520, num_columns=200),
    case("half a cache, float16", shared=True, dtype="float16", T=130, cache_bytes=150_000),
    case(
        "cache with everything, narrow tiles", shared=True, T=264, H=192, V=1000, num_rows=100, num_columns=700,
        logit_softcap=3.0, temperature=True, cache_bytes=300_000, stats=True,
    ),
    case("candidates, columns that are no whole atom", chunk=1, T=100, V=777, num_candidates=5, cache_bytes=80_000),
    case("candidates that XLA gathers", chunk=1, T=40, H=64, V=512, num_candidates=3, weight_layout="hv"),
    case("candidates, half a cache", chunk=1, num_candidates=3, cache_bytes=160_000, logit_softcap=3.0),
    case(
        "candidates, cache, padding, rows left out", T=264, V=1000, num_candidates=5, num_rows=100, num_columns=700,
        temperature=True, cache_bytes=1 << 30,
    ),
    case("dweight added", adds_dweight=True, num_rows=100, cache_bytes=1 << 30),
    case("dweight added, padding", adds_dweight=True, T=100, num_columns=600),
    case("dweight added, columns that are no whole atom", adds_dweight=True, chunk=1, V=777, num_columns=775, T=40),
    case("dweight written to a sum", adds_dweight=True, writes_sum=True, chunk=1, T=40),
    case("dweight written to a sum, no row left", adds_dweight=True, writes_sum=True, T=264, num_rows=0, V=512),
    case("dweight written to a sum, padding, hv", adds_dweight=True, writes_sum=True, V=832, num_columns=600, T=40,
         weight_layout="hv"),
    case("dweight written to a sum, columns that are no whole atom", adds_dweight=True, writes_sum=True, V=777, T=40),
    case("dweight added, hv", adds_dweight=True, V=832, weight_layout="hv", T=40),
    case("hv", weight_layout="hv", V=832),
    case(
        "parts, padding, shared, clusters", shared=True, cluster=2, T=264, H=64, V=1056, num_columns=601, stats=True,
        vocab_part_size=264, traced_columns=True, temperature=True, num_candidates=3, num_rows=200,
    ),
    case("parts, several launches", T=40, H=64, V=8500, statistics_bytes=11_000, vocab_part_size=4200),
    case("parts of an odd V", T=40, V=777, num_columns=775, vocab_part_size=256),
    case("parts, hv", T=40, V=832, weight_layout="hv", vocab_part_size=192),
    case("floor, columns that are no whole atom", has_floor=True, T=100, V=777, num_columns=775, entropy=False,
         chunk=1),
    case(
        "floor with everything", shared=True, has_floor=True, T=264, H=64, V=1000, num_rows=100, num_columns=700,
        logit_softcap=3.0, temperature=True, cache_bytes=300_000, stats=True,
    ),
    case("floor, parts", has_floor=True, T=40, H=64, V=777, num_columns=775, vocab_part_size=256, stats=True),
    case("adapter, padding", rank=64, chunk=1, num_columns=600, cache_bytes=160_000),
    case("adapter with everything", rank=128, chunk=1, cluster=2, T=264, H=192, V=777, num_rows=100, num_columns=775,
         has_floor=True, temperature=True, logit_softcap=3.0, stats=True),
    case("adapter, rounded", shared=True, rank=64, H=64, cache_bytes=1 << 30, rounds_dhidden=True, dtype="float16"),
    case("hv with a narrow swizzle and a cache", shared=True, weight_layout="hv", cache_bytes=1 << 30, entropy=False),
]  # fmt: skip


def draw(test: Case) -> tuple[Operands, Results]:
    rng = np.random.default_rng(0)
    live = np.arange(test.T) < (test.T if test.num_rows is None else test.num_rows)
    hidden = np.where(live[:, None], rng.standard_normal((test.T, test.H)), 0)  # as compaction leaves them
    weight = rng.standard_normal((test.V, test.H)) * 2 / np.sqrt(test.H)
    columns = test.V if test.num_columns is None else test.num_columns
    weight[columns:] = np.nan  # padding may hold anything
    factor = None
    if rank := test.options.rank:  # of which the last columns are zero, as those that pad it are
        beside, factor = rng.standard_normal((test.T, rank)), rng.standard_normal((test.V, rank)) * np.sqrt(2 / rank)
        beside[:, rank - 5 :], factor[:, rank - 5 :], factor[columns:] = 0, 0, np.nan
        hidden = np.concatenate([hidden, np.where(live[:, None], beside, 0)], 1)
    if test.options.weight_layout == "hv":
        weight = weight.T
    inverse_temperature = np.where(live, rng.uniform(0.5, 2.0, test.T), 0) if test.temperature else None
    operands = Operands(
        hidden=jnp.asarray(hidden, test.dtype),
        weight=jnp.asarray(weight, test.dtype),
        targets=jnp.asarray(rng.integers(-1, max(columns, 1), test.T) if columns else -np.ones(test.T), jnp.int32),
        inverse_temperature=None if inverse_temperature is None else jnp.asarray(inverse_temperature, jnp.float32),
        num_rows=None if test.num_rows is None else jnp.int32(test.num_rows),
        num_columns=jnp.int32(columns) if test.traced_columns else test.num_columns,
        candidates=draw_candidates(test, columns) if test.options.num_candidates else None,
        adapter=None if factor is None else jnp.asarray(factor, test.dtype),
    )
    if test.options.has_floor:
        operands = operands._replace(floor=draw_floor(test, operands, columns))
    seeds = [jnp.asarray(np.where(live, rng.standard_normal(test.T), 0), jnp.float32) for _ in range(4)]
    outputs = LogprobOutput(*seeds[:3])
    if test.options.num_candidates:
        of_candidates = np.where(live[:, None], rng.standard_normal((test.T, test.options.num_candidates)), 0)
        outputs = outputs._replace(candidate_logprobs=jnp.asarray(of_candidates, jnp.float32))
    return operands, Results(outputs, mean_logit=seeds[3] if test.options.mean_logit else None)


def draw_floor(test: Case, operands: Operands, columns: int) -> jax.Array:
    """In the middle between two logits, so that no rounding moves one over it; all or none reach some of them."""
    rng, matrix = np.random.default_rng(2), matrix_of(operands, test.options)
    x = np.sort(np.asarray(operands.hidden, np.float64) @ matrix[:columns].T, axis=1)
    place = rng.integers(0, columns - 1, (test.T, 1))
    floor = (np.take_along_axis(x, place, 1) + np.take_along_axis(x, place + 1, 1))[:, 0] / 2
    if test.options.logit_softcap is not None:
        floor = np.tanh(floor / test.options.logit_softcap)
    floor[:2], floor[2:4] = -np.inf, np.where(operands.targets[2:4] < 0, 0, np.inf)
    return jnp.asarray(floor, jnp.float32)


def draw_candidates(test: Case, columns: int) -> jax.Array:
    """Some of them on no shard or another one, in the last columns, or twice in a token."""
    rng, shape = np.random.default_rng(1), (test.T, test.options.num_candidates)
    ids = np.where(rng.random(shape) < 0.2, -1, rng.integers(0, columns, shape))
    ids[::3, 0] = columns - 1 - np.arange(len(ids[::3])) % 20
    ids[1::3, -1] = ids[1::3, 0]
    return jnp.asarray(ids, jnp.int32)


def make_call(test: Case, device: Device = H200) -> _types.Call:
    return dataclasses.replace(
        test.options, num_tokens=test.T, hidden_size=test.H, columns=test.V, dtype=jnp.dtype(test.dtype),
        partial_rows=test.num_rows is not None,
        device=device._replace(core_count=MULTIPROCESSORS),
    )  # fmt: skip


def budget_of(test: Case, budget: Budget, tiling: Tiling) -> Budget:
    """One that gives several chunks, or several launches of the forward."""
    if test.chunk is not None:
        columns = test.chunk * tiling.tile
        budget = dataclasses.replace(budget, temporary_bytes=0, chunk_columns=columns)
    if test.statistics_bytes is not None:
        budget = dataclasses.replace(budget, statistics_bytes=test.statistics_bytes)
    return budget


def check(test: Case, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares statistics, cache and gradients, and looks for a race in the last kernel; others print theirs."""
    afresh()
    monkeypatch.setattr(jax.lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))
    call = make_call(test, device)
    assert mosaic.supports(call) is None
    operands, cotangent = draw(test)
    want, rows, gradients = expected(test, operands, cotangent)
    cache = check_statistics(test, call, operands, want)
    check_gradients(test, call, operands, rows, cache, gradients)
    assert not races_found()  # in the last kernel


def expected(test: Case, operands: Operands, cotangent: Results) -> Any:
    """The oracle's statistics; the coefficients that the gradients are given; the oracle's gradients."""
    oracle = Oracle(operands, test.options)
    want = whole = oracle.statistics()
    if test.num_columns == 0:  # this shard owns no column; another one owns them all
        whole = want._replace(max=jnp.zeros_like(want.max), sumexp=jnp.ones_like(want.sumexp))
    live = None if test.num_rows is None else jnp.arange(test.T) < test.num_rows
    rows = jax.jit(functools.partial(coefficients, test))(whole, cotangent, operands, live)
    return want, rows, oracle.gradients(rows)


def matrix_of(operands: Operands, options: _types.Call) -> np.ndarray:
    """The weight [V, H], or with an adapter [V, H + R]: the weight, then B."""
    weight = np.asarray(operands.weight, np.float64)
    weight = weight if options.vocab_dim == 0 else weight.T
    if operands.adapter is None:
        return weight
    return np.concatenate([weight, np.asarray(operands.adapter, np.float64)], 1)


class Oracle:
    """One shard's stored logits in float64, and eqs. 1, 4 and 5 of them."""

    def __init__(self, operands: Operands, options: _types.Call) -> None:
        self.operands, self.options = operands, options
        self.hidden, self.weight = np.asarray(operands.hidden, np.float64), matrix_of(operands, options)
        self.columns = len(self.weight) if operands.num_columns is None else int(operands.num_columns)
        self.rows = len(self.hidden) if operands.num_rows is None else int(operands.num_rows)
        raw, cap = self.hidden @ self.weight[: self.columns].T, options.logit_softcap
        self.x = (-raw if options.logit_scale < 0 else raw) if cap is None else np.tanh(raw * options.logit_scale / cap)
        self.dcap = np.ones_like(raw) if cap is None else 1 / np.cosh(raw * options.logit_scale / cap) ** 2
        self.inside = np.ones(raw.shape, bool)
        if operands.floor is not None:
            labels = np.arange(self.columns) == np.asarray(operands.targets)[:, None]
            self.inside = (self.x >= np.asarray(operands.floor, np.float64)[:, None]) | labels
        k = np.float64(1 if operands.inverse_temperature is None else operands.inverse_temperature)
        k = np.broadcast_to(k * (abs(options.logit_scale) if cap is None else cap), len(raw))[:, None]
        self.max = self.x.max(1, keepdims=True, where=self.inside, initial=-1e30)
        self.u = np.where(self.inside, (self.x - self.max) * k, 0)
        self.e = np.where(self.inside, np.exp(self.u), 0)

    def statistics(self) -> ShardStatistics:
        """Those that the options ask for, in float32."""
        fields = dict(
            max=self.max[:, 0], sumexp=self.e.sum(1), weighted=(self.e * self.u).sum(1), squares=(self.e**2).sum(1),
            target=self.at(self.u, self.operands.targets), total=self.x.sum(1), support=self.inside.sum(1),
            min=self.x.min(1, where=self.inside, initial=1e30), candidates=self.at(self.x, self.operands.candidates),
        )  # fmt: skip
        asked = self.options.statistics
        return ShardStatistics(**{name: jnp.float32(x) if name in asked else None for name, x in fields.items()})

    def at(self, of: np.ndarray, ids: Any) -> np.ndarray:
        """What stands at each token's ids, -inf where there is none."""
        ids = np.asarray([] if ids is None else ids, int)
        found = np.full(ids.shape, -np.inf)
        where = np.nonzero(ids >= 0)
        found[where] = of[where[0], ids[where]]
        return found

    def gradients(self, rows: RowCoefficients, kept: Any = 1.0) -> tuple[np.ndarray, np.ndarray]:
        """Dhidden and dweight; ``kept`` [T, columns] is 0 where dlogits are left out."""

        def of(x: Any) -> Any:
            return 0.0 if x is None else np.asarray(x, np.float64)[:, None]

        d = self.e * (of(rows.constant) + of(rows.slope) * self.u) * self.dcap
        targets = np.asarray(self.operands.targets)
        owned = np.flatnonzero(targets[: self.rows] >= 0)
        d[owned, targets[owned]] = of(rows.target)[owned, 0]
        for row in range(self.rows if self.operands.candidates is not None else 0):
            for column, term in zip(self.operands.candidates[row].tolist(), rows.candidates[row].tolist(), strict=True):
                d[row, column] += term if column >= 0 else 0.0
        d = d * kept + of(rows.uniform) * self.dcap
        d[self.rows :] = 0
        dweight = np.zeros_like(self.weight)
        dweight[: self.columns] = d.T @ self.hidden
        return d @ self.weight[: self.columns], dweight if self.options.vocab_dim == 0 else dweight.T


def coefficients(test: Case, stats: Any, cotangent: Results, operands: Operands, where: Any = None) -> RowCoefficients:
    """What `_shard` makes of the statistics of the whole vocabulary."""
    inverse = operands.inverse_temperature
    scale, factor = (
        _logprobs.compute_row_scale(test.options, inverse),
        _logprobs.compute_row_factor(test.options, inverse),
    )
    return _logprobs.row_coefficients(stats, cotangent, scale, factor, where, test.options, test.V)


def traced(function: Any, operands: Operands, *rest: Any) -> Any:
    """The jitted ``function``'s results; a number of columns that is static stays so."""
    static = operands.num_columns

    def compute(operands: Operands, *rest: Any) -> Any:
        return function(operands._replace(num_columns=static) if isinstance(static, int) else operands, *rest)

    return jax.jit(compute)(operands, *rest)


def check_statistics(test: Case, call: _types.Call, operands: Operands, want: Any) -> Cache | None:
    """Returns the cache."""
    stats, cache = traced(lambda operands: mosaic.statistics(operands, call, True), operands)
    for name, got in stats._asdict().items():
        expected = getattr(want, name)
        assert (got is None) == (expected is None), name
        if got is not None:
            live = slice(test.num_rows)
            np.testing.assert_allclose(got[live], expected[live], rtol=2e-6, atol=1e-4, err_msg=name)
    kept = 0 if cache is None else cache.exponentials.nbytes + cache.max.nbytes
    assert kept <= test.options.cache_bytes
    assert (kept > 0) == (test.options.cache_bytes > 0)
    return cache


def check_gradients(
    test: Case, call: _types.Call, operands: Operands, rows: Any, cache: Cache | None, want: tuple[jax.Array, jax.Array]
) -> None:
    allowed = {"may_round_dhidden": test.rounds_dhidden, "may_overwrite_cache": test.owns_cache}
    held = np.nan if test.writes_sum else 0.5
    before = jnp.full(operands.weight.shape, held, jnp.float32) if test.adds_dweight else None

    def run(operands: Operands, rows: Any, cache: Any, before: Any, adds: Any) -> Any:
        return mosaic.gradients(operands, call, rows, cache, dweight=before, adds_dweight=adds, **allowed)

    dhidden, dweight, _, dadapter = traced(run, operands, rows, cache, before, not test.writes_sum)
    if call.rank:
        assert dweight is None
        assert dadapter.dtype == jnp.float32
        dweight, want = dadapter, (want[0], want[1][:, call.hidden_size :])
    if before is not None:
        assert dweight.dtype == before.dtype
        dweight = dweight if test.writes_sum else dweight - before
    assert dhidden.dtype == (test.dtype if test.rounds_dhidden else jnp.float32)
    expected_dhidden, expected_dweight = want
    # One rounding of dlogits to eight or eleven bits: 2^-9 / sqrt(3) or less, and as much again in the weight's dtype.
    bound = {"bfloat16": 4e-3, "float16": 5e-4}[test.dtype]
    live = slice(test.num_rows)
    for got, expected in ((dhidden[live], expected_dhidden[live]), (dweight, expected_dweight)):
        error = np.linalg.norm(np.asarray(got, np.float64) - np.asarray(expected, np.float64))
        assert error <= bound * np.linalg.norm(np.asarray(expected, np.float64))
