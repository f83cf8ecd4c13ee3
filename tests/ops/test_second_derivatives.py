"""A derivative of a gradient is refused; a gradient under ``stop_gradient`` is not one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from lce_jax import linear_logprobs
from tests import oracle
from tests.small_call import HIDDEN, LABELS, WEIGHT


def loss(hidden, weight=WEIGHT):
    return linear_logprobs(hidden, weight, LABELS).logprobs.sum()


def scan_gradient(hidden, of_gradient):
    def step(carry, _):
        return carry + of_gradient(hidden, jax.grad(loss)(hidden)), None

    return jax.lax.scan(step, 0.0, None, length=2)[0]


def squares(_, gradient):
    return jnp.sum(gradient**2)


SECOND_DERIVATIVES = {
    "grad of grad": jax.grad(lambda h: squares(h, jax.grad(loss)(h))),
    "in the weight": jax.grad(lambda h: squares(h, jax.grad(loss, argnums=1)(h, WEIGHT))),
    "hessian": jax.hessian(loss),
    "jacrev of jacrev": jax.jacrev(jax.jacrev(loss)),
    "jvp of grad": lambda h: jax.jvp(jax.grad(loss), (h,), (h,)),
    "in a scan": jax.grad(lambda h: scan_gradient(h, squares)),
}


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", SECOND_DERIVATIVES)
def test_second_derivatives_are_refused(name: str, jitted: bool) -> None:
    function = SECOND_DERIVATIVES[name]
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        (jax.jit(function) if jitted else function)(HIDDEN)


def inner(hidden, gradient):
    return jnp.sum(hidden * jax.lax.stop_gradient(gradient))


@pytest.mark.parametrize("jitted", [pytest.param(False, marks=pytest.mark.slow, id="eager"), True])
@pytest.mark.parametrize("name", ["plain", "scan", "remat", "vmap"])
def test_a_gradient_under_stop_gradient_is_no_second_derivative(name: str, jitted: bool) -> None:
    def objective(hidden):
        return inner(hidden, jax.grad(loss)(hidden))

    function = {
        "plain": jax.grad(objective),
        "scan": lambda h: jax.grad(lambda h: scan_gradient(h, inner))(h) / 2,
        "remat": jax.grad(jax.checkpoint(objective)),
        "vmap": lambda h: jax.vmap(jax.grad(objective))(jnp.stack([h, 2 * h]))[0],
    }[name]
    got = (jax.jit(function) if jitted else function)(HIDDEN)
    assert oracle.relative_norm(got, jax.grad(loss)(HIDDEN)) < 1e-6
