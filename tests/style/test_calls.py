"""How many functions, in how many files, a reader follows from a call to its gradients: those that Python enters."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import lce_jax
from lce_jax import linear_kl, linear_logprobs, linear_loss, linear_topk

PACKAGE = str(pathlib.Path(lce_jax.__file__).parent)
# A shape of its own for each call, so that nothing of it is traced already.
HIDDEN, WEIGHT = jnp.ones((5, 11)), jnp.ones((37, 11))
LABELS = jnp.arange(5)


def gradient(of: Callable[..., Any]) -> Callable[[], Any]:
    return lambda: jax.value_and_grad(of, (0, 1))(HIDDEN, WEIGHT)


# The most that may be: what a call enters today. It may fall, and then the number here falls too.
CALLS = {
    "linear_logprobs": (gradient(lambda h, w: jnp.sum(linear_logprobs(h, w, LABELS).logprobs)), 203, 31),
    "linear_loss": (gradient(lambda h, w: linear_loss(lambda logprob, *_: -logprob, h, w, LABELS)[0]), 236, 33),
    "linear_kl": (gradient(lambda h, w: jnp.sum(linear_kl(h, w, HIDDEN, WEIGHT))), 205, 32),
    "linear_topk": (lambda: linear_topk(HIDDEN, WEIGHT, 3), 108, 24),
}


def entered(call: Callable[[], Any]) -> set[tuple[str, str]]:
    """The file and the name of every function of the package that ``call`` enters."""
    found = set()

    def record(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            found.add((code.co_filename, code.co_qualname))

    jax.clear_caches()
    sys.setprofile(record)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize("name", CALLS)
def test_functions_that_a_call_enters(name: str) -> None:
    call, functions, files = CALLS[name]
    found = entered(call)
    count = len(found), len({path for path, _ in found})
    print(f"{name}: {count[0]} functions in {count[1]} files")
    assert count <= (functions, files)
    assert count[1] <= files
