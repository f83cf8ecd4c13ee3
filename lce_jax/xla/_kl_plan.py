"""What `explain` says of `lce_jax.linear_kl`: its tiles, and the bytes that XLA will hold."""

from __future__ import annotations

from lce_jax._plans import PassBytes, Plan, Surroundings, format_bytes
from lce_jax.mathematics._kl import KLStatistics
from lce_jax.xla import _plan
from lce_jax.xla._kl import KLPlan


def plan(kl: KLPlan, around: Surroundings) -> Plan:
    """Tiles and bytes of a call on one device."""
    student, teacher = kl.cases
    tile_t, tile_v = kl.tiles
    held = _plan.passes(kl.cases, tile_t, tile_v, around)
    alone = _plan.passes((student,), tile_t, tile_v, around)
    columns = min(student.vocab_size, teacher.vocab_size)
    return Plan(
        implementation="xla",
        refused={},
        case=student,
        tiles={"tokens": tile_t, "vocabulary": tile_v},
        forward_bytes=held.forward,
        backward_bytes=held.backward,
        kept_bytes=len(KLStatistics._fields) * student.num_tokens * kl.dtype.itemsize,
        logits_bytes=student.num_tokens * columns * kl.dtype.itemsize,
        notes=(
            f"linear_kl: of the forward {format_bytes(held.forward - alone.forward)} for the teacher (hidden size "
            f"{teacher.hidden_size:,}, {teacher.dtype.name}): a tile of its logits, the tile's columns, its tokens",
        ),
        stored=stored(kl, columns),
    )


def stored(kl: KLPlan, columns: int) -> PassBytes:
    """Of plain JAX code, two products and two log-softmaxes: their results, and a gradient where it fits nowhere."""
    case, logits = kl.cases.student, kl.cases.student.num_tokens * columns
    item, stat = case.dtype.itemsize, kl.dtype.itemsize
    backward = 3 * stat + (item if item < stat and case.device.platform == "cpu" else 0)
    if columns * case.hidden_size * item >= stat * logits:  # it lies where dweight will be
        backward -= stat
    return PassBytes(2 * stat * logits, max(2 * stat, backward) * logits)
