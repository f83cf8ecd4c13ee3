"""What `explain` says of `lce_jax.linear_logits`: the bytes that XLA will hold."""

from __future__ import annotations

from lce_jax._plans import PassBytes, Plan, Surroundings, format_bytes
from lce_jax._types import Case
from lce_jax.xla import _logits, _plan


def plan(case: Case, around: Surroundings, name: str) -> Plan:
    """Chunks and bytes of a call on one device, whose ids are the case's candidates."""
    count, stat = case.num_tokens * case.options.num_candidates, case.stat_dtype.itemsize
    at_once = name != "xla"
    forward, backward = (_passes_at_once if at_once else _passes)(case, around) if count else (0, 0)
    rows = count * case.hidden_size * stat if at_once else _gathered_bytes(case)
    logits = case.num_tokens * case.vocab_size
    return Plan(
        implementation=name,
        refused={},
        case=case,
        tiles={"tokens": case.num_tokens if at_once else _tokens(case)},
        forward_bytes=forward,
        backward_bytes=backward,
        kept_bytes=count * stat,
        logits_bytes=logits * stat,
        notes=(
            f"linear_logits: {case.options.num_candidates} ids per token, {count:,} products with one row of the "
            f"weight each, at most {format_bytes(rows)} of rows at a time",
        ),
        stored=PassBytes(logits * stat, logits * stat),
    )


def _tokens(case: Case) -> int:
    """Of a chunk."""
    most = _logits.chunk_tokens(max(case.options.num_candidates, 1), case.hidden_size, case.dtype.itemsize)
    return min(max(case.num_tokens, 1), most)


def _gathered_bytes(case: Case) -> int:
    item = case.stat_dtype.itemsize if _plan.widens_operands(case) else case.dtype.itemsize
    return _tokens(case) * case.options.num_candidates * case.hidden_size * item


def _passes(case: Case, around: Surroundings) -> tuple[int, int]:
    """Of a forward, whose gathered rows a GPU does not store, and of both passes: a chunk's sums and their factors."""
    count, stat = case.num_tokens * case.options.num_candidates, case.stat_dtype.itemsize
    gathered = _gathered_bytes(case) if case.device.platform == "cpu" else 0
    if gathered and case.options.vocab_dim == 1:  # hidden states turned to the weight's layout
        gathered += _tokens(case) * case.hidden_size * stat
    own = _plan.own_hidden_bytes(case, around)
    several = _tokens(case) < case.num_tokens
    forward = own + gathered + (2 * count * stat if several else 0)
    blocks = _logits.blocks(count, case.hidden_size, stat)
    sums = 2 * blocks.size * case.hidden_size * stat + blocks.size * blocks.pairs * stat
    unrounded = case.dtype != case.stat_dtype and case.device.platform != "cpu"
    dhidden = case.num_tokens * case.hidden_size * stat if unrounded else 0
    return forward, max(forward, own + dhidden + sums + 6 * count * stat)


def _passes_at_once(case: Case, around: Surroundings) -> tuple[int, int]:
    """Of a forward and of both passes: all gathered rows; the terms of dweight, and its sum."""
    stat = case.stat_dtype.itemsize
    rows = case.num_tokens * case.options.num_candidates * case.hidden_size * stat
    forward = _plan.own_hidden_bytes(case, around) + rows
    return forward, forward + case.vocab_size * case.hidden_size * stat
