"""The case matrix on a GPU, against float64."""

from __future__ import annotations

import pytest

from tests import cases
from tests.ops import test_parity

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("implementation", test_parity.IMPLEMENTATIONS)
@pytest.mark.parametrize("test", test_parity.CALLS, ids=str)
def test_matches_float64(test: cases.TestCase, implementation: str) -> None:
    # The same roundings as the materialised path's, so the same error up to chance.
    test_parity.check(test, implementation, slack=1.02)
