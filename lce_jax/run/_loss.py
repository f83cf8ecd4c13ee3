"""`lce_jax.linear_loss` as the runner takes it: the traced loss of one token, and gradients in the forward.

The loss of a token is traced once, with what it closes over as arguments. The forward keeps the gradients themselves,
for a cotangent of 1, and the backward multiplies them.
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
from lce_jax.run._runner import ArraySharding, Capability, OperandType, Program, result_axes, spread
from lce_jax.run._token_chunks import TokenChunk, chunk_rows, describe_chunk
from lce_jax.types import _jax, scalars
from lce_jax.types._types import Call, LogprobOutput, Primals, Results

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Bool, Float


GIVE_IT_AS_AN_ARGUMENT = "give it as a per-token argument, jnp.broadcast_to(x, (*labels.shape, *x.shape))"


class Inputs(NamedTuple):
    """The operands with gradients, or these gradients, with None in place of what has none."""

    primals: Primals
    per_token: tuple[Any, ...]  # [*b, ...], the leaves of the loss's own arguments
    constants: tuple[Any, ...]  # the traced arrays that the loss closes over


# The loss of one token


@dataclasses.dataclass(frozen=True)
class TokenLoss:
    """A traced loss of one token, equal to itself alone; that of `identify` to all that compute the same."""

    # Of the types that the jaxpr takes. None for one device: it keeps nothing alive.
    retrace: Callable[..., ClosedJaxpr] | None = dataclasses.field(compare=False)
    jaxpr: ClosedJaxpr = dataclasses.field(compare=False)  # with None for each array that it closes over
    # The arrays that it closes over; None in place of the traced ones.
    known: tuple[Any, ...] = dataclasses.field(compare=False)
    impls: tuple[Any, ...]  # of those that are typed random keys; None for the others
    identity: Any = dataclasses.field(default_factory=object)

    @classmethod
    def of(cls, retrace: Callable[..., ClosedJaxpr], types: list[Any]) -> tuple[TokenLoss, tuple[Any, ...]]:
        """The loss, and the traced arrays that it closes over, `untyped`."""
        closed = retrace(types)
        known = tuple(None if _is_traced(x) else x for x in closed.consts)
        empty = closed.replace(consts=[None] * len(known))
        impls = tuple(map(_impl, closed.consts))
        return cls(retrace, empty, known, impls), tuple(untyped(x) for x in closed.consts if _is_traced(x))

    def take_arrays(self, inputs: Inputs) -> tuple[TokenLoss, Inputs]:
        """The loss with all that it closes over among the inputs: a function that XLA splits closes over nothing."""
        traced = iter(inputs.constants)
        known = (None if x is None else _describe.put_on_device(x, inputs.primals.hidden) for x in self.known)
        constants = tuple(next(traced) if x is None else untyped(x) for x in known)
        return dataclasses.replace(self, known=(None,) * len(constants)), inputs._replace(constants=constants)

    def retrace_here(self) -> TokenLoss:
        """The same loss traced over the mesh where it is computed, which a traced program knows."""
        assert self.retrace is not None
        try:
            loss, _ = TokenLoss.of(self.retrace, self.types)
            return dataclasses.replace(loss, known=self.known)
        except (NotImplementedError, ValueError) as error:  # JAX: what is typed over the axes of the mesh outside
            if not self.known:
                raise
            raise ValueError(
                "loss_fn closes over an array that lies on a mesh, and JAX cannot use it on one device of the mesh: "
                f"{GIVE_IT_AS_AN_ARGUMENT}"
            ) from error

    @property
    def types(self) -> list[jax.ShapeDtypeStruct]:
        """What the jaxpr takes: the results of one token, and its slice of each argument."""
        return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.jaxpr.in_avals]

    def __call__(
        self, live: Bool[Array, "T"] | None, results: Results, per_token: Any, constants: Any
    ) -> Float[Array, "T"]:
        """The losses of flat tokens, 0 where they do not count."""
        traced, known = iter(constants), zip(self.known, self.impls, strict=True)
        closed = self.jaxpr.replace(consts=[_typed(next(traced), impl) if x is None else x for x, impl in known])
        # The mean logit is for `lce_jax.linear_cross_entropy` alone.
        of_results = jax.tree.leaves((results.outputs[:3], results.mean_logit))
        (losses,) = jax.vmap(jaxpr_as_fun(closed))(*of_results, *per_token)
        losses = losses.astype(results.outputs.lse.dtype)
        return losses if live is None else jnp.where(live, losses, 0.0)


def identify(loss: TokenLoss, inputs: Inputs) -> tuple[TokenLoss, Inputs]:
    """The loss for a program that outlives the call: with all arrays among the inputs, told by what it computes.

    That is its value and its derivatives, in which custom rules have become operations. All that the function reads may
    have changed when it is called again.
    """
    loss, inputs = loss.take_arrays(inputs)
    jaxpr, impls = loss.jaxpr, loss.impls
    both = jax.value_and_grad(
        lambda constants, given: jaxpr_as_fun(jaxpr.replace(consts=[*map(_typed, constants, impls)]))(*given)[0],
        argnums=(0, 1),
        allow_int=True,
    )
    made = jax.make_jaxpr(both)(inputs.constants, loss.types)
    return dataclasses.replace(loss, identity=(str(made), *_constants_of(made))), inputs


def flatten_arguments(arguments: Any, labels: Any) -> tuple[tuple[Any, ...], Callable[..., Any]]:
    """The arrays of the loss's own arguments, one for each token and `untyped`, and what makes arguments of such.

    Numbers are no arrays: the loss gets them as they are.
    """
    given, tree = jax.tree_util.tree_flatten_with_path(arguments)
    shape, flat, impls = tuple(labels.shape), [], []
    numbers = [x if scalars.is_number(x) else None for _, x in given]
    for path, x in given:
        if not scalars.is_number(x):
            name = f"per-token argument {jax.tree_util.keystr(path[1:], simple=True, separator='.')} of loss_fn"
            _checks.check_array(name, x)
            scalars.check_per_token_shape(name, x.shape, shape)
            array = jnp.asarray(x)
            data = untyped(array)
            whole = (*shape, *data.shape[min(array.ndim, len(shape)) :])
            flat.append(data if data.shape == whole else jnp.broadcast_to(data, whole))
            impls.append(_impl(array))

    def arguments_of_token(own: Any) -> Any:
        arrays = map(_typed, own, impls)
        return jax.tree.unflatten(tree, [next(arrays) if x is None else x for x in numbers])

    return tuple(flat), arguments_of_token


def untyped(x: Any) -> Any:
    """Typed random keys as the integers that they hold, which can be zero, split and sent like any array."""
    return x if _impl(x) is None else jax.random.key_data(x)


def _typed(x: Any, impl: Any) -> Any:
    return x if impl is None else jax.random.wrap_key_data(x, impl=impl)


def _impl(x: Any) -> Any:
    return jax.random.key_impl(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else None


def trace(
    loss_fn: Callable[..., Any],
    arguments_of_token: Callable[..., Any],
    call: Call,
    per_token: tuple[Any, ...],
    num_dims: int,
    axes: frozenset[Any],
) -> tuple[TokenLoss, tuple[Any, ...]]:
    """The loss of one token, and the traced arrays that it closes over; everything per token varies over ``axes``.

    ``num_dims``: the leading dimensions of ``per_token`` that are the call's.
    """
    scalar: Any = jax.ShapeDtypeStruct((), call.stat_dtype)
    results = [scalar, scalar if call.entropy else None, scalar, *([scalar] if call.mean_logit else [])]
    arguments = [jax.ShapeDtypeStruct(x.shape[num_dims:], x.dtype) for x in per_token]

    def loss_of_token(results: Any, arguments: Any) -> Any:
        by_place, by_name = arguments_of_token(arguments)
        return loss_fn(*results, *by_place, **by_name)

    def retrace(types: list[Any]) -> ClosedJaxpr:
        return jax.make_jaxpr(loss_of_token)(*jax.tree.unflatten(jax.tree.structure((results, arguments)), types))

    types = jax.tree.leaves((results, arguments))
    if axes:
        types = _jax.vary_over([jnp.zeros(x.shape, x.dtype) for x in types], axes)
    loss, constants = TokenLoss.of(retrace, types)
    shapes = [(tuple(x.shape), x.dtype) for x in loss.jaxpr.out_avals]
    if len(shapes) != 1 or shapes[0][0] != () or not jnp.issubdtype(shapes[0][1], jnp.floating):
        said = ", ".join(f"{dtype.name}{list(shape)}" for shape, dtype in shapes) or "nothing"
        raise ValueError(
            f"loss_fn must return one floating-point scalar for one token, got {said}: it is given scalars, "
            "and the slice of each per-token argument that belongs to the token"
        )
    return loss, constants


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
        if own - axes or (jnp.issubdtype(x.dtype, jnp.inexact) and own != axes):
            raise ValueError(
                f"loss_fn closes over a traced {jax.typeof(x).str_short()}, which varies over {sorted(own, key=str)}; "
                f"the tokens vary over {sorted(axes, key=str)}: inside shard_map {GIVE_IT_AS_AN_ARGUMENT}"
            )


def _is_traced(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer)


# In chunks of tokens


class _Whole(NamedTuple):
    """What the chunks fill and add to."""

    losses: Float[Array, "T"]
    outputs: LogprobOutput  # [T]
    gradients: Primals  # [T, H]; dweight and dbias as sums
    per_token: tuple[Any, ...]  # [T, ...]
    constants: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Chunks:
    """The chunks of one call, in turn."""

    call: Call  # of a chunk
    loss: TokenLoss
    primals: Primals  # hidden flat; cast already if it was gathered
    rows: Rows  # flat
    per_token: tuple[Any, ...]  # [T, ...]
    constants: tuple[Any, ...]
    order: _describe.Compaction | None
    size: int  # rows per chunk
    tokens: int
    adds: bool  # whether there are several chunks, whose dweight are added
    writes: bool  # whether the first of them writes the sum of dweight, which may hold anything before
    token_axes: frozenset[Any]  # the types of everything per token
    psum_axes: tuple[Any, ...]  # over which each chunk's dhidden is summed
    hidden_axes: frozenset[Any]  # the type of dhidden then
    weight_axes: frozenset[Any]  # that of dweight and dbias
    rounds: bool  # whether nothing is added to dhidden after that
    hidden_dtype: jnp.dtype

    @classmethod
    def of(cls, call: Call, loss: TokenLoss, inputs: Inputs, rows: Rows) -> _Chunks:
        primals, size, tokens = inputs.primals, chunk_rows(call), rows.labels.size
        tracked = call.axis_name is not None and _jax.tracks_varying(call.axis_name)
        given, all_axes = _jax.varying_axes(primals.hidden), _jax.varying_axes((inputs, rows))
        names = frozenset(_jax.list_axes(call.axis_name))
        psum = names - given if tracked else frozenset()
        if call.token_axes is not None and call.gather_dim is None:
            psum = names
        weight_axes = all_axes | names if tracked else all_axes
        hidden_axes = weight_axes - psum
        hidden = primals.hidden.reshape(-1, primals.hidden.shape[-1])
        if call.gather_dim is not None:
            hidden = _shard.flat_operands(call, primals).hidden
        flat_rows, per_token = _describe.flatten_tokens((rows, inputs.per_token), rows.labels.ndim)
        chunk = describe_chunk(call, size, rows.where is not None or tokens % size != 0)
        implementation = _dispatch.choose(chunk)[0].NAME
        chunk = dataclasses.replace(chunk, implementation=implementation, gather_dim=None)  # it is gathered
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
            token_axes=result_axes(call, (inputs, rows)),
            psum_axes=tuple(sorted(psum, key=str)),
            hidden_axes=hidden_axes,
            weight_axes=weight_axes,
            rounds=call.gather_dim is None and hidden_axes == given,
            hidden_dtype=primals.hidden.dtype,
        )

    def run(self) -> _Whole:
        """All chunks that have a row that counts."""
        count: Any = -(-self.tokens // self.size)
        if self.order is not None:
            count = -(-self.order.num_rows // self.size)
            if self.call.axis_name is not None and not _jax.tracks_varying(self.call.axis_name):
                count = lax.pmax(count, self.call.axis_name)  # or a shard given other rows would wait for ever

        def steps() -> _Whole:
            empty = self._empty(lax.empty if self.writes else jnp.zeros)
            if self.adds:
                return lax.fori_loop(0, count, lambda i, whole: self._step(i * self.size, whole), empty)
            return self._step(jnp.int32(0), empty)  # a loop would fill dweight with zeros first

        known = self.order is None or (self.adds and not self.writes)
        return steps() if known else lax.cond(count > 0, steps, self._empty)

    def _empty(self, of_dweight: Any = jnp.zeros) -> _Whole:
        call, weight = self.call, self.primals.weight
        zeros = functools.partial(jnp.zeros, dtype=call.stat_dtype)
        outputs = jax.eval_shape(lambda: _logprobs.empty_results(self.tokens, call.stat_dtype, call).outputs)
        dhidden = jnp.zeros(self.primals.hidden.shape, self.hidden_dtype if self.rounds else call.stat_dtype)
        dweight = of_dweight(weight.shape, call.stat_dtype if self.adds else call.dtype)
        dbias = None if self.primals.bias is None else zeros(self.primals.bias.shape)
        of_tokens = _Whole(
            zeros(self.tokens),
            jax.tree.map(lambda x: zeros(x.shape), outputs),
            Primals(None, None),
            *(jax.tree.map(jnp.zeros_like, _floats(x)) for x in (self.per_token, self.constants)),
        )
        of_tokens = _jax.vary_over(of_tokens, self.token_axes)
        dweight, dbias = _jax.vary_over((dweight, dbias), self.weight_axes)
        gradients = Primals(_jax.vary_over(dhidden, self.hidden_axes), dweight, dbias)
        return of_tokens._replace(gradients=gradients.select(call.gradients))

    @jax.named_scope("chunk_of_tokens")
    def _step(self, first: Any, whole: _Whole) -> _Whole:
        """``whole`` with the results and gradients of the chunk that begins at ``first``."""
        chunk, call = TokenChunk.starting_at(first, self.size, self.tokens, self.order), self.call
        hidden, rows, per_token = jax.tree.map(
            lambda x: chunk.take(x, self.size), (self.primals.hidden, self.rows, self.per_token)
        )
        rows = rows._replace(num_rows=chunk.num_rows)
        part = _shard.Part.of(call, _shard.as_operand(self.primals._replace(hidden=hidden)), rows)
        results, stats, cache = _shard.compute_results(part, keep_cache=call.gradients.any)
        live = rows.unmasked
        if live is not None:
            results = jax.tree.map(lambda x: jnp.where(live, x, x[0]), results)
        losses, cotangent, dper_token, dconstants = self._differentiate(live, results, per_token)
        found = whole.gradients
        if call.gradients.any:
            found = part.gradients(
                stats, cotangent, cache,
                may_round_dhidden=self.rounds and not self.psum_axes and self.hidden_dtype == call.dtype,
                dweight=found.weight if self.adds else None, adds_dweight=first > 0 if self.writes else True,
            )  # fmt: skip
        return _Whole(
            chunk.put(whole.losses, losses),
            jax.tree.map(chunk.put, whole.outputs, results.outputs),
            self._add(chunk, whole.gradients, found),
            jax.tree.map(chunk.put, whole.per_token, dper_token),
            jax.tree.map(jnp.add, whole.constants, dconstants),
        )

    def _differentiate(
        self, live: Bool[Array, "t"] | None, results: Results, per_token: tuple[Any, ...]
    ) -> tuple[Array, Results, tuple[Any, ...], tuple[Any, ...]]:
        """A chunk's losses, and the derivatives of their sum in results, arguments and what the loss closes over."""
        results, per_token = _jax.vary_over((results, per_token), self.token_axes)

        def total(results: Results, per_token: Any, constants: Any) -> tuple[Array, Array]:
            losses = self.loss(live, results, per_token, constants)
            return jnp.sum(losses), losses

        read = results._replace(outputs=LogprobOutput(*results.outputs[:3]))
        value, pull, losses = jax.vjp(total, read, per_token, self.constants, has_aux=True)
        dresults, *others = pull(_jax.vary_like(jnp.ones((), value.dtype), value))
        dper_token, dconstants = map(_floats, others)
        return losses, dresults, dper_token, dconstants

    def _add(self, chunk: TokenChunk, whole: Primals, found: Primals) -> Primals:
        """``whole`` with a chunk's dhidden in its rows; dweight, which is the sum already; and dbias added."""
        dhidden = found.hidden
        if self.psum_axes:
            # As in `_shard.reduced`, the collective starts after the kernels.
            found = lax.optimization_barrier(found)
            dhidden = jax.tree.map(lambda x: lax.psum(x, self.psum_axes), found.hidden)
        dweight, dbias = _jax.vary_over((found.weight, found.bias), self.weight_axes)
        dhidden = _jax.vary_over(dhidden, self.hidden_axes)
        return Primals(
            jax.tree.map(lambda all_of, x: chunk.put(all_of, x.astype(all_of.dtype)), whole.hidden, dhidden),
            dweight,
            jax.tree.map(jnp.add, whole.bias, dbias),
        )


def _floats(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """Those that have a gradient, or are one; None in place of the others."""
    return tuple(x if jnp.issubdtype(x.dtype, jnp.inexact) else None for x in arrays)


# What one device computes


def device_forward(
    call: Call, loss: TokenLoss, inputs: Inputs, rows: Rows, differentiated: bool
) -> tuple[tuple[Array, LogprobOutput], Inputs | None]:
    """The sum over this device's tokens and the results; and the gradients for a cotangent of 1, if asked for."""
    if not differentiated:
        results, _ = _shard.device_forward(call, inputs.primals, rows, keep_cache=False)
        live, flat, per_token = _describe.flatten_tokens((rows.where, results, inputs.per_token), rows.labels.ndim)
        flat, per_token = _jax.vary_over((flat, per_token), result_axes(call, (inputs, rows)))
        return (_total(call, jnp.sum(loss(live, flat, per_token, inputs.constants))), results.outputs), None
    whole = _Chunks.of(call, loss, inputs, rows).run()
    (dhidden, dweight, dbias), (hidden, weight, _) = whole.gradients, inputs.primals
    outputs = jax.tree.map(lambda x: x.reshape(rows.labels.shape), whole.outputs)
    per_token = tuple(
        None if dx is None else dx.reshape(x.shape) for dx, x in zip(whole.per_token, inputs.per_token, strict=True)
    )
    constants = jax.tree.map(functools.partial(_total, call), whole.constants)
    dweight = None if dweight is None else _total(call, dweight.astype(weight.dtype))
    dbias = None if dbias is None else _total(call, dbias)
    if dhidden is not None and call.gather_dim is not None:
        dhidden = _shard.scattered(call, dhidden, hidden).astype(hidden.dtype)
    primals = Primals(None if dhidden is None else dhidden.reshape(hidden.shape), dweight, dbias)
    return (_total(call, jnp.sum(whole.losses)), outputs), Inputs(primals, per_token, constants)


def _total(call: Call, x: Array) -> Array:
    """The sum over the devices that hold other tokens of the same call, where no types say so."""
    return lax.psum(x, call.token_axes) if call.token_axes else x


# `lce_jax.linear_loss` as the runner takes it


def forward(
    call: Call, inputs: Inputs, rows: Rows, differentiated: bool, loss: TokenLoss
) -> tuple[tuple[Array, LogprobOutput], Inputs | None]:
    """The sum of the losses, and the results, which carry no gradient; and the gradients, if asked for."""
    left = _runner.is_left_to_xla(call, (inputs, rows))
    of_device, all_inputs = loss.take_arrays(inputs) if left else (loss, inputs)

    def run(share: Call, inputs: Inputs, rows: Rows) -> Any:
        own = of_device if left or call.mesh is None else of_device.retrace_here()
        return device_forward(share, own, inputs, rows, differentiated)

    kinds: Any = Inputs(_runner.head(call.vocab_dim), ArraySharding.TOKENS, ArraySharding.REPLICATED)  # type: ignore[arg-type]
    results = (ArraySharding.REPLICATED, ArraySharding.RESULTS), kinds if differentiated else None
    out, found = spread(call, Program(run, (kinds, ArraySharding.TOKENS), results), all_inputs, rows)
    if found is None:
        return out, None
    if left:  # XLA takes the arrays that are known too
        pairs = zip(found.constants, loss.known, strict=True)
        found = found._replace(constants=tuple(dx for dx, known in pairs if known is None))
    found = found if call.mesh is None else _runner.split_as(found, inputs)
    # An array without numbers stands for a gradient that is not asked for: what is kept has the same tree whichever
    # are, because JAX takes it from any trace, also one where other operands are differentiated.
    there = (
        jnp.zeros((0,), x.dtype) if dx is None and x is not None else dx
        for dx, x in zip(found.primals, inputs.primals, strict=True)
    )
    return out, found._replace(primals=Primals(*there))


def backward(call: Call, types: Inputs, _: Any, gradients: Inputs, cotangent: Any) -> Inputs:
    """The gradients multiplied by the cotangent of the sum."""
    own = jnp.asarray(cotangent[0])  # a number, where the caller of ``jax.vjp`` gives one
    shared = own if call.axis_name is None else _collectives.sum_cotangents(own, call.axis_name)

    def scale(by: Array, gradient: Array | None, operand: OperandType) -> Array | None:
        if gradient is None:
            return None
        # Under value_and_grad the cotangent is the literal 1, and XLA drops the product.
        wide = jnp.promote_types(gradient.dtype, by.dtype)
        product = (gradient.astype(wide) * by).astype(gradient.dtype)
        return _jax.psum_to_axes(product, operand.varying).astype(operand.dtype)

    primals = gradients.primals.select(call.gradients)
    return Inputs(
        Primals(*map(functools.partial(scale, shared), primals, types.primals)),
        tuple(map(functools.partial(scale, own), gradients.per_token, types.per_token)),
        tuple(map(functools.partial(scale, own), gradients.constants, types.constants)),
    )


def _of_no_tokens(call: Call, rows: Rows) -> tuple[Array, LogprobOutput]:
    out = _shard.of_no_tokens(call, rows).outputs
    return jnp.zeros((), out.lse.dtype), out


# Of ``static=(loss,)``, a `TokenLoss`.
LOSS = Capability(forward, backward, _of_no_tokens, keeps_gradients=True)


_programs: dict[int, Any] = {}  # `_runner.compute` of each loss_fn that is alive, by its id


def keep_program(loss_fn: Any) -> tuple[Any, Any]:
    """`_runner.compute` with one program per kind of call while ``loss_fn`` lives; and ``loss_fn`` held weakly."""
    owner = getattr(loss_fn, "__func__", loss_fn)  # a bound method is a new object each time
    found = _programs.get(id(owner))
    if found is not None:
        return found, weakref.proxy(loss_fn)
    found = jax.jit(functools.partial(_runner.compute), static_argnums=(0, 1))
    try:
        weakref.finalize(owner, _programs.pop, id(owner)).atexit = False
    except TypeError:  # what cannot be held weakly is compiled for each call
        return found, loss_fn
    _programs[id(owner)] = found
    return found, weakref.proxy(loss_fn)
