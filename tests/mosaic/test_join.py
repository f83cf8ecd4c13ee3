"""The kernel that joins the tiles' statistics, interpreted; a token's bits depend on nothing else in the call."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lce_jax import mosaic
from lce_jax.mathematics import _statistics
from lce_jax.mosaic import _generations, _operands
from lce_jax.mosaic._pallas import interpreting, plgpu
from lce_jax.mosaic.common._join import join
from lce_jax.types._types import Operands
from tests.mosaic.test_interpret import kernels_of
from tests.mosaic_cases import Case, case, make_call
from tests.mosaic_interpreter import races_found

TOKENS = 256


@pytest.mark.fast("20-17-16")
@pytest.mark.parametrize(("parts", "count", "group"), [(20, 20, 16), (20, 17, 16), (5, 5, 16), (40, 30, 40)])
def test_a_union(parts: int, count: int, group: int) -> None:
    """Of the parts that count; the others hold NaN. A group without any has the statistics of no columns."""
    rng, call = np.random.default_rng(0), make_call(case("join", T=TOKENS))
    scale = jnp.asarray(rng.uniform(0.5, 2.0, TOKENS), jnp.float32)
    m, s = rng.normal(size=(2, parts, TOKENS))
    owner = rng.integers(0, 2 * parts, TOKENS)  # one part at most
    t = np.where(np.arange(parts)[:, None] == owner, -rng.random((parts, TOKENS)), -np.inf)
    given = np.stack([m, np.exp(s), -np.abs(m), t], 1).astype(np.float32)
    given[count:] = np.nan
    groups = -(-parts // group)

    def joined(given: Any, scale: Any) -> Any:
        memory = jnp.full((groups + 1, 4, TOKENS), jnp.nan)
        return join((scale,), given, memory, call, group, jnp.asarray([130, count, 1], jnp.int32))

    with interpreting(plgpu.InterpretGPUParams(detect_races=True)):
        found = np.asarray(jax.jit(joined)(given, scale))
    assert not races_found()
    assert np.isnan(found[0]).all()
    for number in range(groups):
        of_group = _operands.unstack_statistics(call, given[number * group : min((number + 1) * group, count)])
        want: Any = _operands.UNWRITTEN
        if number * group < count:
            nats = of_group._replace(weighted=of_group.weighted * np.log(2), target=of_group.target * np.log(2))
            want = _statistics.merge(nats, scale * np.log(2))
            want = want._replace(weighted=want.weighted / np.log(2), target=want.target / np.log(2))
        for i, name in enumerate(_operands.list_statistics(call)):
            expected = np.broadcast_to(getattr(want, name), TOKENS)
            np.testing.assert_allclose(found[1 + number, i, :130], expected[:130], rtol=1e-5, err_msg=name)


def statistics(test: Case, hidden: Any, weight: Any, targets: Any) -> Any:
    call = dataclasses.replace(make_call(test), num_tokens=len(hidden))
    operands = Operands(hidden, weight, targets, None, None, None)
    with _generations.using(kernels_of(test)), interpreting(plgpu.InterpretGPUParams()):
        return jax.jit(lambda operands: mosaic.statistics(operands, call, True)[0])(operands)


@pytest.mark.slow
def test_a_tokens_bits() -> None:
    """Alone, among others, with a part of the tiles in a cache, in several launches: the same."""
    H, V = 64, 4400  # two groups of tiles
    rng = np.random.default_rng(1)
    hidden = jnp.asarray(rng.normal(size=(20, H)) * 3, jnp.bfloat16)
    weight = jnp.asarray(rng.normal(size=(V, H)) / 8, jnp.bfloat16)
    targets = jnp.asarray(rng.integers(0, V, 20), jnp.int32)
    every = statistics(case("all", H=H, V=V), hidden, weight, targets)
    some = jnp.asarray([17, 3, 8])
    others = [
        (some, statistics(case("some", H=H, V=V), hidden[some], weight, targets[some])),
        (jnp.arange(20), statistics(case("cached", H=H, V=V, cache_bytes=400_000), hidden, weight, targets)),
        (jnp.arange(20), statistics(case("launches", H=H, V=V, statistics_bytes=11_000), hidden, weight, targets)),
    ]
    for rows, found in others:
        for name in ("max", "sumexp", "weighted", "target"):
            assert np.array_equal(getattr(found, name), getattr(every, name)[rows]), name
