"""Figures in README.md and the pages: every table and picture is what ``benchmarks/*.json`` says."""

from __future__ import annotations

import importlib.util
import json

import pytest

from tests.doc_blocks import ROOT


def script(name):
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / "_build" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tables, figures = script("tables"), script("figures")


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_tables_are_those_of_the_data(page):
    assert page.read_text() == tables.written(page, tables.tables()), "run: python docs/_build/tables.py"


def test_every_table_is_shown():
    shown = {name for page in tables.PAGES for _, name, *_ in tables.PLACE.findall(page.read_text())}
    assert shown == set(tables.tables())


@pytest.mark.parametrize("picture", ["speed-and-memory", "way"])
@pytest.mark.parametrize("mode", figures.THEMES)
def test_pictures_are_drawn_from_the_data(picture, mode):
    text = (figures.ASSETS / f"{picture}-{mode}.svg").read_text()
    assert figures.drawn_from() in text, "run: python docs/_build/figures.py"


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("*.json")), ids=lambda path: path.stem)
def test_every_run_says_what_repeats_it(path):
    data = json.loads(path.read_text())
    for run in data.get("runs", {"": data}).values():
        assert run["command"].startswith("python ")
        assert run["date"]
        assert {"device_kind", "jax"} <= set(run["device"])
