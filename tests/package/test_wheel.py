"""A wheel of this tree, in an environment that has only JAX and NumPy besides."""

from __future__ import annotations

import email
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from lce_jax.__main__ import CHECKOUT_COMMANDS
from tests.site.test_figures import script

pytestmark = pytest.mark.site
ROOT = Path(__file__).parents[2]
NEEDED = ("jax", "jaxlib", "numpy", "ml_dtypes", "opt_einsum")  # what an import of JAX needs
QUICK_START = """
import jax, jax.numpy as jnp, lce_jax, sys
from lce_jax import explain, linear_cross_entropy, linear_logprobs
hidden, weight, labels = jnp.ones((4, 8)), jnp.zeros((1000, 8)), jnp.array([1, 2, 3, -100])
loss, gradients = jax.value_and_grad(linear_cross_entropy, argnums=(0, 1))(hidden, weight, labels, ignore_index=-100)
out = linear_logprobs(hidden, weight, labels, temperature=0.8)
assert explain(hidden, weight, labels).implementation == "xla"
print(round(float(loss), 3), out.entropy.shape, lce_jax.__file__)
"""


def run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd="/")
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    isolation = (
        ["--no-build-isolation"] if importlib.util.find_spec("hatchling") else []
    )  # otherwise pip downloads hatchling
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", *isolation, "--wheel-dir", folder, ROOT)
    (path,) = folder.glob("lce_jax-*.whl")
    return path


def test_it_has_the_two_packages_and_their_types(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {"lce_jax/py.typed", "lce_torch_bridge/py.typed", "lce_jax/explain/__main__.py"} <= set(names)
    packages = ("lce_jax", "lce_torch_bridge")
    assert {name.partition("/")[0].partition("-")[0] for name in names} == set(packages)
    tracked = {path.relative_to(ROOT).as_posix() for name in packages for path in (ROOT / name).rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == tracked
    assert {name for name in names if not name.endswith(".py") and ".dist-info/" not in name} == {
        f"{name}/py.typed" for name in packages
    }


def test_it_has_neither_the_bench_nor_the_demo(wheel: Path) -> None:
    checkout_files = [path for name in ("benchmarks", "examples") for path in (ROOT / name).rglob("*.py")]
    assert len(checkout_files) > 20
    contents = {zipfile.ZipFile(wheel).read(name) for name in zipfile.ZipFile(wheel).namelist()}
    assert not [path for path in checkout_files if path.read_bytes() in contents]


def test_it_runs_the_quick_start(wheel: Path, tmp_path: Path) -> None:
    """Links lead to this environment's JAX and NumPy, so that nothing is downloaded."""
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel)
    for name in NEEDED:
        for file in importlib.metadata.files(name) or []:
            top = packages / file.parts[0]
            if file.parts[0] not in ("..", "__pycache__") and not top.exists():
                top.symlink_to(Path(importlib.metadata.distribution(name).locate_file(file.parts[0])))
    loss, *_, where = run(python, "-I", "-W", "error", "-c", QUICK_START).split()
    assert loss == "6.908"  # ln 1000
    assert Path(where).is_relative_to(tmp_path)
    assert "qwen3-8b" in run(python.parent / "lce-jax", "explain", "--model", "qwen3-8b", "--tokens", "8192")
    for name, commands in CHECKOUT_COMMANDS.items():
        done = subprocess.run([python.parent / "lce-jax", name], capture_output=True, text=True, check=False, cwd="/")
        assert done.returncode == 2
        assert f"in a checkout of the repository, run {' or '.join(commands)}" in done.stderr
    for module, extra in (("lce_torch_bridge", "torch"), ("lce_jax.flax.nnx", "flax")):  # neither is installed
        refused = f"try: import {module}\nexcept ModuleNotFoundError as error: print(error.name, error)"
        assert run(python, "-I", "-c", refused).startswith(f"{extra} {module.removesuffix('.nnx')} needs ")
        assert f": in the checkout, pip install '.[{extra}]'" in run(python, "-I", "-c", refused)


def test_its_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        (name,) = [name for name in file.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(file.read(name))
    assert (metadata["Name"], metadata["Author"]) == ("lce-jax", "the lce-jax authors")
    assert metadata["Description-Content-Type"] == "text/markdown"
    needed = {re.match(r"[\w-]+", line)[0] for line in metadata.get_all("Requires-Dist") if "extra ==" not in line}
    assert needed == {"jax", "numpy"}
    assert "torch>=2.11; extra == 'torch'" in metadata.get_all("Requires-Dist")


def test_a_release_leads_to_its_repository() -> None:
    repository, tag = "https://example.org/of/a-fork", "v9"
    release = script("for_release")
    text = release.readme((ROOT / "README.md").read_text(), repository, tag)
    targets = re.findall(r"\]\(([^)]+)\)|(?:src|srcset)=\"([^\"]+)\"", text)
    assert len(targets) > 20
    for target in (link or picture for link, picture in targets):
        path = re.fullmatch(rf"{repository}/(?:blob|raw)/{tag}/([^#]+)(#.*)?", target)
        assert path, target
        assert (ROOT / path[1]).exists(), target
    assert f"git clone {repository} && cd a-fork\n" in text
    project = tomllib.loads(release.project((ROOT / "pyproject.toml").read_text(), repository, tag))["project"]
    assert project["urls"]["Repository"] == repository
    assert project["scripts"]
    assert "docs/_build/for_release.py" in (ROOT / ".github" / "workflows" / "release.yml").read_text()
