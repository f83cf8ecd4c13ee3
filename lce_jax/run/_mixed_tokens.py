"""Refuses a per-token loss that is written for many tokens, and so reduces a scalar.

`lce_jax.linear_loss` traces its loss for one token. A ``jnp.mean(logprob)`` that is meant as a mean over tokens is then
the mean of a scalar, which is the scalar itself. JAX accepts this without a warning, so this module searches the jaxpr.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend import source_info_util
from jax.extend.core import Jaxpr, Literal

# reduce_or and reduce_and are not listed, because samplers of jax.random use them in the conditions of loops.
ALONG_AXES = ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "argmax", "argmin", "rev", "sort")
SCANS = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
ADDITIONS = ("scatter-add", "scatter-mul", "scatter-max", "scatter-min")
LOOPS = ("while", "scan")  # their bodies are not searched: a solver or a sampler of one token may reduce scalars

TOKEN = "token"  # the value depends on the token
FLAT = "flat"  # a scalar of the token, reshaped to an array of one element, as jnp.ravel does


def refuse_mixed_tokens(jaxpr: Jaxpr, refusal: Callable[[str], ValueError]) -> None:
    """Refuses a per-token loss that reduces a scalar, such as ``jnp.mean(logprob)``: a reduction without effect.

    Raises:
        ValueError: made by ``refusal`` from a text that names the reduction.
    """
    _, operation = _search(jaxpr, [TOKEN] * len(jaxpr.invars))
    if operation is not None:
        raise refusal(f"its arguments are scalars of one token, and {operation} of a scalar reduces no axis")


def _search(jaxpr: Jaxpr, input_kinds: Sequence[str | None]) -> tuple[list[str | None], str | None]:
    """Returns the kind of each output (`TOKEN`, `FLAT`, or None: equal for all tokens), and the refused operation."""
    kinds: dict[Any, str | None] = dict(zip(jaxpr.invars, input_kinds, strict=True))
    for equation in jaxpr.eqns:
        inputs = [None if isinstance(x, Literal) else kinds.get(x) for x in equation.invars]
        if not any(inputs):
            continue
        if _reduces_a_scalar(equation, inputs):
            return [], _describe(equation.primitive.name, equation)
        outputs = [_classify(equation, x, inputs) for x in equation.outvars]
        for inner in [] if equation.primitive.name in LOOPS else _list_jaxprs(equation):
            inner_inputs = inputs[len(inputs) - len(inner.invars) :]  # the first input of `cond` selects the branch
            if len(inner_inputs) != len(inner.invars):
                continue
            inner_kinds, operation = _search(inner, inner_inputs)
            if operation is not None:
                # Name the outer equation's place: for an inner equation, JAX keeps only the place of its first trace.
                return [], _describe(operation.partition(" ")[0], equation)
            outputs = [new or old for old, new in zip(outputs, inner_kinds, strict=True)]
        kinds.update(zip(equation.outvars, outputs, strict=True))
    return [None if isinstance(x, Literal) else kinds.get(x) for x in jaxpr.outvars], None


def _describe(name: str, equation: Any) -> str:
    place = source_info_util.summarize(equation.source_info)
    return f"{name} ({place})" if place else name


def _classify(equation: Any, output: Any, inputs: Sequence[str | None]) -> str:
    """Returns the kind of an equation's output. At least one of the equation's inputs depends on the token."""
    made_flat = equation.primitive.name == "reshape" and equation.invars[0].aval.shape == ()
    return FLAT if getattr(output.aval, "shape", None) == (1,) and (made_flat or FLAT in inputs) else TOKEN


def _reduces_a_scalar(equation: Any, inputs: Sequence[str | None]) -> bool:
    """Whether an equation reduces one scalar of the token as if it were an array over tokens."""
    name, params = equation.primitive.name, equation.params
    is_scalar = [kind is FLAT or x.aval.shape == () for kind, x in zip(inputs, equation.invars, strict=True)]
    if name in ALONG_AXES:
        axes = params["dimension"] if name == "sort" else params.get("axes", params.get("dimensions"))
        return is_scalar[0] and (inputs[0] is FLAT or axes == ())
    if name in SCANS:
        return inputs[0] is FLAT
    if name == "dot_general":
        return all(inputs) and all(is_scalar)
    if name == "slice":  # jnp.roll takes an empty slice of a one-element array
        return inputs[0] is FLAT and 0 in equation.outvars[0].aval.shape
    # jax.ops.segment_sum and similar functions add to an array of zeros
    return name in ADDITIONS and inputs[0] is None and inputs[2] is not None and equation.invars[2].aval.size == 1


def _list_jaxprs(equation: Any) -> list[Jaxpr]:
    """Returns the jaxprs that an equation calls."""
    params = [x for param in equation.params.values() for x in (param if isinstance(param, tuple) else (param,))]
    return [getattr(x, "jaxpr", x) for x in params if hasattr(x, "eqns")]
