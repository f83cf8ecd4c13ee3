"""The figures of ``02_mathematics.ipynb``."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from .style import ACCENT, FADE, INK, MUTED, RED, WARM, show


def tiles(p: np.ndarray, labels: np.ndarray, tile: int) -> None:
    """Draws all probabilities, with lines between tiles and frames around labels."""
    fig, ax = plt.subplots(figsize=(7, 2.6))
    image = ax.imshow(np.log10(p), cmap=FADE, aspect="auto", vmin=-5, vmax=0)
    edges(ax, p.shape[1], tile)
    ax.scatter(labels, range(len(p)), marker="s", s=14, facecolors="none", edgecolors=RED, lw=1.2)
    ax.set(
        xlabel=f"vocabulary entry (lines: tiles of {tile})",
        ylabel="token",
        title="Probabilities, never stored as a whole",
    )
    fig.colorbar(image, label="log₁₀ p", pad=0.01)
    show(fig, "Probabilities of 24 tokens over 96 entries as shades of blue, in six tiles, a red frame at each label")


def edges(ax: Axes, vocabulary: int, tile: int, alpha: float = 1.0) -> None:
    """Draws a line between tiles."""
    for edge in range(tile, vocabulary, tile):
        ax.axvline(edge - 0.5, color=INK, lw=0.9, alpha=alpha)


def merged(history: list[Any], exact_lse: np.ndarray, exact_entropy: np.ndarray) -> None:
    """Draws lse and entropy of three tokens after each tile."""
    fig, axes = plt.subplots(1, 2, figsize=(7, 2.5))
    for token, color in zip((0, 1, 2), (ACCENT, WARM, MUTED), strict=True):
        for ax, index, exact in ((axes[0], 2, exact_lse), (axes[1], 1, exact_entropy)):
            values = [h[index][token] for h in history]
            ax.plot(range(1, len(history) + 1), values, "o-", color=color, ms=4, label=f"token {token}")
            ax.axhline(exact[token], color=color, lw=0.8, ls=":")
    for ax, name in zip(axes, ("lse", "entropy"), strict=True):
        ax.set(title=f"{name} after each tile (dotted: exact)", xlabel="tiles merged", ylabel="nats")
    axes[1].legend()
    show(fig, "lse and entropy of three tokens after one to six tiles: each ends on its exact value")


def entropy_errors(shifts: np.ndarray, naive: list[float], shifted: list[float]) -> None:
    """Draws the errors of both formulas over the constant added to the logits."""
    fig, ax = plt.subplots(figsize=(7, 2.6))
    ax.loglog(shifts, naive, "o-", color=WARM, label="lse - Σ p z")
    ax.loglog(shifts, shifted, "o-", color=ACCENT, label="ln s - q / s")
    ax.set(xlabel="constant added to all logits", ylabel="largest error, nats", title="Entropy in float32")
    ax.legend()
    show(fig, "Error of the entropy over the constant: lse - Σ p z grows with it, ln s - q / s does not")


def gradient(steps: np.ndarray, errors: list[float]) -> None:
    """Draws the error of central differences, and the entropy's gradient for two entries."""
    fig, axes = plt.subplots(1, 2, figsize=(7, 2.6), width_ratios=(1.2, 1))
    axes[0].loglog(steps, errors, "o-", color=ACCENT, ms=4)
    axes[0].set(xlabel="step h", ylabel="relative error", title="Central differences against the formula")
    grid = np.linspace(1e-6, 1 - 1e-6, 400)
    binary = -(grid * np.log(grid) + (1 - grid) * np.log(1 - grid))
    axes[1].plot(grid, -grid * (np.log(grid) + binary), color=ACCENT)
    axes[1].axhline(0, color=MUTED, lw=0.8)
    axes[1].set(
        xlabel="p of one of two entries", ylabel="d entropy / d logit", title="The entropy's gradient: towards ½"
    )
    show(
        fig,
        "Error of central differences over their step, lowest in the middle; the entropy's gradient over p, 0 at ½",
    )


def cache(shape: tuple[int, int], tile: int, both: dict[str, Any]) -> None:
    """Draws half a cache, and time over memory of the measured caches."""
    named = {"ours": "no cache", "ours half cache": "half", "ours full cache": "full", "materialised": "logits\nstored"}
    keys = [key for key in named if key in both]
    tokens, vocabulary = shape
    fig, axes = plt.subplots(1, 2, figsize=(7, 2.7), width_ratios=(1, 1.3))
    is_cached = np.zeros(shape)
    is_cached[:, : vocabulary // 2] = 1
    axes[0].imshow(is_cached, cmap=FADE, aspect="auto", vmin=0, vmax=1)
    edges(axes[0], vocabulary, tile, alpha=0.35)
    axes[0].text(vocabulary / 4, tokens / 2, "eᵘ kept", ha="center", va="center", color="white", weight="bold")
    axes[0].text(3 * vocabulary / 4, tokens / 2, "recomputed", ha="center", va="center", color=INK)
    axes[0].set(xlabel="vocabulary entry", ylabel="token", title="Half a cache")
    memory = [both[key]["temp_bytes"] / 2**30 for key in keys]
    time = [both[key]["ratio_to_gemm"] for key in keys]
    axes[1].plot(memory[:-1], time[:-1], "-", color=ACCENT, zorder=1)
    axes[1].scatter(memory, time, color=[ACCENT] * (len(keys) - 1) + [WARM], zorder=2)
    for x, y, key in zip(memory, time, keys, strict=True):
        axes[1].annotate(named[key], (x, y), xytext=(7, 3), textcoords="offset points")
    axes[1].axhline(3, color=MUTED, lw=0.8, ls=":")
    axes[1].set(xlabel="temporary memory, GiB", ylabel="time, in products", xlim=(0, 7.5), ylim=(2.9, 4.3),
                title="Forward + backward, 8192 × 4096 × 131,072")  # fmt: skip
    show(
        fig, "Half of the tiles kept, half recomputed; time falls from four products to three as the cache takes 2 GiB"
    )


def rounding(without: np.ndarray, cached: np.ndarray) -> None:
    """Draws the distribution of both roundings' errors."""
    fig, ax = plt.subplots(figsize=(7, 2.3))
    bins = np.linspace(-0.0042, 0.0042, 43)
    ax.hist(without, bins, histtype="step", color=WARM, lw=1.5, label=f"dz rounded: {without.std():.2e}")
    ax.hist(cached, bins, histtype="step", color=ACCENT, lw=1.5, label=f"eᵘ rounded: {cached.std():.2e}")
    ax.set(
        xlabel="relative error of dz",
        ylabel="entries",
        title="One rounding to bfloat16, here or there (standard deviation)",
    )
    ax.legend()
    show(fig, "Two histograms of relative errors, of dz rounded and of the cached exponentials rounded: they are alike")
