"""The chunks of tokens of `lce_jax.linear_loss`: the size of a chunk, its rows, and its memory."""

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

CHUNK_BYTES_ON_CPU = 256 << 20  # the default of chunk_bytes on a CPU
CHUNK_BYTES = 1400 << 20  # the default elsewhere; at V = 151936 on an H200, a chunk then has 4832 tokens
UNLIMITED = 1 << 62  # a value of cache_bytes that no chunk exceeds
GRAIN = 128  # a chunk's number of rows is a multiple of this, the rows of a kernel's block


def choose_chunk_rows(call: Call) -> int:
    """Returns the number of rows per chunk: the fastest that fits the budget.

    The products take the same time with any chunk size. But each chunk reads and writes the sum of dweight, and if the
    last chunk is smaller, all chunks copy their rows. So the cost is the number of chunks; plus a quarter if the last
    one is smaller.

    A single chunk needs no float32 sum for dweight. So a single chunk of all tokens may exceed the budget by the
    memory that the sum would take beyond dweight: this is faster and takes less memory. The rule does not apply on a
    CPU, nor with a ``gradient_threshold`` (no exponentials are cached) or a frozen weight (there is no sum).
    """
    tokens, on_cpu, saved_bytes = call.num_tokens, call.device.platform == "cpu", 0
    row_bytes = call.columns * (call.stat_dtype if on_cpu else call.dtype).itemsize
    budget = CHUNK_BYTES_ON_CPU if on_cpu else CHUNK_BYTES
    budget = budget if call.chunk_bytes is None else call.chunk_bytes
    if not on_cpu and not call.gradient_threshold and call.gradients.weight:
        saved_bytes = call.columns * call.hidden_size * (call.stat_dtype.itemsize - call.dtype.itemsize)
    largest = max(budget // row_bytes // GRAIN, 1) * GRAIN
    if tokens <= largest or tokens * row_bytes <= budget + saved_bytes:
        return tokens
    fewest = -(-tokens // largest)
    equal = (tokens // n for n in range(fewest, fewest + fewest // 4 + 1) if tokens % (n * GRAIN) == 0)
    return next(equal, -(-tokens // (fewest * GRAIN)) * GRAIN)


def check_chunk_bytes(chunk_bytes: Any, options: Mapping[str, Any]) -> int | None:
    """Validates ``chunk_bytes`` of `lce_jax.linear_loss`, and refuses options that `linear_loss` does not have."""
    if "cache_bytes" in options:
        raise ValueError(
            f"cache_bytes={options['cache_bytes']!r}: linear_loss keeps nothing for a backward pass; pass chunk_bytes, "
            "the bytes that one chunk of tokens may take"
        )
    if options.get("vocab_part_size") is not None:
        raise ValueError(
            f"vocab_part_size={options['vocab_part_size']!r}: linear_loss caches exponentials of the forward's "
            "tiles, which the backward cannot use with vocabulary parts. Call linear_logprobs(..., vocab_part_size=)"
        )
    if options.get("candidates") is not None:
        raise ValueError(
            "candidates: loss_fn gets only the label's log-probability. For a loss of several ids call "
            "linear_logprobs(..., candidates=), or linear_logits for their logits"
        )
    return None if chunk_bytes is None else scalars.num_bytes("chunk_bytes", chunk_bytes)


def check_loss_chunk_bytes(chunk_bytes: Any, because: str | None) -> int | None:
    """Returns the validated ``chunk_bytes`` of `lce_jax.linear_cross_entropy`.

    ``because`` is the result of `refuse_forward_gradients`.
    """
    if chunk_bytes is not None and because is not None:
        raise ValueError(
            f"chunk_bytes={chunk_bytes!r}, but the backward computes the gradients: {because}. chunk_bytes limits the "
            "chunks of a forward that computes the gradients: leave it out"
        )
    return None if chunk_bytes is None else scalars.num_bytes("chunk_bytes", chunk_bytes)


def refuse_forward_gradients(call: Call, reduction: str | None, options: Mapping[str, Any]) -> str | None:
    """Returns why the backward of `linear_cross_entropy` computes the gradients; None if the forward computes them.

    A float16 gradient needs the loss scale, which only the backward knows. Unscaled, the gradient of a mean over many
    tokens would be 0, and the gradient of a sum might overflow.
    """
    if reduction == "none":
        return 'with reduction="none" the gradient of each token\'s loss needs its cotangent'
    if options.get("cache_bytes") is not None:
        return f"cache_bytes={options['cache_bytes']} requests it"
    if jnp.dtype(jnp.float16) in (call.dtype, call.hidden_dtype):
        return "float16 gradients need the loss's scale, which the backward knows"
    if call.gradient_threshold:
        return f"with gradient_threshold={call.gradient_threshold:g} there is little to recompute"
    if call.vocab_part_size is not None:
        return f"with vocab_part_size={call.vocab_part_size} no exponentials are cached that would save a product"
    if not _logprobs.can_cache_exponentials(call):
        return "with label_smoothing and a logit_softcap no exponentials are cached that would save a product"
    return None


def describe_chunk(call: Call, size: int, partial_rows: bool) -> Call:
    """Returns the call of one chunk. It caches all exponentials; with a ``gradient_threshold``, it caches none."""
    cache_bytes = 0 if call.gradient_threshold else UNLIMITED
    return dataclasses.replace(call, num_tokens=size, partial_rows=partial_rows, cache_bytes=cache_bytes)


def plan(call: Call) -> Plan:
    """Returns the plan of a call: the memory of one chunk and of what all chunks share."""
    size = choose_chunk_rows(call)
    chunks = -(-call.num_tokens // max(size, 1))
    chunk = describe_chunk(call, size, call.partial_rows or call.num_tokens % max(size, 1) != 0)
    chunk_plan = _dispatch.explain(chunk)
    call_plan = _dispatch.explain(dataclasses.replace(call, cache_bytes=0))
    item, columns = call.stat_dtype.itemsize, call.columns * call.hidden_size
    # Without `has_sum`, there is one chunk or no dweight, or dweight itself is the sum.
    has_sum = chunks > 1 and call.gradients.weight and call.dtype != call.stat_dtype
    total = columns * item if has_sum else 0
    copies = size * call.hidden_size * (call.hidden_dtype.itemsize + item) if chunks > 1 else 0  # hidden and dhidden
    cache = max(chunk_plan.kept_bytes - chunk.statistics_bytes, 0)
    per_token = (2 + len(call.statistics)) * call.num_tokens * item
    notes = [f"{chunks} chunks of {size:,} tokens, gradients in the forward; only the gradients are kept"]
    if total:
        notes.append(f"backward: includes {format_bytes(total)} for the sum of dweight over the chunks")
    if cache and not call.gradient_threshold:
        notes.append(
            f"backward: includes {format_bytes(cache)} for a chunk's exponentials, which its dlogits overwrite"
        )
    return dataclasses.replace(
        call_plan,
        call=call,
        tiles={"chunk of tokens": size, **chunk_plan.tiles},
        backward_bytes=max(chunk_plan.forward_bytes, chunk_plan.backward_bytes) + total + copies + cache + per_token,
        kept_bytes=0,
        notes=(*call_plan.notes, *notes),
    )


class TokenChunk(NamedTuple):
    """The rows of one chunk of tokens."""

    first: Any  # the chunk's first row, in the order in which chunks take rows
    source: Int[Array, "t"] | None  # which rows of the call the chunk reads; None: the rows from ``first`` on
    target: Int[Array, "t"] | None  # which rows of the call the chunk writes; out of range for masked rows
    num_rows: Int[Array, ""] | None  # how many of the chunk's rows, the first ones, are unmasked; None: all

    @classmethod
    def make(cls, first: Any, size: int, tokens: int, order: Compaction | None) -> TokenChunk:
        """Makes the chunk of ``size`` rows from ``first`` on, counted among ``tokens`` or ``order``'s unmasked rows."""
        if order is None and tokens % size == 0:
            return cls(first, None, None, None)
        total = jnp.int32(tokens) if order is None else order.num_rows
        num_rows = jnp.clip(total - first, 0, size)
        offset = jnp.arange(size, dtype=jnp.int32)
        # Rows after the last unmasked row repeat the chunk's first row, so that the loss gets no unexpected values.
        position = first + jnp.where(offset < num_rows, offset, 0)
        source = position if order is None else order.source[position]
        return cls(first, source, jnp.where(offset < num_rows, source, tokens + offset), num_rows)

    def take(self, x: Array, size: int) -> Array:
        """Returns the chunk's rows of ``x``."""
        return lax.dynamic_slice_in_dim(x, self.first, size) if self.source is None else x[self.source]

    def put(self, full: Array, part: Array) -> Array:
        """Returns ``full`` with the chunk's rows replaced by ``part``."""
        if self.target is None:
            return lax.dynamic_update_slice_in_dim(full, part, self.first, 0)
        return full.at[self.target].set(part, mode="drop", unique_indices=True)
