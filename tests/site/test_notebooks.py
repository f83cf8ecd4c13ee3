"""Notebooks as readers meet them: with outputs, run from top to bottom, free of warnings and of anyone's paths.

They are run again here, in small form: a process each, which executes their cells.
"""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.site.test_figures import script

pytestmark = pytest.mark.site
NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
LOCAL_PATH = re.compile(r"(?<![\w./:-])/(?:home|root|tmp|usr|var|opt|mnt|work|workspace|Users|private)/|[A-Z]:\\")


# What is written in place of what, each once in its notebook.
SMALL = {
    "01_quickstart_flax": {
        "T, H, V = 1024, 256, 32768": "T, H, V = 64, 64, 4096",
        "range(13, 19)": "range(13, 15)",
        "range(31)": "range(3)",
        "range(0, 31, 10)": "range(3)",
    },
    "03_sft_and_grpo": {
        "VOCABULARY = 4000": "VOCABULARY = 600",
        "EVERY = 3 ": "EVERY = 20 ",
        "SFT_STEPS = 120": "SFT_STEPS = 2",
        "RL_STEPS = 14": "RL_STEPS = 1",
        "dtype=jnp.bfloat16)": "dtype=jnp.bfloat16, num_layers=1)",
        "(0.0, 0.01, 0.05)": "(0.0, 0.05)",
        "rng, 8, 129)": "rng, 4, 33)",
        "rng, 32, 129)": "rng, 4, 33)",
        "rl.RlConfig(RL_STEPS, prompts=8, ": "rl.RlConfig(RL_STEPS, prompts=2, group=2, ",
    },
    "04_tensor_parallel": {"B, S, H, V = 8, 64, 128, 8192": "B, S, H, V = 8, 64, 32, 1024"},
    "05_pytorch_megatron": {"STEPS = 30": "STEPS = 1"},
    "07_distillation_and_thresholds": {
        "STEPS = 150": "STEPS = 3",
        "T, V, TEACHER, STUDENT = 512, 4096,": "T, V, TEACHER, STUDENT = 64, 1024,",
        "N, WIDE, ROWS, COLUMNS = 512, 32768,": "N, WIDE, ROWS, COLUMNS = 256, 4096,",
    },
}


SELDOM = "import gc; gc.set_threshold(50_000, 20, 20)\n"  # as in conftest.py


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


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_page_says_what_each_picture_shows(path):
    text, pictures = script("notebooks").page(path)
    described = re.findall(r"!\[([^\]]*)\]\((\S+)\)", text)
    assert {name for _, name in described} == set(pictures)
    assert all(len(words.split()) >= 8 for words, _ in described)
    assert f"[download]({path.name})" in text


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_pictures_of_characters_are_as_narrow_as_their_place(path):
    """Lines of ``pre`` in HTML are not broken: docs/assets/site.css says how many characters fit."""
    (fits,) = re.findall(r"(\d+) characters fit", (path.parents[1] / "docs" / "assets" / "site.css").read_text())
    for output in outputs(path):
        for block in re.findall(r"<pre.*?</pre>", "".join(output.get("data", {}).get("text/html", [])), re.DOTALL):
            assert max(map(len, html.unescape(re.sub("<.*?>", "", block)).splitlines())) <= int(fits)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_small_enough_to_ship(path):
    assert path.stat().st_size < 400_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path):
    """Without a kernel: no cell uses more than Python."""
    code = "\n".join("".join(cell["source"]) for cell in code_cells(path))
    for written, small in SMALL.get(path.stem, {}).items():
        assert code.count(written) == 1, written
        code = code.replace(written, small)
    given = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}  # a notebook sets its own
    environment = given | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SELDOM + code]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=path.parent, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
