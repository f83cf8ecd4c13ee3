"""Whether the loss of one token is written for many: where a traced loss reduces a number over no axis.

`lce_jax.linear_loss` traces its loss for one token. ``jnp.mean(logprob)``, which means a mean over tokens, then is the
mean of a scalar, which is that scalar. JAX takes it in silence, so the equations are searched for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend import source_info_util
from jax.extend.core import Jaxpr, Literal

# Not reduce_or and reduce_and: samplers of jax.random have them in the conditions of their loops.
ALONG_AXES = ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "argmax", "argmin", "rev", "sort")
SCANS = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
ADDITIONS = ("scatter-add", "scatter-mul", "scatter-max", "scatter-min")
LOOPS = ("while", "scan")  # a solver or a sampler of the token alone may reduce scalars in them

TOKEN = "token"  # depends on the token
FLAT = "flat"  # one number of the token that was made an array of one element, as jnp.ravel does


def refuse_mixed_tokens(jaxpr: Jaxpr, refusal: Callable[[str], ValueError]) -> None:
    """Refuses the loss of one token that reduces one of the token's numbers over no axis.

    Raises:
        ValueError: ``refusal`` of what was found.
    """
    _, found = _search(jaxpr, [TOKEN] * len(jaxpr.invars))
    if found is not None:
        raise refusal(f"it is given the numbers of one token, and {found} of one number goes over no axis")


def _search(jaxpr: Jaxpr, of_inputs: Sequence[str | None]) -> tuple[list[str | None], str | None]:
    """What the outputs are: `TOKEN`, `FLAT` or None, which is the same for all tokens. And what reduces a number."""
    kinds: dict[Any, str | None] = dict(zip(jaxpr.invars, of_inputs, strict=True))
    for equation in jaxpr.eqns:
        inputs = [None if isinstance(x, Literal) else kinds.get(x) for x in equation.invars]
        if not any(inputs):
            continue
        if _reduces_a_number(equation, inputs):
            return [], _describe(equation.primitive.name, equation)
        outputs = [_kind(equation, x, inputs) for x in equation.outvars]
        for inner in [] if equation.primitive.name in LOOPS else _list_jaxprs(equation):
            given = inputs[len(inputs) - len(inner.invars) :]  # the first input of `cond` chooses the branch
            if len(given) != len(inner.invars):
                continue
            kinds_of_inner, found = _search(inner, given)
            if found is not None:
                return [], _describe(found.partition(" ")[0], equation)  # JAX keeps where it first traced the inner one
            outputs = [new or old for old, new in zip(outputs, kinds_of_inner, strict=True)]
        kinds.update(zip(equation.outvars, outputs, strict=True))
    return [None if isinstance(x, Literal) else kinds.get(x) for x in jaxpr.outvars], None


def _describe(name: str, equation: Any) -> str:
    place = source_info_util.summarize(equation.source_info)
    return f"{name} ({place})" if place else name


def _kind(equation: Any, output: Any, inputs: Sequence[str | None]) -> str:
    """What one output is, of an equation with an input that depends on the token."""
    made_flat = equation.primitive.name == "reshape" and equation.invars[0].aval.shape == ()
    return FLAT if getattr(output.aval, "shape", None) == (1,) and (made_flat or FLAT in inputs) else TOKEN


def _reduces_a_number(equation: Any, inputs: Sequence[str | None]) -> bool:
    """Whether a number of the token, as it is or flat, is reduced as the numbers of many tokens would be."""
    name, params = equation.primitive.name, equation.params
    of_numbers = [kind is FLAT or x.aval.shape == () for kind, x in zip(inputs, equation.invars, strict=True)]
    if name in ALONG_AXES:
        axes = params["dimension"] if name == "sort" else params.get("axes", params.get("dimensions"))
        return of_numbers[0] and (inputs[0] is FLAT or axes == ())
    if name in SCANS:
        return inputs[0] is FLAT
    if name == "dot_general":
        return all(inputs) and all(of_numbers)
    if name == "slice":  # of jnp.roll, which leaves nothing of one element
        return inputs[0] is FLAT and 0 in equation.outvars[0].aval.shape
    # of jax.ops.segment_sum and its like, which begin with zeros
    return name in ADDITIONS and inputs[0] is None and inputs[2] is not None and equation.invars[2].aval.size == 1


def _list_jaxprs(equation: Any) -> list[Jaxpr]:
    """The functions that an equation calls."""
    params = [x for param in equation.params.values() for x in (param if isinstance(param, tuple) else (param,))]
    return [getattr(x, "jaxpr", x) for x in params if hasattr(x, "eqns")]
