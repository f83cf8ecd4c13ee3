"""What `explain` says of `lce_jax.linear_kl`: its tiles, and the bytes that XLA will hold."""

from __future__ import annotations

from lce_jax._plans import OVERWRITES, PassBytes, Plan, Surroundings, cache_notes, format_bytes
from lce_jax.xla import _cache, _plan
from lce_jax.xla._kl import KLPlan


def plan(kl: KLPlan, around: Surroundings) -> Plan:
    """Tiles and bytes of a call on one device."""
    student, teacher = kl.cases
    tile_t, tile_v = kl.tiles
    columns, kept = min(student.vocab_size, teacher.vocab_size), kl.kept_columns
    has_padding = around.true_columns != student.vocab_size  # or may have
    in_place = _cache.is_one_piece(student, kept, tile_t, has_padding, around.adds_dweight)
    held = _plan.passes(kl.cases, tile_t, tile_v, around, kl.kept_item_bytes if kept else 0, in_place)
    alone = _plan.passes((student,), tile_t, tile_v, around)
    sizes = tile_v, kl.per_tile
    return Plan(
        implementation="xla",
        refused={},
        case=student,
        tiles={"tokens": tile_t, "vocabulary": tile_v},
        forward_bytes=held.forward,
        backward_bytes=held.backward,
        kept_bytes=kl.numbers_kept * student.num_tokens * kl.dtype.itemsize + _cache.num_bytes(student, kept, *sizes),
        logits_bytes=student.num_tokens * columns * kl.dtype.itemsize,
        notes=(
            f"linear_kl: of the forward {format_bytes(held.forward - alone.forward)} for the teacher (hidden size "
            f"{teacher.hidden_size:,}, {teacher.dtype.name}): a tile of its logits, the tile's columns, its tokens",
            *cache_notes(student, -(-kept // tile_v), -(-kl.columns // tile_v), _cache.tile_bytes(student, *sizes)),
            *([OVERWRITES] if in_place else []),
        ),
        full_cache_bytes=_cache.num_bytes(student, kl.columns, *sizes),
        stored=stored(kl, columns),
    )


def stored(kl: KLPlan, columns: int) -> PassBytes:
    """Of plain JAX code, two products and two log-softmaxes: their results, and on a CPU a gradient.

    Where dweight has room for a copy, one lies there.
    """
    case, logits = kl.cases.student, kl.cases.student.num_tokens * columns
    item, stat, on_cpu = case.dtype.itemsize, kl.dtype.itemsize, case.device.platform == "cpu"
    both = (3 * stat + (item if item < stat else 0)) if on_cpu else 2 * stat
    if columns * case.hidden_size * item >= stat * logits:
        both -= stat
    return PassBytes(2 * stat * logits, both * logits)
