"""The case matrix on a GPU, against float64: by `xla`, and by the Hopper kernels, which take 16 bits without a bias."""

from __future__ import annotations

import jax
import pytest

from tests import cases
from tests.ops.test_parity import CALLS, check

pytestmark = pytest.mark.gpu
OF_KERNELS = [test for test in CALLS if test.dtype != "float32" and not test.bias]
EVERY = [*((test, "xla") for test in CALLS), *((test, "mosaic_gpu") for test in OF_KERNELS)]


@pytest.mark.parametrize(("test", "implementation"), EVERY, ids=str)
def test_matches_float64(test: cases.TestCase, implementation: str) -> None:
    if implementation == "mosaic_gpu" and jax.devices()[0].compute_capability != "9.0":
        pytest.skip("kernels for Hopper")
    # The same roundings as the materialised path's, so the same error up to chance.
    check(test, implementation, slack=1.02)
