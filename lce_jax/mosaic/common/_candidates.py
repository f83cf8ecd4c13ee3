"""Candidates, a few columns of each token beside its label: their logits, and their places in dlogits.

logits    hidden and gathered rows of the weight  ->  x (eq. 0)
values    x, terms and a row's factors            ->  what stands at each candidate's place (eqs. 4, 5), in float32

A value is all that stands there, not what is to be added: where a candidate is nearly certain, its terms nearly cancel
the rest, which a chunk of dlogits holds rounded. `_put_candidates` puts it there.

What is per candidate is flat: a field of ``stride`` numbers for each, in which those of a token lie side by side.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax._types import Case
from lce_jax.mathematics import _logprobs, _statistics
from lce_jax.mosaic._geometry import geometry
from lce_jax.mosaic._operands import RowFactors
from lce_jax.mosaic._pallas import pl, plgpu
from lce_jax.mosaic.common._threads import THREADS, Rows, along
from lce_jax.mosaic.common._tiles import TILING
from lce_jax.mosaic.common._tokens import kernel

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Float, Int

LEAST_HIDDEN = THREADS  # of a gathered row of the weight: a number for every thread
VECTOR = 8  # 16-bit numbers of the widest load of a thread
LOADED = 4  # rows of the weight whose loads overlap; their sums take 8 registers of a thread each
OF_BLOCK = 16  # candidates of a token that a block computes: few enough for few tokens to fill the GPU
AT_A_TIME = 8  # candidates of a thread's token whose loads overlap


def gathers(case: Case) -> bool:
    """Whether `candidate_logits` serves ``case``: where a column of the weight is contiguous."""
    return case.options.vocab_dim == 0 and case.hidden_size >= LEAST_HIDDEN


def candidate_logits(
    case: Case,
    hidden: Float[Array, "T H"],
    weight: Float[Array, "V H"],
    ids: Int[Array, "n"],
    x: Float[Array, "m"],
    numbers: Int[Array, "5"],
    first: tuple[int, int],
) -> Float[Array, "m"]:
    """``x`` with the x (eq. 0) of the candidates that are columns of the shard, -inf at the others.

    Args:
        case: T tokens, and the shard.
        hidden: in the weight's dtype; there may be more rows.
        weight: the shard's.
        ids: of the candidates.
        x: memory, some of it for these results.
        numbers: how many rows there are, the strides of ``ids`` and of ``x``, the id of the shard's first column, and
            how many columns it has.
        first: the fields of the first candidate in ``ids`` and in ``x``.
    """
    groups = -(-case.options.num_candidates // OF_BLOCK)
    output = jax.ShapeDtypeStruct(x.shape, x.dtype)
    body = functools.partial(_logits, case, groups, first)
    # One axis, because the others of a CUDA grid end at 65535. Blocks that share a row of hidden are neighbours.
    run = kernel(body, [output], "lce_candidate_logits", {"block": case.num_tokens * groups}, updated={4: 0})
    return run(hidden, weight, ids, numbers, x)[0]


def _logits(case: Case, groups: int, first: tuple[int, int], hidden: Any, weight: Any, ids: Any, *refs: Any) -> None:
    numbers, _, output = refs
    block, most = lax.axis_index("block"), case.options.num_candidates
    token, group = lax.div(block, groups), lax.rem(block, groups)
    count, id_stride, x_stride, start, num_columns = (numbers[i] for i in range(5))

    def step(i: Any, _: Any) -> None:
        begin = group * OF_BLOCK + i * LOADED
        which = [jnp.minimum(begin + j, most - 1) for j in range(min(LOADED, most))]  # after the last, that one again
        columns = [ids[(first[0] + k) * id_stride + token] - start for k in which]
        products = _products(case, hidden, weight, token, [jnp.clip(c, 0, case.vocab_size - 1) for c in columns])
        for k, column, product in zip(which, columns, products, strict=True):
            x = _logprobs.unscaled_logits(product, case.options, tanh=jnp.tanh)
            owned = (column >= 0) & (column < num_columns)
            output.at[(first[1] + k) * x_stride + token][...] = jnp.where(owned, x, -jnp.inf)

    steps = lax.div(jnp.minimum(most - group * OF_BLOCK, OF_BLOCK) + LOADED - 1, LOADED)
    pl.when(token < count)(lambda: lax.fori_loop(0, steps, step, None))


def _products(case: Case, hidden: Any, weight: Any, token: Any, columns: list[Any]) -> list[Any]:
    """Hidden of one token times the weight's rows at ``columns``, in float32, a piece of H after the other.

    H may be no multiple of a piece. The last one then ends where H ends, with zeros in place of what has been counted.
    """
    size = next(THREADS * n for n in (VECTOR, 4, 2, 1) if case.hidden_size >= THREADS * n)
    layout = plgpu.Layout.WG_STRIDED((size,), vec_size=size // THREADS)
    sums: list[Any] = []
    for begin in range(0, case.hidden_size, size):
        at = min(begin, case.hidden_size - size)
        load = functools.partial(_piece, pl.ds(at, size), layout)
        of_hidden = load(hidden, token)
        if at < begin:
            number = plgpu.layout_cast(lax.iota(jnp.int32, size), layout)
            of_hidden = jnp.where(number < begin - at, 0.0, of_hidden)
        products = [of_hidden * piece for piece in [load(weight, column) for column in columns]]
        sums = [a + b for a, b in zip(sums, products, strict=True)] if sums else products
    return [jnp.sum(x) for x in sums]


def _piece(columns: Any, layout: Any, ref: Any, row: Any) -> Float[Array, "n"]:
    return plgpu.load(ref.at[row, columns], layout=layout, optimized=False).astype(jnp.float32)


def candidate_values(
    case: Case,
    ids: Int[Array, "n"],
    x: Float[Array, "m"],
    terms: Float[Array, "K*stride"],
    targets: Int[Array, "Tp"],
    scale: Float[Array, "Tp"],
    factors: Float[Array, "factors Tp"],
    numbers: Int[Array, "3"],
    first: tuple[int, int],
) -> Float[Array, "K*stride"]:
    """The gradient in the raw product at each candidate that is a column of the shard: anything at the others.

    The terms of one id are added in the candidates' order.

    Args:
        case: T tokens, and the shard.
        ids: of the candidates.
        x: theirs.
        terms: what each adds to its column.
        targets: the shard's columns of the labels.
        scale: the k of eq. 0, in base 2.
        factors: those of eq. 4.
        numbers: how many rows there are, the stride of all that is flat, and the id of the shard's first column.
        first: the fields of the first candidate in ``ids`` and in ``x``.
    """
    most = case.options.num_candidates
    output = jax.ShapeDtypeStruct((most * geometry(case, TILING).padded_tokens,), jnp.float32)
    grid = {"group": -(-most // AT_A_TIME), "rows": -(-case.num_tokens // THREADS)}
    run = kernel(functools.partial(_values, case, first), [output], "lce_candidate_values", grid)
    return run(ids, x, terms, targets, scale, factors, numbers)[0]


def _values(
    case: Case,
    first: tuple[int, int],
    ids: Any,  # flat
    x: Any,  # flat
    terms: Any,  # flat
    targets: Any,  # [Tp]
    scale: Any,  # [Tp]
    factors: Any,  # [3 or 4, Tp]
    numbers: Any,
    output: Any,  # flat
) -> None:
    most, stride, start = case.options.num_candidates, numbers[1], along(numbers[2])
    rows, begin = Rows.of(lax.axis_index("rows"), numbers[0]), lax.axis_index("group") * AT_A_TIME
    at_once = range(min(AT_A_TIME, most))

    def id_of(k: Any) -> Any:
        return ids[rows.of_field(first[0] + k, stride)]

    def term(k: Any) -> tuple[Any, Any]:
        """Of candidate k, and its id; 0 after the last."""
        at = jnp.minimum(k, most - 1)
        return id_of(at), jnp.where(along(k) < most, terms[rows.of_field(at, stride)], along(0.0, jnp.float32))

    def write() -> None:
        own = [jnp.minimum(begin + j, most - 1) for j in at_once]  # after the last, that one again
        own_ids = [id_of(k) for k in own]

        def add(i: Any, sums: list[Any]) -> list[Any]:
            found = [term(i * AT_A_TIME + j) for j in at_once]
            return [_with_terms(one, found, total) for one, total in zip(own_ids, sums, strict=True)]

        none = [along(0.0, jnp.float32)] * len(own)
        sums = lax.fori_loop(0, -(-most // AT_A_TIME), add, none)
        of_rows = RowFactors(
            *(factors[f, rows.here] for f in range(factors.shape[0])), *[None] * (4 - factors.shape[0])
        )
        row_scale, target = scale[rows.here], targets[rows.here]
        for k, one, total in zip(own, own_ids, sums, strict=True):
            d = _gradient(case, x[rows.of_field(first[1] + k, stride)], row_scale, of_rows)
            at_label = one - start == target
            output.at[rows.of_field(k, stride)][...] = jnp.where(at_label, of_rows.target, d) + total

    pl.when(rows.live)(write)


def _with_terms(one: Any, found: list[tuple[Any, Any]], total: Any) -> Any:
    """``total`` and the terms of those that are the candidate ``one``, added in their order."""
    for other, term in found:
        total = total + jnp.where(other == one, term, along(0.0, jnp.float32))
    return total


def _gradient(case: Case, x: Any, scale: Any, rows: RowFactors) -> Any:
    """Eqs. 4 and 5 at one column per token that is not the label, in base 2, without the candidates' terms."""
    u = jnp.minimum(_statistics.distance(x, rows.max, scale), 0.0)
    e = jnp.exp2(u)
    d = rows.constant * e
    d = d if rows.slope is None else d + rows.slope * (u * e)
    return d if case.options.logit_softcap is None else d * _logprobs.cap_derivative(x)
