"""The file of a card: every row measured on it, with the date, the commit and the versions of packages.

    {"device_kind": "NVIDIA H200",
     "runs": {ID: {"date", "commit", "code", "rounds", "device"}},
     "jobs": {"heads --shape 8192,4096,131072": {"shape", "dtype", ..., "rows": {NAME: {"run": ID, ...}}}}}

A job is what one command measures together, in turns. Only rows of the same job may be compared. The key of a job is
the arguments of its command. Running the command again replaces the job's rows.
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

# Packages whose versions are recorded, by their names in the registry: the peers, and the packages that they build on.
PACKAGES = (
    "flax", "torch", "triton", "cut-cross-entropy", "liger-kernel", "nvidia-cutlass-dsl", "quack-kernels", "trl",
)  # fmt: skip
UNTIMED = ("explain", "flax")  # folders of this package whose code no timed program runs
FOLDER = Path("bench-out")

type File = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Measured:
    """The results of a job: its rows by name, their common fields, and whether this package's rows are right."""

    rows: Mapping[str, Fields]
    about: Fields = dataclasses.field(default_factory=dict)
    healthy: bool = True


@dataclasses.dataclass(frozen=True)
class Job:
    """A measurement: the arguments that repeat it, and the function that makes it."""

    arguments: Sequence[str]
    measure: Callable[[], Measured]

    @property
    def key(self) -> str:
        """The job's name in the file."""
        return shlex.join(self.arguments)


def device() -> dict[str, str]:
    """Returns the device and the versions of the software, without which a speed means nothing."""
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
    """Returns the path of a file that is named after the card."""
    return FOLDER / f"{re.sub(r'[^a-z0-9]+', '-', device_kind.lower()).strip('-')}.json"


def read(path: Path, device_kind: str | None = None) -> File:
    """Reads the file, or returns one without rows. With a ``device_kind``, refuses the file of another card."""
    file: File = {"device_kind": device_kind, "runs": {}, "jobs": {}}
    if path.exists():
        file = json.loads(path.read_text())
    if device_kind not in (None, file["device_kind"]):
        raise ValueError(f"{path} has rows of {file['device_kind']}, but this is {device_kind}: name another file")
    return file


def merge(path: Path, key: str, measured: Measured, run: Fields) -> None:
    """Writes the results of a job into the file, in place of its earlier results."""
    file = read(path)
    file["device_kind"] = run["device"]["device_kind"]
    name = hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()[:8]
    rows = {row: {"run": name, **fields} for row, fields in measured.rows.items()}
    file["runs"][name] = run
    file["jobs"][key] = {**measured.about, "rows": rows}
    used = {row["run"] for one in file["jobs"].values() for row in one["rows"].values()}
    file = file | {"runs": {name: run for name, run in file["runs"].items() if name in used}}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(file, indent=1, ensure_ascii=False) + "\n")
    partial.replace(path)  # in one step, because the command may be ended while it writes


def describe_run(rounds: int, device: dict[str, str]) -> dict[str, Any]:
    """Returns the date, the commit, the hash of the code, the rounds, and the device with the versions."""
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"date": date, "commit": commit(), "code": code(), "rounds": rounds, "device": device}


def commit() -> str | None:
    """Returns the commit of the checkout that the package was imported from; None without a checkout."""
    command = ["git", "-C", str(Path(lce_jax.__file__).parent), "rev-parse", "--short=12", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


@functools.cache
def code() -> str:
    """Returns a hash of the timed code.

    Changes of comments, of docstrings and of code that no timed program runs do not change it.
    """
    folder, digest = Path(lce_jax.__file__).parent, hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        if path.relative_to(folder).parts[0] not in UNTIMED:
            digest.update(_strip_docstrings(path.read_text()).encode())
    return digest.hexdigest()[:12]


def _strip_docstrings(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            del node.body[0]
    return ast.unparse(tree)


def jobs(file: File, part: str) -> Iterator[dict[str, Any]]:
    """Yields the jobs of a part as plain data: ``arguments``, the common fields, and ``rows`` with their runs."""
    for key, job in file["jobs"].items():
        arguments = shlex.split(key)
        if arguments[0] == part:
            rows = [row | {"name": name, "run": file["runs"][row["run"]]} for name, row in job["rows"].items()]
            yield job | {"arguments": arguments, "rows": rows}


def command(job: Fields) -> str:
    """Returns the command that repeats a job of `jobs`."""
    rounds = str(job["rows"][0]["run"]["rounds"])
    return shlex.join(["python", "-m", "benchmarks", *job["arguments"], "--rounds", rounds])


def find_row(job: dict[str, Any], key: str, direction: str) -> dict[str, Any] | None:
    """Returns a row of a job of `jobs`, or None if it was not timed."""
    return next((row for row in timed(job["rows"]) if (row["key"], row["direction"]) == (key, direction)), None)


def timed(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows that were timed."""
    return [row for row in rows if "left_out" not in row]
