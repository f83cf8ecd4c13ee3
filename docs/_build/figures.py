"""``python docs/_build/figures.py``: draws ``docs/assets/*.svg``, light and dark, from ``benchmarks/*.json``."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(Path(__file__).parent))

import bench_tables  # noqa: E402

from benchmarks.records import timed  # noqa: E402
from lce_jax.explain._compile_targets import TARGETS  # noqa: E402

FILE = f"benchmarks/{bench_tables.CARD}.json"
RECORDED = "benchmarks/recorded.json"
ASSETS = ROOT / "docs" / "assets"
SHARE = 0.75  # of a card's memory: what JAX takes of it unless told otherwise


class Theme(NamedTuple):
    """Colours of a picture. It has a background of its own, so it is legible on any page."""

    background: str
    ink: str
    muted: str
    ours: str
    other: str
    panel: str


THEMES = {
    "light": Theme("#ffffff", "#1f2933", "#5b6672", "#0b6e99", "#b4bcc6", "#eef2f6"),
    "dark": Theme("#14161c", "#e6e9ee", "#9aa5b1", "#4cb4dd", "#6b7584", "#232730"),
}


def drawn_from() -> str:
    """What a picture says it was drawn from: the data and this file."""
    data = [x.read_bytes() for x in (ROOT / FILE, Path(__file__))]
    return hashlib.sha256(b"".join([*data, json.dumps(first_run()).encode()])).hexdigest()[:16]


def first_run() -> dict[str, Any]:
    """The run of the README's table and picture."""
    return bench_tables.load("recorded")["runs"]["hopper"]


def save(name: str, size: tuple[float, float], draw: Callable[[Figure, Theme], None]) -> None:
    """One picture in both themes."""
    for mode, theme in THEMES.items():
        style: dict[str, Any] = {"svg.hashsalt": name, "font.size": 10, "text.color": theme.ink}
        style |= dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), theme.ink)
        with mpl.rc_context(style):
            figure = Figure(figsize=size, layout="constrained", facecolor=theme.background)
            draw(figure, theme)
            metadata = {"Date": None, "Description": drawn_from()}
            figure.savefig(ASSETS / f"{name}-{mode}.svg", metadata=metadata)


def speed_and_memory(figure: Figure, theme: Theme) -> None:
    """Bars of time and of memory with all gradients: the rows of the README's table, by what they give."""
    run = first_run()
    rows = [(*name.replace("`", "").rpartition(": ")[::2], numbers) for name, *numbers in run["rows"]]
    groups = [gives for gives, _, _ in rows]
    at = [n + sum(0.9 if gives else 0.3 for gives in {*groups[: n + 1]}) for n in range(len(rows))]
    ours = ["linear_" in way or "the same" in way for _, way, _ in rows]
    time, memory = figure.subplots(1, 2, sharey=True)
    bars(time, at, [float(numbers[1]) for _, _, numbers in rows], "{:.2f}", ours, theme)
    bars(memory, at, [float(numbers[2]) for _, _, numbers in rows], "{:.1f} GiB", ours, theme)
    time.set_yticks(at, [way for _, way, _ in rows])
    time.set_title("time, in products", loc="left", fontsize=9.5)
    memory.set_title("peak memory, with gradients", loc="left", fontsize=9.5)
    time.axvline(3, color=theme.ink, lw=1, ls=":")
    time.invert_yaxis()
    for gives in dict.fromkeys(groups):
        place = {"xy": (0, at[groups.index(gives)] - 0.65), "xytext": (-4, 0), "textcoords": "offset points"}
        time.annotate(gives, **place, ha="right", va="center", weight="bold")
    device = run["device"]
    figure.suptitle("A head with all its gradients", x=0.01, ha="left", fontsize=11, weight="bold")
    figure.supxlabel(
        f"Tokens, hidden size, vocabulary: {run['columns'][0]}; bfloat16. With entropy: it and the log-probability.\n"
        "1 product is the time of hidden · weightᵀ alone. Dotted: the three that a gradient needs.\n"
        f"{device['device_kind']}, PyTorch {device['torch']}, Liger Kernel {device['liger-kernel']}; {RECORDED}",
        x=0.01, ha="left", fontsize=8, color=theme.muted,
    )  # fmt: skip


def step(figure: Figure, theme: Theme) -> None:
    """A whole training step: tokens per second and memory by the size of the batch, with stored logits and without."""
    jobs = [one for one in bench_tables.jobs("step") if "cross entropy" in one["arguments"]]
    rows = [row for one in jobs for row in timed(one["rows"])]
    batches = sorted({row["tokens"] for row in rows})
    room = SHARE * TARGETS[bench_tables.CARD].memory_bytes / 2**30
    speed, memory = figure.subplots(1, 2)
    for axes, unit in ((speed, "thousand tokens per second"), (memory, "GiB that a step needs")):
        for shift, head, color in ((-0.2, "logits stored", theme.other), (0.2, "lce_jax", theme.ours)):
            for row in (row for row in rows if row["head"] == head):
                at, fits = batches.index(row["tokens"]) + shift, row["seconds"] is not None
                rate = row["tokens"] / row["seconds"] / 1e3 if fits else 0.0
                value = rate if axes is speed else row["memory_bytes"] / 2**30
                axes.bar(at, value, 0.38, color=color, alpha=1.0 if fits else 0.4, label=head if at < 0.5 else None)
                inside: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "fontsize": 7}
                if value:
                    ink = theme.background if color == theme.ours else theme.ink
                    axes.annotate(f"{value:.1f}", (at, value), xytext=(0, -9), color=ink, **inside)
                else:
                    axes.annotate("out of memory", (at, 0), xytext=(0, 4), rotation=90, **inside)
        axes.set_title(unit, loc="left", fontsize=9.5)
        axes.set_xticks(range(len(batches)), [f"{tokens:,}" for tokens in batches], fontsize=8)
        axes.set_xlabel("tokens of a step", fontsize=8)
        axes.set_facecolor(theme.background)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.yaxis.set_visible(False)
    memory.axhline(room, color=theme.ink, lw=1, ls=":")
    memory.annotate(f"{room:.0f}: JAX's share", (-0.45, room), xytext=(0, 3), textcoords="offset points", fontsize=7)
    figure.legend(*speed.get_legend_handles_labels(), fontsize=8, frameon=False, loc="upper right", ncols=2)
    figure.suptitle("A training step, cross entropy", x=0.01, ha="left", fontsize=11, weight="bold")
    of = jobs[0]["sizes"]
    note = (
        f"{jobs[0]['model']}'s sizes: {of['layers']} layers, hidden size {of['hidden_size']:,}, vocabulary "
        f"{of['vocab_size']:,}; sequences of {jobs[0]['length']:,} tokens.\n"
        "JAX takes three quarters of the card's memory by default. Faint bars do not fit.\n"
        f"{device_of(jobs[0])}; {FILE}"
    )
    figure.supxlabel(note, x=0.01, ha="left", fontsize=8, color=theme.muted)


def device_of(job: dict[str, Any]) -> str:
    """The card and the version of JAX."""
    device = job["rows"][0]["run"]["device"]
    return f"{device['device_kind']}, JAX {device['jax']}"


def sizes(job: dict[str, Any]) -> tuple[int, int, int]:
    """Tokens, hidden size, vocabulary."""
    return job["shape"]["T"], job["shape"]["H"], job["shape"]["V"]


def bars(axes: Axes, at: list[float], values: list[float], text: str, ours: list[bool], theme: Theme) -> None:
    """A row of bars with their values, without an axis."""
    colors = [theme.ours if each else theme.other for each in ours]
    drawn = axes.barh(at, values, color=colors, height=0.68)
    axes.bar_label(drawn, [text.format(value) for value in values], padding=3, fontsize=9)
    axes.set_facecolor(theme.background)
    axes.set_xlim(0, 1.32 * max(values))
    axes.xaxis.set_visible(False)
    axes.spines[:].set_visible(False)
    axes.tick_params(axis="y", length=0)


# (height of the box's middle, title, second line, whether the logits of a tile exist there)
STEPS = (
    (10.4, "linear_logprobs(hidden, weight, labels)", "ops/: checks, flat [T, H] rows", False),
    (9.2, "which implementation?", "_dispatch.py: mosaic_gpu or xla, with the reason", False),
    (8.0, "rows that count come first", "call/: where=False costs no work", False),
    (6.5, "a tile: x = hidden · weight[tile]ᵀ", "on the chip: m = max x, s = Σ eᵘ, q = Σ u eᵘ, t  (eq. 1)", True),
    (5.0, "merge tiles, chunks and shards", "mathematics/: a few numbers per token  (eq. 2)", False),
    (3.8, "logprob, entropy, lse", "mathematics/: finish  (eq. 3)", False),
    (2.3, "a tile again: x, or the cached eᵘ", "dz from three numbers per token  (eq. 4)", True),
    (
        0.8,
        "dhidden += dz · weight[tile],  dweight[tile] = dzᵀ · hidden",
        "summed in float32, rounded once  (eq. 5)",
        False,
    ),
)


def way(figure: Figure, theme: Theme) -> None:
    """The way of the data, from top to bottom."""
    axes = figure.subplots()
    axes.set(xlim=(0, 10), ylim=(0.1, 11.2))
    axes.axis("off")
    for height, title, detail, tile in STEPS:
        edge = theme.ours if tile else theme.other
        box = FancyBboxPatch(
            (0.5, height - 0.38), 9, 0.76, boxstyle="round,pad=0.06", fc=theme.panel, ec=edge, lw=2 if tile else 1
        )
        axes.add_patch(box)
        axes.text(5, height + 0.15, title, ha="center", va="center", weight="bold", fontsize=9)
        axes.text(5, height - 0.19, detail, ha="center", va="center", fontsize=8, color=theme.muted)
    for above, below in zip(STEPS, STEPS[1:], strict=False):
        arrow = {"arrowstyle": "-|>", "color": theme.muted, "lw": 1.2}
        axes.annotate("", (5, below[0] + 0.46), (5, above[0] - 0.46), arrowprops=arrow)
    for height, text in ((5.75, "next tile of the vocabulary"), (1.55, "next tile")):
        axes.text(5.25, height, text, fontsize=8, color=theme.ours, va="center")
    axes.text(5.25, 3.05, "backward", fontsize=8, color=theme.muted, va="center")


def main() -> None:
    """Draws all of them."""
    save("speed-and-memory", (6.4, 4.0), speed_and_memory)
    save("step", (7.2, 3.6), step)
    save("way", (5.0, 7.2), way)


if __name__ == "__main__":
    main()
