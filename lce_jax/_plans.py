"""What `explain` returns: how a call will be computed, and how many bytes it will hold."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from lce_jax._types import Case, Options


class Surroundings(NamedTuple):
    """What changes a plan's bytes but no kernel: padding, and the collectives around one device's part."""

    true_columns: int | None = None  # how many of the case's columns are not padding, if known
    gathers_hidden: bool = False  # the vocabulary's axis splits the sequence too
    sums_dweight: bool = False  # other devices hold other tokens
    shards: int = 1  # of the vocabulary
    adds_dweight: bool = False  # to a sum over chunks of tokens


ALONE = Surroundings()


class PassBytes(NamedTuple):
    """Temporary memory on one device, in bytes: operands, results and the gradients themselves are not counted.

    Attributes:
        forward: of a program that runs the forward alone.
        backward: of one that runs both passes, with all that lies between them.
    """

    forward: int
    backward: int


class HeadMemory(NamedTuple):
    """What a head takes with stored logits, and as this package computes it.

    Attributes:
        stored: of plain JAX code: a product, softmax and entropy in float32, differentiated by JAX. On a GPU the least:
            for an H200, B200 or B300 XLA may keep four bytes more of each logit.
        fused: of the plan.
    """

    stored: PassBytes
    fused: PassBytes


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a call will be computed and what it will hold, in bytes per device. ``str(plan)`` is for people.

    Attributes:
        implementation: the implementation that will run.
        refused: each implementation tried before it, and why it cannot serve the call.
        case: the shapes, dtypes and device the plan is for.
        tiles: tile sizes by name.
        forward_bytes: temporary memory of a program that runs the forward alone, an estimate.
        backward_bytes: temporary memory of one that runs both passes, an estimate that leaves out the gradients
            themselves; until they are written, the forward's tiles may use their memory.
        kept_bytes: memory kept from forward to backward beyond the call's own operands.
        logits_bytes: what one copy of the logits in the statistics' dtype would take, for comparison.
        notes: remarks on options, in sentences.
        full_cache_bytes: the least ``cache_bytes`` with which the backward recomputes nothing; 0 where it cannot.
        stored: temporary memory of plain JAX code that stores logits; None: that of log-probabilities and entropy.
        same_bits: in which calls a token's logprob, entropy and lse have the same bits, in words. None: these may
            depend on whatever else is in the call.
    """

    implementation: str
    refused: dict[str, str]
    case: Case
    tiles: dict[str, int]
    forward_bytes: int
    backward_bytes: int
    kept_bytes: int
    logits_bytes: int
    notes: tuple[str, ...] = ()
    full_cache_bytes: int = 0
    stored: PassBytes | None = None
    same_bits: str | None = None

    @property
    def memory(self) -> HeadMemory:
        """What the head takes on one device: with stored logits, and by this plan."""
        stored = _stored(self.case) if self.stored is None else self.stored
        return HeadMemory(stored, PassBytes(self.forward_bytes, self.backward_bytes + self.kept_bytes))

    def __str__(self) -> str:
        case = self.case
        where = case.device.kind or case.device.platform
        lines = [
            f"{self.implementation}: {case.num_tokens:,} tokens, hidden size {case.hidden_size:,}, "
            f"{case.vocab_size:,} vocabulary columns, {case.dtype.name}, on {where}",
            "  tiles      " + ", ".join(f"{name} {size:,}" for name, size in self.tiles.items()),
            f"  forward    {format_bytes(self.forward_bytes)} temporary",
            f"  backward   {format_bytes(self.backward_bytes)} temporary, gradients not counted",
            f"  kept       {format_bytes(self.kept_bytes)} from forward to backward",
            f"  logits     {format_bytes(self.logits_bytes)} if they were stored",
        ]
        if self.same_bits:
            lines.append(f"  same bits  {self.same_bits}")
        lines += [f"  not used   {name}: {reason}" for name, reason in self.refused.items()]
        lines += [f"  note       {note}" for note in self.notes]
        return "\n".join(lines)


def _stored(case: Case) -> PassBytes:
    """Copies of the logits that XLA holds of plain JAX code, on a GPU the least.

    The forward reads the product's result, and what it is widened to or capped; the backward has the gradient too.
    Copies lie where dweight will be, as far as they fit. So it is on an A100 and an H100. Where memory is faster (H200,
    B200, B300) XLA computes less of the logits again, and keeps up to four bytes more of each. A CPU's programs have
    the logits, the softmax and the gradient.
    """
    item, stat = case.dtype.itemsize, case.stat_dtype.itemsize
    entropy, capped, narrow = case.options.entropy, case.options.logit_softcap is not None, item < stat
    logits, dweight = case.num_tokens * case.vocab_size, case.vocab_size * case.hidden_size * item
    if case.device.platform == "cpu":
        forward = stat + (0 if not entropy else stat if capped else item * narrow)
        backward = 4 * stat + stat * capped - (0 if entropy else stat) - (item if dweight >= item * logits else 0)
    else:
        forward = item + stat * (capped and narrow)
        backward = forward + (stat if dweight < stat * logits else 0)
    return PassBytes(forward * logits, max(forward, backward) * logits)


def unused_notes(options: Options) -> tuple[str, ...]:
    """The plan's notes on options that an implementation without kernels has no use for."""
    notes = []
    if options.gradient_threshold:
        notes.append(
            f"gradient_threshold={options.gradient_threshold:g} is not used: this implementation's gradients are exact"
        )
    if options.vocab_part_size is not None:
        notes.append(
            f"vocab_part_size={options.vocab_part_size} is not used: this implementation's bits depend on the number "
            "of shards"
        )
    return tuple(notes)


OVERWRITES = "the backward overwrites what was kept; outside jax.jit, a copy of it"


def cache_notes(case: Case, kept: int, of: int, tile_bytes: int) -> tuple[str, ...]:
    """What of ``cache_bytes`` is used."""
    if not case.options.cache_bytes:
        return ()
    return (f"the forward keeps {kept} of {of} vocabulary tiles, {format_bytes(tile_bytes)} each",)


def candidate_notes(case: Case) -> tuple[str, ...]:
    """The plan's note on what candidates add to its bytes."""
    if not case.options.num_candidates:
        return ()
    held, kept = format_bytes(case.candidate_bytes), format_bytes(case.candidate_bytes // 3)
    return (f"{case.options.num_candidates} candidates per token add {held} to each pass and {kept} to what is kept",)


def format_bytes(count: float) -> str:
    """``count`` in the largest binary unit that keeps it at least 1: ``format_bytes(3 << 20)`` is ``'3.0 MiB'``."""
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024 or unit == "GiB":
            break
    return f"{count:,.1f} {unit}"
