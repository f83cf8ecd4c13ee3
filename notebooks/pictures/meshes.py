"""The figure of ``04_tensor_parallel.ipynb``."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from .style import ACCENT, MUTED, WARM, show


def sent(results: dict[str, tuple[dict[str, int], dict[str, int], float]], logits_bytes: float) -> None:
    """Draws what each program sends, by collective."""
    kinds = {"all-gather": ACCENT, "all-reduce": WARM, "reduce-scatter": MUTED}
    fig, axes = plt.subplots(1, 2, figsize=(7.4, 2.5), sharey=True)
    for ax, index, title in ((axes[0], 0, "forward"), (axes[1], 1, "forward + backward")):
        left: Any = np.zeros(len(results))
        for kind, color in kinds.items():
            values = np.array([result[index].get(kind, 0) / 1024 for result in results.values()])
            ax.barh(list(results), values, left=left, color=color, label=kind, height=0.6)
            left += values
        ax.set(title=title, xlabel="KiB per device")
        ax.xaxis.set_major_formatter("{x:,.0f}")
    axes[0].invert_yaxis()
    axes[1].legend(loc="center right", fontsize=8)
    title = f"What is sent; the logits of one data group would be {logits_bytes / 2**20:.0f} MiB"
    fig.suptitle(title, x=0.01, ha="left", fontsize=10)
    show(fig, "KiB that one device receives, by collective, for four ways to split: the table above as bars")
