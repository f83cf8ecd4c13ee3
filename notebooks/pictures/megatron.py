"""The figures of ``05_pytorch_megatron.ipynb``."""

from __future__ import annotations

import math

import matplotlib.pyplot as plt

from .style import ACCENT, MUTED, WARM, show


def gradients(differences: dict[str, float]) -> None:
    """Draws the difference of each parameter's gradient, relative to its norm."""
    short = [
        name.replace("decoder.", "").replace("self_attention.", "attn.").replace("weight", "w") for name in differences
    ]
    fig, ax = plt.subplots(figsize=(7, 0.19 * len(short) + 0.8))
    ax.barh(short, list(differences.values()), color=ACCENT, height=0.65)
    ax.axvline(2**-23, color=WARM, lw=1, ls=":")
    ax.text(2**-23 * 1.05, -1.2, "float32's ε", color=WARM, fontsize=8, va="bottom")
    ax.set(xscale="log", xlim=(1e-9, 1e-5), xlabel="‖ours − stock‖ / ‖stock‖", title="Gradient of every parameter")
    ax.invert_yaxis()
    ax.tick_params(axis="y", labelsize=7)
    show(fig, "A bar for each parameter: its gradient differs from that of stored logits by about float32's rounding")


def grpo(curve: list[tuple[float, float]], vocabulary: int) -> None:
    """Draws reward and entropy over the steps."""
    fig, axes = plt.subplots(1, 2, figsize=(7, 2.5))
    steps = range(1, len(curve) + 1)
    axes[0].plot(steps, [c[0] for c in curve], color=ACCENT, lw=1.8)
    axes[0].set(xlabel="step", ylabel="share of distinct even tokens", title="Reward", ylim=(0, 1.02))
    axes[1].plot(steps, [c[1] for c in curve], color=ACCENT, lw=1.8)
    uniform = math.log(vocabulary)
    axes[1].axhline(uniform, color=MUTED, lw=0.8, ls=":")
    axes[1].annotate(f"uniform over {vocabulary}", (len(curve), uniform), xytext=(0, 3), textcoords="offset points",
                     ha="right", fontsize=8, color=MUTED)  # fmt: skip
    axes[1].set(xlabel="step", ylabel="nats per token", title="Entropy of the policy", ylim=(0, 6.8))
    show(fig, "Over the steps of GRPO the reward rises, and the policy's entropy falls from that of a uniform choice")
