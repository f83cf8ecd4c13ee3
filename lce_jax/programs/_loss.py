"""The ``custom_vjp`` of `lce_jax.linear_loss`: its residuals are the gradients themselves, for a cotangent of 1."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from lce_jax import _jax
from lce_jax._types import LogprobOutput, Primals
from lce_jax.call._loss import Gradients, Inputs, TokenLoss
from lce_jax.call._spec import Spec
from lce_jax.mesh import _collectives
from lce_jax.programs import _logprobs, _loss_in_forward
from lce_jax.programs._token_chunks import Budget
from lce_jax.runner import _over_devices
from lce_jax.runner._over_devices import Kind, Program, spread

if TYPE_CHECKING:
    from lce_jax._shapes import Array


def run(spec: Spec, loss: TokenLoss, budget: Budget, inputs: Inputs) -> tuple[Array, LogprobOutput]:
    """The sum of the losses, differentiable in all inputs, and the results, which carry no gradient."""
    if not spec.case.num_tokens:
        out = _logprobs.of_no_tokens(spec, inputs.rows).outputs
        return _jax.vary_over((jnp.zeros((), out.lse.dtype), out), _loss_in_forward.axes_of_tokens(spec, inputs))
    marked = functools.partial(_jax.only_in_reverse.bind, function=spec.case.options.function)
    primals, per_token, constants = jax.tree.map(marked, (inputs.primals, inputs.per_token, inputs.constants))
    return _run(spec, loss, budget, Inputs(primals, inputs.rows, per_token, constants))


_programs: dict[int, Any] = {}  # `run` of each loss_fn that is alive, by its id


def outside_jit(loss_fn: Any) -> tuple[Any, Any]:
    """`run`, which keeps one program of each kind of call as long as ``loss_fn`` lives, and ``loss_fn`` held weakly."""
    owner = getattr(loss_fn, "__func__", loss_fn)  # a bound method is a new object each time
    found = _programs.get(id(owner))
    if found is not None:
        return found, weakref.proxy(loss_fn)
    found = jax.jit(functools.partial(run), static_argnums=(0, 1, 2))
    try:
        weakref.finalize(owner, _programs.pop, id(owner)).atexit = False
    except TypeError:  # what cannot be held weakly is compiled for each call
        return found, loss_fn
    _programs[id(owner)] = found
    return found, weakref.proxy(loss_fn)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _run(spec: Spec, loss: TokenLoss, budget: Budget, inputs: Inputs) -> tuple[Array, LogprobOutput]:
    del budget
    return _spread_over(spec, loss, inputs, _loss_in_forward.forward, OF_A_FORWARD)


OF_A_FORWARD = (Kind.WHOLE, Kind.RESULTS)  # the sum, and the results


def _spread_over(spec: Spec, loss: TokenLoss, inputs: Inputs, run: Callable[..., Any], results: tuple[Any, ...]) -> Any:
    """``run(spec, loss, inputs)`` on every device that holds the inputs."""
    left = _over_devices.is_left_to_xla(spec, inputs)
    loss, inputs = loss.with_arguments(inputs) if left else (loss, inputs)

    def device(share: Spec, inputs: Inputs) -> Any:
        return run(share, loss if left or spec.mesh is None else loss.here(inputs), inputs)

    operands: Any = Inputs(_over_devices.head(spec.case.options.vocab_dim), Kind.TOKENS, Kind.TOKENS, Kind.WHOLE)  # type: ignore[arg-type]
    return spread(spec, Program(device, (operands,), results), inputs)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Kind:
    """What a gradient must look like: the dtype and the manual axes of its operand."""

    dtype: jnp.dtype
    varying: frozenset[Any]


def _fwd(spec: Spec, loss: TokenLoss, budget: Budget, inputs: Inputs) -> tuple[Any, Any]:
    kinds: Any = Gradients(_over_devices.head(spec.case.options.vocab_dim), Kind.TOKENS, Kind.WHOLE)  # type: ignore[arg-type]
    run = functools.partial(_loss_in_forward.forward_and_gradients, budget=budget)
    results = (*OF_A_FORWARD, kinds)
    of_inputs = _jax.not_differentiable(lambda inputs: _spread_over(spec, loss, inputs, run, results))
    total, outputs, gradients = of_inputs(inputs)
    if len(gradients.constants) == len(loss.known):  # as XLA takes them, of arrays that are known too
        pairs = zip(gradients.constants, loss.known, strict=True)
        gradients = gradients._replace(constants=tuple(dx for dx, known in pairs if known is None))
    given = Gradients(inputs.primals, inputs.per_token, inputs.constants)
    gradients = gradients if spec.mesh is None else _over_devices.split_as(gradients, given)
    kinds = jax.tree.map(lambda x: _Kind(jnp.dtype(x.dtype), _jax.varying_axes(x)), given)
    return (total, outputs), (gradients, kinds)


def _bwd(spec: Spec, loss: TokenLoss, budget: Budget, residuals: Any, cotangent: Any) -> tuple[Inputs]:
    del loss, budget
    (gradients, kinds), (own, _) = residuals, cotangent
    own = jnp.asarray(own)  # a number, where the caller of ``jax.vjp`` gives one
    shared = own if spec.axis_name is None else _collectives.total_cotangent(own, spec.axis_name)

    def scaled(by: Array, gradient: Array | None, kind: _Kind) -> Array | None:
        if gradient is None:
            return None
        # Under value_and_grad the cotangent is the literal 1, and XLA drops the product.
        wide = jnp.promote_types(gradient.dtype, by.dtype)
        product = (gradient.astype(wide) * by).astype(gradient.dtype)
        return _jax.psum_to_axes(product, kind.varying).astype(kind.dtype)

    primals = Primals(*map(functools.partial(scaled, shared), gradients.primals, kinds.primals))
    per_token = tuple(map(functools.partial(scaled, own), gradients.per_token, kinds.per_token))
    constants = tuple(map(functools.partial(scaled, own), gradients.constants, kinds.constants))
    return (Inputs(primals, None, per_token, constants),)  # type: ignore[arg-type]


_run.defvjp(_fwd, _bwd)
