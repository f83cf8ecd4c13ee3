"""One shard's statistics and gradients, without collectives, for callers who reduce over their own process group.

    stats, cache = local.statistics(hidden, weight, labels, vocab_start=start)
    merged = local.merge(<the fields of all shards, stacked to [N, T]>, temperature=...)
    out = local.finish(merged, labels, vocab_size=V, temperature=...)
    dhidden, dweight = local.gradients(hidden, weight, labels, merged, cotangent, vocab_start=start, cache=cache)

`KLShard` does the same for `lce_jax.linear_kl`. `tags` tell whether all shards have the same tokens.

``dhidden`` is this shard's part, to be summed over the shards; ``dweight`` is whole. All are plain functions of
arrays: jit them. They are not differentiable themselves.
"""

from lce_jax._types import ShardStatistics
from lce_jax.local._dropped_mass import dropped_mass
from lce_jax.local._kl import KLShard
from lce_jax.local._results import finish, mean_logit, merge
from lce_jax.local._shard import fields, gradients, pack, statistics, unpack
from lce_jax.mathematics._kl import KLStatistics
from lce_jax.mathematics._kl_mixture import MixtureSums
from lce_jax.mesh._collectives import differences, tags

__all__ = [
    "KLShard",
    "KLStatistics",
    "MixtureSums",
    "ShardStatistics",
    "differences",
    "dropped_mass",
    "fields",
    "finish",
    "gradients",
    "mean_logit",
    "merge",
    "pack",
    "statistics",
    "tags",
    "unpack",
]
