"""Pages show the programs of ``examples/``, and each program runs in a test."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import lce_torch_bridge
from tests.site.test_figures import script

pytestmark = pytest.mark.site
ROOT = Path(__file__).parents[2]
PROGRAMS = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "examples").glob("[a-z]*.py"))]
TESTS = "".join(
    path.read_text() for folder in ("tests", "examples/frameworks") for path in (ROOT / folder).rglob("*.py")
)
programs = script("programs")


@pytest.mark.parametrize("page", programs.PAGES, ids=lambda page: page.stem)
def test_a_page_shows_its_programs(page: Path) -> None:
    assert page.read_text() == programs.render(page), "run: python docs/_build/programs.py"


@pytest.mark.parametrize("page", programs.RECIPES, ids=lambda page: page.stem)
def test_a_recipe_shows_what_runs_elsewhere(page: Path) -> None:
    text = page.read_text()
    line = r"^```python\nimport lce_torch_bridge\.(\w+)\n\nlce_torch_bridge\.\1\.(\w+)\((?:model)?\)\n```$"
    lines = re.findall(line, text, re.MULTILINE)
    assert text.count("```python") == len(programs.PLACE.findall(text)) + len(lines)
    for module, name in lines:  # tests/torch/test_frameworks.py calls them
        assert callable(getattr(getattr(lce_torch_bridge, module), name))
    for name in re.findall(r"`((?:examples|tests)/[\w/.]+)`", text):
        assert (ROOT / name).exists(), name
    for code in re.findall(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        shown = [name for _, name, *_ in programs.PLACE.findall(text)]
        assert any(code.strip() in (ROOT / name).read_text() for name in shown) or code.strip() in TESTS, code


def test_every_program_is_on_one_page_and_in_a_test() -> None:
    shown = [name for page in programs.PAGES for _, name, *_ in programs.PLACE.findall(page.read_text())]
    assert sorted(shown) == PROGRAMS
    for name in PROGRAMS:
        assert re.search(rf"\bimport (?:\(?[\w, ]*\b)?{Path(name).stem}\b|{re.escape(name)}", TESTS), name


def test_every_program_has_a_recorded_run_with_versions() -> None:
    runs = json.loads((ROOT / "benchmarks" / "recorded.json").read_text())["runs"]
    called_by_tests = json.loads((ROOT / "benchmarks" / "frameworks.json").read_text())["rows"]  # called by a test
    rows = {row[0]: row[1] for row in (*runs["examples cpu"]["rows"], *called_by_tests)}
    modules = {f"lce_torch_bridge.{name}" for name in ("areal", "nemo_rl", "skyrl", "torchtitan")}  # with no program
    assert {*rows, "distillation"} == {Path(name).stem for name in PROGRAMS} | modules
    assert all(re.search(r" \d+\.\d+\.\d+", versions) for versions in rows.values())
    assert runs["distillation"]["device"]["jax"]


def test_every_page_is_in_the_table() -> None:
    index = (ROOT / "docs" / "recipes" / "index.md").read_text()
    assert set(re.findall(r"\]\(([\w-]+\.md)\)", index)) == {page.name for page in programs.RECIPES} - {"index.md"}


def test_accuracy_and_perplexity_are_those_of_stored_logits() -> None:
    """It runs the page's lines for PyTorch. Both count the tokens that have a label."""
    text = (
        (ROOT / "docs" / "recipes" / "accuracy.md").read_text().partition("## In PyTorch")[2].partition("## In JAX")[0]
    )
    setting, accuracy, perplexity = re.findall(r"`(correct = .*?|correct.sum.*?|linear_cross.*?)`", text)
    draw = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(3, 5, 8, generator=draw), torch.randn(20, 8, generator=draw)
    logits = hidden @ weight.T
    labels = logits.argmax(-1).where(torch.arange(5) < 3, 7)
    labels[:, 0] = -100
    names = {name: getattr(lce_torch_bridge, name) for name in lce_torch_bridge.__all__}
    names |= {"hidden": hidden, "weight": weight, "labels": labels}
    exec(setting, names)
    counts = labels != -100
    assert eval(accuracy, names) == (logits.argmax(-1) == labels)[counts].float().mean()
    want = torch.nn.functional.cross_entropy(logits[counts], labels[counts]).exp()
    torch.testing.assert_close(eval(perplexity, names), want)
