"""Colours and settings of all figures, and how a notebook shows one."""

from __future__ import annotations

import matplotlib.pyplot as plt
from IPython.display import display
from matplotlib.figure import Figure

INK, MUTED, ACCENT, LIGHT, WARM, GREEN = "#1f2933", "#8a94a0", "#0b6e99", "#7fb8d1", "#d9730d", "#3f7d20"

plt.rcParams.update(
    {
        "figure.dpi": 110, "figure.constrained_layout.use": True, "axes.spines.top": False, "axes.spines.right": False,
        "axes.titlelocation": "left", "axes.titlesize": 10, "font.size": 9, "legend.frameon": False,
    }
)  # fmt: skip


def show(figure: Figure, alt: str) -> None:
    """Shows a figure under its cell. ``alt`` says in words what it shows, to those who cannot see it."""
    display(figure, metadata={"image/png": {"alt": alt}})
    plt.close(figure)
