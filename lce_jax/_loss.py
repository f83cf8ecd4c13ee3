"""A loss of per-token scalars as `lce_jax.linear_loss` takes it: traced once, with what it closes over as arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun  # type: ignore[attr-defined]

from lce_jax import _checks, _compat
from lce_jax._rows import Rows
from lce_jax._types import Case, LogprobOutput, Primals

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float


class Inputs(NamedTuple):
    """The arrays of a call."""

    primals: Primals
    rows: Rows
    per_token: tuple[Any, ...]  # [*b, ...], flat
    constants: tuple[Any, ...]  # the traced arrays that the loss closes over


class Gradients(NamedTuple):
    """Those of the differentiable inputs, None in place of the others."""

    primals: Primals
    per_token: tuple[Any, ...]
    constants: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class TokenLoss:
    """A traced loss of one token."""

    retrace: Callable[..., ClosedJaxpr] | None  # of examples of a token's results and of its arguments
    jaxpr: ClosedJaxpr  # with None for each array that it closes over
    known: tuple[Any, ...]  # the arrays that it closes over; None in place of the traced ones

    @classmethod
    def of(cls, retrace: Callable[..., ClosedJaxpr], *examples: Any) -> tuple[TokenLoss, tuple[Any, ...]]:
        """The loss, and the traced arrays that it closes over."""
        closed = retrace(*examples)
        known = tuple(None if _is_traced(x) else x for x in closed.consts)
        empty = closed.replace(consts=[None] * len(known))
        return cls(retrace, empty, known), tuple(filter(_is_traced, closed.consts))

    def without_retrace(self) -> TokenLoss:
        """The loss for one device, which keeps nothing alive that it closes over."""
        return dataclasses.replace(self, retrace=None)

    def here(self, inputs: Inputs) -> TokenLoss:
        """The same loss traced over the mesh where it is computed, which a traced program knows."""
        assert self.retrace is not None
        dtype = jnp.promote_types(inputs.primals.weight.dtype, jnp.float32)
        try:
            return TokenLoss.of(self.retrace, *_examples(dtype, inputs))[0]
        except NotImplementedError as error:  # JAX: a closure over what is typed over Explicit axes
            if not inputs.constants:
                raise
            raise ValueError(
                "loss_fn closes over a traced array that is typed over Explicit axes: give it as a per-token argument, "
                "jnp.broadcast_to(x, labels.shape)"
            ) from error

    def __call__(
        self, live: Bool[Array, "T"] | None, outputs: LogprobOutput, per_token: Any, constants: Any
    ) -> Float[Array, "T"]:
        """The losses of flat tokens, 0 where they do not count."""
        given, traced = [x for x in outputs[:3] if x is not None], iter(constants)
        closed = self.jaxpr.replace(consts=[next(traced) if x is None else x for x in self.known])

        def one(scalars: Any, per_token: Any) -> Array:
            (loss,) = jaxpr_as_fun(closed)(*scalars, *per_token)
            return loss

        losses = jax.vmap(one)(given, tuple(per_token)).astype(outputs.lse.dtype)
        return losses if live is None else jnp.where(live, losses, 0.0)


def flat_arguments(per_token: tuple[Any, ...], labels: Any) -> tuple[Any, Any]:
    """The arrays in the loss's own arguments, checked, and their tree."""
    flat, tree = jax.tree.flatten(per_token)
    shape = tuple(labels.shape)
    for place, x in enumerate(flat):
        name = f"per-token argument {place} of loss_fn"
        _checks.array(name, x)
        if tuple(x.shape[: len(shape)]) != shape:
            raise ValueError(f"{name} {tuple(x.shape)} must begin with the shape of labels {shape}")
    return tuple(map(jnp.asarray, flat)), tree


def trace(
    loss_fn: Callable[..., Any], tree: Any, case: Case, inputs: Inputs, axes: frozenset[Any]
) -> tuple[TokenLoss, tuple[Any, ...]]:
    """The loss of one token, and the traced arrays that it closes over; everything per token varies over ``axes``."""
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function of (logprob, entropy, lse, *per_token), got {loss_fn!r}")
    entropy = case.options.entropy

    def of_token(logprob: Any, bits: Any, lse: Any, *own: Any) -> Any:
        return loss_fn(logprob, bits if entropy else None, lse, *jax.tree.unflatten(tree, own))

    def retrace(scalar: Any, *own: Any) -> ClosedJaxpr:
        return jax.make_jaxpr(of_token)(scalar, scalar if entropy else None, scalar, *own)

    loss, constants = TokenLoss.of(retrace, *_compat.vary_over(_examples(case.stat_dtype, inputs), axes))
    shapes = [(tuple(x.shape), x.dtype) for x in loss.jaxpr.out_avals]
    if len(shapes) != 1 or shapes[0][0] != () or not jnp.issubdtype(shapes[0][1], jnp.floating):
        said = ", ".join(f"{dtype.name}{list(shape)}" for shape, dtype in shapes) or "nothing"
        raise ValueError(
            f"loss_fn must return one floating-point scalar for one token, got {said}: it is given scalars, "
            "and the slice of each per-token argument that belongs to the token"
        )
    return loss, constants


def _examples(dtype: Any, inputs: Inputs) -> list[Array]:
    """A result of one token, and its slice of each argument."""
    dims = inputs.rows.labels.ndim
    return [jnp.zeros((), dtype), *(jnp.zeros(x.shape[dims:], x.dtype) for x in inputs.per_token)]


def check_closure(constants: tuple[Any, ...], axes: frozenset[Any]) -> None:
    """Refuses a traced array that is typed otherwise than the tokens, which vary over ``axes``.

    If it is the same on devices whose tokens are not, its gradient would be summed over them before each part is
    multiplied by its own cotangent.
    """
    for x in constants:
        own = _compat.varying_axes(x)
        if own - axes or (is_float(x) and own != axes):
            raise ValueError(
                f"loss_fn closes over a traced {jax.typeof(x).str_short()}, which varies over {sorted(own, key=str)}; "
                f"the tokens vary over {sorted(axes, key=str)}: inside shard_map give it as a per-token argument, "
                "jnp.broadcast_to(x, labels.shape)"
            )


def is_float(x: Any) -> bool:
    """Whether ``x`` has a gradient."""
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def _is_traced(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer)
