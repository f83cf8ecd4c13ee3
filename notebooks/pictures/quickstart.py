"""The figure of ``01_quickstart_flax.ipynb``."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt

from .style import ACCENT, INK, MUTED, show


def memory(vocabularies: Sequence[int], stored: Sequence[int], tiled: Sequence[int]) -> None:
    """Draws bytes over the size of the vocabulary, both on logarithmic axes."""
    fig, ax = plt.subplots(figsize=(7, 3.5))
    for series, color, name in ((stored, MUTED, "with logits"), (tiled, ACCENT, "linear_logprobs")):
        ax.plot(vocabularies, series, "o-", color=color, lw=2, ms=4.5)
        ax.annotate(name, (vocabularies[-1], series[-1]), xytext=(0, 9), textcoords="offset points",
                    color=color, ha="right", fontweight="bold")  # fmt: skip
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.set_xticks(vocabularies, [f"{v // 1024}k" for v in vocabularies])
    ax.set_yticks([2**k for k in (24, 27, 30, 33)], ["16 MiB", "128 MiB", "1 GiB", "8 GiB"])
    ax.set_ylim(2**24, 2**35)
    ax.minorticks_off()
    ax.grid(axis="y", color=INK, lw=0.8, alpha=0.3)
    ax.set_axisbelow(True)
    ax.tick_params(length=0, colors=INK)
    ax.set(xlabel="vocabulary", title="Temporary memory of value_and_grad, 4,096 tokens, hidden size 1,024, float32")
    show(fig, "Temporary memory over the vocabulary: with logits a rising line, with linear_logprobs a flat one")
