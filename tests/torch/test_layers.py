"""The bridge imports only what lce_jax makes public, name by name."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import lce_jax
import lce_torch_bridge

FOLDER = Path(lce_torch_bridge.__file__).parent


def imported(path: Path) -> set[tuple[str, str]]:
    """(module, name) of everything that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {(node.module or "", alias.name) for alias in node.names}
    return found


def test_only_public_names_of_lce_jax() -> None:
    names = {pair for path in FOLDER.rglob("*.py") for pair in imported(path) if pair[0].startswith("lce_jax")}
    public = {("lce_jax", name) for name in lce_jax.__all__} | {("lce_jax", "")}
    public |= {("lce_jax", name) for name in ("scalars", "sequences", "kernels")}
    public |= {("lce_jax.local", name) for name in lce_jax.local.__all__}
    assert names
    assert names <= public


def test_private_names_of_jax_and_torch_are_few_and_known() -> None:
    """For these four things the libraries have no public way, or a slow one; torch documents its dispatch modes."""
    private = {
        (path.name, module)
        for path in FOLDER.rglob("*.py")
        for module, _ in imported(path)
        if module.split(".")[0] in ("jax", "torch") and any(part.startswith("_") for part in module.split("."))
    }
    documented = ("_weight.py", "torch.utils._python_dispatch")
    assert private == {
        ("_runtime.py", "jax._src"),
        ("_runtime.py", "jax._src.lib"),
        ("_dtensor.py", "torch.distributed._composable_state"),
        documented,
    }
    uses = [path.name for path in FOLDER.rglob("*.py") if "_resolve_process_group" in path.read_text()]
    assert uses == ["_tensor_parallel.py"]


def test_everything_public_is_documented() -> None:
    for name in lce_torch_bridge.__all__:
        assert getattr(lce_torch_bridge, name).__doc__, name


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="'lce_torch_bridge' has no attribute 'linear_logprob'"):
        _ = lce_torch_bridge.linear_logprob
