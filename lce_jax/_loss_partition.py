"""`lce_jax.linear_loss` over Auto axes: a rule by which XLA partitions value and gradients as one operation.

The arrays of a call are split by token, by column of the vocabulary, or not at all.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from lce_jax import _loss, _loss_in_forward, _partition
from lce_jax._layout import Layout, layout_of_specs
from lce_jax._loss import Gradients, Inputs, TokenLoss
from lce_jax._shard import Spec
from lce_jax._token_chunks import Budget
from lce_jax._types import LogprobOutput
from lce_jax._xla_partitioning import Partition, Partitioned

if TYPE_CHECKING:
    from jaxtyping import Array

type Program = Callable[[Spec, Inputs], Any]  # of one device, or of all of a call


def forward(spec: Spec, loss: TokenLoss, inputs: Inputs) -> tuple[Array, LogprobOutput]:
    """`_loss_in_forward.forward` of global arrays."""
    lifted, inputs = _lifted(loss, inputs)

    def program(spec: Spec, inputs: Inputs) -> Any:
        return _loss_in_forward.forward(spec, lifted, inputs)

    return _partitioned(program, False, spec, inputs)


def forward_and_gradients(
    spec: Spec, loss: TokenLoss, budget: Budget, inputs: Inputs
) -> tuple[Array, LogprobOutput, Gradients]:
    """`_loss_in_forward.forward_and_gradients` of global arrays."""
    lifted, inputs = _lifted(loss, inputs)

    def program(spec: Spec, inputs: Inputs) -> Any:
        return _loss_in_forward.forward_and_gradients(spec, lifted, budget, inputs)

    total, outputs, gradients = _partitioned(program, True, spec, inputs)
    traced = (dx for dx, known in zip(gradients.constants, loss.known, strict=True) if known is None)
    return total, outputs, gradients._replace(constants=tuple(traced))


def _lifted(loss: TokenLoss, inputs: Inputs) -> tuple[TokenLoss, Inputs]:
    """The loss with all that it closes over as arguments: a partitioned function closes over nothing."""
    traced = iter(inputs.constants)
    constants = tuple(next(traced) if x is None else _loss.untyped(jnp.asarray(x)) for x in loss.known)
    return dataclasses.replace(loss, known=(None,) * len(constants)), inputs._replace(constants=constants)


def _partitioned(program: Program, with_gradients: bool, spec: Spec, inputs: Inputs) -> Any:
    whole = functools.partial(program, spec.as_traced)
    _, outputs, *_ = jax.eval_shape(whole, inputs)
    tokens, *operands = _dimensions(spec, inputs)
    results = ["", *(tokens for _ in jax.tree.leaves(outputs))]
    if with_gradients:
        primals, _, *rest = operands
        results += primals
        for names, arrays in zip(rest, inputs[2:], strict=True):
            results += [name for name, x in zip(names, arrays, strict=True) if _loss.has_gradient(x)]
    named = [name for names in operands for name in names]
    dims = dict.fromkeys(dim for name in named for dim in name.split())  # in order, as XLA wants them
    unsplit = tuple(dim for dim in dims if dim != "v" and dim not in tokens.split())
    dimensions = f"{', '.join(named)} -> {', '.join(results)}"
    rule = functools.partial(_rule, program, with_gradients, spec)
    return Partitioned(whole, rule, dimensions, unsplit, spec.mesh, spec.case, spec.requested)(inputs)


def _dimensions(spec: Spec, inputs: Inputs) -> tuple[str, list[str], list[str], list[str], list[str]]:
    """The names of the dimensions of tokens, and those of each operand, in the order of `Inputs`."""
    primals, rows, per_token, constants = inputs
    dims = rows.labels.ndim
    tokens = " ".join(f"b{dim}" for dim in range(dims))

    def names(first: str, kind: str, rest: int) -> str:
        return " ".join([first, *(f"{kind}d{dim}" for dim in range(rest))]).strip()

    weight = "v h" if spec.case.options.vocab_dim == 0 else "h v"
    return (
        tokens,
        [f"{tokens} h".strip(), weight, *("v" for _ in jax.tree.leaves(primals.bias))],
        [tokens for _ in jax.tree.leaves(rows)],
        [names(tokens, f"p{i}", x.ndim - dims) for i, x in enumerate(per_token)],
        [names("", f"c{i}", x.ndim) for i, x in enumerate(constants)],
    )


def _rule(program: Program, with_gradients: bool, spec: Spec, mesh: Any, shapes: Any, specs: Any) -> Partition:
    (inputs,), (given,) = shapes, specs
    of_rows = jax.tree.leaves((given.rows, given.per_token), is_leaf=lambda x: isinstance(x, P))
    hidden, weight, _ = inputs.primals
    of_hidden, of_weight, _ = given.primals
    layout = layout_of_specs(mesh, hidden, weight, of_hidden, of_weight, of_rows, spec.case.options.vocab_dim)
    primals = layout.primal_specs
    primals = primals if inputs.primals.bias is not None else primals._replace(bias=None)
    rows, per_token = jax.tree.map(lambda _: layout.row_spec, (inputs.rows, inputs.per_token))
    constants = tuple(P() for _ in inputs.constants)
    gradients = [Gradients(primals, layout.row_spec, P())] if with_gradients else []  # type: ignore[arg-type]
    device = functools.partial(_device, program, spec, layout)
    return Partition(device, (Inputs(primals, rows, per_token, constants),), (P(), layout.out_spec, *gradients))


def _device(program: Program, spec: Spec, layout: Layout, inputs: Inputs) -> Any:
    """One device's program: the sum over all devices, its own tokens' results, gradients fully summed."""
    total, outputs, *gradients = program(_partition.device_spec(spec, layout, inputs.primals, inputs.rows), inputs)
    return total, jax.tree.map(layout.own_rows, outputs), *gradients
