"""Functions that `lce_torch_bridge` compiles for one shard of a vocabulary.

The bridge merges the shards over a process group. hidden is flat, [T, H], and per-token arrays are [T]. Except for the
columns of the head, all arguments are equal on all shards. The bridge has validated them. No function here is
differentiable. Two arguments say which columns a shard has:

    vocab_start   the global id of the shard's first column
    vocab_size    the size of the full vocabulary, or None if no shard has padding
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp

from lce_jax import mosaic
from lce_jax.call import _describe, _dispatch, _options
from lce_jax.call._describe import Rows
from lce_jax.call._options import Arguments
from lce_jax.mathematics import _statistics
from lce_jax.mathematics._kl import KLStatistics, MixtureSums, Pair
from lce_jax.mathematics._statistics import pack, unpack
from lce_jax.mesh._collectives import compute_tags, difference_terms
from lce_jax.run import _shard
from lce_jax.run._kl import KLArguments, KLPart
from lce_jax.types import scalars
from lce_jax.types._types import Call, LogprobOutput, Primals, RequestedGradients, Results, ShardStatistics

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Bool, Float, Int


class LogprobPart(NamedTuple):
    """One shard's part of `lce_jax.linear_logprobs`."""

    call: Call
    primals: Primals
    rows: Rows
    start: Int[Array, ""]

    @classmethod
    def of(
        cls, call: Call, primals: Primals, labels: Any, temperature: Any, candidates: Any, floor: Any,
        vocab_start: int, num_rows: Any,
    ) -> LogprobPart:  # fmt: skip
        """Makes a part from a ``call`` that has only options so far. The first ``num_rows`` rows are unmasked."""
        hidden, weight, bias, adapter = primals
        rank, fields = call.rank, {}
        if rank:
            fields = {"gradients": RequestedGradients(weight=False)}
        requested = _options.check_option("implementation", {"implementation": call.requested})
        call = call.replace(rank=0, has_bias=bias is not None, requested=requested, vocab_size=0)
        arrays = hidden[:, : weight.shape[1]], weight, labels, None, 1.0 if temperature is None else temperature
        others = bias, candidates, floor, None, None, None
        arguments = _describe.describe_call(Arguments(call, *arrays, None, None, *others))
        call = _choose_implementation(
            arguments._replace(call=arguments.call.replace(partial_rows=True, rank=rank, **fields))
        )
        primals, rows = _describe.make_operands(call, arguments._replace(hidden=hidden))
        primals = primals._replace(adapter=adapter)
        return cls(call, _shard.cast_hidden(primals), rows._replace(num_rows=num_rows), jnp.int32(vocab_start))

    def statistics(self, keep_cache: bool) -> tuple[ShardStatistics, Any]:
        """Returns the statistics of the shard, and the cache."""
        return _shard.Part.of(*self).statistics(keep_cache)[:2]

    def gradients(self, merged: ShardStatistics, cotangent: Results, cache: Any, **options: Any) -> Primals:
        """Computes `_shard.Part.gradients`. Does not overwrite the cache, because autograd may read it again."""
        part = _shard.Part.of(*self)
        if self.call.gradient_threshold:
            cache, _ = part.select(merged, cache)
        return part.gradients(merged, cotangent, cache, may_overwrite_cache=False, **options)


def results(
    parts: ShardStatistics,
    labels: Int[Array, "T"],
    where: Bool[Array, "T"],
    temperature: Float[Array, "T"] | None,
    **options: Any,
) -> tuple[ShardStatistics, Results]:
    """Merges the statistics of all shards, stacked as [N, T], and computes the results.

    ``options`` are the fields of `Call` that define the logits, and the size of the full vocabulary. XLA merges the
    shards. On a device with kernels, a kernel then computes the results, so a single shard has the same bits as
    `lce_jax.linear_logprobs`.
    """
    device = _dispatch.current_device(parts.max)
    implementation = mosaic.NAME if mosaic.serves(device) else "xla"
    call = Call(has_floor=True, device=device, implementation=implementation, **options)
    part = _shard.Part.of(call, Primals(None, None), Rows(labels, where, temperature), 0)
    merged = _statistics.merge(parts, part.row_scale)
    return merged, part.finish(merged, where, None)


def kl_part(
    options: Mapping[str, Any], hidden: Pair[Any], weight: Pair[Any], vocab_start: int, where: Any, direction: Any
) -> KLPart:
    """Makes one shard's part of `lce_jax.linear_kl`. Each `Pair` is the student's array and the teacher's array."""
    arguments = KLArguments.of(Pair(*zip(hidden, weight, strict=True)), where, direction, options)
    heads = arguments.describe()
    calls = Pair(*map(_choose_implementation, heads))
    (student, rows), (teacher, teacher_rows) = map(_describe.make_operands, calls, heads)
    call = arguments.combine_calls(*calls)
    if arguments.beta is not None:
        rows = rows._replace(
            weights=_describe.make_mixture_weights(arguments.beta, rows.labels.shape, call.result_dtype, rows.labels)
        )
    return KLPart.of(call, Pair(student, teacher), Pair(rows, teacher_rows), jnp.int32(vocab_start))


def _choose_implementation(arguments: Arguments) -> Call:
    """Chooses the implementation.

    Only the bridge knows the number of shards, so a ``vocab_size`` is assumed to leave padding.
    """
    return _describe.choose_implementation(arguments.call, scalars.INT32_MAX).replace(
        padded=arguments.call.caller_vocab_size is not None
    )


__all__ = [
    "Call",
    "KLPart",
    "KLStatistics",
    "LogprobOutput",
    "LogprobPart",
    "MixtureSums",
    "Pair",
    "Primals",
    "Results",
    "compute_tags",
    "difference_terms",
    "kl_part",
    "pack",
    "results",
    "unpack",
]
