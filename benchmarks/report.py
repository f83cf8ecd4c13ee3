"""The measurements of heads for people and for the file: a table per shape, the bounds in plain words, and rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.run import Measurement, Row
from benchmarks.shapes import DIRECTIONS, GEMM, bounds
from lce_jax._plans import format_bytes

MIN_WIDTH = 160  # columns of a table that is piped or logged, without a terminal


def console() -> Console:
    """Standard output, wide enough for the table even if it is not a terminal."""
    out = Console()
    return out if out.is_terminal else Console(width=max(out.width, MIN_WIDTH))


def table(measured: Measurement) -> Table:
    """The rows of one shape, a section per direction."""
    out = Table(
        title=f"{measured.shape}, {measured.dtype}" + (", text-like" if measured.data == "text" else ""),
        caption="temp: memory beyond operands and results (the bare GEMM's result is the logits)"
        + ("; off: distance from the gradient in float32, relative" if measured.data == "text" else ""),
        title_justify="left",
        caption_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    out.add_column("")
    of_threshold = ("skipped", "dropped", "off dhidden", "off dweight") if measured.data == "text" else ()
    for heading in ("ms", "±", "÷ GEMM", "÷ stored", "TFLOP/s", "temp", "compile s", *of_threshold):
        out.add_column(heading, justify="right", no_wrap=True)
    for direction in DIRECTIONS:
        rows = [row for row in measured.rows if row.direction == direction]
        if rows and direction != GEMM:
            out.add_row(f"[italic]{direction.replace('+', ' + ')}[/italic]")
        for row in rows:
            out.add_row(*_cells(measured, row), style="bold cyan" if row.key.startswith("ours") else "")
        out.add_section()
    return out


def _cells(measured: Measurement, row: Row) -> tuple[str, ...]:
    tflops = measured.useful_flops(row) / row.median / 1e12
    return (
        row.label if row.direction == GEMM else f"  {row.label}",
        f"{row.median * 1e3:,.2f}",
        f"{row.spread:.1%}",
        _times(measured.ratio(row, "gemm", GEMM)),
        _times(measured.ratio(row, "materialised", row.direction)),
        f"{tflops:,.1f}" if tflops >= 10 else f"{tflops:.3f}",
        format_bytes(row.temp_bytes),
        f"{row.compile_seconds:.1f}",
        *_of_threshold(measured, row),
    )


def _of_threshold(measured: Measurement, row: Row) -> list[str]:
    """What the row leaves out, and how far its gradients lie from those in float32."""
    if measured.data != "text":
        return []
    return [_share(x) for x in (row.skipped, row.dropped_mass, row.errors.get("dhidden"), row.errors.get("dweight"))]


def _share(x: float | None) -> str:
    return "–" if x is None else f"{x:.2%}"


def _times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}"


def left_out(measured: Measurement, before: Sequence[Measurement] = ()) -> list[str]:
    """A line per reason with the candidates that it excludes, unless an earlier shape had the same."""
    reasons: dict[str, list[str]] = {}
    for name, reason in measured.left_out.items():
        if all(one.left_out.get(name) != reason for one in before):
            reasons.setdefault(reason, []).append(name)
    return [f"not timed: {', '.join(names)}: {reason}" for reason, names in reasons.items()]


def held_bounds(measured: Measurement, where: dict[str, str]) -> list[str]:
    """In plain words, the project's bounds for this shape on this device: what was measured, and whether it holds."""
    lines = []
    kinds = (where["platform"], where["device_kind"], measured.data)
    for one in bounds(measured.shape, measured.dtype, *kinds):
        row, other = measured.row(*one.row), measured.row(*one.baseline)
        name = " ".join(one.row)
        if row is None or other is None:
            lines.append(f"{name}: not measured (bound {one.limit:.2f}x {other.label if other else one.baseline[0]})")
            continue
        ratio = row.median / other.median
        limit = one.limit if row.skipped is None else one.limit - one.per_skipped * row.skipped
        verdict = "holds" if ratio <= limit else "DOES NOT HOLD"
        lines.append(f"{name}: {ratio:.2f}x {other.label} (bound {limit:.2f}x): {verdict}")
    return lines


def as_rows(measured: Measurement) -> dict[str, dict[str, Any]]:
    """Everything measured of a shape, as plain data; what was left out is there with the reason."""
    left_out = {name: {"left_out": reason} for name, reason in measured.left_out.items()}
    return left_out | {f"{row.label}, {row.direction}": _as_dict(measured, row) for row in measured.rows}


def _as_dict(measured: Measurement, row: Row) -> dict[str, Any]:
    return dataclasses.asdict(row) | {
        "median_seconds": row.median,
        "useful_flops_per_second": measured.useful_flops(row) / row.median,
        "ratio_to_gemm": measured.ratio(row, "gemm", GEMM),
        "ratio_to_materialised": measured.ratio(row, "materialised", row.direction),
    }
