"""The ``custom_vjp`` of `lce_jax.linear_loss`: its residuals are the gradients themselves, for a cotangent of 1."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from lce_jax import _batching, _collectives, _compat, _loss_in_forward, _loss_over_mesh, _loss_partition
from lce_jax._layout import Layout
from lce_jax._loss import Gradients, Inputs, TokenLoss
from lce_jax._shard import Spec
from lce_jax._token_chunks import Budget
from lce_jax._types import LogprobOutput, Primals

if TYPE_CHECKING:
    from jaxtyping import Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def linear_loss(
    spec: Spec, layout: Layout | None, loss: TokenLoss, budget: Budget, inputs: Inputs
) -> tuple[Array, LogprobOutput]:
    """The sum of the losses, differentiable in all inputs, and the results, which carry no gradient.

    Over ``layout``, of global arrays; without one, over the mesh of ``spec``, as XLA splits them there, or of this
    device's.
    """
    del budget
    if layout is not None:
        run = functools.partial(_loss_over_mesh.forward, spec, layout, loss)
    elif spec.mesh is not None:
        run = functools.partial(_loss_partition.forward, spec, loss)
    else:
        run = functools.partial(_loss_in_forward.forward, spec, loss)
    return _one_by_one_under_vmap(run, inputs)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Kind:
    """What a gradient must look like: the dtype and the manual axes of its operand."""

    dtype: jnp.dtype
    varying: frozenset[Any]


def _fwd(spec: Spec, layout: Layout | None, loss: TokenLoss, budget: Budget, inputs: Inputs) -> tuple[Any, Any]:
    if layout is not None:
        run = functools.partial(_loss_over_mesh.forward_and_gradients, spec, layout, loss, budget)
    elif spec.mesh is not None:
        run = functools.partial(_loss_partition.forward_and_gradients, spec, loss, budget)
    else:
        run = functools.partial(_loss_in_forward.forward_and_gradients, spec, loss, budget)
    once = _compat.first_order_only(functools.partial(_one_by_one_under_vmap, run))
    total, outputs, gradients = once(inputs)
    given = Gradients(inputs.primals, inputs.per_token, inputs.constants)
    kinds = jax.tree.map(lambda x: _Kind(jnp.dtype(x.dtype), _compat.varying_axes(x)), given)
    return (total, outputs), (gradients, kinds)


def _bwd(
    spec: Spec, layout: Layout | None, loss: TokenLoss, budget: Budget, residuals: Any, cotangent: Any
) -> tuple[Inputs]:
    del loss, budget, layout
    (gradients, kinds), (own, _) = residuals, cotangent
    own = jnp.asarray(own)  # a number, where the caller of ``jax.vjp`` gives one
    shared = own if spec.axis_name is None else _collectives.total_cotangent(own, spec.axis_name)

    def scaled(by: Array, gradient: Array, kind: _Kind) -> Array:
        # Under value_and_grad the cotangent is the literal 1, and XLA drops the product.
        wide = jnp.promote_types(gradient.dtype, by.dtype)
        product = (gradient.astype(wide) * by).astype(gradient.dtype)
        return _compat.psum_to_axes(product, kind.varying).astype(kind.dtype)

    def each(by: Array, found: Any, kinds: Any) -> Any:
        return tuple(None if x is None else scaled(by, x, kind) for x, kind in zip(found, kinds, strict=True))

    primals = Primals(*each(shared, gradients.primals, kinds.primals))
    per_token, constants = (each(own, *pair) for pair in zip(gradients[1:], kinds[1:], strict=True))
    return (Inputs(primals, None, per_token, constants),)  # type: ignore[arg-type]


linear_loss.defvjp(_fwd, _bwd)


def _one_by_one_under_vmap(run: Any, inputs: Inputs) -> Any:
    """``run(inputs)``; under ``vmap``, of each example in turn."""
    call = jax.custom_batching.custom_vmap(run)

    @call.def_vmap
    def batched(size: int, in_batched: Any, inputs: Inputs) -> Any:
        del size
        out = _batching.one_by_one(functools.partial(_one_by_one_under_vmap, run), in_batched, (inputs,))
        return out, jax.tree.map(lambda _: True, out)

    return call(inputs)
