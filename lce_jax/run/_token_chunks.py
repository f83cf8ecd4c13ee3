"""The chunks of tokens of `lce_jax.linear_loss`: how many rows, by memory, which of them, and what they hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from lce_jax.call import _dispatch
from lce_jax.call._describe import Compaction
from lce_jax.mathematics import _logprobs
from lce_jax.types import scalars
from lce_jax.types._types import Call, Plan
from lce_jax.types.scalars import format_bytes

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Int

ON_CPU = 256 << 20  # bytes of a chunk's exponentials by default
ELSEWHERE = 1400 << 20  # on an H200, chunks of 4832 tokens at V 151936
ALL = 1 << 62  # cache_bytes that no chunk exceeds
GRAIN = 128  # rows that a chunk is a multiple of: a row block of the kernels


def chunk_rows(call: Call) -> int:
    """Rows per chunk: of all sizes that fit, the one that costs least.

    The products take the same time in any chunks. What chunks add is that each reads and writes the sum of dweight,
    and that those of unequal size copy their rows. So the cost is the number of chunks, a quarter more if they are
    unequal. What fits some bytes fits more bytes too: more never cost more.

    One chunk has no sum, which takes more than dweight itself: dweight exists after the sum only. So all tokens are
    one chunk where they take no more than a chunk and what the sum has beyond dweight: it is faster and holds less.
    Not on a CPU, nor with a threshold, where chunks keep no exponentials that could take the sum's place, nor of a
    frozen weight, which has no sum.
    """
    tokens, on_cpu, spared = call.num_tokens, call.device.platform == "cpu", 0
    row_bytes = call.columns * (call.stat_dtype if on_cpu else call.dtype).itemsize
    given = ON_CPU if on_cpu else ELSEWHERE
    given = given if call.chunk_bytes is None else call.chunk_bytes
    if not on_cpu and not call.gradient_threshold and call.gradients.weight:
        spared = call.columns * call.hidden_size * (call.stat_dtype.itemsize - call.dtype.itemsize)
    most = max(given // row_bytes // GRAIN, 1) * GRAIN
    if tokens <= most or tokens * row_bytes <= given + spared:
        return tokens
    least = -(-tokens // most)
    equal = (tokens // n for n in range(least, least + least // 4 + 1) if tokens % (n * GRAIN) == 0)
    return next(equal, -(-tokens // (least * GRAIN)) * GRAIN)


def chunk_bytes(given: Any, options: Mapping[str, Any]) -> int | None:
    """`Call.chunk_bytes`, checked."""
    if "cache_bytes" in options:
        raise ValueError(
            f"cache_bytes={options['cache_bytes']!r}: linear_loss keeps nothing for a backward pass; chunk_bytes says "
            "how many bytes one chunk of tokens may take"
        )
    if options.get("vocab_part_size") is not None:
        raise ValueError(
            f"vocab_part_size={options['vocab_part_size']!r}: linear_loss keeps exponentials of the forward's tiles, "
            "which a backward cannot use of a vocabulary in parts. Call linear_logprobs(..., vocab_part_size=)"
        )
    if options.get("candidates") is not None:
        raise ValueError(
            "candidates: a loss_fn gets the label's log-probability alone. For a loss of several ids call "
            "linear_logprobs(..., candidates=), or linear_logits for their logits"
        )
    return None if given is None else scalars.num_bytes("chunk_bytes", given)


def chunk_bytes_of_loss(given: Any, because: str | None) -> int | None:
    """The same of `lce_jax.linear_cross_entropy`; ``because``: why its gradients are computed in the backward."""
    if given is not None and because is not None:
        raise ValueError(
            f"chunk_bytes={given!r} with gradients that are computed in the backward: {because}. It says how many "
            "bytes a chunk of tokens may take in a forward that computes the gradients: leave chunk_bytes out"
        )
    return None if given is None else scalars.num_bytes("chunk_bytes", given)


def refuse_forward_gradients(call: Call, reduction: str | None, options: Mapping[str, Any]) -> str | None:
    """Why a `lce_jax.linear_cross_entropy` computes its gradients in the backward; None if it does not.

    A float16 gradient needs the loss's scale, which the backward alone knows: that of a mean over many tokens would be
    0 before it is scaled, and that of a sum might overflow.
    """
    if reduction == "none":
        return 'with reduction="none" the gradient of each token\'s loss needs its cotangent'
    if options.get("cache_bytes") is not None:
        return f"cache_bytes={options['cache_bytes']} asks for it"
    if jnp.dtype(jnp.float16) in (call.dtype, call.hidden_dtype):
        return "float16 gradients need the loss's scale, which the backward knows"
    if call.gradient_threshold:
        return f"with gradient_threshold={call.gradient_threshold:g} there is little to recompute"
    if call.vocab_part_size is not None:
        return f"with vocab_part_size={call.vocab_part_size} no exponentials are kept that would spare a product"
    if not _logprobs.can_cache_exponentials(call):
        return "with label_smoothing and a logit_softcap no exponentials are kept that would spare a product"
    return None


def describe_chunk(call: Call, size: int, partial_rows: bool) -> Call:
    """The call of a chunk, which keeps all its exponentials, or with a threshold recomputes those of live tiles."""
    cache_bytes = 0 if call.gradient_threshold else ALL
    return dataclasses.replace(call, num_tokens=size, partial_rows=partial_rows, cache_bytes=cache_bytes)


def plan(call: Call) -> Plan:
    """What `explain` says of a call: the plan of one chunk, and what all chunks share."""
    size = chunk_rows(call)
    chunks = -(-call.num_tokens // max(size, 1))
    chunk = describe_chunk(call, size, call.partial_rows or call.num_tokens % max(size, 1) != 0)
    found = _dispatch.explain(chunk)
    whole = _dispatch.explain(dataclasses.replace(call, cache_bytes=0))
    item, columns = call.stat_dtype.itemsize, call.columns * call.hidden_size
    sums = (
        chunks > 1 and call.gradients.weight and call.dtype != call.stat_dtype
    )  # else there is none, or it is dweight
    total = columns * item if sums else 0
    taken = size * call.hidden_size * (call.hidden_dtype.itemsize + item) if chunks > 1 else 0  # hidden and dhidden
    cache = max(found.kept_bytes - chunk.statistics_bytes, 0)
    per_token = (2 + len(call.statistics)) * call.num_tokens * item
    notes = [f"{chunks} chunks of {size:,} tokens, gradients in the forward; kept are the gradients alone"]
    if total:
        notes.append(f"backward: of it {format_bytes(total)} for the sum of dweight over the chunks")
    if cache and not call.gradient_threshold:
        notes.append(f"backward: of it {format_bytes(cache)} for a chunk's exponentials, which its dlogits overwrite")
    return dataclasses.replace(
        whole,
        call=call,
        tiles={"chunk of tokens": size, **found.tiles},
        backward_bytes=max(found.forward_bytes, found.backward_bytes) + total + taken + cache + per_token,
        kept_bytes=0,
        notes=(*whole.notes, *notes),
    )


class TokenChunk(NamedTuple):
    """Which rows a chunk has."""

    first: Any  # in the order of the walk
    source: Int[Array, "t"] | None  # their rows of the call; None: those from ``first`` on
    place: Int[Array, "t"] | None  # where to write them, outside the call for those that do not count
    num_rows: Int[Array, ""] | None  # how many count, from the first on; None: all

    @classmethod
    def starting_at(cls, first: Any, size: int, tokens: int, order: Compaction | None) -> TokenChunk:
        """The ``size`` rows from ``first`` on, of ``tokens`` or of those that count in ``order``."""
        if order is None and tokens % size == 0:
            return cls(first, None, None, None)
        total = jnp.int32(tokens) if order is None else order.num_rows
        num_rows = jnp.clip(total - first, 0, size)
        offset = jnp.arange(size, dtype=jnp.int32)
        # Rows that do not count are copies of the first, which does, so that the loss meets nothing unexpected there.
        place = first + jnp.where(offset < num_rows, offset, 0)
        source = place if order is None else order.source[place]
        return cls(first, source, jnp.where(offset < num_rows, source, tokens + offset), num_rows)

    def take(self, x: Array, size: int) -> Array:
        """The chunk's rows."""
        return lax.dynamic_slice_in_dim(x, self.first, size) if self.source is None else x[self.source]

    def put(self, whole: Array, part: Array) -> Array:
        """``whole`` with the chunk's rows written."""
        if self.place is None:
            return lax.dynamic_update_slice_in_dim(whole, part, self.first, 0)
        return whole.at[self.place].set(part, mode="drop", unique_indices=True)
