"""The case matrix on a GPU, against float64."""

from __future__ import annotations

import numpy as np
import pytest

from tests import cases, oracle
from tests.test_parity import GRADIENT_BOUND, IMPLEMENTATIONS, VALUE_BOUND, evaluate, materialised

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("test", cases.MATRIX, ids=str)
def test_matches_float64(test: cases.TestCase, implementation: str) -> None:
    out, grads, (hidden, weight, labels, seeds, options) = evaluate(test, implementation)
    product_hidden = hidden.astype(weight.dtype)
    for got, true in zip(out, oracle.logprobs(product_hidden, weight, labels, **options), strict=True):
        assert got is None or oracle.value_error(got, true) <= VALUE_BOUND[test.dtype] * max(1.0, test.spread / 10)
    wanted = oracle.gradients(product_hidden, weight, labels, seeds, **options)
    if "float16" in (test.dtype[-7:], str(hidden.dtype)[-7:]):
        plain = materialised(hidden, weight, labels, seeds, options)
        # The same roundings as the materialised path's, so the same error up to chance.
        bounds = [1.02 * oracle.relative_norm(theirs, true) for theirs, true in zip(plain, wanted, strict=True)]
    else:
        bounds = [GRADIENT_BOUND, GRADIENT_BOUND]
    for got, true, bound in zip(grads, wanted, bounds, strict=True):
        assert np.all(np.isfinite(np.asarray(got, np.float32)))
        assert oracle.relative_norm(got, true) <= bound
