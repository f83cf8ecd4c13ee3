"""A loss of per-token scalars as `lce_jax.linear_loss` takes it: traced once, with what it closes over as arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun  # type: ignore[attr-defined]

from lce_jax import _jax
from lce_jax._types import Case, LogprobOutput, Primals
from lce_jax.call import _checks, _rows
from lce_jax.call._rows import Rows

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Bool, Float


GIVE_IT_AS_AN_ARGUMENT = "give it as a per-token argument, jnp.broadcast_to(x, (*labels.shape, *x.shape))"


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


@dataclasses.dataclass(frozen=True)
class TokenLoss:
    """A traced loss of one token, equal to itself alone; that of `outliving` to all that compute the same."""

    # Of examples of a token's results and of its arguments. None for one device: it keeps nothing alive.
    retrace: Callable[..., ClosedJaxpr] | None = dataclasses.field(compare=False)
    jaxpr: ClosedJaxpr = dataclasses.field(compare=False)  # with None for each array that it closes over
    # The arrays that it closes over; None in place of the traced ones.
    known: tuple[Any, ...] = dataclasses.field(compare=False)
    impls: tuple[Any, ...]  # of those that are typed random keys; None for the others
    identity: Any = dataclasses.field(default_factory=object)

    @classmethod
    def of(cls, retrace: Callable[..., ClosedJaxpr], *examples: Any) -> tuple[TokenLoss, tuple[Any, ...]]:
        """The loss, and the traced arrays that it closes over, `untyped`."""
        closed = retrace(*examples)
        known = tuple(None if _is_traced(x) else x for x in closed.consts)
        empty = closed.replace(consts=[None] * len(known))
        impls = tuple(map(_impl, closed.consts))
        return cls(retrace, empty, known, impls), tuple(untyped(x) for x in closed.consts if _is_traced(x))

    def with_arguments(self, inputs: Inputs) -> tuple[TokenLoss, Inputs]:
        """The loss with all that it closes over among the inputs: a function that XLA splits closes over nothing."""
        traced = iter(inputs.constants)
        known = (None if x is None else _rows.on_device(x, inputs.primals.hidden) for x in self.known)
        constants = tuple(next(traced) if x is None else untyped(x) for x in known)
        return dataclasses.replace(self, known=(None,) * len(constants)), inputs._replace(constants=constants)

    def here(self, inputs: Inputs) -> TokenLoss:
        """The same loss traced over the mesh where it is computed, which a traced program knows."""
        assert self.retrace is not None
        dtype = jnp.promote_types(inputs.primals.weight.dtype, jnp.float32)
        try:
            loss, _ = TokenLoss.of(self.retrace, *_examples(dtype, inputs))
            return dataclasses.replace(loss, known=self.known)
        except (NotImplementedError, ValueError) as error:  # JAX: what is typed over the axes of the mesh outside
            if not self.known:
                raise
            raise ValueError(
                "loss_fn closes over an array that lies on a mesh, and JAX cannot use it on one device of the mesh: "
                f"{GIVE_IT_AS_AN_ARGUMENT}"
            ) from error

    def __call__(
        self, live: Bool[Array, "T"] | None, outputs: LogprobOutput, per_token: Any, constants: Any
    ) -> Float[Array, "T"]:
        """The losses of flat tokens, 0 where they do not count."""
        given, traced = [x for x in outputs[:3] if x is not None], iter(constants)
        known = zip(self.known, self.impls, strict=True)
        closed = self.jaxpr.replace(consts=[_typed(next(traced), impl) if x is None else x for x, impl in known])
        (losses,) = jax.vmap(jaxpr_as_fun(closed))(*given, *per_token)
        losses = losses.astype(outputs.lse.dtype)
        return losses if live is None else jnp.where(live, losses, 0.0)


def outliving(loss: TokenLoss, inputs: Inputs) -> tuple[TokenLoss, Inputs]:
    """The loss for a program that outlives the call: with all arrays among the inputs, told by what it computes.

    That is its value and its derivatives, in which custom rules have become operations. All that the function reads may
    have changed when it is called again.
    """
    loss, inputs = loss.with_arguments(inputs)
    jaxpr, impls = loss.jaxpr, loss.impls
    both = jax.value_and_grad(
        lambda constants, given: jaxpr_as_fun(jaxpr.replace(consts=[*map(_typed, constants, impls)]))(*given)[0],
        argnums=(0, 1),
        allow_int=True,
    )
    structs = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jaxpr.in_avals)
    made = jax.make_jaxpr(both)(inputs.constants, structs)
    return dataclasses.replace(loss, identity=(str(made), *_constants_of(made))), inputs


class LossArguments(NamedTuple):
    """How the loss takes its own arguments."""

    tree: Any
    impls: tuple[Any, ...]  # of the typed random keys among its leaves; None for the others

    def of(self, flat: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments that hold the leaves ``flat``."""
        return jax.tree.unflatten(self.tree, [_typed(*pair) for pair in zip(flat, self.impls, strict=True)])


def flat_arguments(per_token: tuple[Any, ...], labels: Any) -> tuple[tuple[Any, ...], LossArguments]:
    """The arrays in the loss's own arguments, checked and `untyped`, and what they make up."""
    flat, tree = jax.tree.flatten(per_token)
    shape = tuple(labels.shape)
    for place, x in enumerate(flat):
        name = f"per-token argument {place} of loss_fn"
        _checks.array(name, x)
        if tuple(x.shape[: len(shape)]) != shape:
            raise ValueError(f"{name} {tuple(x.shape)} must begin with the shape of labels {shape}")
    return tuple(untyped(jnp.asarray(x)) for x in flat), LossArguments(tree, tuple(map(_impl, flat)))


def untyped(x: Any) -> Any:
    """Typed random keys as the integers that they hold, which can be zero, split and sent like any array."""
    return x if _impl(x) is None else jax.random.key_data(x)


def _typed(x: Any, impl: Any) -> Any:
    return x if impl is None else jax.random.wrap_key_data(x, impl=impl)


def _impl(x: Any) -> Any:
    return jax.random.key_impl(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else None


def trace(
    loss_fn: Callable[..., Any], own: LossArguments, case: Case, inputs: Inputs, axes: frozenset[Any]
) -> tuple[TokenLoss, tuple[Any, ...]]:
    """The loss of one token, and the traced arrays that it closes over; everything per token varies over ``axes``."""
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function of (logprob, entropy, lse, *per_token), got {loss_fn!r}")
    entropy = case.options.entropy

    def retrace(scalar: Any, *flat: Any) -> ClosedJaxpr:
        results = scalar, scalar if entropy else None, scalar
        return jax.make_jaxpr(lambda results, *flat: loss_fn(*results, *own.of(flat)))(results, *flat)

    examples = _examples(case.stat_dtype, inputs)
    if axes:
        examples = _jax.vary_over([jnp.zeros(x.shape, x.dtype) for x in examples], axes)
    loss, constants = TokenLoss.of(retrace, *examples)
    shapes = [(tuple(x.shape), x.dtype) for x in loss.jaxpr.out_avals]
    if len(shapes) != 1 or shapes[0][0] != () or not jnp.issubdtype(shapes[0][1], jnp.floating):
        said = ", ".join(f"{dtype.name}{list(shape)}" for shape, dtype in shapes) or "nothing"
        raise ValueError(
            f"loss_fn must return one floating-point scalar for one token, got {said}: it is given scalars, "
            "and the slice of each per-token argument that belongs to the token"
        )
    return loss, constants


def _examples(dtype: Any, inputs: Inputs) -> list[Any]:
    """A result of one token, and its slice of each argument."""
    dims, struct = inputs.rows.labels.ndim, jax.ShapeDtypeStruct
    return [struct((), dtype), *(struct(x.shape[dims:], x.dtype) for x in inputs.per_token)]


def _constants_of(jaxpr: Any) -> Iterator[bytes | int]:
    """What tells the arrays that a program and the functions in it close over, which its text does not show."""
    yield from (x.tobytes() if isinstance(x, np.ndarray) else id(x) for x in getattr(jaxpr, "consts", ()))
    for equation in jaxpr.eqns:
        for inner in jax.tree.leaves(list(equation.params.values())):
            if hasattr(inner, "eqns"):
                yield from _constants_of(inner)


def check_closure(constants: tuple[Any, ...], axes: frozenset[Any]) -> None:
    """Refuses a traced array that is typed otherwise than the tokens, which vary over ``axes``.

    If it is the same on devices whose tokens are not, its gradient would be summed over them before each part is
    multiplied by its own cotangent.
    """
    for x in constants:
        own = _jax.varying_axes(x)
        if own - axes or (has_gradient(x) and own != axes):
            raise ValueError(
                f"loss_fn closes over a traced {jax.typeof(x).str_short()}, which varies over {sorted(own, key=str)}; "
                f"the tokens vary over {sorted(axes, key=str)}: inside shard_map {GIVE_IT_AS_AN_ARGUMENT}"
            )


def has_gradient(x: Any) -> bool:
    """Whether ``x``, `untyped`, has a gradient: complex numbers have one too."""
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def _is_traced(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer)
