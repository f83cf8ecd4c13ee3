"""A vocabulary split over any number of shards, which one device computes in turn, without collectives."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from lce_jax import LogprobOutput
from lce_jax.call import _describe, _options
from lce_jax.run import _shard
from lce_jax.types import scalars


def linear_logprobs(
    shards: int, hidden: Any, weight: Any, labels: Any, *, where: Any = None, vocab_size: int, **options: Any
) -> LogprobOutput:
    """Returns what each shard returns of `lce_jax.linear_logprobs`, computed by the kernels."""
    options = {**options, "vocab_size": vocab_size, "implementation": "mosaic_gpu"}
    columns = weight.shape[0] // shards
    shape = jax.ShapeDtypeStruct(labels.shape, labels.dtype)  # labels with values would be compared with one shard
    arguments = _options.parse_arguments(options, hidden, weight[:columns], shape, where)
    arguments = _describe.describe_call(arguments)._replace(labels=labels)
    spec = _describe.choose_implementation(arguments.call, scalars.INT32_MAX).replace(
        padded=vocab_size < weight.shape[0]
    )
    primals, rows = _describe.make_operands(spec, arguments)

    def part_at(primals: Any, rows: Any, start: Any) -> _shard.Part:
        return _shard.Part.of(spec, _shard.cast_hidden(primals), rows, start)

    @jax.jit
    def part(primals: Any, rows: Any, start: Any) -> Any:
        sent = []

        def keep(parts: Any) -> Any:
            sent.append(parts)
            return jax.tree.map(lambda x: jnp.stack([x] * shards), parts)

        part_at(primals, rows, start).statistics(False, keep)
        return sent[0]

    @jax.jit
    def finished(primals: Any, rows: Any, stacked: Any) -> LogprobOutput:
        first = part_at(primals, rows, jnp.int32(0))
        stats, _, _ = first.statistics(False, lambda _: stacked)
        return first.finish(stats, rows.where, None).outputs

    def take_shard(i: int) -> Any:
        return primals._replace(weight=weight[i * columns :][:columns])

    sent = [part(take_shard(i), rows, jnp.int32(i * columns)) for i in range(shards)]
    return finished(primals, rows, jax.tree.map(lambda *x: jnp.stack(x), *sent))
