"""`linear_logits`, the logits of chosen ids of each token; `masked_logprobs`, log-probabilities over these ids."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Unpack

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax.call import _checks, _describe, _options
from lce_jax.call._options import LogprobOptions
from lce_jax.mesh import _collectives
from lce_jax.run import _runner
from lce_jax.run._logits import LOGITS
from lce_jax.types import shared_checks
from lce_jax.types._types import LogprobOutput

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, ArrayLike, Bool, Float, Int


def masked_logprobs(
    logits: Float[ArrayLike, "*b K"], ids: Int[ArrayLike, "*b K"], labels: Int[ArrayLike, "*b"]
) -> LogprobOutput:
    """Log-probability and entropy of a softmax over a set of ids, such as the ids that top-k or top-p sampling keeps.

    Let z be the logits from `linear_logits`. Then ``lse = ln Σ_{k: ids[k] ≥ 0} exp(z[k])``,
    ``logprobs = z[label] - lse``, and ``entropy = -Σ p ln p`` over the set. All three are differentiable in ``logits``.

    Args:
        logits: ``[..., K]``, the logits that `linear_logits` returns for ``ids``.
        ids: ``[..., K]`` the set of each token. The ids of a token must differ from each other; -1 stands for no id.
            Replace ids outside the vocabulary by -1.
        labels: ``[...]`` integer vocabulary ids; they stay global ids if the vocabulary is split.

    Returns:
        A `LogprobOutput` with ``logprobs``, ``entropy`` and ``lse``, each ``[...]`` in the dtype of the logits. If the
        label is not in the set, the logprob is -inf, because sampling could not have drawn it. If the label is negative
        (in a prompt, say), the logprob is 0, as in `linear_logprobs`. In both cases the logprob has no gradient. If the
        set is empty, all three are 0.

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit; the message has the values.

    Example:
        >>> import jax.numpy as jnp
        >>> from lce_jax import masked_logprobs
        >>> ids = jnp.array([[3, 5, -1], [3, 5, 8]])
        >>> out = masked_logprobs(jnp.zeros((2, 3)), ids, jnp.array([5, 6]))
        >>> [round(float(x), 3) for x in out.logprobs]      # -ln 2, and a label outside the set
        [-0.693, -inf]
        >>> [round(float(x), 3) for x in out.entropy]       # ln 2, ln 3
        [0.693, 1.099]
    """
    _checks.check_array("logits", logits)
    _checks.check_labels(ids, "ids")
    shared_checks.count_candidates("ids", ids.shape)
    _checks.check_labels(labels)
    shared_checks.check_candidate_shape("ids", ids.shape, labels.shape, "labels")
    if tuple(logits.shape) != tuple(ids.shape) or not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ValueError(
            f"logits {tuple(logits.shape)} of {logits.dtype} must be floating point in the shape of ids "
            f"{tuple(ids.shape)}"
        )
    return _masked(_describe.put_on_device(logits), _describe.cast_labels(ids, "ids"), _describe.cast_labels(labels))


@functools.partial(jax.jit, inline=True)
def _masked(logits: Array, ids: Array, labels: Array) -> LogprobOutput:
    """Computes `masked_logprobs`. The function is jitted, so that no Python scalars are transferred."""
    # Without the barrier, a compiler may fuse the logits' computation into u and round it differently, so that u > 0.
    logits = lax.optimization_barrier(logits)
    in_set = ids >= 0
    has_ids = jnp.any(in_set, axis=-1)
    is_label = in_set & (ids == labels[..., None])
    highest = lax.stop_gradient(jnp.max(jnp.where(in_set, logits, -jnp.inf), axis=-1, keepdims=True))
    highest = jnp.where(highest == -jnp.inf, 0.0, highest)
    u = jnp.where(in_set, logits - highest, 0.0)
    e = jnp.where(in_set, jnp.exp(u), 0.0)
    total = jnp.where(has_ids, jnp.sum(e, axis=-1), 1.0)
    at_label = jnp.sum(jnp.where(is_label, u, 0.0), axis=-1)
    no_draw = jnp.where((labels < 0) | ~has_ids, 0.0, -jnp.inf).astype(logits.dtype)
    logprobs = jnp.where(jnp.any(is_label, axis=-1), at_label - jnp.log(total), no_draw)
    entropy = jnp.log(total) - jnp.sum(e * jnp.where(e > 0, u, 0.0), axis=-1) / total
    return LogprobOutput(logprobs, entropy, jnp.where(has_ids, highest[..., 0], 0.0) + jnp.log(total))


def linear_logits(
    hidden: Float[ArrayLike, "*b H"],
    weight: Float[ArrayLike, "V H"],
    ids: Int[ArrayLike, "*b K"],
    *,
    where: Bool[ArrayLike, "*b"] | None = None,
    **options: Unpack[LogprobOptions],
) -> Float[Array, "*b K"]:
    """The logits at chosen ids, without a pass over the vocabulary.

    ``z[k] = cap(logit_scale · (hidden · weight[ids[k]] + bias[ids[k]])) / temperature`` in float32, from T·K dot
    products. The logits have first derivatives with respect to ``hidden``, ``weight`` and ``bias``. `masked_logprobs`
    computes a softmax over them. For log-probabilities under the full vocabulary, use
    ``linear_logprobs(..., candidates=ids)``.

    Args:
        hidden, weight: as in `linear_logprobs`.
        ids: ``[..., K]`` integer vocabulary ids per token, with K from 1 to 512; they stay global ids if the vocabulary
            is split. -1 stands for no id.
        where: ``[...]`` bool, the rows that count. The others are exactly 0 in outputs and gradients, whatever they
            hold. None: every row counts.
        **options: those of `linear_logprobs` but ``entropy``, ``stats``, ``cache_bytes``, ``candidates``,
            ``gradient_threshold``, ``vocab_part_size``, ``logit_floor`` and ``lora``. The ``implementation`` is always
            "xla", because this function has no kernels.

    Returns:
        ``[..., K]`` in float32 (float64 for a float64 weight). Where the id is -1 or outside the vocabulary, and where
        ``where`` is False, the logit is 0 and has no gradient.

    Raises:
        UnsupportedError: a requested implementation cannot serve the call; the message says why.
        ValueError, TypeError: shapes, dtypes or options do not fit; the message has the values.
        NotImplementedError: for a second derivative, and for forward mode (``jax.jvp``).

    Memory:
        The call takes O(T·K) beyond the operands and the gradients, and a few chunks of gathered weight rows, 32 MiB
        each.

    Numerics:
        Every sum is float32, and each gradient is rounded once, to its operand's dtype. There is no matrix product, so
        all results are exact to float32 rounding, whatever ``precision`` is. Two runs are bitwise equal, because the
        gradients of an id that occurs many times are added in a fixed order.

    Sharding:
        Under ``jit`` on a mesh, the call is partitioned by the operands' types (Explicit axes) or by XLA (Auto axes,
        which TPUs refuse). Inside ``shard_map``, give ``axis_name``. The only collective of the forward sums one value
        per id over the shards, or two if the call is differentiated.

    Example:
        >>> import jax.numpy as jnp
        >>> from lce_jax import linear_logits
        >>> hidden, weight = jnp.ones((2, 4)), jnp.arange(10.0)[:, None] * jnp.ones(4)
        >>> linear_logits(hidden, weight, jnp.array([[3, 0], [7, -1]])).tolist()
        [[12.0, 0.0], [28.0, 0.0]]
    """
    _options.check_names(linear_logits, options)
    arguments = _describe.describe_call(_options.parse_arguments_with_ids(options, hidden, weight, ids, where))
    call, primals, rows, agree = _describe.bind_call(arguments)
    logits = _runner.run(LOGITS, call, primals, rows)
    return logits if agree is None else _collectives.set_nan_where_different(agree, logits)
