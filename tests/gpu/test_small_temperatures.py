"""Small temperatures on a Hopper GPU: the interpreted calls, their kernels compiled, and "xla" by cuBLAS."""

from __future__ import annotations

import dataclasses
import functools

import pytest

from lce_jax import linear_logprobs, mosaic
from lce_jax.call import _dispatch
from lce_jax.mosaic import _generations
from tests.mathematics import test_small_temperatures as of_xla
from tests.mosaic import test_small_temperatures as of_kernels
from tests.mosaic.test_interpret import kernels_of
from tests.mosaic_cases import Case, make_call

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("test", of_kernels.CASES, ids=str)
def test_kernels(test: Case) -> None:
    call = dataclasses.replace(make_call(test), device=_dispatch.current_device())
    if (reason := mosaic.supports(call)) is not None:
        pytest.skip(reason)
    with _generations.using(kernels_of(test)):
        of_kernels.check(test, call)


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "random"])
@pytest.mark.parametrize("name", of_xla.OPTIONS)
def test_xla(name: str, greedy: bool) -> None:
    problem = of_xla.draw(greedy, **of_xla.OPTIONS[name])
    logprobs = functools.partial(linear_logprobs, implementation="xla", precision="highest")
    of_xla.assert_as_exact_as_stored(problem, of_xla.gradients(problem, logprobs))
