"""How many functions, in how many files, a reader follows from a call to its gradients: those that Python enters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import lce_jax
from lce_jax import linear_kl, linear_logprobs, linear_loss, linear_topk
from tests.entered import entered

HIDDEN, WEIGHT = jnp.ones((5, 11)), jnp.ones((37, 11))
LABELS = jnp.arange(5)


def gradient(of: Callable[..., Any]) -> Callable[[], Any]:
    return lambda: jax.value_and_grad(of, (0, 1))(HIDDEN, WEIGHT)


# The most that may be: what a call enters today. It may fall, and then the number here falls too.
CALLS = {
    "linear_logprobs": (gradient(lambda h, w: jnp.sum(linear_logprobs(h, w, LABELS).logprobs)), 155, 27),
    "linear_loss": (gradient(lambda h, w: linear_loss(lambda logprob, *_: -logprob, h, w, LABELS)[0]), 186, 30),
    "linear_kl": (gradient(lambda h, w: jnp.sum(linear_kl(h, w, HIDDEN, WEIGHT))), 174, 31),
    "linear_topk": (lambda: linear_topk(HIDDEN, WEIGHT, 3), 89, 23),
}


@pytest.mark.parametrize("name", CALLS)
def test_functions_that_a_call_enters(name: str) -> None:
    call, functions, files = CALLS[name]
    jax.clear_caches()  # what is traced already is not entered again
    found = entered(call, lce_jax)
    print(f"{name}: {found}")
    assert len(found.functions) <= functions
    assert len(found.files) <= files
