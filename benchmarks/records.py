"""The file of a card: every row that the bench measured on it, and when, at which commit, with which versions.

    {"device_kind": "NVIDIA H200",
     "runs": {ID: {"date", "commit", "code", "rounds", "device"}},
     "jobs": {"heads --shape 8192,4096,131072": {"shape", "dtype", ..., "rows": {NAME: {"run": ID, ...}}}}}

A job is what one command measures together, in turns: only its rows may be compared. Its key is the arguments of the
command, which replaces the rows of the job.
"""

from __future__ import annotations

import ast
import dataclasses
import datetime
import functools
import hashlib
import importlib.metadata
import json
import platform
import re
import shlex
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import lce_jax
from benchmarks.measure import Fields

# What else takes part, by its name in the registry: the peers, and what they are built on.
PACKAGES = (
    "flax", "torch", "triton", "cut-cross-entropy", "liger-kernel", "nvidia-cutlass-dsl", "quack-kernels", "trl",
)  # fmt: skip
UNTIMED = ("explain", "flax")  # folders of this package that no timed program runs
FOLDER = Path("bench-out")

type File = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a job found: its rows by name, what all of them have in common, and whether this package's own are right."""

    rows: Mapping[str, Fields]
    about: Fields = dataclasses.field(default_factory=dict)
    healthy: bool = True


@dataclasses.dataclass(frozen=True)
class Job:
    """Something to measure: the arguments that repeat it, and how."""

    arguments: Sequence[str]
    measure: Callable[[], Measured]

    @property
    def key(self) -> str:
        """Its name in the file."""
        return shlex.join(self.arguments)


def device() -> dict[str, str]:
    """Where and with what the numbers were taken: a speed without these means nothing."""
    first = jax.devices()[0]
    return {
        "platform": first.platform,
        "device_kind": first.device_kind,
        "jax": jax.__version__,
        "lce_jax": lce_jax.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    } | {name: version for name in PACKAGES if (version := _installed(name))}


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def default_path(device_kind: str) -> Path:
    """A file named after the card."""
    return FOLDER / f"{re.sub(r'[^a-z0-9]+', '-', device_kind.lower()).strip('-')}.json"


def read(path: Path, device_kind: str | None = None) -> File:
    """The file, or one without rows. With a ``device_kind``, refuses a file of another card."""
    file: File = {"device_kind": device_kind, "runs": {}, "jobs": {}}
    if path.exists():
        file = json.loads(path.read_text())
    if device_kind not in (None, file["device_kind"]):
        raise ValueError(f"{path} has rows of {file['device_kind']}, and this is {device_kind}: name another file")
    return file


def merge(path: Path, key: str, measured: Measured, run: Fields) -> None:
    """Writes what a job found into the file, over what it found before."""
    file = read(path)
    file["device_kind"] = run["device"]["device_kind"]
    name = hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()[:8]
    rows = {row: {"run": name, **fields} for row, fields in measured.rows.items()}
    file["runs"][name] = run
    file["jobs"][key] = {**measured.about, "rows": rows}
    named = {row["run"] for one in file["jobs"].values() for row in one["rows"].values()}
    file = file | {"runs": {name: run for name, run in file["runs"].items() if name in named}}
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(file, indent=1, ensure_ascii=False) + "\n")
    beside.replace(path)  # at once: a command may be ended while it writes


def this_run(rounds: int, where: dict[str, str]) -> dict[str, Any]:
    """When, at which commit, on which device and with which versions."""
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"date": date, "commit": commit(), "code": code(), "rounds": rounds, "device": where}


def commit() -> str | None:
    """Of the checkout that the package was imported from; None: it is not in one."""
    asked = ["git", "-C", str(Path(lce_jax.__file__).parent), "rev-parse", "--short=12", "HEAD"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


@functools.cache
def code() -> str:
    """Names the code that is timed: the same after a change of comments, docstrings or what no timed program runs."""
    folder, found = Path(lce_jax.__file__).parent, hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        if path.relative_to(folder).parts[0] not in UNTIMED:
            found.update(_without_words(path.read_text()).encode())
    return found.hexdigest()[:12]


def _without_words(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            del node.body[0]
    return ast.unparse(tree)


def jobs(file: File, part: str) -> Iterator[dict[str, Any]]:
    """The jobs of a part, as plain data: ``arguments``, what its rows have in common, and ``rows`` with their runs."""
    for key, job in file["jobs"].items():
        arguments = shlex.split(key)
        if arguments[0] == part:
            rows = [row | {"name": name, "run": file["runs"][row["run"]]} for name, row in job["rows"].items()]
            yield job | {"arguments": arguments, "rows": rows}


def command(job: Fields) -> str:
    """What repeats a job of `jobs`."""
    rounds = str(job["rows"][0]["run"]["rounds"])
    return shlex.join(["python", "-m", "benchmarks", *job["arguments"], "--rounds", rounds])


def row_of(job: dict[str, Any], key: str, direction: str) -> dict[str, Any] | None:
    """A row of a job of `jobs`, if it was timed."""
    return next((row for row in timed(job["rows"]) if (row["key"], row["direction"]) == (key, direction)), None)


def timed(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without those that were left out."""
    return [row for row in rows if "left_out" not in row]
