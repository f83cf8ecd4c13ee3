"""`linear_topk`: the k most likely tokens of each distribution, and their log-probabilities."""

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
from lce_jax.run import _topk
from lce_jax.run._partitioning import ArraySharding, Program, head_sharding
from lce_jax.run._runner import run_program
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

    Returns exactly the k largest of ``logprobs[v] = z[v] - ln Σ_u exp(z[u])``, the largest first, with
    ``z = cap(logit_scale · (hidden · weight + bias)) / temperature`` in float32. Among equal values, the smaller id
    comes first.

    The results are not differentiable: a derivative that is used raises an error. For log-probabilities with a
    gradient, such as those of a student, pass the ids to ``linear_logprobs(..., candidates=ids)``.

    Args:
        hidden, weight: as in `linear_logprobs`.
        k: the number of tokens to return, a Python integer from 1 to 512, and at most the vocabulary size.
        where: ``[...]`` bool, the rows that count. The others return ids of -1 and zeros, whatever they hold, and cost
            no work. None: every row counts.
        **options: those of `linear_logprobs` but ``entropy``, ``stats``, ``cache_bytes``, ``candidates``,
            ``gradient_threshold``, ``vocab_part_size``, ``logit_floor`` and ``lora``. No option has a gradient. The
            temperature does not change the order; an invalid value in a traced temperature makes its row return ids of
            -1, and NaN in the other fields. The ``implementation`` is always "xla"; kernels would not be faster than
            XLA's matrix product.

    Returns:
        A `TopK` with ``ids`` and ``logprobs`` ``[..., k]``, and ``lse`` ``[...]``.

    Raises:
        UnsupportedError: a requested implementation cannot serve the call; the message says why.
        ValueError, TypeError: shapes, dtypes or options do not fit; the message has the values. Also if k is 0, larger
            than the vocabulary, traced, or not an integer.
        NotImplementedError: a derivative is used.

    Memory:
        The call takes the logits of one chunk of tokens, at most 160 MiB (32 MiB on a CPU) unless 256 tokens (128 on a
        CPU) need more. It also takes O(T·k), and with ``where`` a copy of ``hidden``. On a CPU, XLA makes a float32
        copy of a float16 weight, and of a bfloat16 weight if the call has one token.

    Numerics:
        Tokens are ordered by their float32 products. Softcap and temperature cannot change the order, even where they
        round two logits to the same value. With a scale of 0, all tokens are tied. ``logprobs <= 0``, and their
        exponentials sum to at most 1, up to rounding. lse agrees with the lse of `linear_logprobs` up to rounding, but
        not bit for bit.

    Sharding:
        Under ``jit`` on a mesh, the call is partitioned by the operands' types (Explicit axes) or by XLA (Auto axes,
        which TPUs refuse). Inside ``shard_map``, give ``axis_name``. One all-gather of 2k + 1 values per token, or 3k +
        1 with a softcap, merges the shards' k largest.

    Example:
        >>> import jax.numpy as jnp
        >>> from lce_jax import linear_logprobs, linear_topk
        >>> hidden, weight = jnp.ones((2, 4)), jnp.array([0.0, 2.0, 1.0, 2.0])[:, None] * jnp.ones(4)
        >>> top = linear_topk(hidden, weight, 3)
        >>> top.ids.tolist(), round(float(top.logprobs[0, 0]), 3)      # among equal values, the smaller id first
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
    """Computes the results of global arrays, or of one device's arrays. It is jitted, so that it is compiled once."""
    shape = rows.labels.shape
    if call.num_tokens == 0:
        k, dtype = call.top_k, call.stat_dtype
        none = TopK(jnp.zeros((*shape, k), jnp.int32), jnp.zeros((*shape, k), dtype), jnp.zeros(shape, dtype))
        return _jax.vary_like(none, (primals.hidden, rows.labels))
    operands = head_sharding(call.vocab_dim), ArraySharding.TOKENS
    run = functools.partial(run_program, call, Program(_topk.forward, operands, ArraySharding.RESULTS, joins=True))
    return _jax.not_differentiable(run, _NO_DERIVATIVE)(primals, rows)
