"""What `explain` returns: how a call will be computed, and how many bytes it will hold."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from lce_jax._types import Case, Options


class Surroundings(NamedTuple):
    """What changes a plan's bytes but no kernel: padding, and the collectives around one device's part."""

    true_columns: int | None = None  # how many of the case's columns are not padding, if known
    gathers_hidden: bool = False  # the vocabulary's axis splits the sequence too
    shards: int = 1  # of the vocabulary


ALONE = Surroundings()


class PassBytes(NamedTuple):
    """Temporary memory of compiled programs on one device, in bytes, as XLA has allotted it.

    Attributes:
        forward: of a program that runs the forward alone.
        backward: of one that runs both passes, beside the gradients, which are its results.
    """

    forward: int
    backward: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a call will be computed and what it will hold, in bytes per device. ``str(plan)`` is for people.

    What a pass takes is what it asks for itself: tiles or chunks of logits and statistics, sums in float32 and copies
    of operands, beside a few numbers per token. Operands, results and gradients are not counted. How XLA places these
    arrays, and which of its own it adds, only its compiler knows: see ``compiled``.

    Attributes:
        implementation: the implementation that will run.
        refused: each implementation tried before it, and why it cannot serve the call.
        case: the shapes, dtypes and device the plan is for.
        tiles: tile sizes by name.
        forward_bytes: what the forward takes.
        backward_bytes: what the backward takes, beside what is kept.
        kept_bytes: memory kept from forward to backward beyond the call's own operands.
        logits_bytes: what one copy of the logits in the statistics' dtype would take, for comparison.
        notes: remarks on options, in sentences.
        full_cache_bytes: the least ``cache_bytes`` with which the backward recomputes nothing; 0 where it cannot.
        same_bits: in which calls a token's logprob, entropy and lse have the same bits, in words. None: these may
            depend on whatever else is in the call.
        compiled: all temporary memory of the call's compiled programs; None unless ``compile=True`` asks for it.
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
    same_bits: str | None = None
    compiled: PassBytes | None = None

    @property
    def most_bytes(self) -> int:
        """What both passes take at most, some of it perhaps where gradients will be: the larger, and what is kept."""
        return self.kept_bytes + max(self.forward_bytes, self.backward_bytes)

    def __str__(self) -> str:
        case = self.case
        where = case.device.kind or case.device.platform
        lines = [
            f"{self.implementation}: {case.num_tokens:,} tokens, hidden size {case.hidden_size:,}, "
            f"{case.vocab_size:,} vocabulary columns, {case.dtype.name}, on {where}",
            "  tiles      " + ", ".join(f"{name} {size:,}" for name, size in self.tiles.items()),
            f"  forward    {format_bytes(self.forward_bytes)} in tiles and copies",
            f"  backward   {format_bytes(self.backward_bytes)} in tiles, sums and copies; gradients not counted",
            f"  kept       {format_bytes(self.kept_bytes)} from forward to backward",
            f"  logits     {format_bytes(self.logits_bytes)} if they were stored",
        ]
        if self.compiled:
            forward, both = map(format_bytes, self.compiled)
            lines.append(f"  compiled   {forward} temporary in a forward's program, {both} in that of both passes")
        if self.same_bits:
            lines.append(f"  same bits  {self.same_bits}")
        lines += [f"  not used   {name}: {reason}" for name, reason in self.refused.items()]
        lines += [f"  note       {note}" for note in self.notes]
        return "\n".join(lines)


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
