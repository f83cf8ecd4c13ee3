"""The runner: how a function that has a derivative becomes one call of JAX, on one device or over many.

A `Capability` says what is computed, a `Program` what one device computes of its share, and `spread` where: on this
device, over the devices that names or types give, or where XLA partitions. All functions have one ``custom_vjp``, whose
residuals are the call's own operands and what the forward keeps, or the gradients where the forward computes these; one
derivative alone; and calls without tokens.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from lce_jax import mosaic
from lce_jax.call import _dispatch
from lce_jax.mesh._custom_partitioning import Partition, Partitioned, warn_once
from lce_jax.mesh._layout import Layout, auto_axes, find_typed_mesh, layout_of_specs
from lce_jax.types import _jax, scalars
from lce_jax.types._types import Call, Device, Primals, RequestedGradients, UnsupportedError
from lce_jax.xla import _logprobs as xla

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array


def has_own_columns(in_batched: Any) -> bool:
    """Whether each example has a weight, a bias or an adapter of its own."""
    return any(any(primals[1:]) for primals in _primals(in_batched))


def _primals(operands: Any) -> list[Primals]:
    """The heads among the operands of a call, one or several."""
    leaves = jax.tree.leaves(operands, is_leaf=_is_primals)
    return [x for x in leaves if _is_primals(x)]


def _is_primals(x: Any) -> bool:
    return isinstance(x, Primals)


def one_by_one(function: Callable[..., Any], in_batched: Any, operands: Any) -> Any:
    """``function`` of each example in turn: its own operands and those that all share.

    Explicit axes that split the examples are Manual for ``function``: each of their devices has examples of its own.
    """
    tree: Any = jax.tree.structure(operands)
    batched = jax.tree.leaves(tuple(in_batched))
    flat = list(zip(jax.tree.leaves(operands), batched, strict=True))

    def all_of(own: list[Array], shared: list[Array]) -> Any:
        def one(own: list[Array]) -> Any:
            of_each, of_all = iter(own), iter(shared)
            return function(*tree.unflatten(next(of_each if b else of_all) for b in batched))

        return lax.map(one, own)

    own, shared = [x for x, b in flat if b], [x for x, b in flat if not b]
    sharding = jax.typeof(own[0]).sharding
    examples = P(_jax.partitions(sharding.spec)[0])
    axes = _jax.list_axes(examples[0])
    if not axes:
        return all_of(own, shared)
    of_each_device: Any = jax.shard_map(
        all_of, mesh=sharding.mesh, in_specs=(examples, P()), out_specs=examples, axis_names=set(axes), check_vma=False
    )
    return of_each_device(own, shared)


def with_batch(size: int, in_batched: Any, operands: Any) -> Any:
    """Every leaf with the batch as its first dimension, except weights, biases and adapters."""

    def lead(batched: bool, x: Array) -> Array:
        return x if batched else jnp.broadcast_to(x, (size, *x.shape))

    def shared(batched: Any) -> Any:
        if not _is_primals(batched):
            return batched
        return Primals(batched.hidden, *(None if x is None else True for x in batched[1:]))

    in_batched = jax.tree.map(shared, tuple(in_batched), is_leaf=_is_primals)
    return jax.tree.map(lead, in_batched, tuple(operands))


class ArraySharding(enum.Enum):
    """How a mesh shards an array. Dimensions that are not named here are never split."""

    HIDDEN = "split by token, also over the vocabulary axis if that axis splits the sequence"
    RESULTS = "per token and sharded like hidden; an operand of this kind is gathered over the vocabulary axis"
    TOKENS = "per token, split by token and replicated over the vocabulary axis"
    ROWS = "the first dimension is the vocabulary and is split over the vocabulary axis"
    COLUMNS = "the second dimension is the vocabulary and is split over the vocabulary axis"
    REPLICATED = "the same on every device"
    DEVICE = "each device has its own array, which no other device reads"

    @property
    def vocab_dim(self) -> int | None:
        """The dimension of the vocabulary."""
        return {ArraySharding.ROWS: 0, ArraySharding.COLUMNS: 1}.get(self)

    def spec(self, layout: Layout) -> P:
        """Returns the partition spec of such an array over ``layout``."""
        if self in (ArraySharding.HIDDEN, ArraySharding.RESULTS):
            return layout.out_spec
        if self is ArraySharding.TOKENS:
            return layout.row_spec
        if self is ArraySharding.DEVICE:
            return layout.every_device
        return P() if self is ArraySharding.REPLICATED else P(*[None] * (self.vocab_dim or 0), layout.vocab_axes)


def head(vocab_dim: int) -> Primals[ArraySharding]:
    """Returns the shardings of a head's operands and of their gradients."""
    return Primals(
        ArraySharding.HIDDEN,
        ArraySharding.COLUMNS if vocab_dim else ArraySharding.ROWS,
        ArraySharding.ROWS,
        ArraySharding.ROWS,
    )


@dataclasses.dataclass(frozen=True)
class Program:
    """What one device computes of its share, with its collectives.

    Attributes:
        run: ``run(call, *operands)``, with the call of the share, whose ``axis_name``, ``gather_dim`` and
            ``token_axes`` say which collectives it needs.
        operands: an `ArraySharding` in place of each array, or of a tree of arrays. One of them is
            `ArraySharding.HIDDEN`, another is a weight.
        results: the same.
        joins: whether a batch of calls is one call with more tokens: all results are by token.
        unused: what is lost of the call where XLA decides how operands are split, in words.
    """

    run: Callable[..., Any]
    operands: tuple[Any, ...]
    results: Any
    joins: bool = False
    unused: tuple[str, ...] = ()


def spread(call: Call, program: Program, *operands: Any) -> Any:
    """``program`` of global arrays, or of this device's."""

    @jax.custom_batching.custom_vmap
    def run_here(*operands: Any) -> Any:
        if call.mesh is None:
            first, *others = jax.tree.leaves(operands)
            told = [_traced_for_p.bind(first, call=call), *others]
            return program.run(call, *jax.tree.unflatten(jax.tree.structure(operands), told))
        layout = call.mesh if isinstance(call.mesh, Layout) else _layout_of_types(call, program, operands)
        run = _by_xla if layout is None else functools.partial(_over_devices, layout)
        return run(call, program, *operands)

    @run_here.def_vmap
    def batched(size: int, in_batched: Any, *operands: Any) -> Any:
        by_default = call.cache_bytes is None and call.cache_budget > 0
        run = _keeping_nothing if by_default else _spread_batch
        out = run(call, program, size, tuple(in_batched), operands)
        return out, jax.tree.map(lambda _: True, out)

    return run_here(*operands)


def _spread_batch(call: Call, program: Program, size: int, in_batched: Any, operands: Any) -> Any:
    """`spread` of a batch of calls, as one call or one by one."""
    if program.joins and not has_own_columns(in_batched):
        operands = with_batch(size, in_batched, operands)
        return spread(_of_batch(call, program, operands), program, *operands)
    return one_by_one(functools.partial(spread, call, program), in_batched, operands)


def _keeping_nothing(call: Call, program: Program, size: int, in_batched: Any, operands: Any) -> Any:
    """A batch of calls that do not ask for a cache: that of each example would be too much, so there is none.

    A program that returns a cache returns zeros in its place, which the compiler drops, because a program that is given
    one of a batch does not read it.
    """
    kinds = program.operands
    if any(
        jax.tree.leaves(jax.tree.map(lambda kind, x: x if kind is ArraySharding.DEVICE else None, kinds, in_batched))
    ):
        in_batched, operands = (jax.tree.map(_but_of_devices, kinds, x) for x in (in_batched, operands))
    elif ArraySharding.DEVICE not in jax.tree.leaves(program.results):
        return _spread_batch(call, program, size, in_batched, operands)
    joins = program.joins or ArraySharding.DEVICE in jax.tree.leaves(program.results)
    found = _spread_batch(
        call.replace(cache_bytes=0), dataclasses.replace(program, joins=joins), size, in_batched, operands
    )
    examples = jax.tree.map(functools.partial(_jax.example_type, size), in_batched, operands)
    made, shapes = jax.make_jaxpr(functools.partial(spread, call, program), return_shape=True)(*examples)
    avals = jax.tree.unflatten(jax.tree.structure(shapes), made.out_avals)

    def filled(kind: ArraySharding, own: Any, avals: Any) -> Any:
        return (
            jax.tree.map(functools.partial(_jax.make_batch_zeros, size), avals) if kind is ArraySharding.DEVICE else own
        )

    return jax.tree.map(filled, program.results, found, avals)


def _but_of_devices(kind: ArraySharding, x: Any) -> Any:
    return None if kind is ArraySharding.DEVICE else x


def _of_batch(call: Call, program: Program, operands: Any) -> Call:
    """A batch of calls as one, with a dimension of tokens more."""
    hidden = _hidden(program, operands)
    call = call.replace(num_tokens=math.prod(hidden.shape[:-1]))
    if not isinstance(call.mesh, Layout):
        return call
    return dataclasses.replace(call, mesh=call.mesh.add_batch(jax.typeof(hidden).sharding.spec))


def is_left_to_xla(call: Call, operands: Any) -> bool:
    """Whether XLA decides how operands are split: nothing can be kept there that is no global array."""
    if call.mesh is None or isinstance(call.mesh, Layout):
        return False
    return all(kind == AxisType.Auto for kind in find_typed_mesh(operands).axis_types)


def typed_as(gradients: Primals, operands: Primals) -> Primals:
    """Gradients split and typed as their operands are: summed over axes of a ``shard_map`` that share an operand."""
    summed = []
    for gradient, operand in zip(gradients, operands, strict=True):
        axes = _jax.varying_axes(operand)
        if _jax.varying_axes(gradient) - axes:
            wide = gradient.astype(jnp.promote_types(gradient.dtype, jnp.float32))
            summed.append(_jax.psum_to_axes(wide, axes).astype(gradient.dtype))
        else:
            summed.append(gradient)
    return split_as(Primals(*summed), operands)


def split_as[T](gradients: T, operands: T) -> T:
    """Gradients split as their operands are by types. Some may be None."""
    shardings = jax.tree.map(lambda x: jax.typeof(x).sharding, operands)
    return jax.tree.map(
        lambda x, like: x if x is None or like.mesh.empty else jax.sharding.reshard(x, like),
        gradients,
        shardings,
        is_leaf=lambda x: x is None,
    )


def _pairs(kinds: Any, tree: Any) -> Iterator[tuple[ArraySharding, Any]]:
    """Each array with its kind."""
    return zip(jax.tree.leaves(jax.tree.broadcast(kinds, tree)), jax.tree.leaves(tree), strict=True)


def _hidden(program: Program, operands: Any) -> Any:
    """The hidden states whose leading dimensions are those of the call."""
    return next(x for kind, x in _pairs(program.operands, operands) if kind is ArraySharding.HIDDEN)


def _share(call: Call, layout: Layout, program: Program, operands: Any) -> Call:
    """What one device computes of its ``operands``, by the implementation that serves their shapes."""
    hidden = _hidden(program, operands)
    gathered = 1 if layout.gather_dim is None else layout.vocab_shards
    pairs = _pairs(program.operands, operands)
    columns = [x.shape[kind.vocab_dim] for kind, x in pairs if kind.vocab_dim is not None and x.ndim == 2]
    teacher = call.teacher and dataclasses.replace(call.teacher, columns=columns[1])
    share = dataclasses.replace(call, columns=columns[0], teacher=teacher).replace(
        num_tokens=math.prod(hidden.shape[:-1]) * gathered,
        axis_name=layout.vocab_axes,
        gather_dim=layout.gather_dim,
        token_axes=layout.token_axes,
        mesh=None,
    )
    share = _dispatch.use_mesh_device(share, layout.mesh)
    scalars.check_vocab_parts(call.vocab_part_size, call.columns, share.columns)
    return dataclasses.replace(share, implementation=_dispatch.choose(share)[0].NAME)


def _split_layout(mesh: Any, program: Program, operands: Any, specs: Any) -> Layout:
    """The layout of operands that are split by ``specs``."""
    split = list(zip(_pairs(program.operands, operands), specs, strict=True))
    (hidden, of_hidden), *others = [(x, spec) for (kind, x), spec in split if kind is ArraySharding.HIDDEN]
    weights = [(kind.vocab_dim, x, spec) for (kind, x), spec in split if kind.vocab_dim is not None and x.ndim == 2]
    of_rows = [spec for (kind, _), spec in split if kind in (ArraySharding.TOKENS, ArraySharding.RESULTS)]
    of_rows += [spec for _, spec in others]
    vocab_dim, weight, of_weight = weights[0]
    layout = layout_of_specs(mesh, hidden, weight, of_hidden, of_weight, of_rows, vocab_dim)
    if len({x.shape[dim] for dim, x, _ in weights}) > 1:  # of different sizes: each device has all of each
        return dataclasses.replace(layout, vocab_axes=None, gather_dim=None)
    return layout


# By names, and by types


def _layout_of_types(call: Call, program: Program, operands: Any) -> Layout | None:
    """The layout that the operands' types name; None if all axes of their mesh are Auto."""
    mesh = find_typed_mesh(operands)
    if all(kind == AxisType.Auto for kind in mesh.axis_types):
        return None
    if auto := auto_axes(mesh):
        warn_once(
            f"{call.function} takes its operands as whole over {', '.join(map(repr, auto))}, Auto axes of a mesh "
            f"that also has Explicit ones: make them Explicit, or call {call.sharded_function}"
        )
    return _split_layout(mesh, program, operands, [jax.typeof(x).sharding.spec for x in jax.tree.leaves(operands)])


def _over_devices(layout: Layout, call: Call, program: Program, *operands: Any) -> Any:
    """The program on every device of a layout.

    It writes all collectives itself, so no types are checked; inside a ``shard_map`` over other axes, results vary over
    those as operands do.
    """
    here = jax.sharding.get_abstract_mesh()
    layout = dataclasses.replace(layout, mesh=here) if here.manual_axes else layout
    pairs = _pairs(program.operands, operands)
    placed = [x if kind is ArraySharding.DEVICE else layout.reshard(x, kind.spec(layout)) for kind, x in pairs]
    in_specs, out_specs = _specs(layout, program)
    device = functools.partial(_of_device, layout, call, program)
    mapped = jax.shard_map(device, mesh=layout.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    found = mapped(*jax.tree.unflatten(jax.tree.structure(operands), placed))
    return _jax.vary_over(found, _jax.varying_axes(operands))


def _of_device(layout: Layout, call: Call, program: Program, *operands: Any) -> Any:
    """The program of one device's share: of what is by token, its own part."""
    share = _share(call, layout, program, operands)
    kinds, flat = zip(*_pairs(program.operands, operands), strict=True)
    gathered = iter(
        layout.gather_rows([x for kind, x in zip(kinds, flat, strict=True) if kind is ArraySharding.RESULTS])
    )
    whole = [next(gathered) if kind is ArraySharding.RESULTS else x for kind, x in zip(kinds, flat, strict=True)]
    found = program.run(share, *jax.tree.unflatten(jax.tree.structure(operands), whole))
    own = [
        layout.take_local_rows(x) if kind is ArraySharding.RESULTS else x for kind, x in _pairs(program.results, found)
    ]
    return jax.tree.unflatten(jax.tree.structure(found), own)


def _specs(layout: Layout, program: Program) -> tuple[Any, Any]:
    """How operands and results are split, a spec in place of each kind."""
    operands = jax.tree.map(lambda kind: kind.spec(layout), program.operands)
    return operands, jax.tree.map(lambda kind: kind.spec(layout), program.results)


# By XLA


def _by_xla(call: Call, program: Program, *operands: Any) -> Any:
    """The program of global arrays, which XLA partitions."""
    whole = functools.partial(program.run, call)
    if call.mesh.empty:  # then it may be lowered for one device
        whole = functools.partial(spread, dataclasses.replace(call, mesh=None), program)
    rule, dimensions = functools.partial(_rule, call, program), functools.partial(_dimensions, program)
    return Partitioned(whole, rule, dimensions, call.mesh, call, program.unused)(*operands)


def _dimensions(program: Program, operands: Any, results: Any) -> tuple[str, tuple[str, ...]]:
    """The names of all arrays' dimensions, for XLA, and of those that are not split, in the order of appearance.

    A name has one size, so sizes are names, but those of tokens.
    """
    all_tokens = [f"b{dim}" for dim in range(_hidden(program, operands).ndim - 1)]
    sides, unsplit = [], []
    for kinds, tree in ((program.operands, operands), (program.results, results)):
        arrays = []
        for kind, x in _pairs(kinds, tree):
            tokens = all_tokens if kind in (ArraySharding.HIDDEN, ArraySharding.RESULTS, ArraySharding.TOKENS) else []
            names = [*tokens, *(f"n{size}" for size in x.shape[len(tokens) :])]
            if kind.vocab_dim is not None:
                names[kind.vocab_dim] = f"v{x.shape[kind.vocab_dim]}"
            unsplit += [name for name in names if name.startswith("n")]
            arrays.append(" ".join(names))
        sides.append(", ".join(arrays))
    return " -> ".join(sides), tuple(dict.fromkeys(unsplit))


def _rule(call: Call, program: Program, mesh: Any, operands: Any, specs: Any) -> Partition:
    layout = _split_layout(mesh, program, operands, jax.tree.leaves(specs, is_leaf=_is_spec))
    in_specs, out_specs = _specs(layout, program)
    device = functools.partial(_of_device, layout, call, program)
    return Partition(device, jax.tree.broadcast(in_specs, operands, is_leaf=_is_spec), out_specs)


def _is_spec(x: Any) -> bool:
    return isinstance(x, P)


# Without a mesh


_traced_for_p = Primitive("lce_traced_for")  # its operand, in a program that knows what it was traced for
_traced_for_p.def_abstract_eval(lambda x, **_: x)
_traced_for_p.def_impl(lambda x, **_: x)


def _lower_traced(context: Any, x: Any, *, call: Call) -> list[Any]:
    """Refuses a program that is lowered for other devices than it was traced for.

    Tracing chooses the implementation, for the device that the mesh, the arrays or JAX's default name. ``jit`` may
    lower the program for another: where ``in_shardings`` or the operands' own devices name one, or by ``jax.export``.
    """
    module, traced = context.module_context, call.device
    count = getattr(module.axis_context, "num_devices", 1)
    if count > 1:
        raise UnsupportedError(
            f"{call.function} is lowered for {count} devices, and tracing saw no mesh: each device would compute "
            f"all of it. Call it under jax.set_mesh(mesh), or call {call.sharded_function}"
        )
    kinds = {"cuda": "gpu", "rocm": "gpu"}
    for platform in module.platforms:
        kind, backend = kinds.get(platform, platform), module.backend
        there = traced if traced.platform == kind else None
        if backend is not None and kinds.get(backend.platform, backend.platform) == kind:
            there = _dispatch.describe_device(backend.devices()[0])
        if there != traced:
            _check(call, there, platform)
    return [x]


_jax.mlir.register_lowering(_traced_for_p, _lower_traced)


def _check(call: Call, there: Device | None, platform: str) -> None:
    """Raises unless what was traced serves the call on a device as well; ``there`` is None for one that is not here."""
    traced, reason = call.device, f"{platform}, for a device that is not known here"
    if call.requested == (call.implementation,) == (xla.NAME,) or (there is None and mosaic.without_kernels(call)):
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
        f"{call.function} was traced for {traced.kind or traced.platform}, where implementation "
        f'"{call.implementation}" serves it, and is lowered for {reason}. Call it under jax.set_mesh(mesh) with a mesh '
        'of the devices that it is for, such as jax.sharding.Mesh([device], ("device",)), or give implementation="xla"'
    )


class Capability(NamedTuple):
    """A function of global arrays, differentiable in its operands. Everything else is ``rest``."""

    forward: Callable[..., Any]  # (call, operands, rest, differentiated, *static) -> results, kept for the backward
    backward: Callable[
        ..., Any
    ]  # (call, operands, rest, kept, cotangent) -> gradients, None if not in `Call.gradients`
    of_no_tokens: Callable[..., Any]  # (call, rest) -> results
    static: tuple[Hashable, ...] = ()
    # Whether the forward keeps the gradients, for a cotangent of 1. Then the backward multiplies them, it may be
    # differentiated, and it is given `OperandType`s: nothing keeps the operands.
    keeps_gradients: bool = False


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class OperandType:
    """What a gradient must look like."""

    dtype: jnp.dtype
    varying: frozenset[Any]  # the manual mesh axes


def compute(capability: Capability, call: Call, operands: Any, rest: Any) -> Any:
    """The results, differentiable in ``operands``."""
    if not call.num_tokens:
        return _jax.vary_over(capability.of_no_tokens(call, rest), result_axes(call, (operands, rest)))
    marked = functools.partial(_jax.only_in_reverse.bind, function=call.function)
    return _differentiable(capability, call, jax.tree.map(marked, operands), rest)


# Jitted, so that calls outside ``jit`` compile once; within ``jit`` it is inlined.
run = jax.jit(compute, static_argnums=(0, 1), inline=True)


def result_axes(call: Call, operands: Any) -> frozenset[Any]:
    """The axes over which results may differ by the types of ``operands``."""
    return _jax.varying_axes(operands) - frozenset(_jax.list_axes(call.axis_name))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _differentiable(capability: Capability, call: Call, operands: Any, rest: Any) -> Any:
    return capability.forward(call, operands, rest, False, *capability.static)[0]


def _forward_rule(capability: Capability, call: Call, operands: Any, rest: Any) -> tuple[Any, Any]:
    primals, *_ = _primals(operands)
    asked = RequestedGradients(*(x is not None and x.perturbed for x in primals))
    if call.rank and asked.weight:
        raise ValueError(
            f"{call.function} with lora has no gradient of the weight: give it jax.lax.stop_gradient(weight)"
        )
    call, given = call.replace(gradients=asked), _jax.primal_arrays((operands, rest))
    out, kept = _jax.not_differentiable(lambda *given: capability.forward(call, *given, True, *capability.static))(
        *given
    )
    if capability.keeps_gradients:
        given = jax.tree.map(lambda x: OperandType(jnp.dtype(x.dtype), _jax.varying_axes(x)), given)
    # The shape of an array without numbers tells the backward rule what is asked for. The residuals' tree cannot: JAX
    # takes it from any trace of this rule, also one where other operands are differentiated.
    told = jnp.zeros((0, *dataclasses.astuple(asked)), jnp.int8)
    return out, (given, kept, told)


def _backward_rule(capability: Capability, call: Call, residuals: Any, cotangent: Any) -> tuple[Any, None]:
    given, kept, told = residuals
    backward = functools.partial(
        capability.backward, call.replace(gradients=RequestedGradients(*map(bool, told.shape[1:])))
    )
    if capability.keeps_gradients:
        return backward(*given, kept, _jax.cotangent_arrays(cotangent)), None
    gradients = _jax.not_differentiable(backward)(*given, kept, _jax.cotangent_arrays(cotangent))
    return (gradients if call.mesh is None else typed_as(gradients, given[0])), None


_differentiable.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)
