"""What the XLA implementation decides before it runs: its tile sizes, and the bytes of what its tiles are."""

from __future__ import annotations

from lce_jax._plans import OVERWRITES, Plan, Surroundings, cache_notes, candidate_notes, unused_notes
from lce_jax._types import Case
from lce_jax.mathematics import _dlogits
from lce_jax.xla import _cache


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
    in_place = _cache.is_one_piece(case, kept, tile_t, around.true_columns != case.vocab_size, adds_dweight=False)
    held = copied_bytes(case, around) + tile_bytes(case, tile_t, min(tile_v, columns)) + case.candidate_bytes
    return Plan(
        implementation=name,
        refused={},
        case=case,
        tiles={"tokens": tile_t, "vocabulary": tile_v},
        forward_bytes=held,
        backward_bytes=held + (0 if in_place and around.shards == 1 else sum_bytes(case, around)),
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


def tile_bytes(case: Case, tile_t: int, width: int) -> int:
    """Of a tile of logits."""
    return min(tile_t, case.num_tokens) * width * case.stat_dtype.itemsize


def copied_bytes(case: Case, around: Surroundings) -> int:
    """Of a copy of hidden: it is gathered, cast or multiplied by a sign, or its rows are moved."""
    own = case.partial_rows or around.gathers_hidden or case.hidden_dtype != case.dtype or case.options.signs_hidden
    return case.num_tokens * case.hidden_size * case.dtype.itemsize if own else 0


def sum_bytes(case: Case, around: Surroundings) -> int:
    """Of dhidden in the statistics' dtype, before it is rounded, scattered or its rows are put back."""
    is_result = case.hidden_dtype == case.stat_dtype and not case.partial_rows and not around.gathers_hidden
    return 0 if is_result else case.num_tokens * case.hidden_size * case.stat_dtype.itemsize
