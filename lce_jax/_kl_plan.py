"""What `explain` says of `lce_jax.linear_kl`: its tiles, and the bytes that XLA will hold."""

from __future__ import annotations

from lce_jax import _xla_plan
from lce_jax._kl_math import KLStatistics
from lce_jax._kl_tiles import KLPlan
from lce_jax._plans import PassBytes, Plan, Surroundings, format_bytes
from lce_jax._types import Case


def plan(kl: KLPlan, around: Surroundings) -> Plan:
    """Tiles and bytes of a call on one device."""
    student, teacher = kl.cases
    tile_t, tile_v = kl.tiles
    columns = min(student.vocab_size, teacher.vocab_size)
    of_teacher = _tokens(kl, teacher, around) + _columns(kl, teacher) + _tile(kl)
    return Plan(
        implementation="xla",
        refused={},
        case=student,
        tiles={"tokens": tile_t, "vocabulary": tile_v},
        forward_bytes=_forward_bytes(kl, around) if student.num_tokens else 0,
        backward_bytes=_backward_bytes(kl, around) if student.num_tokens else 0,
        kept_bytes=len(KLStatistics._fields) * student.num_tokens * kl.dtype.itemsize,
        logits_bytes=student.num_tokens * columns * kl.dtype.itemsize,
        notes=(
            f"linear_kl: of each pass {format_bytes(of_teacher)} for the teacher (hidden size "
            f"{teacher.hidden_size:,}, {teacher.dtype.name}): a tile of its logits, the tile's columns, its tokens",
        ),
        stored=_stored(kl, columns),
    )


def _tile(kl: KLPlan) -> int:
    """A tile of one model's logits."""
    tile_t, tile_v = kl.tiles
    return tile_t * tile_v * kl.dtype.itemsize


def _columns(kl: KLPlan, case: Case) -> int:
    """A copy of a tile's columns of a weight, unless the tile has all of them and they need no widening."""
    _, width = kl.tiles
    if _xla_plan.widens_operands(case):
        return width * case.hidden_size * case.stat_dtype.itemsize
    return width * case.hidden_size * case.dtype.itemsize if width < case.vocab_size else 0


def _tokens(kl: KLPlan, case: Case, around: Surroundings) -> int:
    """Copies of a model's hidden states: of all, of a tile, and widened."""
    tile_t, _ = kl.tiles
    total = _xla_plan.own_hidden_bytes(case, around)
    if tile_t < case.num_tokens:
        total += tile_t * case.hidden_size * case.dtype.itemsize
    if _xla_plan.widens_operands(case):
        total += tile_t * case.hidden_size * case.stat_dtype.itemsize
    return total


def _shared(kl: KLPlan, around: Surroundings) -> tuple[int, int]:
    """What both passes hold: copies of hidden states, and numbers per token; copies of a tile's columns."""
    tokens = sum(_tokens(kl, case, around) for case in kl.cases)
    vectors = 12 * kl.cases.student.num_tokens * kl.dtype.itemsize
    return tokens + vectors, sum(_columns(kl, case) for case in kl.cases)


def _forward_bytes(kl: KLPlan, around: Surroundings) -> int:
    """Both models' tiles, and the exponentials of one; or one, while the other's columns are copied."""
    tokens, columns = _shared(kl, around)
    return tokens + max(columns + _tile(kl), 3 * _tile(kl))


def _backward_bytes(kl: KLPlan, around: Surroundings) -> int:
    """Of a backward, or of both passes: until dweight is written, the forward uses its memory."""
    case, (tile_t, width), stat = kl.cases.student, kl.tiles, kl.dtype.itemsize
    tokens, columns = _shared(kl, around)
    dweight = case.vocab_size * case.hidden_size * case.dtype.itemsize
    widened, total = width * case.hidden_size * stat, tokens + columns + 2 * _tile(kl)
    if case.dtype != case.stat_dtype:  # dhidden before it is rounded, and on a CPU columns in float32
        total += case.num_tokens * case.hidden_size * stat
        if case.device.platform == "cpu" and not _xla_plan.widens_operands(case):
            total += widened
    if tile_t < case.num_tokens:  # an addend of the columns' gradient
        total += widened
    if around.sums_dweight:  # over devices, at the end
        total += dweight - min(dweight, 2 * _tile(kl))
    return max(total, _forward_bytes(kl, around) - min(dweight, _tile(kl)))


def _stored(kl: KLPlan, columns: int) -> PassBytes:
    """Of plain JAX code, two products and two log-softmaxes: their results, and a gradient where it fits nowhere."""
    case, logits = kl.cases.student, kl.cases.student.num_tokens * columns
    item, stat = case.dtype.itemsize, kl.dtype.itemsize
    backward = 3 * stat + (item if item < stat and case.device.platform == "cpu" else 0)
    if columns * case.hidden_size * item >= stat * logits:  # it lies where dweight will be
        backward -= stat
    return PassBytes(2 * stat * logits, max(2 * stat, backward) * logits)
