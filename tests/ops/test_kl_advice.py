"""What `linear_kl` does not guess about a teacher: refusals, and whether the advice in their messages is right."""

from __future__ import annotations

import ast
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lce_jax import explain, linear_kl, sharded_linear_kl
from tests import oracle
from tests.kl_cases import Drawn, call, draw, evaluate, expected

OF_THE_STUDENT = {"logit_scale": 1 / 16, "logit_softcap": 4.0}


def right(drawn: Drawn) -> float:
    """The mean divergence, which is that of float64, as are the gradients."""
    (kl, gradients), want = evaluate(drawn), expected(drawn)
    assert oracle.value_error(kl, want.kl) < 4e-6
    assert all(oracle.relative_norm(a, b) < 2e-6 for a, b in zip(gradients, want.gradients, strict=True))
    return float(jnp.mean(kl))


def test_advice_on_columns_is_right() -> None:
    right(draw(call("columns", V=40, teachers_columns=32, vocab_size=30)))


@pytest.mark.fast("softcap")
@pytest.mark.parametrize("name", OF_THE_STUDENT)
def test_advice_on_scale_and_cap_is_right(name: str) -> None:
    """Both values that the message suggests, and a third value for the teacher."""
    drawn = draw(call(name, spread=4.0, **{name: OF_THE_STUDENT[name]}))
    with pytest.raises(ValueError, match=f"{name}={OF_THE_STUDENT[name]} is only the student's") as refused:
        evaluate(drawn)
    advice = [ast.literal_eval(x) for x in re.findall(rf'\bteacher_{name}=("same"|[\w.]+)', str(refused.value))]
    assert advice == ["same", {"logit_scale": 1.0, "logit_softcap": None}[name]]
    found = []
    for teachers in (*advice, 0.7):
        with_it = drawn._replace(options=drawn.options | {f"teacher_{name}": teachers})
        found.append(right(with_it))
    assert min(abs(a - b) for a, b in zip(found, found[1:] + found[:1], strict=True)) > 0.1  # three models


def refuses(**options: Any) -> None:
    """Checks that every function of two heads refuses the options."""
    hidden, weight = jnp.ones((4, 8)), jnp.ones((32, 8))
    mesh = jax.sharding.AbstractMesh((1,), ("tensor",))
    for function, more in ((linear_kl, {}), (sharded_linear_kl, {"mesh": mesh})):
        with pytest.raises(ValueError, match=r"is only the student's, .*: write teacher_"):
            function(hidden, weight, hidden, weight, **options, **more)
    with pytest.raises(ValueError, match=r"is only the student's, .*: write teacher_"):
        explain(hidden, weight, jnp.zeros(4, int), teacher=(hidden, weight), **options)


@pytest.mark.parametrize("name", OF_THE_STUDENT)
def test_every_function_refuses(name: str) -> None:
    """An array is not looked at, so that a scale of 1 is refused there too."""
    refuses(**{name: OF_THE_STUDENT[name]})
    refuses(**{name: jnp.float32(1.0)})
    jax.jit(lambda x: refuses(**{name: x}))(1.0)
    refuses(**OF_THE_STUDENT | {f"teacher_{name}": "same"})  # of the other one


def test_neutral_ones_need_no_word() -> None:
    drawn = draw(call("neutral", leading=(3,)))
    want = linear_kl(*drawn.student, *drawn.teacher)
    for one in (1, np.float32(1.0), np.ones(())):
        assert jnp.array_equal(linear_kl(*drawn.student, *drawn.teacher, logit_scale=one, logit_softcap=None), want)
    explain(*drawn.student, jnp.zeros(3, int), teacher=drawn.teacher, logit_scale=1.0)
