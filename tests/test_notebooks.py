"""Notebooks as readers meet them: with outputs, run from top to bottom, free of warnings and of anyone's paths.

``pytest --nbmake notebooks`` checks that they still run.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
LOCAL_PATH = re.compile(r"(?<![\w./:-])/(?:home|root|tmp|usr|var|opt|mnt|work|workspace|Users|private)/|[A-Z]:\\")


def code_cells(path):
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def outputs(path):
    return [output for cell in code_cells(path) for output in cell["outputs"]]


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_was_run_from_top_to_bottom(path):
    counts = [cell["execution_count"] for cell in code_cells(path)]
    assert counts == list(range(1, len(counts) + 1))
    assert outputs(path)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_shows_neither_warnings_nor_errors(path):
    for output in outputs(path):
        assert output["output_type"] != "error", output["ename"]
        assert output.get("name") != "stderr", output["text"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_shows_no_path_of_the_machine_it_ran_on(path):
    shown = [output.get("text") or output.get("data", {}).get("text/plain", []) for output in outputs(path)]
    found = [line for text in shown for line in ([text] if isinstance(text, str) else text) if LOCAL_PATH.search(line)]
    assert not found
