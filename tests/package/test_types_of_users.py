"""A user's script under mypy and pyright, where only JAX, NumPy, torch and Flax are installed beside the packages.

Each line with ``# wrong`` must be reported, and no other.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.site
ROOT = Path(__file__).parents[2]
JAX_SCRIPT = """
import jax
import jax.numpy as jnp
import lce_jax
from lce_jax import LogprobOutput, explain, linear_cross_entropy, linear_logprobs, linear_loss, losses


def objective(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
    out = linear_logprobs(hidden, weight, labels, where=labels != -100, temperature=0.8)
    assert out.entropy is not None
    return -jnp.mean(out.logprobs + 0.01 * out.entropy)


def either(hidden: jax.Array, weight: jax.Array, labels: jax.Array, entropy: bool) -> LogprobOutput:
    if entropy:
        return linear_logprobs(hidden, weight, labels)
    out = lce_jax.sharded_linear_logprobs(hidden, weight, labels, vocab_axis=("tensor",), entropy=entropy)
    assert out.entropy is not None
    print(out.entropy + 1)
    return out


def bytes_held(hidden: jax.ShapeDtypeStruct, weight: jax.ShapeDtypeStruct, labels: jax.Array) -> int:
    return explain(hidden, weight, labels, z_loss=1e-4).most_bytes


def metrics(hidden: jax.Array, weight: jax.Array, labels: jax.Array, old: jax.Array) -> tuple[jax.Array, jax.Array]:
    loss, out = linear_loss(losses.with_entropy_bonus(losses.ppo_clip, 0.01), hidden, weight, labels, old, {"a": old})
    assert out.entropy is not None
    own = linear_loss(losses.dapo, hidden, weight, labels, old_logprob=old, advantage=old, clip_high=0.3, stats=True)
    return loss + own[0] + linear_cross_entropy(hidden, weight, labels, z_loss=1e-4), out.entropy


def mistakes(hidden: jax.Array, weight: jax.Array, labels: jax.Array, flag: bool) -> None:
    linear_logprobs(hidden, weight, labels="labels")  # wrong
    linear_logprobs(hidden, weight, labels, temprature=0.8)  # wrong
    linear_logprobs(hidden, weight, labels, axis_name=3)  # wrong
    out = linear_logprobs(hidden, weight, labels, entropy=False)
    print(out.entropy + 1)  # wrong
    print(linear_logprobs(hidden, weight, labels, entropy=flag).entropy + 1)  # wrong
    print(linear_logprobs(hidden, weight, labels).max_logit + 1)  # wrong
    print(linear_loss(losses.cross_entropy, hidden, weight, labels, entropy=False)[1].entropy + 1)  # wrong
    linear_cross_entropy(hidden, weight, labels, reduction="average")  # wrong
"""
TORCH_SCRIPT = """
import torch
from lce_torch_bridge import linear_cross_entropy, linear_entropy, linear_logprobs, linear_loss, losses


def objective(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    out = linear_logprobs(hidden, weight, labels, entropy="metric", where=labels != -100)
    total, seen = linear_loss(lambda logprobs, entropy, lse: -logprobs, hidden, weight, labels, wgrad="main_grad")
    linear_loss(losses.ppo_clip, hidden, weight, labels, old_logprob=out.logprobs, advantage=out.lse, clip=0.1)
    entropy, lse = linear_entropy(hidden, weight, temperature=0.7)
    assert out.entropy is not None
    assert seen.entropy is not None
    return total - out.logprobs.sum() - 0.01 * (out.entropy + entropy).sum() + seen.entropy.mean()


def mistakes(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> None:
    linear_logprobs(hidden, weight, labels="labels")  # wrong
    linear_logprobs(hidden, weight, labels, entropy="gradient")  # wrong
    print(linear_logprobs(hidden, weight, labels, entropy=False).entropy + 1)  # wrong
    linear_cross_entropy(hidden, weight, labels, candidates=labels)  # wrong
"""
FLAX_SCRIPT = """
import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from lce_jax import losses
from lce_jax.flax import linen
from lce_jax.flax.nnx import LMHead

head = LMHead.tied(nnx.Embed(1000, 16, rngs=nnx.Rngs(0)), logit_softcap=30.0, vocab_axis="tensor")
other = linen.LMHead(16, 1000, dtype=jnp.bfloat16)


def objective(hidden: jax.Array, labels: jax.Array) -> jax.Array:
    out = head.logprobs(hidden, labels, stats=True, ignore_index=-100)
    head.linear_loss(losses.ppo_clip, hidden, labels, old_logprob=out.logprobs, advantage=out.lse, clip=0.1)
    assert out.entropy is not None
    return head.loss(hidden, labels, z_loss=1e-4) - out.logprobs.sum() - out.entropy.sum() + other(hidden).max()


def mistakes(hidden: jax.Array, labels: jax.Array) -> None:
    head.logprobs(hidden, "labels")  # wrong
    print(head.logprobs(hidden, labels, entropy=False).entropy + 1)  # wrong
    print(other.logprobs(hidden, labels, entropy=False).entropy + 1)  # wrong
    linen.LMHead.tied(nn.Embed(1000, 16), logit_softcap="30")  # wrong
"""
SCRIPTS = {"jax": JAX_SCRIPT, "torch": TORCH_SCRIPT, "flax": FLAX_SCRIPT}
NEEDED = ("jax", "jaxlib", "numpy", "ml_dtypes", "torch", "typing_extensions", "flax")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with links to the packages and to what they need."""
    folder = tmp_path_factory.mktemp("plain")
    venv.create(folder, with_pip=False)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    for name in NEEDED:
        for file in importlib.metadata.files(name) or []:
            top = packages / file.parts[0]
            if file.parts[0] not in ("..", "__pycache__") and not top.exists():
                top.symlink_to(Path(importlib.metadata.distribution(name).locate_file(file.parts[0])))
    for name in ("lce_jax", "lce_torch_bridge"):
        (packages / name).symlink_to(ROOT / name)
    return folder / "bin" / "python"


def wrong_lines(script: str) -> set[int]:
    return {number for number, line in enumerate(script.splitlines(), 1) if line.endswith("# wrong")}


def mypy(script: Path, python: Path) -> set[int]:
    told = ["--strict", "--no-error-summary", "--python-executable", python, "--cache-dir", script.parent / "cache"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file=", *told, script.name],
        capture_output=True, text=True, timeout=500, check=False, cwd=script.parent,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    errors = re.findall(r"^(.+?):(\d+): error: (.*)$", done.stdout, re.MULTILINE)
    assert {name for name, _, _ in errors} <= {script.name}, done.stdout
    return {int(line) for _, line, _ in errors}


def pyright(script: Path, python: Path) -> set[int]:
    config = {"typeCheckingMode": "standard", "pythonVersion": "3.12", "include": [script.name]}
    (script.parent / "pyrightconfig.json").write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", python],
        capture_output=True, text=True, timeout=500, check=False, cwd=script.parent,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    found = [each for each in json.loads(done.stdout)["generalDiagnostics"] if each["severity"] == "error"]
    assert {Path(each["file"]).name for each in found} <= {script.name}, done.stdout
    return {each["range"]["start"]["line"] + 1 for each in found}


def check(package: str, checker: Callable[[Path, Path], set[int]], plain: Path, tmp_path: Path) -> None:
    script = tmp_path / "of_a_user.py"
    script.write_text(SCRIPTS[package])
    assert checker(script, plain) == wrong_lines(SCRIPTS[package])


@pytest.mark.parametrize(
    "package", ["jax", *(pytest.param(name, marks=pytest.mark.slow) for name in ("torch", "flax"))]
)
def test_mypy_reports_the_mistakes_and_nothing_else(package: str, plain: Path, tmp_path: Path) -> None:
    check(package, mypy, plain, tmp_path)


@pytest.mark.parametrize("package", SCRIPTS)
def test_pyright_reports_the_mistakes_and_nothing_else(package: str, plain: Path, tmp_path: Path) -> None:
    pytest.importorskip("basedpyright")
    check(package, pyright, plain, tmp_path)
