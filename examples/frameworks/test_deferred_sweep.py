"""Every class of Transformers that predicts tokens trains the same with deferred logits; most store no logits."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("transformers"), reason="needs transformers: make test-frameworks"
)
ROOT = Path(__file__).parents[2]
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    path = tmp_path_factory.mktemp("sweep") / "results.jsonl"
    command = [sys.executable, "-m", "examples.frameworks.deferred_sweep", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_no_class_differs(rows: Rows) -> None:
    trained = {row["name"] for row in rows if not row["error"]}
    assert len(trained) >= 110
    assert {f"{row['name']}, {row['dtype']}": row["differs"] for row in rows if row["differs"]} == {}


def test_a_class_is_served_or_says_why_not(rows: Rows) -> None:
    for row in rows:
        if not row["error"] and not row["refused"]:
            assert row["served"] or row["reasons"], row["name"]
            assert row["reasons"] or not row["stored"], row["name"]


def test_most_causal_classes_store_no_logits(rows: Rows) -> None:
    causal = {row["name"] for row in rows if row["kind"] == "causal" and not row["error"]}
    stored = {row["name"] for row in rows if row["stored"] or row["refused"]}
    assert len(causal - stored) >= 0.95 * len(causal), sorted(causal & stored)
