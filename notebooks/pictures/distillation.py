"""The figures of ``07_distillation_and_thresholds.ipynb``."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from .style import ACCENT, FADE, GREEN, INK, MUTED, WARM, show


def mass(by_token: np.ndarray, vocabulary: int) -> None:
    """Draws the probability of the k most likely entries, for some tokens and on average."""
    fig, ax = plt.subplots(figsize=(7, 2.6))
    k = np.arange(1, by_token.shape[1] + 1)
    ax.plot(k, by_token[:60].T, color=MUTED, lw=0.5, alpha=0.5)
    ax.plot(k, by_token.mean(0), color=ACCENT, lw=2, label="mean of the tokens")
    ax.set_xscale("log", base=2)
    title = f"What the k most likely of {vocabulary:,} entries hold"
    ax.set(xlabel="k", ylabel="share of probability", title=title, ylim=(0, 1.02))
    ax.legend()
    show(
        fig,
        "Share of the probability that the k most likely entries hold, over k: faint lines of tokens and their mean",
    )


def students(runs: dict[str, Any]) -> None:
    """Draws the exact divergence over the steps, for each objective."""
    fig, ax = plt.subplots(figsize=(7, 2.9))
    for (name, (_, curve)), color in zip(runs.items(), (WARM, MUTED, GREEN, ACCENT), strict=True):
        ax.plot(curve, color=color, lw=1.8, label=f"{name}: {curve[-1]:.2f}")
    first = next(iter(runs.values()))[1][0]
    ax.set(xlabel="step", ylabel="exact KL(teacher ‖ student), nats", title="Trained on", ylim=(0, 1.6 * first))
    ax.legend()
    show(
        fig,
        "Divergence from the teacher over the steps: the more of the vocabulary an objective sees, the lower it ends",
    )


def entropies(by_model: dict[str, Any]) -> None:
    """Draws histograms of the entropies of teacher and students."""
    fig, ax = plt.subplots(figsize=(7, 2.4))
    for (name, values), color in zip(by_model.items(), (MUTED, ACCENT, WARM), strict=True):
        label = f"{name}: {values.mean():.2f}"
        ax.hist(np.asarray(values), np.linspace(0, 8, 49), histtype="step", lw=1.6, color=color, label=label)
    ax.set(xlabel="entropy, nats", ylabel="tokens", title="Entropy of the tokens (mean)", ylim=(0, 78))
    ax.legend()
    show(
        fig,
        "Histograms of the tokens' entropies: the forward KL's student lies above the teacher, the reverse KL's below",
    )


def threshold(
    largest: np.ndarray, thresholds: np.ndarray, shares: dict[str, list[float]], columns: int, rows: int, entropy: float
) -> None:
    """Draws the largest probability of each tile, and what a threshold leaves out."""
    fig, axes = plt.subplots(1, 2, figsize=(7.4, 2.8), width_ratios=(1, 1.2))
    image = axes[0].imshow(np.log2(largest), aspect="auto", cmap=FADE, vmin=-20, vmax=0, interpolation="nearest")
    axes[0].set(xlabel=f"tile of {columns} entries", ylabel=f"tile of {rows} tokens", yticks=range(len(largest)),
                title="log₂ of the largest p of each tile")  # fmt: skip
    fig.colorbar(image, ax=axes[0], pad=0.02)
    for (label, values), color in zip(shares.items(), (ACCENT, WARM, INK), strict=True):
        axes[1].plot(thresholds, values, "o-", color=color, ms=3, label=label)
    axes[1].axvline(2**-12, color=MUTED, lw=0.8, ls=":")
    axes[1].set_xscale("log", base=2)
    axes[1].set(
        xlabel="threshold (dotted: 2⁻¹²)", ylabel="share", title=f"At a mean entropy of {entropy:.1f} nats", ylim=(0, 1)
    )
    axes[1].legend(fontsize=8)
    show(
        fig,
        "The largest probability of each tile; over the threshold, the tiles left out, their probability and the error",
    )
