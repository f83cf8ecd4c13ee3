"""Users' scripts under mypy and pyright, where only JAX, NumPy, torch and Flax are installed beside the packages.

Each line with ``# wrong`` must be reported, and no other line; no line of README's programs must be.
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

from tests import doc_blocks

pytestmark = pytest.mark.site
ROOT = Path(__file__).parents[2]
JAX_SCRIPT = """
import jax
import jax.numpy as jnp
import lce_jax
import numpy as np
from lce_jax import LogprobOutput, explain, linear_cross_entropy, linear_logprobs, linear_loss, losses, rows
from typing_extensions import assert_type


def objective(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
    out = linear_logprobs(hidden, weight, labels, where=labels != -100, temperature=0.8)
    assert_type(out.entropy, jax.Array)
    assert_type(out.lse, jax.Array)
    logprobs, entropy, *_ = linear_logprobs(hidden, weight, labels, entropy=True)
    return -jnp.mean(out.logprobs + 0.01 * out.entropy) + jnp.sum(logprobs * entropy)


def either(hidden: jax.Array, weight: jax.Array, labels: jax.Array, entropy: bool) -> LogprobOutput:
    if entropy:
        return linear_logprobs(hidden, weight, labels)
    out = lce_jax.sharded_linear_logprobs(hidden, weight, labels, vocab_axis=("tensor",), entropy=entropy)
    assert out.entropy is not None
    print(out.entropy + 1)
    return out


def asked_for(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
    out = linear_logprobs(hidden, weight, labels, stats=True, candidates=labels[:, None])
    return jnp.stack([out.correct.mean(), (out.max_logit - out.min_logit).max(), out.candidate_logprobs[0, 0]])


def of_numpy(hidden: np.ndarray, weight: np.ndarray, tokens: np.ndarray, mask: np.ndarray) -> jax.Array:
    labels = rows.next_tokens(tokens)
    bytes_held = explain(hidden, weight, tokens, where=mask).most_bytes
    out = linear_logprobs(hidden, weight, tokens, where=mask, temperature=np.float32(0.7), bias=weight[:, 0])
    total, _ = linear_loss(losses.cross_entropy, hidden, weight, labels, where=mask)
    kl = lce_jax.linear_kl(hidden, weight, hidden, weight, where=mask)
    return bytes_held + total + kl.sum() + out.lse.sum() + linear_cross_entropy(hidden, weight, labels, where=mask)


def bytes_held(hidden: jax.ShapeDtypeStruct, weight: jax.ShapeDtypeStruct, labels: jax.Array) -> int:
    return explain(hidden, weight, labels, z_loss=1e-4).most_bytes


def metrics(hidden: jax.Array, weight: jax.Array, labels: jax.Array, old: jax.Array) -> tuple[jax.Array, jax.Array]:
    loss, out = linear_loss(losses.with_entropy_bonus(losses.ppo_clip, 0.01), hidden, weight, labels, old, {"a": old})
    own = linear_loss(losses.dapo, hidden, weight, labels, old_logprob=old, advantage=old, clip_high=0.3, stats=True)
    return loss + own[0] + linear_cross_entropy(hidden, weight, labels, z_loss=1e-4), out.entropy


def mistakes(hidden: jax.Array, weight: jax.Array, labels: jax.Array, flag: bool) -> None:
    linear_logprobs(hidden, weight, labels="labels")  # wrong
    linear_logprobs(hidden, weight, labels, temprature=0.8)  # wrong
    linear_logprobs(hidden, weight, labels, axis_name=3)  # wrong
    out = linear_logprobs(hidden, weight, labels, entropy=False)
    print(out.entropy + 1)  # wrong
    print(linear_logprobs(hidden, weight, labels, entropy=flag).entropy + 1)  # wrong
    print(lce_jax.sharded_linear_logprobs(hidden, weight, labels, entropy=False).entropy + 1)  # wrong
    print(linear_logprobs(hidden, weight, labels, stats=True).max_logit.softmax())  # wrong
    print(linear_loss(losses.cross_entropy, hidden, weight, labels, entropy=False)[1].entropy + 1)  # wrong
    loss, seen = lce_jax.sharded_linear_loss(losses.cross_entropy, hidden, weight, labels, entropy=flag)
    print(loss, seen.entropy + 1)  # wrong
    linear_logprobs([1.0, 2.0], weight, labels)  # wrong
    linear_cross_entropy(hidden, weight, labels, reduction="average")  # wrong
"""
TORCH_SCRIPT = """
import torch
from lce_torch_bridge import linear_cross_entropy, linear_entropy, linear_logprobs, linear_loss, losses
from typing_extensions import assert_type


def objective(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    out = linear_logprobs(hidden, weight, labels, entropy="metric", where=labels != -100)
    total, seen = linear_loss(lambda logprobs, entropy, lse: -logprobs, hidden, weight, labels, wgrad="main_grad")
    linear_loss(losses.ppo_clip, hidden, weight, labels, old_logprob=out.logprobs, advantage=out.lse, clip=0.1)
    entropy, lse = linear_entropy(hidden, weight, temperature=0.7)
    assert_type(out.entropy, torch.Tensor)
    assert_type(out.lse, torch.Tensor)
    assert linear_logprobs(hidden, weight, labels, stats=True).max_logit.mean() > 0
    return total - out.logprobs.sum() - 0.01 * (out.entropy + entropy).sum() + seen.entropy.mean()


def mistakes(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> None:
    linear_logprobs(hidden, weight, labels="labels")  # wrong
    linear_logprobs(hidden, weight, labels, entropy="gradient")  # wrong
    print(linear_logprobs(hidden, weight, labels, entropy=False).entropy + 1)  # wrong
    print(linear_loss(losses.cross_entropy, hidden, weight, labels, entropy=False)[1].entropy + 1)  # wrong
    linear_cross_entropy(hidden, weight, labels, candidates=labels)  # wrong
"""
FLAX_SCRIPT = """
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx
from lce_jax import losses
from lce_jax.flax import linen
from lce_jax.flax.nnx import LMHead

head = LMHead.tied(nnx.Embed(1000, 16, rngs=nnx.Rngs(0)), logit_softcap=30.0, vocab_axis="tensor")
other = linen.LMHead(16, 1000, dtype=jnp.bfloat16)


def objective(hidden: jax.Array, labels: jax.Array) -> jax.Array:
    out = head.logprobs(hidden, labels, stats=True, ignore_index=-100)
    other.logprobs(np.asarray(hidden), np.asarray(labels), entropy=True).entropy.mean()
    head.linear_loss(losses.ppo_clip, hidden, labels, old_logprob=out.logprobs, advantage=out.lse, clip=0.1)
    return head.loss(hidden, labels, z_loss=1e-4) - out.logprobs.sum() - out.entropy.sum() + other(hidden).max()


def mistakes(hidden: jax.Array, labels: jax.Array) -> None:
    head.logprobs(hidden, "labels")  # wrong
    print(head.logprobs(hidden, labels, entropy=False).entropy + 1)  # wrong
    print(other.logprobs(hidden, labels, entropy=False).entropy + 1)  # wrong
    print(head.linear_loss(losses.cross_entropy, hidden, labels, entropy=False)[1].entropy + 1)  # wrong
    linen.LMHead.tied(nn.Embed(1000, 16), logit_softcap="30")  # wrong
"""
SCRIPTS = {"jax": JAX_SCRIPT, "torch": TORCH_SCRIPT, "flax": FLAX_SCRIPT}
NEEDED = ("jax", "jaxlib", "numpy", "ml_dtypes", "torch", "typing_extensions", "flax")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the interpreter of an environment with links to the packages and to what they need."""
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


def write(folder: Path, **scripts: str) -> list[Path]:
    for name, text in scripts.items():
        (folder / f"{name}.py").write_text(text)
    return [folder / f"{name}.py" for name in scripts]


def mypy(scripts: list[Path], python: Path, strict: bool) -> set[tuple[str, int]]:
    """Returns the lines that mypy reports. All must be in the scripts."""
    folder = scripts[0].parent
    rules = ["--strict"] if strict else ["--check-untyped-defs", "--ignore-missing-imports", "--scripts-are-modules"]
    arguments = [*rules, "--no-error-summary", "--python-executable", python, "--cache-dir", folder / "cache"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file=", *arguments, *(script.name for script in scripts)],
        capture_output=True, text=True, timeout=500, check=False, cwd=folder,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    errors = re.findall(r"^(.+?):(\d+): error: (.*)$", done.stdout, re.MULTILINE)
    assert {name for name, _, _ in errors} <= {script.name for script in scripts}, done.stdout
    return {(name, int(line)) for name, line, _ in errors}


def pyright(scripts: list[Path], python: Path, strict: bool) -> set[tuple[str, int]]:
    """Returns the lines that pyright reports. All must be in the scripts."""
    folder, names = scripts[0].parent, [script.name for script in scripts]
    config = {"typeCheckingMode": "standard", "pythonVersion": "3.12", "include": names}
    if not strict:  # imports of a program need not be installed, nor list what they export
        config |= {"reportMissingImports": "none", "reportPrivateImportUsage": "none"}
    (folder / "pyrightconfig.json").write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", python],
        capture_output=True, text=True, timeout=500, check=False, cwd=folder,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    errors = [each for each in json.loads(done.stdout)["generalDiagnostics"] if each["severity"] == "error"]
    assert {Path(each["file"]).name for each in errors} <= set(names), done.stdout
    return {(Path(each["file"]).name, each["range"]["start"]["line"] + 1) for each in errors}


type Checker = Callable[[list[Path], Path, bool], set[tuple[str, int]]]


def check(package: str, checker: Checker, plain: Path, tmp_path: Path) -> None:
    scripts = write(tmp_path, of_a_user=SCRIPTS[package])
    assert checker(scripts, plain, True) == {(scripts[0].name, line) for line in wrong_lines(SCRIPTS[package])}


@pytest.mark.parametrize(
    "package", ["jax", *(pytest.param(name, marks=pytest.mark.slow) for name in ("torch", "flax"))]
)
def test_mypy_reports_the_mistakes_and_nothing_else(package: str, plain: Path, tmp_path: Path) -> None:
    check(package, mypy, plain, tmp_path)


@pytest.mark.parametrize("package", SCRIPTS)
def test_pyright_reports_the_mistakes_and_nothing_else(package: str, plain: Path, tmp_path: Path) -> None:
    pytest.importorskip("basedpyright")
    check(package, pyright, plain, tmp_path)


@pytest.mark.parametrize("checker", [pytest.param(mypy, marks=pytest.mark.slow), pyright])
def test_readme_has_no_line_to_report(checker: Checker, plain: Path, tmp_path: Path) -> None:
    pytest.importorskip("mypy" if checker is mypy else "basedpyright")
    blocks = [block for block in doc_blocks.parts(ROOT / "README.md") if block.language == "python"]
    assert any("out.entropy" in block.code for block in blocks)
    scripts = write(tmp_path, **{f"line_{block.line}": block.code for block in blocks})
    assert checker(scripts, plain, False) == set()
