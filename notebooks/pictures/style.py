"""Colours and settings of all figures, and the function that shows a figure.

A page may be light or dark, so a figure has no background, and each colour stands out from both.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
from IPython.display import display
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

INK, MUTED, ACCENT, LIGHT = "#757d87", "#8a94a0", "#0f7cb0", "#459bca"
WARM, GREEN, RED = "#cc6a08", "#478c24", "#d14a3a"
FADE = LinearSegmentedColormap.from_list("fade", [f"{ACCENT}00", f"{ACCENT}ff"])  # from the page's colour to the accent
BLEND = LinearSegmentedColormap.from_list("blend", [ACCENT, "#8d67ad", WARM])  # no colour is a page's

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
    """Shows a figure under its cell. ``alt`` describes the figure for readers who cannot see it."""
    display(figure, metadata={"image/png": {"alt": alt}})
    plt.close(figure)
