"""The kernels write every element of every result: all memory that they are given, and all of their own, begins as NaN.

What memory held before is no part of a gradient.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lce_jax import mosaic
from lce_jax.mathematics import _logprobs
from lce_jax.mathematics._statistics import Normalizer
from lce_jax.mosaic import _generations
from lce_jax.mosaic._pallas import interpreting, plgpu
from tests.mosaic.test_interpret import kernels_of
from tests.mosaic_cases import case, draw, make_call, traced
from tests.mosaic_interpreter import afresh
from tests.pairs import combined

# Two tiles, with half an atom after them, with less, which no threshold serves; "hv" takes neither.
HEADS = [
    (V, layout, threshold)
    for V, layout in ((512, "vh"), (520, "vh"), (517, "vh"), (512, "hv"))
    for threshold in (0.0, 1e-6)
    if not (threshold and V % 8)
]


@pytest.mark.fast("(520, 'vh', 1e-06)-65536-300-True-30")
@combined(
    head=HEADS,
    cache_bytes=[0, 1 << 16, 1 << 30],
    true_columns=[None, 200, 300, 510],  # the first tile, the second, nearly all
    traced_columns=[False, True],
    rows=[None, 30],
)
def test_every_element_is_written(
    head: tuple[int, str, float],
    cache_bytes: int,
    true_columns: int | None,
    traced_columns: bool,
    rows: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    V, layout, gradient_threshold = head
    test = case(
        "written", T=40, H=64, V=V, num_columns=true_columns, num_rows=rows, chunk=1,
        traced_columns=traced_columns and true_columns is not None,
        gradient_threshold=gradient_threshold, cache_bytes=cache_bytes, weight_layout=layout,
    )  # fmt: skip
    afresh()
    monkeypatch.setattr(jax.lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))
    call = make_call(test)
    assert mosaic.supports(call) is None
    operands, cotangent = draw(test)
    counts = None if rows is None else jnp.arange(test.T) < rows

    def results(operands: Any, cotangent: Any) -> Any:
        stats, cache = mosaic.statistics(operands, call, True)
        if gradient_threshold:
            cache, _ = mosaic.select_tiles(call, cache, Normalizer(stats.max, stats.sumexp), rows)
        coefficients = _logprobs.row_coefficients(stats, cotangent, 1.0, 1.0, counts, test.options, true_columns or V)
        return stats, mosaic.gradients(operands, call, coefficients, cache)

    with _generations.using(kernels_of(test)), interpreting(plgpu.InterpretGPUParams()):
        stats, (dhidden, dweight, *_) = traced(results, operands, cotangent)
    for name, x in {**stats._asdict(), "dhidden": dhidden}.items():
        assert x is None or not np.isnan(np.asarray(x, np.float64)[:rows]).any(), name
    dweight = np.asarray(dweight, np.float64) if layout == "vh" else np.asarray(dweight, np.float64).T
    assert not np.isnan(dweight).any()
    assert (dweight[:true_columns] != 0).any(axis=1).all()
    assert (dweight[V if true_columns is None else true_columns :] == 0).all()
