"""Time and memory as a picture: lines against the number of tokens, or bars where a head was timed at one number."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only, so no display is needed

import matplotlib.pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullLocator

from lce_jax._plans import format_bytes
from lce_jax.bench.run import Measurement, Row
from lce_jax.bench.shapes import BOTH, FORWARD, GEMM, TOPK
from lce_jax.explain._models import Head

OURS = {
    "ours": "#08519c",
    "ours half cache": "#3182bd",
    "ours full cache": "#74add1",
    "ours in forward": "#2aa198",
    "ours split": "#2c3e8f",
    "ours split full cache": "#6a7fd0",
}
KNOWN = {
    "gemm": "#969696",
    **OURS,
    "chunked": "#31a354",
    "materialised": "#e6550d",
    "materialised by hand": "#fdae6b",
}  # in the order of the bars
PEERS = ("#756bb1", "#c51b8a", "#8c6d31", "#d6616b", "#637939", "#7b4173", "#bd9e39")
INK = "#333333"
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#999999",
    "axes.labelcolor": INK,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": "#e5e5e5",
    "legend.frameon": False,
}


def draw(path: Path, measurements: Sequence[Measurement], where: dict[str, str]) -> None:
    """Three panels per head: forward, forward + backward, and the temporary memory of the latter."""
    heads: dict[Head, list[Measurement]] = {}
    for one in sorted(measurements, key=lambda one: one.shape.tokens):
        heads.setdefault(one.shape.head, []).append(one)
    labels = _labels(measurements)
    heights = [3.6 if len(group) > 1 else 0.9 + 0.24 * len(_labels(group)) for group in heads.values()]
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(12, sum(heights) + 0.8), layout="constrained")
        figure.suptitle(
            f"Log-probability and entropy of a language-model head: {where['device_kind']}, jax {where['jax']}",
            x=0.008,
            ha="left",
            fontsize=12,
            fontweight="bold",
        )
        strips = figure.subfigures(len(heads), 1, height_ratios=heights, squeeze=False)[:, 0]
        for strip, (head, group) in zip(strips, heads.items(), strict=True):
            tokens = "" if len(group) > 1 else f"T {group[0].shape.tokens:,}, "
            strip.suptitle(f"{tokens}{head}, {group[0].dtype}", x=0.008, ha="left", fontsize=10, fontweight="bold")
            (_lines if len(group) > 1 else _bars)(strip, group, _colours(labels))
        figure.savefig(path, dpi=150, facecolor="white")
        plt.close(figure)


def _labels(group: Sequence[Measurement]) -> dict[str, str]:
    """Every candidate of a group and its name: those of `KNOWN` first, then the peers."""
    found = {row.key: row.label for one in group for row in one.rows}
    return {key: found[key] for key in KNOWN if key in found} | found


def _colours(labels: dict[str, str]) -> dict[str, str]:
    """A colour for each candidate, the same in every panel."""
    peers = [key for key in labels if key not in KNOWN]
    return KNOWN | {key: PEERS[i % len(PEERS)] for i, key in enumerate(peers)}


def _lines(strip: Any, group: list[Measurement], colours: dict[str, str]) -> None:
    """Against T. Time is per token, so that a cost in proportion to T is a flat line; memory is logarithmic."""
    forward, both, memory = axes = strip.subplots(1, 3)

    def plot(axis: Any, key: str, direction: str, value: Any) -> None:
        points = [(one.shape.tokens, value(one, row)) for one in group if (row := one.row(key, direction))]
        ours = key in OURS
        look = {"linewidth": 2.4 if ours else 1.4, "zorder": 3 if ours else 2, "marker": "o", "markersize": 4}
        axis.plot(*zip(*points, strict=True), color=colours[key], linestyle=":" if direction == GEMM else "-", **look)

    for key, direction in dict.fromkeys((row.key, row.direction) for one in group for row in one.rows):
        if direction == TOPK:
            continue
        plot(both if direction == BOTH else forward, key, direction, _microseconds_per_token)
        if direction == BOTH:
            plot(memory, key, direction, lambda _, row: max(row.temp_bytes, 1))
    ticks = [one.shape.tokens for one in group]
    for axis, title in zip(
        axes, ("forward, µs per token", "forward + backward, µs per token", "forward + backward, memory"), strict=True
    ):
        axis.set_title(title)
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [f"{t:,}" for t in ticks])
        axis.set_xlabel("tokens")
        axis.grid(True, axis="y")
    forward.set_ylim(bottom=0)
    both.set_ylim(bottom=0)
    memory.set_yscale("log", base=2)
    memory.yaxis.set_major_formatter(FuncFormatter(lambda size, _: format_bytes(size)))
    for axis in (*(axis.xaxis for axis in axes), memory.yaxis):
        axis.set_minor_locator(NullLocator())
    handles = [Line2D([], [], color=colours[key], linewidth=2, label=label) for key, label in _labels(group).items()]
    strip.legend(handles=handles, loc="outside right center", fontsize=8)


def _microseconds_per_token(measured: Measurement, row: Row) -> float:
    return row.median / measured.shape.tokens * 1e6


def _bars(strip: Any, group: list[Measurement], colours: dict[str, str]) -> None:
    """One number of tokens: a row of bars per candidate, across the three panels."""
    (measured,) = group
    labels = _labels(group)
    keys = list(labels)
    forward, both, memory = axes = strip.subplots(1, 3, sharey=True)

    def bars(axis: Any, rows: list[Row], value: Any, text: Any) -> None:
        drawn = axis.barh(
            [keys.index(row.key) for row in rows],
            [value(row) for row in rows],
            color=[colours[row.key] for row in rows],
            height=0.72,
        )
        axis.bar_label(drawn, [text(row) for row in rows], padding=3, fontsize=8)

    def milliseconds(row: Row) -> str:
        return f"{row.median * 1e3:,.2f} ms"

    gradients = [row for row in measured.rows if row.direction == BOTH]
    bars(forward, [row for row in measured.rows if row.direction in (GEMM, FORWARD)], _seconds, milliseconds)
    bars(both, gradients, _seconds, milliseconds)
    bars(memory, gradients, lambda row: row.temp_bytes, lambda row: format_bytes(row.temp_bytes))
    forward.set_yticks(range(len(keys)), list(labels.values()))
    forward.invert_yaxis()
    for axis, title in zip(axes, ("forward", "forward + backward", "forward + backward, memory"), strict=True):
        axis.set_title(title)
        axis.margins(x=0.3)
        axis.xaxis.set_visible(False)
        axis.spines["bottom"].set_visible(False)
        axis.tick_params(axis="y", length=0)


def _seconds(row: Row) -> float:
    return row.median
