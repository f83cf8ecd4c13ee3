"""One device's part of `lce_jax.linear_loss`: the loss and its gradients in one pass, a chunk of tokens at a time.

    statistics, with all exponentials kept ─ merge ─ results ─ losses ─ their derivatives ─ gradients of the chunk
    the next chunk: its dhidden in its own rows, its dweight added to one sum

A loss of per-token scalars has a derivative for each token as soon as the token's results are known. So a backward pass
never needs the exponentials of all tokens: a chunk's are overwritten by its dlogits and forgotten. Everything is
computed for a cotangent of 1, and multiplied by the loss's cotangent when that is known.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax import _dispatch, _jax
from lce_jax._types import LogprobOutput, Primals, Results
from lce_jax.call import _loss, _rows
from lce_jax.call._loss import Gradients, Inputs, TokenLoss
from lce_jax.call._rows import Rows
from lce_jax.call._spec import Spec
from lce_jax.mathematics import _logprobs
from lce_jax.mesh import _collectives
from lce_jax.programs import _one_device, _shard
from lce_jax.programs._token_chunks import Budget, TokenChunk, chunk_case

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Bool, Float


def forward(spec: Spec, loss: TokenLoss, inputs: Inputs) -> tuple[Array, LogprobOutput]:
    """The sum over this device's tokens and the results, without gradients."""
    primals, rows, per_token, constants = inputs
    results, _ = _one_device.forward(spec, primals, rows, keep_cache=False)
    live, outputs, per_token = _rows.flattened((rows.where, results.outputs, per_token), rows.labels.ndim)
    outputs, per_token = _jax.vary_over((outputs, per_token), axes_of_tokens(spec, inputs))
    return _total(spec, jnp.sum(loss(live, outputs, per_token, constants))), results.outputs


def forward_and_gradients(
    spec: Spec, loss: TokenLoss, inputs: Inputs, budget: Budget
) -> tuple[Array, LogprobOutput, Gradients]:
    """The same, and the gradients for a cotangent of 1, `scaled` of which the caller sums and rounds."""
    whole = _Chunks.of(spec, loss, budget, inputs).run()
    shape = inputs.rows.labels.shape
    losses, outputs = whole.losses, jax.tree.map(lambda x: x.reshape(shape), whole.outputs)
    per_token = tuple(
        None if dx is None else dx.reshape(x.shape) for dx, x in zip(whole.per_token, inputs.per_token, strict=True)
    )
    constants = tuple(None if dx is None else _total(spec, dx) for dx in whole.constants)
    (dhidden, dweight, dbias), (hidden, weight, _) = whole.gradients, inputs.primals
    dweight = _total(spec, dweight.astype(weight.dtype))
    dbias = None if dbias is None else _total(spec, dbias)
    if spec.gather_dim is not None:
        dhidden = _one_device.scattered(spec, dhidden, hidden).astype(hidden.dtype)
    primals = Primals(dhidden.reshape(hidden.shape), dweight, dbias)
    return _total(spec, jnp.sum(losses)), outputs, Gradients(primals, per_token, constants)


def _total(spec: Spec, x: Array) -> Array:
    """The sum over the devices that hold other tokens of the same call, where no types say so."""
    return lax.psum(x, spec.token_axes) if spec.token_axes else x


def axes_of_tokens(spec: Spec, inputs: Inputs) -> frozenset[Any]:
    """The axes over which results, and so losses, may differ by their types."""
    return _jax.varying_axes(inputs) - frozenset(_jax.as_axes(spec.axis_name))


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

    spec: Spec  # of a chunk
    loss: TokenLoss
    primals: Primals  # hidden flat; cast already if it was gathered
    rows: Rows  # flat
    per_token: tuple[Any, ...]  # flat
    constants: tuple[Any, ...]
    order: _rows.Compaction | None
    size: int  # rows per chunk
    tokens: int
    adds: bool  # whether there are several chunks, whose dweight are added
    token_axes: frozenset[Any]  # the types of everything per token
    psum_axes: tuple[Any, ...]  # over which each chunk's dhidden is summed
    hidden_axes: frozenset[Any]  # the type of dhidden then
    weight_axes: frozenset[Any]  # that of dweight and dbias
    rounds: bool  # whether nothing is added to dhidden after that
    hidden_dtype: jnp.dtype

    @classmethod
    def of(cls, spec: Spec, loss: TokenLoss, budget: Budget, inputs: Inputs) -> _Chunks:
        primals, rows = inputs.primals, inputs.rows
        size, tokens = budget.chunk_rows(spec.case), rows.labels.size
        tracked = spec.axis_name is not None and _jax.tracks_varying(spec.axis_name)
        given, all_axes = _jax.varying_axes(primals.hidden), _jax.varying_axes(inputs)
        names = frozenset(_jax.as_axes(spec.axis_name))
        psum = names - given if tracked else frozenset()
        if spec.token_axes is not None and spec.gather_dim is None:
            psum = names
        weight_axes = all_axes | names if tracked else all_axes
        hidden_axes = weight_axes - psum
        hidden = primals.hidden.reshape(-1, primals.hidden.shape[-1])
        if spec.gather_dim is not None:
            hidden = _one_device.flat_operands(spec, primals).hidden
        flat_rows, per_token = _rows.flattened((rows, inputs.per_token), rows.labels.ndim)
        case = chunk_case(spec.case, size, rows.where is not None or tokens % size != 0)
        chosen, _ = _dispatch.choose(case, spec.requested)
        return cls(
            spec=dataclasses.replace(spec, case=case, implementation=chosen.NAME, gather_dim=None),  # it is gathered
            loss=loss,
            primals=primals._replace(hidden=hidden),
            rows=flat_rows._replace(where=None),
            per_token=per_token,
            constants=inputs.constants,
            order=None if flat_rows.where is None else _rows.compaction(flat_rows.where),
            size=size,
            tokens=tokens,
            adds=size < tokens,
            token_axes=axes_of_tokens(spec, inputs),
            psum_axes=tuple(sorted(psum, key=str)),
            hidden_axes=hidden_axes,
            weight_axes=weight_axes,
            rounds=spec.gather_dim is None and hidden_axes == given,
            hidden_dtype=primals.hidden.dtype,
        )

    def run(self) -> _Whole:
        """All chunks that have a row that counts."""
        empty = self._empty()
        if self.order is None and not self.adds:
            return self._step(jnp.int32(0), empty)
        count: Any = -(-self.tokens // self.size)
        if self.order is not None:
            count = -(-self.order.num_rows // self.size)
            if self.spec.axis_name is not None and not _jax.tracks_varying(self.spec.axis_name):
                count = lax.pmax(count, self.spec.axis_name)  # or a shard given other rows would wait for ever
        return lax.fori_loop(0, count, lambda i, whole: self._step(i * self.size, whole), empty)

    def _empty(self) -> _Whole:
        case, weight = self.spec.case, self.primals.weight
        zeros = functools.partial(jnp.zeros, dtype=case.stat_dtype)
        outputs = jax.eval_shape(lambda: _logprobs.results_of_none(self.tokens, case.stat_dtype, case.options).outputs)
        dhidden = jnp.zeros(self.primals.hidden.shape, self.hidden_dtype if self.rounds else case.stat_dtype)
        dweight = jnp.zeros(weight.shape, case.stat_dtype if self.adds else case.dtype)
        dbias = None if self.primals.bias is None else zeros(self.primals.bias.shape)
        of_tokens = _Whole(
            zeros(self.tokens),
            jax.tree.map(lambda x: zeros(x.shape), outputs),
            Primals(None, None),
            *(jax.tree.map(jnp.zeros_like, _floats(x)) for x in (self.per_token, self.constants)),
        )
        of_tokens = _jax.vary_over(of_tokens, self.token_axes)
        dweight, dbias = _jax.vary_over((dweight, dbias), self.weight_axes)
        return of_tokens._replace(gradients=Primals(_jax.vary_over(dhidden, self.hidden_axes), dweight, dbias))

    @jax.named_scope("chunk_of_tokens")
    def _step(self, first: Any, whole: _Whole) -> _Whole:
        """``whole`` with the results and gradients of the chunk that begins at ``first``."""
        chunk, spec = TokenChunk.starting_at(first, self.size, self.tokens, self.order), self.spec
        hidden, rows, per_token = jax.tree.map(
            lambda x: chunk.take(x, self.size), (self.primals.hidden, self.rows, self.per_token)
        )
        rows = rows._replace(num_rows=chunk.num_rows)
        primals = _shard.as_operand(self.primals._replace(hidden=hidden))
        start = _one_device.first_column(spec, primals.weight)
        stats, cache, agree = _one_device.statistics(spec, primals, rows, keep_cache=True)
        cache, dropped = _one_device.selected(spec, rows, stats, cache)
        outputs = _shard.finish(spec, rows, stats, None, dropped).outputs
        outputs = outputs if agree is None else _collectives.nan_where_different(agree, outputs)
        live = rows.live
        if live is not None:
            outputs = jax.tree.map(lambda x: jnp.where(live, x, x[0]), outputs)
        losses, cotangent, dper_token, dconstants = self._of_loss(live, outputs, per_token)
        found = _shard.gradients(
            spec, primals, rows, start, stats, cotangent, cache,
            may_round_dhidden=self.rounds and not self.psum_axes and self.hidden_dtype == spec.case.dtype,
            dweight=whole.gradients.weight if self.adds else None,
        )  # fmt: skip
        return _Whole(
            chunk.put(whole.losses, losses),
            jax.tree.map(chunk.put, whole.outputs, outputs),
            self._added(chunk, whole.gradients, found),
            jax.tree.map(chunk.put, whole.per_token, dper_token),
            jax.tree.map(jnp.add, whole.constants, dconstants),
        )

    def _of_loss(
        self, live: Bool[Array, "t"] | None, outputs: LogprobOutput, per_token: tuple[Any, ...]
    ) -> tuple[Array, Results, tuple[Any, ...], tuple[Any, ...]]:
        """A chunk's losses, and the derivatives of their sum in results, arguments and what the loss closes over."""
        outputs, per_token = _jax.vary_over((outputs, per_token), self.token_axes)

        def total(results: Any, own: Any, closed: Any) -> tuple[Array, Array]:
            arguments, constants = _filled(own, per_token), _filled(closed, self.constants)
            losses = self.loss(live, LogprobOutput(*results), arguments, constants)
            return jnp.sum(losses), losses

        value, pull, losses = jax.vjp(total, outputs[:3], _floats(per_token), _floats(self.constants), has_aux=True)
        one = _jax.vary_like(jnp.ones((), value.dtype), value)
        dresults, dper_token, dconstants = pull(one)
        return losses, Results(LogprobOutput(*dresults)), dper_token, dconstants

    def _added(self, chunk: TokenChunk, whole: Primals, found: Primals) -> Primals:
        dhidden = found.hidden
        if self.psum_axes:
            # As in `programs._one_device.backward`, the collective starts after the kernels.
            found = lax.optimization_barrier(found)
            dhidden = lax.psum(found.hidden, self.psum_axes)
        dweight, dbias = _jax.vary_over((found.weight, found.bias), self.weight_axes)
        return Primals(
            chunk.put(whole.hidden, _jax.vary_over(dhidden, self.hidden_axes).astype(whole.hidden.dtype)),
            dweight,
            jax.tree.map(jnp.add, whole.bias, dbias),
        )


def _floats(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """Those with a gradient; None in place of the others."""
    return tuple(x if _loss.has_gradient(x) else None for x in arrays)


def _filled(floats: tuple[Any, ...], arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x if own is None else own for own, x in zip(floats, arrays, strict=True))
