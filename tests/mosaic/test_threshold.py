"""The kernels with a ``gradient_threshold``, interpreted with the race detector, against an oracle that drops tiles.

The oracle is float64 with stored logits. Which tiles are active it finds from its own probabilities.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lce_jax import mosaic
from lce_jax.call import _describe
from lce_jax.mathematics import _logprobs
from lce_jax.mathematics._statistics import Normalizer
from lce_jax.mosaic import _generations, sm90
from lce_jax.mosaic._call import Generation
from lce_jax.mosaic._pallas import interpreting, plgpu
from lce_jax.mosaic.sm90._tuning import BY_KERNEL, SHORT, Tunings
from lce_jax.types._types import Operands
from tests.mosaic_cases import Case, Oracle, budget_of, case, coefficients, draw, draw_floor, make_call, traced
from tests.mosaic_interpreter import afresh, races_found
from tests.pairs import values_of

ROWS, COLUMNS = 128, 256
THRESHOLD = 0.03
BETWEEN = 2 * COLUMNS + 5  # where row 4 has between one threshold and two, the most in its tile and row block

CASES = [
    case("several batches, clusters, nothing active", T=264, V=1032, H=64, cluster=2, chunk=1, num_rows=200, stats=True,
         temperature=True, mean_logit=True),
    case("padding, softcap, no entropy, dweight added, float16", T=136, V=776, H=64, num_columns=600,
         logit_softcap=3.0, entropy=False, adds_dweight=True, dtype="float16"),
    case("padding holds half an atom at the end", T=136, V=1032, H=64, num_columns=700),
    case("hv, dweight added, several launches", T=136, V=4352, H=64, weight_layout="hv", adds_dweight=True,
         statistics_bytes=1 << 13, stats=True),
    case("candidates, several batches, clusters, padding", T=264, V=1544, num_columns=1500, num_rows=200, cluster=2,
         chunk=1, num_candidates=3, temperature=True, stats=True),
    case("candidates, hv, softcap, no entropy, dweight added", T=136, V=1280, H=64, num_candidates=2,
         weight_layout="hv", logit_softcap=3.0, entropy=False, adds_dweight=True),
    case("floor, several batches, clusters, padding", T=264, V=1032, H=64, num_columns=1000, num_rows=200, cluster=2,
         chunk=1, has_floor=True, temperature=True, stats=True),
    case("floor, hv, softcap, dweight added, float16", T=136, V=784, H=64, weight_layout="hv", logit_softcap=3.0,
         has_floor=True, adds_dweight=True, dtype="float16"),
]  # fmt: skip


def peaked(test: Case, operands: Operands) -> Operands:
    """Rows of row blocks that concentrate on few vocabulary tiles each; labels where the rows have them."""
    rng = np.random.default_rng(3)
    weight = np.asarray(operands.weight, np.float64)
    weight = weight if test.options.weight_layout == "vh" else weight.T
    true = test.V if test.num_columns is None else test.num_columns
    block = np.arange(test.T) // ROWS
    favourite = (block * 2 * COLUMNS + rng.integers(0, COLUMNS, test.T)) % true
    hidden = 4.0 * weight[favourite] + 0.1 * rng.standard_normal((test.T, test.H))
    hidden[np.arange(test.T) >= (test.T if test.num_rows is None else test.num_rows)] = 0
    targets = np.where((rng.random(test.T) < 0.9) & (block > 0), favourite, -1)  # the first active by probability alone
    targets[:3] = (favourite[:3] + COLUMNS) % true  # of small probability, in tiles that hold nothing else
    if test.options.logit_softcap is None:
        pair, inverse = weight[[favourite[4], BETWEEN]], operands.inverse_temperature
        apart = np.log(1.5 * THRESHOLD) / (1.0 if inverse is None else float(inverse[4]))
        largest = 4.0 * pair[0] @ pair[0]
        hidden[4] = np.linalg.solve(pair @ pair.T, [largest, largest + apart]) @ pair
    operands = operands._replace(hidden=jnp.asarray(hidden, test.dtype), targets=jnp.asarray(targets, jnp.int32))
    if test.options.num_candidates:
        operands = operands._replace(candidates=in_few_tiles(test, favourite, true))
    if test.options.has_floor:
        floor, targets = np.array(draw_floor(test, operands, true)), np.array(targets)
        floor[7:9], targets[7] = np.inf, -1  # no token is left, and one label
        operands = operands._replace(floor=jnp.asarray(floor), targets=jnp.asarray(targets, jnp.int32))
    return operands


def in_few_tiles(test: Case, favourite: np.ndarray, true: int) -> jax.Array:
    """Candidates at the favourites and none, but for some in tiles that hold nothing else."""
    shape = test.T, test.options.num_candidates
    ids = np.where(np.random.default_rng(4).random(shape) < 0.5, favourite[:, None], -1)
    ids[5] = 3 * COLUMNS + 7  # several times
    ids[130, -1], ids[131, 0] = 0, true - 1
    ids[205 % test.T, 0] = 4 * COLUMNS  # with few rows that count, no row that does
    return jnp.asarray(ids, jnp.int32)


class TileOracle(Oracle):
    """Probabilities, and the tiles that are active."""

    @property
    def p(self) -> np.ndarray:
        return self.e / np.maximum(self.e.sum(1, keepdims=True), 1e-300)  # 0 in a row without a token

    def active(self) -> np.ndarray:
        """[tiles, blocks]."""
        tiles, blocks = -(-len(self.weight) // COLUMNS), -(-max(len(self.hidden), ROWS) // ROWS)
        big = np.zeros((blocks * ROWS, tiles * COLUMNS), bool)
        big[: self.rows, : self.columns] = self.p[: self.rows] >= THRESHOLD
        targets = np.asarray(self.operands.targets)
        for row in range(self.rows):
            if targets[row] >= 0:
                big[row, targets[row]] = True
            for column in [] if self.operands.candidates is None else np.asarray(self.operands.candidates[row]):
                big[row, column] |= column >= 0
        active = big.reshape(blocks, ROWS, tiles, COLUMNS).any((1, 3)).T
        return active | self.computed_anyway()

    def computed_anyway(self) -> np.ndarray:
        """The tile where padding begins, which is contracted from a copy, in row blocks with rows that count."""
        active = np.zeros((-(-len(self.weight) // COLUMNS), -(-max(len(self.hidden), ROWS) // ROWS)), bool)
        if self.operands.num_columns is not None:
            active[self.columns // COLUMNS : self.columns // COLUMNS + 1, : -(-self.rows // ROWS)] = True
        return active

    def computed(self, active: np.ndarray) -> np.ndarray:
        """[T, true columns]: what is in the gradients."""
        whole = np.repeat(np.repeat(active, COLUMNS, 0), ROWS, 1).T
        return whole[: len(self.hidden), : self.columns]


def with_threshold(test: Case) -> Case:
    return dataclasses.replace(test, options=dataclasses.replace(test.options, gradient_threshold=THRESHOLD))


def kernels_of(test: Case) -> Generation:
    """Clusters where the call asks for them, and small batches and launches."""
    budget = budget_of(test, sm90.HOPPER.budget, sm90.HOPPER.tiling)
    dlogits = dataclasses.replace(BY_KERNEL["dlogits"], cluster=test.cluster)
    tuned = {("NVIDIA H200", "dlogits"): ((64, dlogits if test.cluster > 1 else SHORT),)}
    return dataclasses.replace(sm90.HOPPER, budget=budget, tunings=Tunings(tuned=tuned, many_row_blocks=1))


@pytest.fixture(name="test")
def interpreted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    afresh()
    monkeypatch.setattr(jax.lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))
    test = with_threshold(request.param)
    with _generations.using(kernels_of(test)), interpreting(plgpu.InterpretGPUParams(detect_races=True)):
        yield test


@pytest.mark.fast("floor, several")
@pytest.mark.parametrize("test", CASES, ids=str, indirect=True)
def test_active_tiles_alone(test: Case, capfd: pytest.CaptureFixture[str]) -> None:
    call = make_call(test)
    assert mosaic.supports(call) is None
    check_active_tiles(test, call)
    assert not races_found()
    assert "RACE DETECTED" not in capfd.readouterr().out


def check_active_tiles(test: Case, call: Any) -> None:
    """Which tiles are active, the mass in the others, and the gradients."""
    operands, cotangent = draw(test)
    operands = peaked(test, operands)
    oracle = TileOracle(operands, test.options)
    active = oracle.active()
    assert test.options.logit_softcap or THRESHOLD < oracle.p[4, BETWEEN] < 2 * THRESHOLD
    assert 0 < active.mean() < 1
    rows_that_count = None if test.num_rows is None else jnp.arange(test.T) < test.num_rows

    def forward(operands: Operands) -> Any:
        stats, tiles = mosaic.statistics(operands, call, True)
        return stats, *mosaic.select_tiles(call, tiles, Normalizer(stats.max, stats.sumexp), test.num_rows)

    stats, found, dropped = traced(forward, operands)
    np.testing.assert_array_equal(found[:, : active.shape[1]], active)
    if test.options.stats:
        want = np.where(oracle.computed(active), 0, oracle.p).sum(1)[: oracle.rows]
        assert want.max() > 0
        np.testing.assert_allclose(dropped[: oracle.rows], want, rtol=1e-3, atol=1e-7)
    if test.options.has_floor:
        rows_that_count = _logprobs.exclude_empty_rows(rows_that_count, stats.sumexp)
        assert not rows_that_count[7]
    rows = coefficients(test, stats, cotangent, operands, rows_that_count)
    check_gradients(test, call, operands, rows, found, oracle.gradients(rows, oracle.computed(active)))
    if "nothing active" in test.name:
        least = oracle.computed_anyway()
        found = jnp.asarray(np.pad(least, ((0, 0), (0, found.shape[1] - least.shape[1]))), jnp.int32)
        check_gradients(test, call, operands, rows, found, oracle.gradients(rows, oracle.computed(least)))


SPLIT = [
    case("candidates", T=136, H=128, V=2048, num_columns=1748, num_candidates=3),
    case("floor", T=136, H=64, V=2048, num_columns=1748, has_floor=True, stats=True),
]


@pytest.mark.slow
@pytest.mark.parametrize("shards", [2, pytest.param(4, marks=pytest.mark.slow)])
@values_of("test", SPLIT, slow=SPLIT[1:])  # torch's tests split a floor
def test_a_split_vocabulary(test: Case, shards: int) -> None:
    """Each shard's tiles and gradients, from the statistics of all: those of the whole vocabulary."""
    afresh()
    test = with_threshold(test)
    operands, cotangent = draw(test)
    operands, size = peaked(test, operands), test.V // shards
    call = dataclasses.replace(make_call(test), columns=size)

    def of_shard(i: int) -> Operands:
        targets, candidates = jax.tree.map(
            lambda ids, i=i: _describe.find_local_columns(ids, i * size, size), (operands.targets, operands.candidates)
        )
        return operands._replace(
            weight=operands.weight[i * size :][:size], targets=targets, candidates=candidates,
            num_columns=jnp.int32(np.clip(test.num_columns - i * size, 0, size)),
        )  # fmt: skip

    def gradients(parts: list[Operands]) -> Any:
        found = [mosaic.partial_statistics(part, call, True) for part in parts]
        stats = mosaic.merge_statistics(
            jax.tree.map(lambda *x: jnp.stack(x), *(each[0] for each in found)), call, None, None
        )
        active = [mosaic.select_tiles(call, tiles, Normalizer(stats.max, stats.sumexp), None) for _, tiles in found]
        counts = _logprobs.exclude_empty_rows(None, stats.sumexp) if test.options.has_floor else None
        rows = coefficients(test, stats, cotangent, operands, counts)
        each = zip(parts, active, strict=True)
        return rows, active, [mosaic.gradients(part, call, rows, tiles)[:2] for part, (tiles, _) in each]

    with _generations.using(kernels_of(test)), interpreting(plgpu.InterpretGPUParams()):
        rows, active, grads = jax.jit(gradients)([of_shard(i) for i in range(shards)])
    oracle = TileOracle(operands, test.options)
    want = oracle.active()
    np.testing.assert_array_equal(np.concatenate([tiles for tiles, _ in active])[:, : want.shape[1]], want)
    assert 0 < want.mean() < 1
    found = sum(np.asarray(x, np.float64) for x, _ in grads), np.concatenate([np.asarray(x, float) for _, x in grads])
    for got, exact in zip(found, oracle.gradients(rows, oracle.computed(want)), strict=True):
        assert np.linalg.norm(got - exact) <= 4e-3 * np.linalg.norm(exact)
    if test.options.stats:
        dropped = sum(np.asarray(mass) for _, mass in active)
        np.testing.assert_allclose(dropped, np.where(oracle.computed(want), 0, oracle.p).sum(1), rtol=1e-3, atol=1e-7)


def check_gradients(test: Case, call: Any, operands: Operands, rows: Any, active: Any, want: Any) -> None:
    before = jnp.full(operands.weight.shape, 0.5, jnp.float32) if test.adds_dweight else None

    def run(operands: Operands, rows: Any, active: Any, before: Any) -> Any:
        return mosaic.gradients(operands, call, rows, active, dweight=before)[:2]

    dhidden, dweight = traced(run, operands, rows, active, before)
    dweight = dweight if before is None else dweight - before
    # As in tests/mosaic/test_interpret.py; a sum is rounded beside 0.5 as well.
    bound = {"bfloat16": 4e-3, "float16": 5e-4}[test.dtype]
    for got, exact in ((dhidden[: test.num_rows], want[0][: test.num_rows]), (dweight, want[1])):
        error = np.linalg.norm(np.asarray(got, np.float64) - exact)
        assert error <= bound * np.linalg.norm(exact) + (0 if before is None else 1e-7 * np.sqrt(exact.size))
