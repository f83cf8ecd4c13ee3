"""``python docs/_build/tables.py``: writes the tables of README.md and of the pages from ``benchmarks/*.json``.

``support.json`` in this folder says what has run where. ``bench_tables.py`` makes the tables of the bench's rows.

A table stands between ``<!-- table: NAME -->`` and ``<!-- /table -->``. A test checks that they are up to date.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import bench_tables
import bounds
import memory
from bench_tables import LIGER, ROOT, Run, load, markdown, measured_by

import lce_jax
import lce_torch_bridge

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "recipes").glob("*.md"))]
PLACE = re.compile(r"(<!-- table: (.+?) -->\n)(.*?)(<!-- /table -->)", re.DOTALL)
VERSIONS = {"torch": "PyTorch", "triton": "Triton", "cuda": "CUDA", **LIGER}  # that a recorded run may name after JAX


def errors(run: Run) -> str:
    """Returns a table of the errors of results and gradients, a row per dtype and way to compute."""
    rows = [[name, *(f"{error:.1e}" for error in numbers)] for name, *numbers in run["rows"]]
    return markdown(run["columns"], rows)


def recorded(run: Run) -> str:
    """Returns the table of a recorded run."""

    def cell(value: Any) -> str:
        if isinstance(value, list):
            return ", ".join(f"{number}" for number in value)
        return "–" if value is None else value if isinstance(value, str) else f"{value:g}"

    return markdown(run["columns"], [[cell(value) for value in row] for row in run["rows"]], run.get("left", 2))


def provenance(run: Run, file: str) -> str:
    """Returns device, versions, date, command and file of a run that names its command."""
    return measured_by(run, run["command"], file, VERSIONS)


def functions() -> str:
    """Returns a table of every public function and the packages that have it."""
    by_name = {name: [name in module.__all__ for module in (lce_jax, lce_torch_bridge)] for name in public_functions()}
    rows = [[f"`{name}`", *("yes" if has else "–" for has in each)] for name, each in sorted(by_name.items())]
    return markdown(["function", "`lce_jax`", "`lce_torch_bridge`"], rows, left=3)


def public_functions() -> set[str]:
    """Returns the names of public functions in both packages."""
    modules = (lce_jax, lce_torch_bridge)
    return {name for each in modules for name in each.__all__ if inspect.isfunction(getattr(each, name))}


def options() -> str:
    """Returns a table of the keyword arguments of `linear_logprobs` and their defaults."""
    parameters = [inspect.signature(module.linear_logprobs).parameters for module in (lce_jax, lce_torch_bridge)]
    names = [name for each in parameters for name, x in each.items() if x.kind is x.KEYWORD_ONLY]
    rows = [
        [f"`{name}`", *(f"`{each[name].default!r}`" if name in each else "–" for each in parameters)]
        for name in dict.fromkeys(names)
    ]
    return markdown(["option", "`lce_jax`", "`lce_torch_bridge`"], rows, left=3)


def tables() -> dict[str, str]:
    """Returns all tables by name."""
    accuracy, tpu = load("accuracy"), load("tpu")
    support = json.loads((ROOT / "docs" / "_build" / "support.json").read_text())
    made = {
        "functions": functions(),
        "options": options(),
        "support": recorded(support),
        "bounds": bounds.bounds(),
        "memory": memory.first_choice(),
        "errors": errors(accuracy),
        "errors by": provenance(accuracy, "accuracy"),
        "tpu": recorded(tpu),
        "tpu by": f"libtpu {tpu['device']['libtpu']}; {provenance(tpu, 'tpu')}",
    }
    for name in ("install", "frameworks"):
        made |= {name: recorded(load(name)), f"{name} by": provenance(load(name), name)}
    for name, run in load("recorded")["runs"].items():
        made |= {name: recorded(run), f"{name} by": provenance(run, "recorded")}
    return made | bench_tables.made()


def source_of(by: str) -> str:
    """Returns the file that a line of provenance names."""
    return re.findall(r"`(benchmarks/\w+\.json)`", by)[-1]


def render(page: Path, made: dict[str, str]) -> str:
    """Returns the text of a page with its tables up to date."""
    return PLACE.sub(lambda match: f"{match[1]}{made[match[2]]}\n{match[4]}", page.read_text())


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(render(path, tables()))
