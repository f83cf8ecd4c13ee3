"""``python docs/_build/memory_picture.py``: draws ``docs/assets/memory-by-tokens-*.svg`` from what `lce_jax.explain` says."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parent))

import figures  # noqa: E402
import memory  # noqa: E402

MODEL = "qwen3-8b"
FREE = 8  # GiB, of the right half
LIMIT = 4096  # thousands of tokens; a call that fits with so many is not bounded by its temporary memory
LABELS = ("logits stored", "lce_jax", "lce_jax, full cache", "lce_jax, linear_loss")


def of_both(tokens: int) -> list[int]:
    """The bytes of forward and backward, by way."""
    return memory.of_call(MODEL, tokens, 1)[1::2]


def most(way: int) -> int:
    """The largest number of tokens, in thousands of 1,024, whose temporary memory fits; `LIMIT` if all do."""
    fits, too_many = 0, LIMIT + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        fits, too_many = (middle, too_many) if of_both(1024 * middle)[way] <= FREE << 30 else (fits, middle)
    return fits


def values() -> dict[str, Any]:
    """All that is drawn."""
    return {"bytes": {n: of_both(n) for n in memory.TOKENS}, "most": [most(way) for way in range(len(LABELS))]}


def drawn_from(drawn: dict[str, Any]) -> str:
    """What the picture says it was drawn from: these values and this file."""
    return hashlib.sha256(json.dumps(drawn).encode() + Path(__file__).read_bytes()).hexdigest()[:16]


def draw(figure: Figure, theme: figures.Theme, drawn: dict[str, Any]) -> None:
    """Lines by tokens, and the tokens that fit."""
    lines, most_tokens = figure.subplots(1, 2, width_ratios=(3, 2))
    tokens = list(drawn["bytes"])
    for way, (label, style) in enumerate(zip(LABELS, ("-", "-", "--", ":"), strict=True)):
        sizes = [drawn["bytes"][n][way] / 2**30 for n in tokens]
        lines.loglog(tokens, sizes, style, color=theme.ours if way else theme.other, label=label, lw=2)
    lines.set_xticks(tokens[::2], [f"{n // 1024}k" for n in tokens[::2]], fontsize=8)
    lines.set_yticks([0.3, 1, 3, 10, 30, 100], ["0.3", "1", "3", "10", "30", "100"], fontsize=8)
    lines.minorticks_off()
    lines.set_title("GiB, forward and backward, by tokens of a call", loc="left", fontsize=9.5)
    lines.legend(fontsize=8, frameon=False, labelcolor=theme.ink)
    lines.spines[["top", "right"]].set_visible(False)
    names = LABELS[::-1]
    found = drawn["most"][::-1]
    shown = most_tokens.barh(
        names, [min(n, 420) for n in found], height=0.6, color=[theme.ours] * (len(names) - 1) + [theme.other]
    )
    texts = ["any number" if n == LIMIT else f"{n:,}k" for n in found]
    most_tokens.bar_label(shown, texts, padding=3, fontsize=9)
    most_tokens.set_xlim(0, 640)
    most_tokens.set_title(f"tokens that fit into {FREE} GiB", loc="left", fontsize=9.5)
    most_tokens.xaxis.set_visible(False)
    most_tokens.spines[:].set_visible(False)
    most_tokens.tick_params(axis="y", length=0, labelsize=8)
    for axes in (lines, most_tokens):
        axes.set_facecolor(theme.background)
        axes.tick_params(colors=theme.ink)
    note = f"The head of {MODEL} in bfloat16 on one H200; temporary memory, as lce_jax.explain plans it, with stored logits the least. k: 1,024."
    figure.supxlabel(note, x=0.01, ha="left", fontsize=8, color=theme.muted)


def main() -> None:
    """Both themes."""
    drawn = values()
    for mode, theme in figures.THEMES.items():
        with mpl.rc_context({"svg.hashsalt": "memory", "font.size": 10, "text.color": theme.ink}):
            figure = Figure(figsize=(8.6, 3.4), layout="constrained", facecolor=theme.background)
            draw(figure, theme, drawn)
            told = {"Date": None, "Description": drawn_from(drawn)}
            figure.savefig(figures.ASSETS / f"memory-by-tokens-{mode}.svg", metadata=told)


if __name__ == "__main__":
    main()
