"""The notebooks have outputs, ran from top to bottom, and show no warnings and no paths of a machine.

A test runs their cells again at a small size, each notebook in its own process.
"""

from __future__ import annotations

import base64
import html
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from tests.site.test_figures import script

pytestmark = pytest.mark.site
NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
LOCAL_PATH = re.compile(r"(?<![\w./:-])/(?:home|root|tmp|usr|var|opt|mnt|work|workspace|Users|private)/|[A-Z]:\\")


# The text that the small run replaces, and its replacement. Each occurs once in its notebook.
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
        "rng, 8, 128)": "rng, 4, 32)",
        "rng, 32, 128)": "rng, 4, 32)",
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


def characters_that_fit(path):
    """Returns how many characters fit in a line of a page, as docs/assets/site.css says."""
    (fits,) = re.findall(r"(\d+) characters fit", (path.parents[1] / "docs" / "assets" / "site.css").read_text())
    return int(fits)


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
    lines = [line for text in shown for line in ([text] if isinstance(text, str) else text) if LOCAL_PATH.search(line)]
    assert not lines


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_page_says_what_each_picture_shows(path):
    text, pictures = script("notebooks").page(path)
    described = re.findall(r"!\[([^\]]*)\]\((\S+)\)", text)
    assert {name for _, name in described} == set(pictures)
    assert all(len(words.split()) >= 8 for words, _ in described)
    assert f"[download]({path.name})" in text


def luminance(color):
    """Returns the luminance by the Web Content Accessibility Guidelines, from 0 to 1."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_every_color_of_the_pictures_stands_out_from_light_and_dark_pages():
    """The guidelines ask for a contrast of 3:1, here against white and the site's dark page."""
    sources = "".join(path.read_text() for path in (NOTEBOOKS[0].parent / "pictures").glob("*.py"))
    colors = set(re.findall(r"#[0-9a-f]{6}\b", sources))
    assert len(colors) >= 5
    pages = [luminance(page) for page in ("#ffffff", "#1e2129")]
    for color in colors:
        for low, high in (sorted((luminance(color), page)) for page in pages):
            assert (high + 0.05) / (low + 0.05) >= 3, color


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_pictures_have_no_background(path):
    encoded = [output["data"]["image/png"] for output in outputs(path) if "image/png" in output.get("data", {})]
    for picture in encoded:
        alpha = matplotlib.image.imread(io.BytesIO(base64.b64decode("".join(picture))))[..., 3]
        assert not np.concatenate([alpha[0], alpha[-1], alpha[:, 0], alpha[:, -1]]).any()
        assert (alpha == 0).mean() > 0.2


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_line_of_a_printed_table_is_broken(path):
    """Sentences may be broken, such as the reasons of `explain`."""
    printed = "".join("".join(output["text"]) for output in outputs(path) if output["output_type"] == "stream")
    rows = [line for line in printed.splitlines() if "   " in line.strip() and not line.startswith("  not used")]
    assert [row for row in rows if len(row) > characters_that_fit(path)] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_pictures_of_characters_are_as_narrow_as_their_place(path):
    """A page does not break the lines of ``pre`` in HTML."""
    for output in outputs(path):
        for block in re.findall(r"<pre.*?</pre>", "".join(output.get("data", {}).get("text/html", [])), re.DOTALL):
            assert max(map(len, html.unescape(re.sub("<.*?>", "", block)).splitlines())) <= characters_that_fit(path)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_small_enough_to_ship(path):
    assert path.stat().st_size < 400_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path):
    """Runs without a kernel, because cells use only Python."""
    code = "\n".join("".join(cell["source"]) for cell in code_cells(path))
    for written, small in SMALL.get(path.stem, {}).items():
        assert code.count(written) == 1, written
        code = code.replace(written, small)
    variables = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}  # a notebook sets its own
    environment = variables | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SELDOM + code]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=path.parent, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
