"""What the XLA implementation decides before it runs: its tile sizes, and the bytes that XLA will hold."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from lce_jax._plans import OVERWRITES, PassBytes, Plan, Surroundings, cache_notes, candidate_notes, unused_notes
from lce_jax._types import Case
from lce_jax.mathematics import _dlogits
from lce_jax.xla import _cache, _walk

# Numbers per token and model: statistics of all tokens, of a chunk, and what merges them; what a backward reads.
VECTORS, VECTORS_OF_STATS, VECTORS_IN_BACKWARD = 16, 4, 8


def tile_sizes(case: Case) -> tuple[int, int]:
    """Tokens and vocabulary columns per tile.

    On CPU a tile has at most 4 Mi logits (16 MiB of float32) and 2048 columns. Wider tiles do not fit the caches (50 ms
    against 28 ms forward at T 512, H 256, V 32000 on two cores); narrower ones make the products too small. XLA copies
    a tile's columns of the weight too. With few tokens this copy is the larger part, so it has at most half as many
    numbers as the call's logits, or 128 Ki if that is more. Elsewhere 64 Mi logits keep a GPU's products large. A tile
    has at most an eighth of the vocabulary, so that a small call does not hold all its logits. If rows may be left out,
    a tile has a sixteenth of the tokens; off the CPU, where every token tile copies the weight, a quarter.
    """
    on_cpu = case.device.platform == "cpu"
    widest_t, widest_v, budget = (4096, 2048, 4 << 20) if on_cpu else (16384, 1 << 20, 64 << 20)
    tile_t = min(max(case.num_tokens, 1), widest_t)  # `explain` takes a call without tokens too
    if case.partial_rows:
        least, parts = (256, 16) if on_cpu else (1024, 4)
        tile_t = min(tile_t, max(least, -(-case.num_tokens // parts)))
    tile_v = max(min(budget // tile_t, widest_v, case.vocab_size // 8) // 128 * 128, 512)
    if on_cpu:
        logits = max(case.num_tokens, 1) * case.vocab_size
        tile_v = min(tile_v, max(max(logits // 2, 1 << 17) // case.hidden_size // 128 * 128, 128))
    return tile_t, min(case.vocab_size, tile_v)


def plan(case: Case, name: str, around: Surroundings) -> Plan:
    """Tiles and bytes."""
    tile_t, tile_v = tile_sizes(case)
    columns = around.true_columns or case.vocab_size
    kept = _cache.kept_columns(case, columns, tile_v)
    has_padding = around.true_columns != case.vocab_size  # or may have
    in_place = _cache.is_one_piece(case, kept, tile_t, has_padding, around.adds_dweight)
    item = _walk.gradient_dtype(case).itemsize if kept else 0
    held = passes((case,), tile_t, tile_v, around, item, in_place)
    return Plan(
        implementation=name,
        refused={},
        case=case,
        tiles={"tokens": tile_t, "vocabulary": tile_v},
        forward_bytes=held.forward,
        backward_bytes=held.backward,
        kept_bytes=case.statistics_bytes + _cache.num_bytes(case, kept, tile_v),
        logits_bytes=case.num_tokens * case.vocab_size * case.stat_dtype.itemsize,
        notes=(
            *_cache_notes(case, kept, columns, tile_v),
            *([OVERWRITES] if in_place else []),
            *unused_notes(case.options),
            *candidate_notes(case),
        ),
        full_cache_bytes=_cache.num_bytes(case, columns, tile_v) if _dlogits.keeps(case.options) else 0,
    )


def _cache_notes(case: Case, kept: int, columns: int, tile_v: int) -> tuple[str, ...]:
    """What of ``cache_bytes`` is used."""
    given = case.options.cache_bytes
    if not given:
        return ()
    if not _dlogits.keeps(case.options):
        return (f"cache_bytes={given} is not used: label smoothing needs capped logits that no exponential shows",)
    tiles = -(-kept // tile_v), -(-columns // tile_v)
    return cache_notes(case, *tiles, _cache.tile_bytes(case, min(tile_v, columns)))


def passes(
    cases: tuple[Case, ...],
    tile_t: int,
    tile_v: int,
    around: Surroundings,
    kept_bytes: int = 0,
    in_place: bool = False,
) -> PassBytes:
    """An upper bound of what XLA holds of a `lce_jax.xla._walk.Walk`: what its tiles and chunks are, and gradients.

    The forward holds a tile of each model's logits, and beside them either the columns that they are made of or the
    exponentials of one. The backward is that of a program with both passes: until dweight is written, the forward may
    use its memory. Of ``kept_bytes`` for a token and column the backward copies a tile, unless its gradient is made
    ``in_place``. XLA unrolls a loop of one tile: then all columns are one tile, and what the forward holds stays.
    """
    (first, *others), num_tokens = cases, cases[0].num_tokens
    if not num_tokens:
        return PassBytes(0, 0)
    stat = max(case.stat_dtype.itemsize for case in cases)
    vocabulary = around.true_columns or min(case.vocab_size for case in cases)
    width, loops = min(tile_v, vocabulary), vocabulary >= 2 * tile_v
    tile = tile_t * stat * (width if loops else vocabulary)
    dweight = first.vocab_size * first.hidden_size * first.dtype.itemsize
    vector = len(cases) * num_tokens * stat
    copies = [_Copies.of(case, tile_t, width, around) for case in cases]
    columns, exponentials = sum(copy.columns for copy in copies), tile if first.options.entropy or others else 0
    forward = sum(copy.hidden for copy in copies) + len(cases) * tile + max(columns, exponentials)
    forward += (VECTORS + VECTORS_OF_STATS * first.options.stats) * vector + first.candidate_bytes
    backward = _gradient_bytes(first, tile_t, width, tile, around)
    backward += tile_t * width * kept_bytes
    if in_place:
        hidden = num_tokens * first.hidden_size * stat  # dhidden, before it is rounded
        backward = hidden + copies[0].hidden + (2 * tile if first.options.num_candidates else 0)
    if others:  # dlogits, beside the tiles that they are made of
        backward = max(backward, 2 * tile + copies[0].columns)
    backward += sum(copy.hidden + copy.columns + tile for copy in copies[1:])
    backward += VECTORS_IN_BACKWARD * vector + first.candidate_bytes
    if around.sums_dweight:  # over devices, at the end; until then a tile uses the sum's memory
        backward += dweight - min(dweight, max(tile, width * first.hidden_size * stat))
        if first.dtype != first.stat_dtype and first.device.platform == "cpu":  # there XLA adds 16-bit numbers widened
            backward = max(backward, 2 * first.vocab_size * first.hidden_size * stat + copies[0].own)
    if not loops:
        backward = max(backward, forward + (tile_t + (num_tokens if copies[0].own else 0)) * first.hidden_size * stat)
    return PassBytes(forward, max(backward, forward - (tile if dweight >= tile else 0)))


class _Copies(NamedTuple):
    """What XLA copies of one model's operands, in bytes."""

    own: int  # of all hidden states
    chunk: int  # of those of a chunk
    columns: int  # of the columns of a tile, unless it has all of them and they need no widening

    @classmethod
    def of(cls, case: Case, tile_t: int, width: int, around: Surroundings) -> _Copies:
        item, stat, widened = case.dtype.itemsize, case.stat_dtype.itemsize, widens_operands(case)
        in_chunk = (item if tile_t < case.num_tokens else 0) + (stat if widened else 0)
        in_tile = stat if widened else item if width < case.vocab_size else 0
        own = own_hidden_bytes(case, around)
        return cls(own, tile_t * case.hidden_size * in_chunk, width * case.hidden_size * in_tile)

    @property
    def hidden(self) -> int:
        return self.own + self.chunk


def _gradient_bytes(case: Case, tile_t: int, width: int, tile: int, around: Surroundings) -> int:
    """Of a model that has gradients: its tile, and what `lce_jax.xla._walk.Walk.gradients` adds up and multiplies.

    On a CPU the products have operands in the statistics' dtype, and an array that fits into dhidden's memory uses it.
    At (4096, 4096, 151936) and (8192, 4096, 131072) in bfloat16 on an H200 this is what was held, 704 MiB.
    `lce_jax.linear_kl` held 224 MiB of the 320 that `passes` says, because the teacher's tile and columns were gone
    when the gradients were computed.
    """
    stat, narrow = case.stat_dtype.itemsize, case.dtype != case.stat_dtype
    part, columns = tile_t * case.hidden_size * stat, width * case.hidden_size * stat
    own, _, copied = _Copies.of(case, tile_t, width, around)
    hidden = case.num_tokens * case.hidden_size
    total = tile
    if case.options.num_candidates and tile_t == case.num_tokens:
        total += tile  # dlogits without the candidates' terms, and with them
    if around.gathers_hidden or own > hidden * case.hidden_dtype.itemsize:
        total += own
    if own or narrow:
        total += hidden * stat  # dhidden, before it is rounded or its rows are put back
    if tile_t < case.num_tokens:  # a chunk of hidden and one of dhidden; columns of weight and dweight, and an addend
        return total + 2 * part + 3 * columns + (copied if narrow else 0)
    if narrow and case.device.platform != "cpu":  # dlogits rounded, and the columns of dweight or a part of dhidden
        rounded = tile_t * width * case.dtype.itemsize
        return total + rounded + max(part, width * case.hidden_size * case.dtype.itemsize) + copied
    if narrow:  # hidden and the columns once more, unless these are copied widened anyway
        if width == case.vocab_size and tile <= width * case.hidden_size * case.dtype.itemsize:
            total -= tile  # it lies where dweight will be, which is rounded last
        return total + part + columns + max(0 if widens_operands(case) else copied, part)
    return total + copied + part


def own_hidden_bytes(case: Case, around: Surroundings) -> int:
    """A copy of hidden, if it is gathered, cast or multiplied by a sign, or if its rows are moved.

    On CPU XLA copies one row always, in the statistics' dtype.
    """
    if case.num_tokens == 1 and case.device.platform == "cpu":
        return case.hidden_size * case.stat_dtype.itemsize
    own = case.partial_rows or around.gathers_hidden or case.hidden_dtype != case.dtype or case.options.signs_hidden
    return case.num_tokens * case.hidden_size * case.dtype.itemsize if own else 0


def widens_operands(case: Case) -> bool:
    """Whether XLA converts the operands to float32: on CPU it does for float16, and for bfloat16 with one token."""
    one_token = case.num_tokens == 1 and case.dtype != case.stat_dtype
    return case.device.platform == "cpu" and (case.dtype == jnp.float16 or one_token)
