"""Colours and settings of all figures, and how a notebook shows one.

A page may be light or dark, so a figure has no background, and each colour stands out from both.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
from IPython.display import display
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

INK, MUTED, ACCENT, LIGHT = "#757d87", "#8a94a0", "#0f7cb0", "#459bca"
WARM, GREEN, RED = "#cc6a08", "#478c24", "#d14a3a"
FADE = LinearSegmentedColormap.from_list("fade", [f"{ACCENT}00", f"{ACCENT}ff"])  # from the page's colour to ours
BLEND = LinearSegmentedColormap.from_list("blend", [ACCENT, "#8d67ad", WARM])  # neither end is a page's colour

_OF_INK = "text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color"
_NONE = "figure.facecolor", "axes.facecolor", "savefig.facecolor"
plt.rcParams.update(
    {
        "figure.dpi": 110, "figure.constrained_layout.use": True, "axes.spines.top": False, "axes.spines.right": False,
        "axes.titlelocation": "left", "axes.titlesize": 10, "font.size": 9, "legend.frameon": False,
        **dict.fromkeys(_OF_INK, INK), **dict.fromkeys(_NONE, "none"),
    }
)  # fmt: skip


def show(figure: Figure, alt: str) -> None:
    """Shows a figure under its cell. ``alt`` says in words what it shows, to those who cannot see it."""
    display(figure, metadata={"image/png": {"alt": alt}})
    plt.close(figure)
