"""Prints the tables and draws the figure at the end of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lce_jax.types.scalars import format_bytes

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


def print_examples(console: Console, stages: list[Evaluation]) -> None:
    """Prints a completion of the same prompt at each stage."""
    for name, stage in zip(_STAGES, stages, strict=True):
        console.print(Panel(Text(_printable(stage.example)), title=f"a completion {name}", title_align="left"))


def _printable(text: str) -> str:
    """Replaces control characters, which an untrained model writes too, by a replacement character."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "�" for letter in text.expandtabs(4))


def print_tables(
    console: Console,
    stages: list[Evaluation],
    real_reward: float,
    stored_run: SecondRun,
    threshold_run: SecondRun | None,
    comparison: Comparison,
) -> None:
    """Prints the effects of training, of other losses of the head, and of the fused head."""
    note = "Short statements alone earn more reward than real text does. The loss shows the cost of that."
    table = Table(title="On held-out files", title_justify="left", caption=note, caption_justify="left")
    table.add_column("")
    for name in _STAGES:
        table.add_column(name, justify="right")
    table.add_row("loss, nats per token", *(f"{stage.loss:.3f}" for stage in stages))
    table.add_row("entropy, nats per token", *(f"{stage.entropy:.3f}" for stage in stages))
    table.add_row(f"reward (real text: {real_reward:.3f})", *(f"{stage.reward:.3f}" for stage in stages))
    console.print(table)
    console.print(_losses_table(stored_run, threshold_run))
    console.print(_comparison_table(comparison))


def _losses_table(stored_run: SecondRun, threshold_run: SecondRun | None) -> Table:
    count = len(stored_run.losses)
    steps = f"the same {count} steps" if count > 1 else "the same step"
    table = Table(title=f"Phase 1: {steps} from the same seed", title_justify="left")
    table.add_column("")
    runs = [stored_run]
    names = ["fused", "logits stored"]
    if threshold_run is not None:
        runs.append(threshold_run)
        names.append("gradient_threshold 2⁻¹²")
    for name in names:
        table.add_column(name, justify="right")
    last = (stored_run.last[0], *(run.last[1] for run in runs))
    table.add_row("loss of the last tenth, nats", *(f"{loss:.3f}" for loss in last))
    table.add_row("largest difference of a step's loss", "", *(f"{run.difference:.1e}" for run in runs))
    if threshold_run is not None:
        table.add_row("probability in the tiles left out", "0", "0", f"{threshold_run.dropped_mass:.2g}")
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


def draw(
    path: pathlib.Path,
    metrics: list[RlMetrics],
    stages: list[Evaluation],
    real_reward: float,
    stored_run: SecondRun,
    threshold_run: SecondRun | None,
) -> None:
    """Draws a PNG: the loss of phase 1, also with stored logits, and the reward and entropy of phase 2."""
    losses = stored_run.fused
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(7, 8), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1), dpi=150)
        loss, reward, entropy = figure.subplots(3)
        _curve(loss, "training batches", losses)
        _second_curve(loss, "training batches, logits stored", stored_run.losses, "--", _INK)
        if threshold_run is not None:
            name = "training batches, gradient_threshold 2⁻¹²"
            _second_curve(loss, name, threshold_run.losses, ":", _GREEN)
        loss.plot([0, len(losses)], [stages[0].loss, stages[1].loss], "o", color=_ORANGE, label="held-out files")
        loss.set(title="Phase 1: loss", xlabel="step", ylabel="nats per token")
        _curve(reward, "rollouts", [step.reward for step in metrics])
        reward.plot([0, len(metrics)], [stages[1].reward, stages[2].reward], "o", color=_ORANGE, label="held-out files")
        reward.axhline(
            real_reward, color=_GREY, linestyle="--", linewidth=1, label="real text: above it, the reward is gamed"
        )
        reward.set(title="Phase 2: reward", xlabel="step", ylabel="share of tokens on statements", ylim=(0, None))
        _curve(entropy, "policy on its rollouts", [step.entropy for step in metrics])
        entropy.set(title="Phase 2: entropy", xlabel="step", ylabel="nats per token", ylim=(0, None))
        for axes in (loss, reward, entropy):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.legend()
        figure.savefig(path)


def _curve(axes: Axes, label: str, values: list[float]) -> None:
    """Draws every value faintly, and over it the mean of each twentieth of the run."""
    steps = range(1, len(values) + 1)
    axes.plot(steps, values, color=_BLUE, alpha=0.5, linewidth=1)
    axes.plot(steps, _means(values), color=_BLUE, linewidth=4, label=label)


def _second_curve(axes: Axes, label: str, values: list[float], style: str, colour: str) -> None:
    axes.plot(range(1, len(values) + 1), _means(values), style, color=colour, linewidth=1.2, label=label)


def _means(values: list[float]) -> list[float]:
    """Returns a moving mean over a twentieth of the run."""
    reach = len(values) // 40
    return [float(np.mean(values[max(0, i - reach) : i + reach + 1])) for i in range(len(values))]
