"""The figures of ``03_sft_and_grpo.ipynb``."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from .style import ACCENT, BLEND, INK, MUTED, WARM, show


def fine_tuning(losses: list[float], evaluations: list[tuple[int, float, float]]) -> None:
    """Draws the loss of each batch, and loss and entropy on held-out files."""
    fig, ax = plt.subplots(figsize=(7, 2.8))
    steps, held_out, entropy = zip(*evaluations, strict=True)
    ax.plot(losses, color=MUTED, lw=1, label="loss, training batches")
    ax.plot(steps, held_out, "o-", color=WARM, ms=4, label="loss, held-out files")
    ax.plot(steps, entropy, "s--", color=ACCENT, ms=4, label="entropy, held-out files")
    ax.set(xlabel="step", ylabel="nats per token", title="Phase 1")
    ax.legend()
    show(
        fig, "Loss and entropy in nats per token over the steps of fine-tuning: all fall, and come close to each other"
    )


def masked(logprobs: Any, entropy: Any, where: np.ndarray) -> None:
    """Draws log-probability and entropy of each token of a rollout. Tokens that do not count are empty."""
    fig, axes = plt.subplots(1, 2, figsize=(7, 2.6), sharey=True)
    pictures = (logprobs, "log-probability", (-8, 0)), (entropy, "entropy", (0, 8))
    for ax, (values, name, (low, high)) in zip(axes, pictures, strict=True):
        shown = np.ma.masked_where(~where, np.asarray(values))
        image = ax.imshow(shown, cmap=BLEND, aspect="auto", vmin=low, vmax=high)
        ax.set(xlabel="position", title=f"{name}, nats (empty: where=False)", yticks=range(0, len(where), 5))
        fig.colorbar(image, ax=ax, pad=0.02)
    axes[0].set_ylabel("sequence")
    show(
        fig,
        "Log-probability and entropy of sixteen rollouts, token by token: prompts and what follows an end are empty",
    )


def bonuses(curves: dict[float, np.ndarray]) -> None:
    """Draws reward and entropy over the steps, a line for each entropy bonus."""
    fig, axes = plt.subplots(1, 2, figsize=(7, 2.8))
    for (bonus, curve), color in zip(curves.items(), (WARM, INK, ACCENT), strict=False):
        for ax, column in zip(axes, (0, 1), strict=True):
            ax.plot(range(1, len(curve) + 1), curve[:, column], color=color, lw=1.6, label=f"bonus {bonus}")
    for ax in axes:
        ax.xaxis.get_major_locator().set_params(integer=True)
    axes[0].set(xlabel="step", ylabel="share of tokens on statements", title="Phase 2: reward of the rollouts")
    axes[1].set(xlabel="step", ylabel="nats per token", title="Phase 2: entropy of the policy")
    axes[1].legend()
    show(fig, "Reward and entropy of the policy over the steps of GRPO, for three entropy bonuses")
