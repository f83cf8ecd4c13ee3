"""The diffs of docs/migration.md: both sides as programs, and what they compute."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch

PAGE = (Path(__file__).parents[2] / "docs" / "migration.md").read_text()


def side(diff: str, marks: str) -> str:
    """Returns the lines of a diff that begin with one of ``marks``, without the mark."""
    return "".join(line[1:] or "\n" for line in diff.splitlines(keepends=True) if line[:1] in (*marks, "\n"))


def sides() -> dict[str, tuple[str, str]]:
    """Returns the programs before and after, by section."""
    diffs = re.findall(r"^## ([^\n]+)\n(?:(?!^## ).)*?^```diff\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return {section: (side(diff, " -"), side(diff, " +")) for section, diff in diffs}


DIFFS = sides()


def results(code: str) -> list[np.ndarray]:
    """Runs a program. Returns its loss, and the gradients in hidden and weight."""
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "migration"}
    exec(compile(code, "docs/migration.md", "exec"), names)
    if "gradients" in names:
        return [np.asarray(x, np.float64) for x in jax.tree.leaves((names["loss"], names["gradients"]))]
    return [x.detach().double().numpy() for x in (names["loss"], names["hidden"].grad, names["weight"].grad)]


def distance(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))
