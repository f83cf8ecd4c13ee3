"""The oracle: stores the logits, in the statistics' dtype. For tests, debugging and small problems.

Feed it float64 operands (with ``jax.enable_x64``) and every step runs in float64.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import lax

from lce_jax._plans import ALONE, Plan, Surroundings, candidate_notes, unused_notes
from lce_jax._types import Case, Operands, Primals, RowCoefficients, ShardStatistics
from lce_jax.mathematics import _columns, _dlogits, _logprobs, _repeats
from lce_jax.mathematics._largest import Largest
from lce_jax.xla import _plan, _topk

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Float

NAME = "reference"


def supports(case: Case) -> str | None:
    """Why this implementation cannot serve ``case``: never, it needs only the memory."""
    del case
    return None


def plan(case: Case, around: Surroundings = ALONE) -> Plan:
    """Bytes: what XLA holds at once on CPU."""
    stat, item = case.stat_dtype.itemsize, case.dtype.itemsize
    logits, hidden = case.num_tokens * case.vocab_size * stat, case.num_tokens * case.hidden_size
    own = _plan.own_hidden_bytes(case, around)
    widened = (hidden + case.vocab_size * case.hidden_size) * stat if case.dtype != case.stat_dtype else 0
    vectors = 8 * case.num_tokens * stat + case.candidate_bytes
    capped = logits if case.options.logit_softcap is not None else 0  # kept with what is computed from them
    forward = own + logits + max(widened, logits if case.options.entropy else 0) + vectors
    forward += capped if case.options.stats else 0
    backward = logits + widened + vectors + (hidden * stat if own or widened else 0)
    backward += capped if case.options.mean_logit else 0
    in_dweight = logits if case.vocab_size * case.hidden_size * item >= logits else 0  # the forward may use it
    if case.options.top_k:  # the sort's operands and results, which have columns too; there is no backward
        forward, backward = own + widened + 3 * logits, 0
    return Plan(
        implementation=NAME,
        refused={},
        case=case,
        tiles={},
        forward_bytes=forward,
        backward_bytes=max(backward, forward - in_dweight) if backward else 0,
        kept_bytes=case.statistics_bytes if backward else 0,
        logits_bytes=logits,
        notes=(*_cache_notes(case), *unused_notes(case.options), *candidate_notes(case)),
    )


def _cache_notes(case: Case) -> tuple[str, ...]:
    given = case.options.cache_bytes
    return (f"cache_bytes={given} is not used: this implementation always recomputes",) if given else ()


def statistics(operands: Operands, case: Case, keep_cache: bool = False) -> tuple[ShardStatistics, None]:
    """Eq. 1 of the whole shard, from logits held at once."""
    del keep_cache
    x = _logprobs.unscaled_logits(_raw(operands, case), case.options, operands.raw_scale)
    scale = _logprobs.row_scale(case.options, operands.inverse_temperature)
    live = _live(operands, case)
    more = operands.candidates, operands.floor
    return _logprobs.tile_statistics(x, scale, operands.targets, live, case.options, *more)[0], None


def gradients(
    operands: Operands,
    case: Case,
    rows: RowCoefficients,
    cache: None = None,
    *,
    may_round_dhidden: bool = False,
    may_overwrite_cache: bool = True,
    dweight: Array | None = None,
) -> Primals:
    """Eq. 5, every product in the statistics' dtype.

    dweight is rounded to the weight's dtype at the end, or added to the sum ``dweight``.
    """
    del cache, may_round_dhidden, may_overwrite_cache
    # The barrier puts all this after the forward's results, so that XLA keeps nothing that both passes compute.
    hidden, weight, rows = lax.optimization_barrier((operands.hidden, operands.weight, rows))
    operands = operands._replace(hidden=hidden, weight=weight)
    if operands.candidates is not None and rows.candidates is not None:
        operands, rows = _repeats.each_once(operands, rows)
    x = _logprobs.unscaled_logits(_raw(operands, case), case.options, operands.raw_scale)
    scale = _logprobs.row_scale(case.options, operands.inverse_temperature)
    live = _live(operands, case)
    more = operands.candidates, operands.floor
    d = _dlogits.from_logits(x, scale, rows, operands.targets, live, case.options, *more)
    hidden, weight = (x.astype(case.stat_dtype) for x in (operands.hidden, operands.weight))
    weight = _columns.without_padding(weight, live, case.options)
    vocab_by_hidden = weight if case.options.vocab_dim == 0 else weight.T
    product = jnp.matmul(d.T, hidden, precision="highest")
    product = product if case.options.vocab_dim == 0 else product.T
    dhidden = jnp.matmul(d, vocab_by_hidden, precision="highest")
    dbias = None if operands.bias is None else jnp.sum(d, axis=0)
    return Primals(dhidden, product.astype(case.dtype) if dweight is None else dweight + product, dbias)


def largest(operands: Operands, case: Case) -> Largest:
    """The k largest products of each token, from all of them, sorted."""

    def select(x: Array, k: int) -> tuple[Array, Array]:
        columns = lax.broadcasted_iota(jnp.int32, x.shape, 1)
        falling, columns = lax.sort((-x, columns), dimension=1, num_keys=2)
        return -falling[:, :k], columns[:, :k]

    operands = _topk.increasing(operands, case.options)
    return _topk.of_products(_raw(operands._replace(bias=None), case), operands, case, select)


def _raw(operands: Operands, case: Case) -> Float[Array, "T V"]:
    hidden, weight = (x.astype(case.stat_dtype) for x in (operands.hidden, operands.weight))
    raw = jnp.matmul(hidden, weight.T if case.options.vocab_dim == 0 else weight, precision="highest")
    return raw if operands.bias is None else raw + operands.bias[None, :]


def _live(operands: Operands, case: Case) -> Array | None:
    return _columns.live_columns(0, case.vocab_size, operands.num_columns)
