"""What the XLA implementation decides before it runs: its tile sizes, and the bytes that XLA will hold."""

from __future__ import annotations

import jax.numpy as jnp

from lce_jax._plans import Plan, Surroundings, candidate_notes, unused_notes
from lce_jax._types import Case


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
    return Plan(
        implementation=name,
        refused={},
        case=case,
        tiles={"tokens": tile_t, "vocabulary": tile_v},
        forward_bytes=_forward_bytes(case, around) if case.num_tokens else 0,
        backward_bytes=_backward_bytes(case, around) if case.num_tokens else 0,
        kept_bytes=case.statistics_bytes,
        logits_bytes=case.num_tokens * case.vocab_size * case.stat_dtype.itemsize,
        notes=(*unused_notes(case.options), *candidate_notes(case)),
    )


def _forward_bytes(case: Case, around: Surroundings) -> int:
    """What XLA holds at once on CPU: a tile of logits, and its copied columns or its exponentials."""
    tile_t, width, stat = *_widest_tile(case, around), case.stat_dtype.itemsize
    logits = tile_t * width * stat
    rows = 0 if tile_t == case.num_tokens else tile_t * case.hidden_size * case.dtype.itemsize
    if widens_operands(case):
        rows += tile_t * case.hidden_size * stat
    for_entropy = logits if case.options.entropy else 0
    vectors = 16 * case.num_tokens * stat  # statistics of all rows, of a tile, and what merges them
    return (
        own_hidden_bytes(case, around)
        + rows
        + logits
        + max(_copied_columns_bytes(case, around), for_entropy)
        + vectors
        + case.candidate_bytes
    )


def _backward_bytes(case: Case, around: Surroundings) -> int:
    """What XLA holds at once on CPU, in a backward or in a program of both passes: see `lce_jax.xla.gradients`.

    The gradients' products have operands in the statistics' dtype. An array that fits into dhidden's memory uses it.
    """
    tile_t, width, stat = *_widest_tile(case, around), case.stat_dtype.itemsize
    hidden, part, logits = case.num_tokens * case.hidden_size, tile_t * case.hidden_size * stat, tile_t * width * stat
    columns, copied, own = (
        width * case.hidden_size * stat,
        _copied_columns_bytes(case, around),
        own_hidden_bytes(case, around),
    )
    narrow, dweight = case.dtype != case.stat_dtype, case.vocab_size * case.hidden_size
    in_dweight = logits if dweight * case.dtype.itemsize >= logits else 0  # a tile, until dweight is written
    total = logits + 8 * case.num_tokens * stat + case.candidate_bytes
    if case.options.num_candidates and tile_t == case.num_tokens:
        total += logits  # dlogits without the candidates' terms, and with them
    if around.gathers_hidden or own > hidden * case.hidden_dtype.itemsize:
        total += own
    if own or narrow:
        total += hidden * stat  # dhidden, before it is rounded or its rows are put back
    if tile_t < case.num_tokens:  # a tile of hidden and one of dhidden; columns of weight and dweight, and an addend
        total += 2 * part + 3 * columns + (copied if narrow else 0)
    elif narrow and width == case.vocab_size:  # hidden and the weight once more, while dlogits use dweight's memory
        total += 2 * part + columns - in_dweight
    elif narrow:  # hidden and the columns once more
        total += part + columns + max(copied, part)
    else:
        total += copied + (part if copied or not own else 0)
    if around.sums_dweight:  # over devices, at the end; until then a tile uses the sum's memory
        total += dweight * case.dtype.itemsize - min(dweight * case.dtype.itemsize, max(logits, columns))
        if narrow and case.device.platform == "cpu":  # there XLA adds 16-bit numbers in float32
            total = max(total, 2 * dweight * stat + own)
    return max(total, _forward_bytes(case, around) - in_dweight)


def _widest_tile(case: Case, around: Surroundings) -> tuple[int, int]:
    tile_t, tile_v = tile_sizes(case)
    return tile_t, min(tile_v, around.true_columns or case.vocab_size)


def own_hidden_bytes(case: Case, around: Surroundings) -> int:
    """A copy of hidden, if it is gathered, cast or multiplied by a sign, or if its rows are moved."""
    own = case.partial_rows or around.gathers_hidden or case.hidden_dtype != case.dtype or case.options.signs_hidden
    return case.num_tokens * case.hidden_size * case.dtype.itemsize if own else 0


def _copied_columns_bytes(case: Case, around: Surroundings) -> int:
    """A copy of a tile's columns of the weight, unless the tile has all of them and they need no widening."""
    _, width = _widest_tile(case, around)
    if widens_operands(case):
        return width * case.hidden_size * case.stat_dtype.itemsize
    return width * case.hidden_size * case.dtype.itemsize if width < case.vocab_size else 0


def widens_operands(case: Case) -> bool:
    """Whether XLA converts the operands to float32: on CPU it does for float16, and not for bfloat16."""
    return case.device.platform == "cpu" and case.dtype == jnp.float16
