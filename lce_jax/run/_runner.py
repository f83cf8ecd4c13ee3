"""Makes a public function differentiable, and runs it on one device or over a mesh.

A `Capability` is the forward and the backward of a public function. Each of them runs a `Program` of
`lce_jax.run._partitioning`, which says what one device computes. `run_program` decides how: on this device, under a
``shard_map``, or partitioned by XLA.

All functions share one ``custom_vjp``. Its residuals are the operands and whatever the forward saves. If the forward
computes the gradients, these are the only residuals. Only first derivatives exist. A call without tokens runs no
program.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from lce_jax import mosaic
from lce_jax.call import _dispatch
from lce_jax.mesh._custom_partitioning import Partitioned
from lce_jax.mesh._layout import Layout, find_typed_mesh
from lce_jax.run._partitioning import (
    ArraySharding,
    Program,
    find_hidden,
    find_layout,
    name_dimensions,
    partition,
    run_over_devices,
)
from lce_jax.types import _jax
from lce_jax.types._types import Call, Device, Primals, RequestedGradients, UnsupportedError
from lce_jax.xla import _logprobs as xla

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array


def has_batched_head(in_batched: Any) -> bool:
    """Whether the examples of a batch have different weights, biases or adapters."""
    return any(any(primals[1:]) for primals in _find_primals(in_batched))


def _find_primals(operands: Any) -> list[Primals]:
    """Returns the `Primals` of each head among the operands of a call."""
    leaves = jax.tree.leaves(operands, is_leaf=_is_primals)
    return [x for x in leaves if _is_primals(x)]


def _is_primals(x: Any) -> bool:
    return isinstance(x, Primals)


def map_examples(function: Callable[..., Any], in_batched: Any, operands: Any) -> Any:
    """Calls ``function`` for each example of a batch in turn, with the example's operands and the shared operands.

    If Explicit mesh axes split the examples, the devices have different examples. So ``function`` then runs under a
    ``shard_map`` over these axes.
    """
    tree: Any = jax.tree.structure(operands)
    batched = jax.tree.leaves(tuple(in_batched))
    flat = list(zip(jax.tree.leaves(operands), batched, strict=True))

    def run_examples(stacked: list[Array], shared: list[Array]) -> Any:
        def run_example(example: list[Array]) -> Any:
            leaves, shared_leaves = iter(example), iter(shared)
            return function(*tree.unflatten(next(leaves if b else shared_leaves) for b in batched))

        return lax.map(run_example, stacked)

    stacked, shared = [x for x, b in flat if b], [x for x, b in flat if not b]
    sharding = jax.typeof(stacked[0]).sharding
    examples = P(_jax.partitions(sharding.spec)[0])
    axes = _jax.list_axes(examples[0])
    if not axes:
        return run_examples(stacked, shared)
    run_on_devices: Any = jax.shard_map(
        run_examples,
        mesh=sharding.mesh,
        in_specs=(examples, P()),
        out_specs=examples,
        axis_names=set(axes),
        check_vma=False,
    )
    return run_on_devices(stacked, shared)


def broadcast_batch(size: int, in_batched: Any, operands: Any) -> Any:
    """Returns the operands with the batch as first dimension of each array, except weights, biases and adapters."""

    def add_batch(batched: bool, x: Array) -> Array:
        return x if batched else jnp.broadcast_to(x, (size, *x.shape))

    def skip_head(batched: Any) -> Any:
        if not _is_primals(batched):
            return batched
        return Primals(batched.hidden, *(None if x is None else True for x in batched[1:]))

    in_batched = jax.tree.map(skip_head, tuple(in_batched), is_leaf=_is_primals)
    return jax.tree.map(add_batch, in_batched, tuple(operands))


def run_program(call: Call, program: Program, *operands: Any) -> Any:
    """Runs ``program`` on global arrays, or on this device's arrays."""

    @jax.custom_batching.custom_vmap
    def run_one(*operands: Any) -> Any:
        if call.mesh is None:
            first, *others = jax.tree.leaves(operands)
            marked = [_traced_for_p.bind(first, call=call), *others]
            return program.run(call, *jax.tree.unflatten(jax.tree.structure(operands), marked))
        layout = call.mesh if isinstance(call.mesh, Layout) else find_layout(call, program, operands)
        run = _run_partitioned if layout is None else functools.partial(run_over_devices, layout)
        return run(call, program, *operands)

    @run_one.def_vmap
    def run_many(size: int, in_batched: Any, *operands: Any) -> Any:
        caches_by_default = call.cache_bytes is None and call.cache_budget > 0
        run = _run_batch_without_cache if caches_by_default else _run_batch
        out = run(call, program, size, tuple(in_batched), operands)
        return out, jax.tree.map(lambda _: True, out)

    return run_one(*operands)


def _run_partitioned(call: Call, program: Program, *operands: Any) -> Any:
    """Runs the program on global arrays, which XLA partitions."""
    run = functools.partial(program.run, call)
    if call.mesh.empty:  # the program may still be lowered for one device
        run = functools.partial(run_program, dataclasses.replace(call, mesh=None), program)
    rule, dimensions = functools.partial(partition, call, program), functools.partial(name_dimensions, program)
    return Partitioned(run, rule, dimensions, call.mesh, call, program.unused)(*operands)


def _run_batch(call: Call, program: Program, size: int, in_batched: Any, operands: Any) -> Any:
    """Runs a batch of calls as one call with more tokens if possible, and otherwise one after the other."""
    if program.joins and not has_batched_head(in_batched):
        operands = broadcast_batch(size, in_batched, operands)
        return run_program(_merge_batch(call, program, operands), program, *operands)
    return map_examples(functools.partial(run_program, call, program), in_batched, operands)


def _run_batch_without_cache(call: Call, program: Program, size: int, in_batched: Any, operands: Any) -> Any:
    """Runs a batch of calls without the cache that is their default, because each example would need its own cache.

    A program that returns a cache returns zeros in its place. The compiler removes these zeros, because in a batch no
    program reads the cache.
    """
    kinds = program.operands
    if any(
        jax.tree.leaves(jax.tree.map(lambda kind, x: x if kind is ArraySharding.DEVICE else None, kinds, in_batched))
    ):
        in_batched, operands = (jax.tree.map(_drop_device_arrays, kinds, x) for x in (in_batched, operands))
    elif ArraySharding.DEVICE not in jax.tree.leaves(program.results):
        return _run_batch(call, program, size, in_batched, operands)
    joins = program.joins or ArraySharding.DEVICE in jax.tree.leaves(program.results)
    results = _run_batch(
        call.replace(cache_bytes=0), dataclasses.replace(program, joins=joins), size, in_batched, operands
    )
    examples = jax.tree.map(functools.partial(_jax.example_type, size), in_batched, operands)
    made, shapes = jax.make_jaxpr(functools.partial(run_program, call, program), return_shape=True)(*examples)
    avals = jax.tree.unflatten(jax.tree.structure(shapes), made.out_avals)

    def fill(kind: ArraySharding, result: Any, avals: Any) -> Any:
        if kind is not ArraySharding.DEVICE:
            return result
        return jax.tree.map(functools.partial(_jax.make_batch_zeros, size), avals)

    return jax.tree.map(fill, program.results, results, avals)


def _drop_device_arrays(kind: ArraySharding, x: Any) -> Any:
    return None if kind is ArraySharding.DEVICE else x


def _merge_batch(call: Call, program: Program, operands: Any) -> Call:
    """Returns the call that computes a whole batch, with the batch as a further token dimension."""
    hidden = find_hidden(program, operands)
    call = call.replace(num_tokens=math.prod(hidden.shape[:-1]))
    if not isinstance(call.mesh, Layout):
        return call
    return dataclasses.replace(call, mesh=call.mesh.add_batch(jax.typeof(hidden).sharding.spec))


def is_partitioned_by_xla(call: Call, operands: Any) -> bool:
    """Whether XLA partitions the call. If so, only global arrays can pass from the forward to the backward."""
    if call.mesh is None or isinstance(call.mesh, Layout):
        return False
    return all(kind == AxisType.Auto for kind in find_typed_mesh(operands).axis_types)


def match_types(gradients: Primals, operands: Primals) -> Primals:
    """Returns the gradients with the shardings and types of their operands.

    Each gradient is summed over the ``shard_map`` axes over which its operand is replicated.
    """
    summed = []
    for gradient, operand in zip(gradients, operands, strict=True):
        axes = _jax.varying_axes(operand)
        if _jax.varying_axes(gradient) - axes:
            wide = gradient.astype(jnp.promote_types(gradient.dtype, jnp.float32))
            summed.append(_jax.psum_to_axes(wide, axes).astype(gradient.dtype))
        else:
            summed.append(gradient)
    return match_shardings(Primals(*summed), operands)


def match_shardings[T](gradients: T, operands: T) -> T:
    """Reshards the gradients to the shardings in their operands' types. A gradient may be None."""
    shardings = jax.tree.map(lambda x: jax.typeof(x).sharding, operands)
    return jax.tree.map(
        lambda x, like: x if x is None or like.mesh.empty else jax.sharding.reshard(x, like),
        gradients,
        shardings,
        is_leaf=lambda x: x is None,
    )


# On one device


_traced_for_p = Primitive("lce_traced_for")  # the identity; lowering compares the device with the device of the trace
_traced_for_p.def_abstract_eval(lambda x, **_: x)
_traced_for_p.def_impl(lambda x, **_: x)


def _lower_traced(context: Any, x: Any, *, call: Call) -> list[Any]:
    """Refuses to lower a program for another device than the one it was traced for.

    Tracing chooses the implementation for one device: a device of the mesh, the device of the arrays, or JAX's default
    device. ``jit`` may lower the program for another device, because of ``in_shardings``, the operands, or
    ``jax.export``.
    """
    module, traced = context.module_context, call.device
    count = getattr(module.axis_context, "num_devices", 1)
    if count > 1:
        raise UnsupportedError(
            f"{call.function} is lowered for {count} devices, but tracing saw no mesh: each device would compute "
            f"the whole call. Call it under jax.set_mesh(mesh), or call {call.sharded_function}"
        )
    kinds = {"cuda": "gpu", "rocm": "gpu"}
    for platform in module.platforms:
        kind, backend = kinds.get(platform, platform), module.backend
        there = traced if traced.platform == kind else None
        if backend is not None and kinds.get(backend.platform, backend.platform) == kind:
            there = _dispatch.describe_device(backend.devices()[0])
        if there != traced:
            _check_device(call, there, platform)
    return [x]


_jax.mlir.register_lowering(_traced_for_p, _lower_traced)


def _check_device(call: Call, there: Device | None, platform: str) -> None:
    """Raises if the traced implementation would not be chosen on the device ``there`` (None: unknown)."""
    traced_for, reason = call.device, f"{platform}, a device that is unknown here"
    if call.requested == (call.implementation,) == (xla.NAME,) or (there is None and mosaic.refuse_function(call)):
        return
    if there is not None:
        try:
            chosen = _dispatch.choose(call.replace(device=there))[0].NAME
        except UnsupportedError as error:
            reason = f"{there.kind or there.platform}: {error}"
        else:
            if chosen == call.implementation:
                return
            reason = f'{there.kind or there.platform}, where "{chosen}" serves it'
    raise UnsupportedError(
        f"{call.function} was traced for {traced_for.kind or traced_for.platform}, where implementation "
        f'"{call.implementation}" serves it, and is lowered for {reason}. Call it under jax.set_mesh(mesh) with a mesh '
        'of the target devices, such as jax.sharding.Mesh([device], ("device",)), or pass implementation="xla"'
    )


class Capability(NamedTuple):
    """A function of global arrays, differentiable in ``operands`` and not in ``rest``."""

    forward: Callable[..., Any]  # (call, operands, rest, differentiated, *static) -> results, saved for the backward
    # (call, operands, rest, saved, cotangent) -> gradients; None where `Call.gradients` requests none
    backward: Callable[..., Any]
    make_empty_results: Callable[..., Any]  # (call, rest) -> results
    static: tuple[Hashable, ...] = ()
    # Whether the forward saves the gradients, for a cotangent of 1. If so, the backward multiplies them by the
    # cotangent, may itself be differentiated, and gets an `OperandType` for each operand, because operands are not
    # saved.
    saves_gradients: bool = False


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class OperandType:
    """The dtype and the varying axes that the gradient of an operand must have."""

    dtype: jnp.dtype
    varying: frozenset[Any]  # the manual mesh axes


def compute(capability: Capability, call: Call, operands: Any, rest: Any) -> Any:
    """Returns the results of a capability, differentiable in ``operands``."""
    if not call.num_tokens:
        return _jax.vary_over(capability.make_empty_results(call, rest), list_result_axes(call, (operands, rest)))
    marked = functools.partial(_jax.only_in_reverse.bind, function=call.function)
    return _differentiable(capability, call, jax.tree.map(marked, operands), rest)


# `run` is jitted, so that calls outside ``jit`` are compiled once. Inside ``jit`` it is inlined.
run = jax.jit(compute, static_argnums=(0, 1), inline=True)


def list_result_axes(call: Call, operands: Any) -> frozenset[Any]:
    """Returns the mesh axes over which results vary, according to the types of ``operands``."""
    return _jax.varying_axes(operands) - frozenset(_jax.list_axes(call.axis_name))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _differentiable(capability: Capability, call: Call, operands: Any, rest: Any) -> Any:
    return capability.forward(call, operands, rest, False, *capability.static)[0]


def _forward_rule(capability: Capability, call: Call, operands: Any, rest: Any) -> tuple[Any, Any]:
    primals, *_ = _find_primals(operands)
    requested = RequestedGradients(*(x is not None and x.perturbed for x in primals))
    if call.rank and requested.weight:
        raise ValueError(f"{call.function} with lora has no gradient of the weight: pass jax.lax.stop_gradient(weight)")
    call, inputs = call.replace(gradients=requested), _jax.primal_arrays((operands, rest))
    out, saved = _jax.not_differentiable(lambda *inputs: capability.forward(call, *inputs, True, *capability.static))(
        *inputs
    )
    if capability.saves_gradients:
        inputs = jax.tree.map(lambda x: OperandType(jnp.dtype(x.dtype), _jax.varying_axes(x)), inputs)
    # The shape of an empty array tells the backward rule which gradients are requested. The structure of the residuals
    # cannot tell this: JAX may take it from any trace of this rule, even one that differentiates other operands.
    requested_shape = jnp.zeros((0, *dataclasses.astuple(requested)), jnp.int8)
    return out, (inputs, saved, requested_shape)


def _backward_rule(capability: Capability, call: Call, residuals: Any, cotangent: Any) -> tuple[Any, None]:
    inputs, saved, requested_shape = residuals
    backward = functools.partial(
        capability.backward, call.replace(gradients=RequestedGradients(*map(bool, requested_shape.shape[1:])))
    )
    if capability.saves_gradients:
        return backward(*inputs, saved, _jax.cotangent_arrays(cotangent)), None
    gradients = _jax.not_differentiable(backward)(*inputs, saved, _jax.cotangent_arrays(cotangent))
    return (gradients if call.mesh is None else match_types(gradients, inputs[0])), None


_differentiable.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)
