"""The tables and the figure at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lce_jax._types import format_bytes

if TYPE_CHECKING:
    import pathlib

    from matplotlib.axes import Axes
    from rich.console import Console

    from examples.demo.compare import Comparison
    from examples.demo.evaluate import Evaluation
    from examples.demo.rl import RlMetrics
    from examples.demo.sft import SecondRun

_STAGES = ("at the start", "after phase 1", "after phase 2")
_BLUE, _ORANGE, _GREEN, _GREY, _INK = "#7fb0e6", "#d9730d", "#2e7d4f", "#8a8f98", "#1f2933"
_STYLE: Any = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.edgecolor": "none",
}


class Curves(NamedTuple):
    """What each step of a run gave, phase by phase."""

    losses: list[float]  # nats per token
    metrics: list[RlMetrics]


def print_examples(console: Console, stages: list[Evaluation]) -> None:
    """How the model goes on from one prompt, at each stage."""
    for name, stage in zip(_STAGES, stages, strict=True):
        console.print(Panel(Text(_printable(stage.example)), title=f"a completion {name}", title_align="left"))


def _printable(text: str) -> str:
    """With a sign in place of each control character, which a model that has learnt nothing writes too."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "�" for letter in text.expandtabs(4))


def print_tables(
    console: Console, stages: list[Evaluation], real_reward: float, again: SecondRun | None, comparison: Comparison
) -> None:
    """What training changed, what the threshold changed, and what fusing changed."""
    gamed = "Short statements alone earn more reward than real text does: the loss says what that costs."
    table = Table(title="On held-out files", title_justify="left", caption=gamed, caption_justify="left")
    table.add_column("")
    for name in _STAGES:
        table.add_column(name, justify="right")
    table.add_row("loss, nats per token", *(f"{stage.loss:.3f}" for stage in stages))
    table.add_row("entropy, nats per token", *(f"{stage.entropy:.3f}" for stage in stages))
    table.add_row(f"reward (real text: {real_reward:.3f})", *(f"{stage.reward:.3f}" for stage in stages))
    console.print(table)
    if again is not None:
        console.print(_threshold_table(again))
    console.print(_comparison_table(comparison))


def _threshold_table(again: SecondRun) -> Table:
    steps = f"{len(again.losses)} steps" if len(again.losses) > 1 else "one step"
    table = Table(title=f"Phase 1 again, from the same seed, {steps}", title_justify="left")
    table.add_column("")
    table.add_column("exact", justify="right")
    table.add_column("gradient_threshold 2⁻¹²", justify="right")
    table.add_row("loss of the last tenth, nats per token", *(f"{loss:.3f}" for loss in again.last))
    table.add_row("largest difference of a step's loss", "", f"{again.difference:.1e}")
    table.add_row("probability in the tiles left out", "0", f"{again.dropped_mass:.2g}")
    return table


def _comparison_table(comparison: Comparison) -> Table:
    shape = _shape(comparison.num_tokens, comparison.hidden_size, comparison.vocab_size)
    table = Table(title=f"The head, loss and gradients: {shape} {comparison.dtype}", title_justify="left")
    table.add_column("")
    table.add_column("fused", justify="right")
    table.add_column("logits stored", justify="right")
    table.add_column("", justify="right")
    fused, stored = comparison.fused, comparison.materialised
    table.add_row(
        "peak temporary memory", format_bytes(fused.temp_bytes), format_bytes(stored.temp_bytes),
        f"{stored.temp_bytes / fused.temp_bytes:.1f}× less",
    )  # fmt: skip
    table.add_row("time", *_times(fused.seconds, stored.seconds))
    if real := comparison.real_size:
        table.add_row(f"time at {_shape(*real.shape)} bfloat16", *_times(real.fused_seconds, real.materialised_seconds))
    table.add_section()
    table.add_row("[italic]largest error against float64[/italic]")
    for name, field in (("loss", "loss"), ("log-probabilities", "logprob"), ("gradients, relative", "gradient")):
        errors = (getattr(program, f"{field}_error") for program in (fused, stored))
        table.add_row(f"  {name}", *(f"{error:.1e}" for error in errors))
    return table


def _shape(num_tokens: int, hidden_size: int, vocab_size: int) -> str:
    return f"{num_tokens:,} × {hidden_size:,} × {vocab_size:,}"


def _times(fused: float, stored: float) -> tuple[str, str, str]:
    return f"{fused * 1e3:.1f} ms", f"{stored * 1e3:.1f} ms", f"{fused / stored:.2f}× the time"


def distance(curves: Curves, stored: Curves) -> str:
    """The largest between two runs from the same seed, in words."""
    loss = np.max(np.abs(np.subtract(curves.losses, stored.losses)))
    apart = np.abs(np.subtract(curves.metrics, stored.metrics))
    reward, entropy = apart.max(axis=0)
    same = int(np.argmax(np.append(apart[:, 0] > 0, True)))
    later = "" if same == len(apart) else ": one token that is sampled otherwise changes what comes after it"
    return (
        f"With stored logits, from the same seed: in phase 1 no step's loss is further away than {loss:.2g} nats per "
        f"token; in phase 2 no reward is further away than {reward:.2g}, and no entropy than {entropy:.2g} nats. "
        f"The first {same} of {len(apart)} rewards are the same{later}."
    )


def draw(
    path: pathlib.Path,
    curves: Curves,
    stored: Curves,
    stages: list[Evaluation],
    real_reward: float,
    again: SecondRun | None,
) -> None:
    """Loss of phase 1, reward and entropy of phase 2, each with stored logits over ours; as a PNG."""
    losses, metrics = curves
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(7, 8), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1), dpi=150)
        loss, reward, entropy = figure.subplots(3)
        _curve(loss, "training batches", losses, stored.losses)
        if again is not None:
            repeated = _means(again.losses, len(losses) // 40)
            loss.plot(range(1, len(repeated) + 1), repeated, ":", color=_GREEN, label="again, gradient_threshold 2⁻¹²")
        loss.plot([0, len(losses)], [stages[0].loss, stages[1].loss], "o", color=_ORANGE, label="held-out files")
        loss.set(title="Phase 1: loss", xlabel="step", ylabel="nats per token")
        _curve(reward, "rollouts", *([step.reward for step in run.metrics] for run in (curves, stored)))
        reward.plot([0, len(metrics)], [stages[1].reward, stages[2].reward], "o", color=_ORANGE, label="held-out files")
        reward.axhline(
            real_reward, color=_GREY, linestyle="--", linewidth=1, label="real text: above it, the reward is gamed"
        )
        reward.set(title="Phase 2: reward", xlabel="step", ylabel="share of tokens on statements", ylim=(0, None))
        _curve(entropy, "policy on its rollouts", *([step.entropy for step in run.metrics] for run in (curves, stored)))
        entropy.set(title="Phase 2: entropy", xlabel="step", ylabel="nats per token", ylim=(0, None))
        for axes in (loss, reward, entropy):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.legend()
        figure.savefig(path)


def _curve(axes: Axes, label: str, values: list[float], stored: list[float]) -> None:
    """Every value, faint, and its mean over a twentieth of the run; over it the mean with stored logits."""
    steps, reach = np.arange(1, len(values) + 1), len(values) // 40
    axes.plot(steps, values, color=_BLUE, alpha=0.5, linewidth=1)
    axes.plot(steps, _means(values, reach), color=_BLUE, linewidth=4, label=label)
    axes.plot(steps, _means(stored, reach), "--", color=_INK, linewidth=1.2, label=f"{label}, logits stored")


def _means(values: list[float], reach: int) -> list[float]:
    """Of each value and the ``reach`` values on either side."""
    return [float(np.mean(values[max(0, i - reach) : i + reach + 1])) for i in range(len(values))]
