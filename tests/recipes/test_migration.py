"""Both sides of each diff of docs/migration.md have the same loss and gradients."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.recipes import migration_doubles
from tests.recipes.migration_diffs import DIFFS, PAGE, distance, results

pytestmark = pytest.mark.site
ROOT = Path(__file__).parents[2]
NEAR = 2e-6  # of float32 sums in another order
INSTALLED = {"Liger": "liger_kernel", "Apple's Cut Cross Entropy": "cut_cross_entropy"}


def test_each_section_is_a_diff() -> None:
    assert len(DIFFS) == PAGE.count("\n## ") == PAGE.count("```diff") == 6
    assert PAGE.count("```") == 2 * len(DIFFS)  # there is no other block


@pytest.mark.parametrize("section", DIFFS)
def test_both_sides_compute_the_same(section: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in migration_doubles.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    if "linear_cross_entropy" in section and not hasattr(torch.nn.functional, "linear_cross_entropy"):
        pytest.skip("needs PyTorch 2.13")
    before, after = DIFFS[section]
    assert "lce_" not in before
    assert "lce_" in after
    for got, want in zip(results(after), results(before), strict=True):
        assert distance(got, want) <= NEAR


@pytest.mark.parametrize("name", INSTALLED)
def test_the_installed_package_computes_the_same(name: str) -> None:
    if not importlib.util.find_spec(INSTALLED[name]):
        pytest.skip(f"needs {INSTALLED[name]}: make test-frameworks")
    command = [sys.executable, "-m", "tests.recipes.migration_worker", f"From {name}"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    assert max(json.loads(done.stdout.splitlines()[-1])) <= NEAR


def test_the_stand_in_has_the_signature_of_verl() -> None:
    """It reads verl's file, because its import needs a GPU."""
    spec = importlib.util.find_spec("verl")
    if spec is None or spec.origin is None:
        pytest.skip("needs verl: make test-frameworks")
    file = Path(spec.origin).parent / "utils" / "kernel" / "linear_cross_entropy.py"
    functions = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)]
    (forward,) = (node for node in functions if node.name == "forward")
    code = migration_doubles.verl.__code__
    assert [each.arg for each in forward.args.args] == ["ctx", *code.co_varnames[: code.co_argcount]]
    assert [each.value for each in forward.args.defaults] == [*migration_doubles.verl.__defaults__]


def test_verl_takes_ligers_kernel_where_it_is_installed() -> None:
    """It reads verl's file, because verl uses its own function where Liger's cannot be imported."""
    spec = importlib.util.find_spec("verl")
    if spec is None or spec.origin is None:
        pytest.skip("needs verl: make test-frameworks")
    tree = ast.parse((Path(spec.origin).parent / "utils" / "experimental" / "torch_functional.py").read_text())
    attempts = [node for node in tree.body if isinstance(node, ast.Try)]
    (liger,) = (node for node in attempts if "liger_kernel.ops" in ast.unparse(node.body))
    assert "LigerFusedLinearScaledCrossEntropyFunction" in ast.unparse(liger.body)
    assert [ast.unparse(each.type) for each in liger.handlers if each.type] == ["ModuleNotFoundError"]
    (fused,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "FusedLinearForPPO")
    assert "'liger'" in ast.unparse(fused)
