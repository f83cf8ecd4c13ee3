"""The forward and the backward of `lce_jax.linear_loss`. The forward computes the gradients, too.

The loss of one token is traced once, and the traced arrays that it closes over become arguments. The forward saves the
gradients for a cotangent of 1, and the backward multiplies these by the cotangent.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun  # type: ignore[attr-defined]

from lce_jax.call import _checks, _describe, _dispatch
from lce_jax.call._describe import Rows
from lce_jax.mathematics import _logprobs
from lce_jax.mesh import _collectives
from lce_jax.run import _runner, _shard
from lce_jax.run._partitioning import ArraySharding, Program, head_sharding
from lce_jax.run._runner import Capability, OperandType, list_result_axes, run_program
from lce_jax.run._token_chunks import TokenChunk, choose_chunk_rows, describe_chunk
from lce_jax.types import _jax, scalars, shared_checks
from lce_jax.types._types import Call, LogprobOutput, Primals, Results

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Bool, Float


GIVE_IT_AS_AN_ARGUMENT = "give it as a per-token argument, jnp.broadcast_to(x, (*labels.shape, *x.shape))"


class Inputs(NamedTuple):
    """The differentiable operands; or their gradients, None for an operand without a gradient."""

    primals: Primals
    per_token: tuple[Any, ...]  # [*b, ...], the arrays among the per-token arguments
    constants: tuple[Any, ...]  # the traced arrays that the loss closes over


# The loss of one token


@dataclasses.dataclass(frozen=True)
class TokenLoss:
    """A traced loss of one token. It equals only itself; after `identify`, it equals losses that compute the same."""

    # Traces the loss for other argument types. None on one device, so that the arrays of a closure are not kept alive.
    retrace: Callable[..., ClosedJaxpr] | None = dataclasses.field(compare=False)
    jaxpr: ClosedJaxpr = dataclasses.field(compare=False)  # with None for each of its constants
    # The arrays that the loss closes over; None in place of traced arrays, which are in `Inputs.constants`.
    known: tuple[Any, ...] = dataclasses.field(compare=False)
    impls: tuple[Any, ...]  # for each of these arrays, the implementation of its random keys, or None
    identity: Any = dataclasses.field(default_factory=object)

    @classmethod
    def of(cls, retrace: Callable[..., ClosedJaxpr], types: list[Any]) -> tuple[TokenLoss, tuple[Any, ...]]:
        """Returns the loss, and the traced arrays that it closes over, with keys unwrapped."""
        closed = retrace(types)
        known = tuple(None if _is_traced(x) else x for x in closed.consts)
        empty = closed.replace(consts=[None] * len(known))
        impls = tuple(map(_impl, closed.consts))
        return cls(retrace, empty, known, impls), tuple(unwrap_keys(x) for x in closed.consts if _is_traced(x))

    def take_arrays(self, inputs: Inputs) -> tuple[TokenLoss, Inputs]:
        """Turns the arrays that the loss closes over into inputs. XLA's partitioning of a function requires this."""
        traced = iter(inputs.constants)
        known = (None if x is None else _describe.put_on_device(x, inputs.primals.hidden) for x in self.known)
        constants = tuple(next(traced) if x is None else unwrap_keys(x) for x in known)
        return dataclasses.replace(self, known=(None,) * len(constants)), inputs._replace(constants=constants)

    def retrace_here(self) -> TokenLoss:
        """Traces the loss again, under the mesh of the program that computes it."""
        assert self.retrace is not None
        try:
            loss, _ = TokenLoss.of(self.retrace, self.types)
            return dataclasses.replace(loss, known=self.known)
        except (NotImplementedError, ValueError) as error:  # JAX: an array's type names axes of the outer mesh
            if not self.known:
                raise
            raise ValueError(
                "loss_fn closes over an array on a mesh, which JAX cannot use on a single device of the mesh: "
                f"{GIVE_IT_AS_AN_ARGUMENT}"
            ) from error

    @property
    def types(self) -> list[jax.ShapeDtypeStruct]:
        """The argument types of the jaxpr: the results of one token, then its slice of each per-token argument."""
        return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.jaxpr.in_avals]

    def __call__(
        self, unmasked: Bool[Array, "T"] | None, results: Results, per_token: Any, constants: Any
    ) -> Float[Array, "T"]:
        """Computes the losses of flat tokens; 0 in masked rows."""
        traced, known = iter(constants), zip(self.known, self.impls, strict=True)
        closed = self.jaxpr.replace(consts=[_wrap_keys(next(traced), impl) if x is None else x for x, impl in known])
        # Only `lce_jax.linear_cross_entropy` requests the mean logit.
        result_leaves = jax.tree.leaves((results.outputs[:3], results.mean_logit))
        (losses,) = jax.vmap(jaxpr_as_fun(closed))(*result_leaves, *per_token)
        losses = losses.astype(results.outputs.lse.dtype)
        return losses if unmasked is None else jnp.where(unmasked, losses, 0.0)


def identify(loss: TokenLoss, inputs: Inputs) -> tuple[TokenLoss, Inputs]:
    """Makes the loss a key of compiled programs: arrays become inputs, and losses that compute the same are equal.

    Two losses compute the same if the jaxprs of their values and derivatives are equal. The derivatives are included
    because custom derivative rules show only there. ``loss_fn`` itself is not the key, because variables that it reads
    may change.
    """
    loss, inputs = loss.take_arrays(inputs)
    jaxpr, impls = loss.jaxpr, loss.impls
    both = jax.value_and_grad(
        lambda constants, args: jaxpr_as_fun(jaxpr.replace(consts=[*map(_wrap_keys, constants, impls)]))(*args)[0],
        argnums=(0, 1),
        allow_int=True,
    )
    made = jax.make_jaxpr(both)(inputs.constants, loss.types)
    return dataclasses.replace(loss, identity=(str(made), *_identify_constants(made))), inputs


def flatten_arguments(arguments: Any, labels: Any) -> tuple[tuple[Any, ...], Callable[..., Any]]:
    """Returns the per-token arguments of the loss as a flat tuple of arrays, and the function that restores them.

    Each array is broadcast to the tokens, and random keys are unwrapped. Scalars of Python and NumPy are not in the
    tuple: the loss gets them unchanged.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(arguments)
    shape, flat, impls = tuple(labels.shape), [], []
    numbers = [x if scalars.is_number(x) else None for _, x in leaves]
    for path, x in leaves:
        if not scalars.is_number(x):
            name = f"per-token argument {jax.tree_util.keystr(path[1:], simple=True, separator='.')} of loss_fn"
            _checks.check_array(name, x)
            shared_checks.check_per_token_shape(name, x.shape, shape)
            array = jnp.asarray(x)
            data = unwrap_keys(array)
            full_shape = (*shape, *data.shape[min(array.ndim, len(shape)) :])
            flat.append(data if data.shape == full_shape else jnp.broadcast_to(data, full_shape))
            impls.append(_impl(array))

    def restore_arguments(token_arrays: Any) -> Any:
        arrays = map(_wrap_keys, token_arrays, impls)
        return jax.tree.unflatten(tree, [next(arrays) if x is None else x for x in numbers])

    return tuple(flat), restore_arguments


def unwrap_keys(x: Any) -> Any:
    """Returns random keys as integers, which can be zeroed, sharded and sent like any array; other arrays unchanged."""
    return x if _impl(x) is None else jax.random.key_data(x)


def _wrap_keys(x: Any, impl: Any) -> Any:
    return x if impl is None else jax.random.wrap_key_data(x, impl=impl)


def _impl(x: Any) -> Any:
    return jax.random.key_impl(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else None


def trace(
    loss_fn: Callable[..., Any],
    restore_arguments: Callable[..., Any],
    call: Call,
    per_token: tuple[Any, ...],
    num_dims: int,
    axes: frozenset[Any],
) -> tuple[TokenLoss, tuple[Any, ...]]:
    """Traces the loss of one token. Returns the traced loss, and the traced arrays that it closes over.

    ``per_token`` arrays vary over ``axes``, and begin with the ``num_dims`` dimensions of the labels.
    """
    scalar: Any = jax.ShapeDtypeStruct((), call.stat_dtype)
    results = [scalar, scalar if call.entropy else None, scalar, *([scalar] if call.mean_logit else [])]
    arguments = [jax.ShapeDtypeStruct(x.shape[num_dims:], x.dtype) for x in per_token]

    def loss_of_token(results: Any, arguments: Any) -> Any:
        args, kwargs = restore_arguments(arguments)
        return loss_fn(*results, *args, **kwargs)

    def retrace(types: list[Any]) -> ClosedJaxpr:
        return jax.make_jaxpr(loss_of_token)(*jax.tree.unflatten(jax.tree.structure((results, arguments)), types))

    types = jax.tree.leaves((results, arguments))
    if axes:
        types = _jax.vary_over([jnp.zeros(x.shape, x.dtype) for x in types], axes)
    loss, constants = TokenLoss.of(retrace, types)
    shapes = [(tuple(x.shape), x.dtype) for x in loss.jaxpr.out_avals]
    if len(shapes) != 1 or shapes[0][0] != () or not jnp.issubdtype(shapes[0][1], jnp.floating):
        returned = ", ".join(f"{dtype.name}{list(shape)}" for shape, dtype in shapes) or "nothing"
        raise ValueError(
            f"loss_fn must return one floating-point scalar for one token, got {returned}: its arguments are "
            "scalars, and the token's slice of each per-token argument"
        )
    return loss, constants


def _identify_constants(jaxpr: Any) -> Iterator[bytes | int]:
    """Yields a key of each array that a jaxpr or an inner jaxpr closes over.

    The text of a jaxpr does not show these arrays.
    """
    yield from (x.tobytes() if isinstance(x, np.ndarray) else id(x) for x in getattr(jaxpr, "consts", ()))
    for equation in jaxpr.eqns:
        for inner in jax.tree.leaves(list(equation.params.values())):
            if hasattr(inner, "eqns"):
                yield from _identify_constants(inner)


def check_closure(constants: tuple[Any, ...], axes: frozenset[Any]) -> None:
    """Refuses a traced constant whose varying axes are not the ``axes`` of the tokens.

    Integers may vary over fewer axes. If a floating-point constant were replicated over devices with different tokens,
    its gradient would be summed over these devices before each device could multiply its part by its own cotangent.
    """
    for x in constants:
        array_axes = _jax.varying_axes(x)
        if array_axes - axes or (jnp.issubdtype(x.dtype, jnp.inexact) and array_axes != axes):
            raise ValueError(
                f"loss_fn closes over a traced {jax.typeof(x).str_short()}, which varies over "
                f"{sorted(array_axes, key=str)}; the tokens vary over {sorted(axes, key=str)}: inside shard_map "
                f"{GIVE_IT_AS_AN_ARGUMENT}"
            )


def _is_traced(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer)


# The chunks of tokens


class _Accumulated(NamedTuple):
    """The results that the chunks have written so far, and the sums over these chunks."""

    losses: Float[Array, "T"]
    outputs: LogprobOutput  # [T]
    gradients: Primals  # dhidden [T, H], and the sums of the other gradients
    per_token: tuple[Any, ...]  # [T, ...]
    constants: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Chunks:
    """Computes a call in chunks of tokens."""

    call: Call  # describes one chunk
    loss: TokenLoss
    primals: Primals  # hidden is flat; a gathered hidden is already cast
    rows: Rows  # flat
    per_token: tuple[Any, ...]  # [T, ...]
    constants: tuple[Any, ...]
    order: _describe.Compaction | None
    size: int  # rows per chunk
    tokens: int
    adds: bool  # whether there are several chunks, so that dweight is a sum
    writes: bool  # whether the first chunk overwrites that sum, whose memory is uninitialized
    token_axes: frozenset[Any]  # the axes over which per-token arrays vary
    psum_axes: tuple[Any, ...]  # the axes over which the dhidden of each chunk is summed
    hidden_axes: frozenset[Any]  # the axes over which the summed dhidden varies
    weight_axes: frozenset[Any]  # the axes over which the other gradients vary
    rounds: bool  # whether the summed dhidden is final, and can be rounded
    hidden_dtype: jnp.dtype

    @classmethod
    def of(cls, call: Call, loss: TokenLoss, inputs: Inputs, rows: Rows) -> _Chunks:
        primals, size, tokens = inputs.primals, choose_chunk_rows(call), rows.labels.size
        tracked = call.axis_name is not None and _jax.tracks_varying(call.axis_name)
        hidden_type, all_axes = _jax.varying_axes(primals.hidden), _jax.varying_axes((inputs, rows))
        names = frozenset(_jax.list_axes(call.axis_name))
        psum = names - hidden_type if tracked else frozenset()
        if call.token_axes is not None and call.gather_dim is None:
            psum = names
        weight_axes = all_axes | names if tracked else all_axes
        hidden_axes = weight_axes - psum
        hidden = primals.hidden.reshape(-1, primals.hidden.shape[-1])
        if call.gather_dim is not None:
            hidden = _shard.flatten_operands(call, primals).hidden
        flat_rows, per_token = _describe.flatten_tokens((rows, inputs.per_token), rows.labels.ndim)
        chunk = describe_chunk(call, size, rows.where is not None or tokens % size != 0)
        implementation = _dispatch.choose(chunk)[0].NAME
        chunk = dataclasses.replace(chunk, implementation=implementation, gather_dim=None)  # hidden is gathered already
        return cls(
            call=chunk,
            loss=loss,
            primals=primals._replace(hidden=hidden),
            rows=flat_rows._replace(where=None),
            per_token=per_token,
            constants=inputs.constants,
            order=None if flat_rows.where is None else _describe.plan_compaction(flat_rows.where),
            size=size,
            tokens=tokens,
            adds=size < tokens,
            writes=size < tokens and _dispatch.writes_dweight(chunk),
            token_axes=list_result_axes(call, (inputs, rows)),
            psum_axes=tuple(sorted(psum, key=str)),
            hidden_axes=hidden_axes,
            weight_axes=weight_axes,
            rounds=call.gather_dim is None and hidden_axes == hidden_type,
            hidden_dtype=primals.hidden.dtype,
        )

    def run(self) -> _Accumulated:
        """Runs all chunks that have an unmasked row."""
        count: Any = -(-self.tokens // self.size)
        if self.order is not None:
            count = -(-self.order.num_rows // self.size)
            if self.call.axis_name is not None and not _jax.tracks_varying(self.call.axis_name):
                count = lax.pmax(count, self.call.axis_name)  # with unequal counts, a shard would wait for ever

        def steps() -> _Accumulated:
            empty = self._empty(lax.empty if self.writes else jnp.zeros)
            if self.adds:
                return lax.fori_loop(0, count, lambda i, accumulated: self._step(i * self.size, accumulated), empty)
            return self._step(jnp.int32(0), empty)  # a loop would first fill dweight with zeros

        always = self.order is None or (self.adds and not self.writes)
        return steps() if always else lax.cond(count > 0, steps, self._empty)

    def _empty(self, make_dweight: Any = jnp.zeros) -> _Accumulated:
        call, weight = self.call, self.primals.weight
        zeros = functools.partial(jnp.zeros, dtype=call.stat_dtype)
        outputs = jax.eval_shape(lambda: _logprobs.empty_results(self.tokens, call.stat_dtype, call).outputs)
        dhidden = jnp.zeros(self.primals.hidden.shape, self.hidden_dtype if self.rounds else call.stat_dtype)
        dweight = make_dweight(weight.shape, call.stat_dtype if self.adds else call.dtype)
        others = jax.tree.map(lambda x: zeros(x.shape), self.primals[2:])
        accumulated = _Accumulated(
            zeros(self.tokens),
            jax.tree.map(lambda x: zeros(x.shape), outputs),
            Primals(None, None),
            *(jax.tree.map(jnp.zeros_like, _select_floats(x)) for x in (self.per_token, self.constants)),
        )
        accumulated = _jax.vary_over(accumulated, self.token_axes)
        of_head = _jax.vary_over((dweight, *others), self.weight_axes)
        gradients = Primals(_jax.vary_over(dhidden, self.hidden_axes), *of_head)
        return accumulated._replace(gradients=gradients.select(call.gradients))

    @jax.named_scope("chunk_of_tokens")
    def _step(self, first: Any, accumulated: _Accumulated) -> _Accumulated:
        """Adds the results and gradients of the chunk that begins at ``first``."""
        chunk, call = TokenChunk.make(first, self.size, self.tokens, self.order), self.call
        hidden, rows, per_token = jax.tree.map(
            lambda x: chunk.take(x, self.size), (self.primals.hidden, self.rows, self.per_token)
        )
        rows = rows._replace(num_rows=chunk.num_rows)
        part = _shard.Part.of(call, _shard.cast_hidden(self.primals._replace(hidden=hidden)), rows)
        results, stats, cache = _shard.compute_results(part, keep_cache=call.gradients.any)
        unmasked = rows.unmasked
        if unmasked is not None:
            results = jax.tree.map(lambda x: jnp.where(unmasked, x, x[0]), results)
        losses, cotangent, dper_token, dconstants = self._differentiate(unmasked, results, per_token)
        gradients = accumulated.gradients
        if call.gradients.any:
            gradients = part.gradients(
                stats, cotangent, cache,
                may_round_dhidden=self.rounds and not self.psum_axes and self.hidden_dtype == call.dtype,
                dweight=gradients.weight if self.adds else None, adds_dweight=first > 0 if self.writes else True,
            )  # fmt: skip
        return _Accumulated(
            chunk.put(accumulated.losses, losses),
            jax.tree.map(chunk.put, accumulated.outputs, results.outputs),
            self._add(chunk, accumulated.gradients, gradients),
            jax.tree.map(chunk.put, accumulated.per_token, dper_token),
            jax.tree.map(jnp.add, accumulated.constants, dconstants),
        )

    def _differentiate(
        self, unmasked: Bool[Array, "t"] | None, results: Results, per_token: tuple[Any, ...]
    ) -> tuple[Array, Results, tuple[Any, ...], tuple[Any, ...]]:
        """Returns a chunk's losses, and the gradients of their sum with respect to results, arguments and constants."""
        results, per_token = _jax.vary_over((results, per_token), self.token_axes)

        def total(results: Results, per_token: Any, constants: Any) -> tuple[Array, Array]:
            losses = self.loss(unmasked, results, per_token, constants)
            return jnp.sum(losses), losses

        used = results._replace(outputs=LogprobOutput(*results.outputs[:3]))
        value, pull, losses = jax.vjp(total, used, per_token, self.constants, has_aux=True)
        dresults, *others = pull(_jax.vary_like(jnp.ones((), value.dtype), value))
        dper_token, dconstants = map(_select_floats, others)
        return losses, dresults, dper_token, dconstants

    def _add(self, chunk: TokenChunk, accumulated: Primals, gradients: Primals) -> Primals:
        """Writes a chunk's dhidden to its rows, and adds the other gradients. Its dweight includes earlier chunks."""
        dhidden = gradients.hidden
        if self.psum_axes:
            # The collective starts after the kernels, which it would delay: see `_shard.reduce_gradients`.
            gradients = lax.optimization_barrier(gradients)
            dhidden = jax.tree.map(lambda x: lax.psum(x, self.psum_axes), gradients.hidden)
        dweight, *others = _jax.vary_over(gradients[1:], self.weight_axes)
        dhidden = _jax.vary_over(dhidden, self.hidden_axes)
        return Primals(
            jax.tree.map(lambda full, x: chunk.put(full, x.astype(full.dtype)), accumulated.hidden, dhidden),
            dweight,
            *jax.tree.map(jnp.add, [*accumulated[2:]], others),
        )


def _select_floats(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """Replaces arrays that are not floating-point by None, because they have no gradient."""
    return tuple(x if jnp.issubdtype(x.dtype, jnp.inexact) else None for x in arrays)


# One device's share


def device_forward(
    call: Call, loss: TokenLoss, inputs: Inputs, rows: Rows, differentiated: bool
) -> tuple[tuple[Array, LogprobOutput], Inputs | None]:
    """Returns ``(sum of losses, results)``, and if ``differentiated`` the gradients for a cotangent of 1, else None."""
    if not differentiated:
        results, _ = _shard.device_forward(call, inputs.primals, rows, keep_cache=False)
        where, flat, per_token = _describe.flatten_tokens((rows.where, results, inputs.per_token), rows.labels.ndim)
        flat, per_token = _jax.vary_over((flat, per_token), list_result_axes(call, (inputs, rows)))
        total = _sum_over_devices(call, jnp.sum(loss(where, flat, per_token, inputs.constants)))
        return (total, results.outputs), None
    accumulated = _Chunks.of(call, loss, inputs, rows).run()
    (dhidden, dweight, *others), (hidden, weight, *_) = accumulated.gradients, inputs.primals
    outputs = jax.tree.map(lambda x: x.reshape(rows.labels.shape), accumulated.outputs)
    per_token = tuple(
        None if dx is None else dx.reshape(x.shape)
        for dx, x in zip(accumulated.per_token, inputs.per_token, strict=True)
    )
    constants = jax.tree.map(functools.partial(_sum_over_devices, call), accumulated.constants)
    dweight = None if dweight is None else _sum_over_devices(call, dweight.astype(weight.dtype))
    others = jax.tree.map(functools.partial(_sum_over_devices, call), others)
    if dhidden is not None and call.gather_dim is not None:
        dhidden = _shard.scatter_dhidden(call, dhidden, hidden).astype(hidden.dtype)
    primals = Primals(None if dhidden is None else dhidden.reshape(hidden.shape), dweight, *others)
    return (_sum_over_devices(call, jnp.sum(accumulated.losses)), outputs), Inputs(primals, per_token, constants)


def _sum_over_devices(call: Call, x: Array) -> Array:
    """Sums over the mesh axes that split the tokens, if the call names them (`Call.token_axes`).

    Otherwise the types of ``shard_map`` show what to sum, and ``x`` is returned.
    """
    return lax.psum(x, call.token_axes) if call.token_axes else x


# The capability


def forward(
    call: Call, inputs: Inputs, rows: Rows, differentiated: bool, loss: TokenLoss
) -> tuple[tuple[Array, LogprobOutput], Inputs | None]:
    """Returns ``(sum of losses, results)`` and, if ``differentiated``, the gradients. The results have no gradient."""
    partitioned = _runner.is_partitioned_by_xla(call, (inputs, rows))
    device_loss, all_inputs = loss.take_arrays(inputs) if partitioned else (loss, inputs)

    def run(share: Call, inputs: Inputs, rows: Rows) -> Any:
        local_loss = device_loss if partitioned or call.mesh is None else device_loss.retrace_here()
        return device_forward(share, local_loss, inputs, rows, differentiated)

    shardings: Any = Inputs(head_sharding(call.vocab_dim), ArraySharding.TOKENS, ArraySharding.REPLICATED)  # type: ignore[arg-type]
    results = (ArraySharding.REPLICATED, ArraySharding.RESULTS), shardings if differentiated else None
    out, gradients = run_program(call, Program(run, (shardings, ArraySharding.TOKENS), results), all_inputs, rows)
    if gradients is None:
        return out, None
    if partitioned:  # here the known arrays are inputs too; they have no gradient
        pairs = zip(gradients.constants, loss.known, strict=True)
        gradients = gradients._replace(constants=tuple(dx for dx, known in pairs if known is None))
    gradients = gradients if call.mesh is None else _runner.match_shardings(gradients, inputs)
    # An empty array stands for a gradient that is not requested. So the residuals always have the same structure.
    # JAX may take it from any trace, even one that differentiates other operands.
    requested = (
        jnp.zeros((0,), x.dtype) if dx is None and x is not None else dx
        for dx, x in zip(gradients.primals, inputs.primals, strict=True)
    )
    return out, gradients._replace(primals=Primals(*requested))


def backward(call: Call, types: Inputs, _: Any, gradients: Inputs, cotangent: Any) -> Inputs:
    """Multiplies the gradients by the cotangent of the sum."""
    local = jnp.asarray(cotangent[0])  # callers of ``jax.vjp`` may pass a Python scalar
    shared = local if call.axis_name is None else _collectives.sum_cotangents(local, call.axis_name)

    def scale(by: Array, gradient: Array | None, operand: OperandType) -> Array | None:
        if gradient is None:
            return None
        # Under value_and_grad the cotangent is the literal 1, so XLA drops the multiplication.
        wide = jnp.promote_types(gradient.dtype, by.dtype)
        product = (gradient.astype(wide) * by).astype(gradient.dtype)
        return _jax.psum_to_axes(product, operand.varying).astype(operand.dtype)

    primals = gradients.primals.select(call.gradients)
    return Inputs(
        Primals(*map(functools.partial(scale, shared), primals, types.primals)),
        tuple(map(functools.partial(scale, local), gradients.per_token, types.per_token)),
        tuple(map(functools.partial(scale, local), gradients.constants, types.constants)),
    )


def _make_empty_results(call: Call, rows: Rows) -> tuple[Array, LogprobOutput]:
    out = _shard.make_empty_results(call, rows).outputs
    return jnp.zeros((), out.lse.dtype), out


# Callers set ``static`` to ``(loss,)``, a `TokenLoss`.
LOSS = Capability(forward, backward, _make_empty_results, saves_gradients=True)


_programs: dict[int, Any] = {}  # the jitted `_runner.compute` of each living loss_fn, by its id


def cache_program(loss_fn: Any) -> tuple[Any, Any]:
    """Returns `_runner.compute`, jitted once for the lifetime of ``loss_fn``, and a weak reference to ``loss_fn``."""
    owner = getattr(loss_fn, "__func__", loss_fn)  # each access to a bound method makes a new object
    program = _programs.get(id(owner))
    if program is not None:
        return program, weakref.proxy(loss_fn)
    program = jax.jit(functools.partial(_runner.compute), static_argnums=(0, 1))
    try:
        weakref.finalize(owner, _programs.pop, id(owner)).atexit = False
    except TypeError:  # without weak references to it, each call compiles anew
        return program, loss_fn
    _programs[id(owner)] = program
    return program, weakref.proxy(loss_fn)
