"""`lce_jax.local.dropped_mass`: what one shard leaves out of the gradients."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Unpack

import jax
import jax.numpy as jnp

from lce_jax import _call, _options, _shard
from lce_jax._call import Rows, Spec
from lce_jax._options import LogprobOptions
from lce_jax._types import ShardStatistics

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Bool, Float, Int


def dropped_mass(
    hidden: Float[Array, "T H"],
    weight: Float[Array, "V H"],
    labels: Int[Array, "T"],
    merged: ShardStatistics,
    *,
    where: Bool[Array, "T"] | None = None,
    num_rows: int | Int[Array, ""] | None = None,
    cache: object = None,
    **options: Unpack[LogprobOptions],
) -> Float[Array, "T"]:
    """The probability in the tiles of this shard that ``gradient_threshold`` leaves out of the gradients.

    Args:
        hidden: ``[T, H]``, the same on every shard.
        weight: this shard's ``[V, H]`` (or ``[H, V]``).
        labels: ``[T]`` global vocabulary ids, the same on every shard. Outside ``[0, vocab_size)`` the logprob is 0.
        merged: the statistics of the whole vocabulary.
        where: ``[T]`` bool, the rows that count. The others are 0 in what `finish` and `gradients` return, whatever
            they hold. None: all.
        num_rows: how many rows count, from the first on; may be traced. Cheaper than ``where``, which moves rows. The
            padding after them may hold anything: its statistics are undefined, its dhidden is zero. None: all.
        cache: what `statistics` returned with its statistics.
        **options: ``temperature``, ``logit_softcap``, ``logit_scale``, ``entropy``, ``stats``, ``vocab_size``,
            ``weight_layout``, ``cache_bytes``, ``precision``, ``implementation``, ``bias``, ``candidates``,
            ``gradient_threshold``, ``vocab_part_size`` and ``logit_floor``, as given to `statistics`.

    Returns:
        ``[T]``, to be added up over the shards; 0 where the implementation leaves nothing out.

    Raises:
        UnsupportedError: an implementation asked for by name cannot serve the call; the message says why.
        ValueError, TypeError: shapes, dtypes or options that do not fit, with the offending values. Also options
            without ``stats=True`` or a ``gradient_threshold``: `statistics` has kept nothing for it then.

    Example:
        >>> import jax.numpy as jnp
        >>> from lce_jax import local
        >>> call = (jnp.ones((2, 4)), jnp.zeros((100, 4)), jnp.array([7, 8]))
        >>> options = {"stats": True, "gradient_threshold": 2.0**-12}
        >>> stats, cache = local.statistics(*call, keep_cache=True, **options)
        >>> [float(x) for x in local.dropped_mass(*call, stats, cache=cache, **options)]
        [0.0, 0.0]
    """
    _options.check_names(dropped_mass, options, "sharded_linear_logprobs")
    spec, _, rows = _call.bind_shard(hidden, weight, labels, where, num_rows, options, False)
    found = spec.case.options
    if not found.reports_dropped_mass:
        raise ValueError(
            f"stats={found.stats}, gradient_threshold={found.gradient_threshold:g}: dropped_mass needs stats=True and "
            "a threshold above 0, here and in local.statistics"
        )
    return jnp.zeros_like(merged.max) if spec.case.num_tokens == 0 else _of_shard(spec, rows, merged, cache)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _of_shard(spec: Spec, rows: Rows, merged: ShardStatistics, cache: Any) -> Array:
    _, dropped = _shard.selected(spec, rows, merged, cache)
    if dropped is None:
        return jnp.zeros_like(merged.max)
    return dropped if rows.live is None else jnp.where(rows.live, dropped, 0.0)
