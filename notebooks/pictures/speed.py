"""The figures of ``06_speed_and_memory.ipynb``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from .style import ACCENT, GREEN, INK, LIGHT, MUTED, WARM, show

type Ratio = Callable[..., float]

WAYS = {
    "ours": ("lce_jax", LIGHT),
    "ours full cache": ("lce_jax, full cache", ACCENT),
    "materialised": ("logits stored", WARM),
}


def times(names: list[str], shapes: list[Any], ratio: Ratio) -> None:
    """Draws bars of every shape: forward, and forward with backward, as multiples of one product."""
    fig, axes = plt.subplots(1, 2, figsize=(7.4, 3.6), sharey=True, width_ratios=(1, 1.7))
    axes[0].barh(names, [ratio(m, "ours", "forward") for m in shapes], color=LIGHT, height=0.5)
    axes[0].axvline(1, color=INK, lw=1, ls=":")
    axes[0].set(title="forward", xlabel="products")
    for offset, (key, (label, color)) in zip((-0.26, 0, 0.26), WAYS.items(), strict=True):
        values = [ratio(m, key) for m in shapes]
        axes[1].barh(np.arange(len(shapes)) + offset, values, color=color, height=0.24, label=label)
    for y, m in enumerate(shapes):
        if np.isnan(ratio(m, "materialised")):
            axes[1].text(0.1, y + 0.28, "out of memory", va="center", fontsize=8, color=WARM)
    axes[1].axvline(3, color=INK, lw=1, ls=":")
    axes[1].set(title="forward + backward (dotted: the product's limit)", xlabel="products")
    axes[1].set_ylim(len(shapes) - 0.4, -0.6)
    fig.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    show(fig, "Bars for six shapes: a forward takes one product; forward and backward four, or three with a full cache")


def times_by_size(sizes: list[int], at: dict[int, Any], ratio: Ratio, xlabel: str, title: str) -> None:
    """Draws forward and backward over tokens or over the hidden size."""
    fig, ax = plt.subplots(figsize=(7, 2.6))
    for key, (label, color) in WAYS.items():
        ax.plot(sizes, [ratio(at[size], key) for size in sizes], "o-", color=color, label=label)
    ax.axhline(3, color=INK, lw=1, ls=":")
    ax.set_xscale("log", base=2)
    ax.set_xticks(sizes, [f"{size:,}" for size in sizes])
    ax.minorticks_off()
    ax.set(xlabel=xlabel, ylabel="products", title=title)
    fig.legend(*ax.get_legend_handles_labels(), loc="outside right center")
    show(
        fig, f"{title}: multiples of one product over {xlabel}, for lce_jax, with a full cache, and with stored logits"
    )


def peers(names: list[str], rows: list[list[Any]], readable: Callable[[float], str]) -> None:
    """Draws time and memory of packages; ``readable`` formats a number of bytes."""
    colors = [ACCENT if name.startswith("lce_jax") else MUTED for name in names]
    fig, axes = plt.subplots(1, 2, figsize=(7.6, 2.9), sharey=True)
    titles = (axes[0], 3, "{:.2f}".format, "time, in products"), (axes[1], 4, readable, "temporary memory")
    for ax, column, text, title in titles:
        drawn = ax.barh(names, [row[column] for row in rows], color=colors, height=0.65)
        ax.bar_label(drawn, [text(row[column]) for row in rows], padding=3, fontsize=8)
        ax.set(title=title, xlim=(0, 1.3 * max(row[column] for row in rows)))
        ax.xaxis.set_visible(False)
        ax.spines["bottom"].set_visible(False)
    axes[0].axvline(3, color=INK, lw=1, ls=":")
    axes[0].invert_yaxis()
    axes[0].tick_params(axis="y", labelsize=8, length=0)
    title = "Forward + backward: 4,096 tokens, hidden size 4,096, vocabulary 151,936, bfloat16"
    fig.suptitle(title, x=0.01, ha="left", fontsize=10)
    show(fig, "Time and temporary memory of lce_jax and of other packages: the table below as bars")


def cache(curves: list[tuple[str, float, float, float, float]]) -> None:
    """Draws time over ``cache_bytes`` from (label, GiB of a full cache, none, half, full); NaN was not measured."""
    fractions = np.linspace(0, 1, 50)
    fig, ax = plt.subplots(figsize=(7, 2.7))
    for (label, full_gib, none, half, full), color in zip(curves, (WARM, GREEN, ACCENT), strict=True):
        ax.plot(fractions * full_gib, none + (full - none) * fractions, lw=1.8, color=color, label=label)
        ax.plot([0, full_gib], [none, full], "o", color=color)
        if not np.isnan(half):
            ax.plot(full_gib / 2, half, "o", color=color, mfc="none")
    title = "Dots are measured; between them the time is a straight line"
    ax.set(xlabel="cache_bytes, GiB (8,192 tokens)", ylabel="products", title=title)
    ax.legend()
    show(fig, "Time over cache_bytes for three hidden sizes: it falls in proportion, from about four products to three")
