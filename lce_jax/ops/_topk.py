"""The most likely tokens of each distribution, with their log-probabilities, without storing the logits."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Unpack

import jax
import jax.numpy as jnp

from lce_jax.call import _describe, _options
from lce_jax.call._describe import Rows
from lce_jax.call._options import LogprobOptions
from lce_jax.mathematics._statistics import expand_like
from lce_jax.mesh import _collectives
from lce_jax.run import _runner, _topk
from lce_jax.run._runner import ArraySharding, Program, run_program
from lce_jax.types import _jax
from lce_jax.types._types import Call, Primals, TopK

if TYPE_CHECKING:
    from lce_jax.types._shapes import ArrayLike, Bool, Float

_NO_DERIVATIVE = (
    "linear_topk is not differentiable. Call it with jax.lax.stop_gradient(hidden) and jax.lax.stop_gradient(weight), "
    "and for log-probabilities with a gradient call linear_logprobs(..., candidates=topk.ids)"
)


def linear_topk(
    hidden: Float[ArrayLike, "*b H"],
    weight: Float[ArrayLike, "V H"],
    k: int,
    *,
    where: Bool[ArrayLike, "*b"] | None = None,
    **options: Unpack[LogprobOptions],
) -> TopK:
    """The k most likely tokens and their log-probabilities: the teacher's side of a distillation.

    The k largest of ``logprobs[v] = z[v] - ln Σ_u exp(z[u])``, exactly, the largest first, with ``z = cap(logit_scale ·
    (hidden · weight + bias)) / temperature`` in float32. Of equal ones the smaller id comes first.

    Not differentiable: a derivative that is used raises. Give the ids to ``linear_logprobs(..., candidates=ids)`` for
    log-probabilities with a gradient, also those of a student.

    Args:
        hidden, weight: as in `linear_logprobs`.
        k: how many, from 1 to 512 and at most the vocabulary; a Python integer.
        where: ``[...]`` bool, the rows that count. The others have ids -1 and zeros, whatever they hold, and cost no
            work. None: every row counts.
        **options: those of `linear_logprobs` but ``entropy``, ``stats``, ``cache_bytes``, ``candidates``,
            ``gradient_threshold``, ``vocab_part_size``, ``logit_floor`` and ``lora``. None has a gradient, and the
            temperature does not change the order; a wrong one of a traced array gives ids -1 and NaN in its row. The
            ``implementation`` is "xla": the kernels do not serve it, because XLA's own product takes the same time.

    Returns:
        A `TopK`: ids and logprobs ``[..., k]``, lse ``[...]``.

    Raises:
        UnsupportedError: an implementation asked for by name cannot serve the call; the message says why.
        ValueError, TypeError: shapes, dtypes or options that do not fit, with the offending values: also a k that is 0,
            more than the vocabulary, no integer or traced.
        NotImplementedError: on a derivative that is used.

    Memory:
        The logits of one chunk of tokens, 160 MiB or 256 tokens if these are more (on a CPU 32 MiB or 128 tokens),
        O(T·k), and with ``where`` a copy of ``hidden``. On a CPU, XLA copies a float16 weight in float32, and a
        bfloat16 one for a call with one token.

    Numerics:
        The order is that of the float32 products: cap and temperature cannot change it, also where they round two
        logits to one. With a scale of 0 all are equal. ``logprobs <= 0``, and their exponentials sum to at most 1 but
        for rounding. lse agrees with that of `linear_logprobs` to rounding, not in its bits.

    Sharding:
        As `linear_logprobs`: under ``jit`` on a mesh it is partitioned by the operands' types (Explicit axes) or by XLA
        (Auto axes, not of TPUs); inside ``shard_map`` give ``axis_name``. One all-gather of 2k + 1 numbers per token,
        with a softcap 3k + 1, merges the shards' own k largest.

    Example:
        >>> import jax.numpy as jnp
        >>> from lce_jax import linear_logprobs, linear_topk
        >>> hidden, weight = jnp.ones((2, 4)), jnp.array([0.0, 2.0, 1.0, 2.0])[:, None] * jnp.ones(4)
        >>> top = linear_topk(hidden, weight, 3)
        >>> top.ids.tolist(), round(float(top.logprobs[0, 0]), 3)      # of equal ones the smaller id first
        ([[1, 3, 2], [1, 3, 2]], -0.702)
        >>> out = linear_logprobs(hidden, weight, jnp.array([0, 0]), candidates=top.ids)
        >>> bool(jnp.allclose(out.candidate_logprobs, top.logprobs))
        True
    """
    _options.check_names(linear_topk, options)
    arguments = _describe.describe_call(_options.parse_arguments(options, hidden, weight, None, where, top_k=k))
    call, primals, rows, agree = _describe.bind_call(arguments)
    out = _program(call, primals, rows)
    if agree is None:
        return out
    ids = jnp.where(expand_like(agree, out.ids), out.ids, -1)
    return TopK(ids, *_collectives.set_nan_where_different(agree, (out.logprobs, out.lse)))


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _program(call: Call, primals: Primals, rows: Rows) -> TopK:
    """The results of global arrays or of one device's, outside ``jit`` compiled once."""
    shape = rows.labels.shape
    if call.num_tokens == 0:
        k, dtype = call.top_k, call.stat_dtype
        none = TopK(jnp.zeros((*shape, k), jnp.int32), jnp.zeros((*shape, k), dtype), jnp.zeros(shape, dtype))
        return _jax.vary_like(none, (primals.hidden, rows.labels))
    operands = _runner.head_sharding(call.vocab_dim), ArraySharding.TOKENS
    run = functools.partial(run_program, call, Program(_topk.forward, operands, ArraySharding.RESULTS, joins=True))
    return _jax.not_differentiable(run, _NO_DERIVATIVE)(primals, rows)
