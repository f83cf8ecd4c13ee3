"""Remembers successful comparisons of first calls in the user's cache folder, for later processes.

A file holds one comparison. The file's name is a digest of what may change the results: this package's sources, the
versions of JAX and of NVIDIA's compilers, the card, the driver, and whether the kernels are of one head or two. Only a
successful comparison is written. A file that is damaged, or cannot be read or written, counts as missing.

Processes that begin together compare once: the first one holds a lock, and the others read its result. If the first
finds a fault or dies, each of the others compares for itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import datetime
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import re
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from lce_jax.types._types import Device

try:
    import fcntl
except ImportError:  # Windows, where JAX has no CUDA
    fcntl = None  # type: ignore[assignment]

VARIABLE = "LCE_JAX_CACHE_DIR"
PREFIX = "first_call-"
WAIT_SECONDS = 120.0  # five comparisons on an H200. A process that hangs delays others no longer than this
POLL_SECONDS = 0.05
DISTRIBUTIONS = ("lce-jax", "jax", "jaxlib")
COMPILERS = (  # the packages of Mosaic, LLVM, and ptxas or nvJitLink
    "jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-nvjitlink",
    "jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12", "nvidia-nvjitlink-cu12",
)  # fmt: skip
MODULE_VERSIONS = (Path("/sys/module/nvidia/version"), Path("/proc/driver/nvidia/version"))
IMPORTED = time.time()  # in seconds; other modules of the package were imported less than a second earlier
HEADS = {1: "one head", 2: "two heads (linear_kl)"}

_logger = logging.getLogger("lce_jax")


def find_folder() -> Path | None:
    """Returns the folder for the files; None if nothing is to be remembered, or if the user has no home.

    ``LCE_JAX_CACHE_DIR`` names the folder. If this variable is empty or 0, nothing is remembered. The default folder is
    ``lce_jax`` in ``XDG_CACHE_HOME`` or ``~/.cache``.
    """
    chosen, base = os.environ.get(VARIABLE), os.environ.get("XDG_CACHE_HOME", "")
    if chosen is not None and chosen.strip() in ("", "0"):
        return None
    try:
        if chosen is not None:
            return Path(chosen).expanduser().absolute()
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "lce_jax"
    except (RuntimeError, OSError):  # no home, no current folder
        return None


@functools.cache
def describe_software() -> dict[str, str] | None:
    """Returns a digest of this package's sources, and the software's versions; None if the sources are unknown.

    Because of the digest, an edited checkout counts as another version. Sources that changed after their import are
    unknown.
    """
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    try:
        sources = sorted(root.rglob("*.py"))
        for source in sources:
            if source.stat().st_mtime > IMPORTED:
                return None
            digest.update(f"{source.relative_to(root)}\0".encode() + source.read_bytes() + b"\0")
    except OSError:
        return None
    versions = {name: find_version(name) for name in (*DISTRIBUTIONS, *COMPILERS)}
    known = {name: version for name, version in versions.items() if version is not None}
    return {"sources": digest.hexdigest(), **known} if sources else None


def find_version(distribution: str) -> str | None:
    """Returns the version of an installed distribution; None if it is not installed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(distribution)
    return None


@functools.cache
def find_driver() -> str | None:
    """Returns the versions of NVIDIA's kernel module and of CUDA's driver library; None if either is unknown.

    The two versions differ if a compatibility package of CUDA is installed. Reading the versions creates no JAX client
    and no CUDA context.
    """
    module, number = _find_module_version(), ctypes.c_int()
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    if status or module is None:
        return None
    return f"{module}, CUDA {number.value // 1000}.{number.value % 1000 // 10}"


def _find_module_version() -> str | None:
    """Returns the version of NVIDIA's kernel module, from the kernel's files or from NVML, which Windows has, too."""
    for path in MODULE_VERSIONS:
        with contextlib.suppress(OSError):
            if match := re.search(r"\d+\.\d[\d.]*", path.read_text()):
                return match[0]
    text = ctypes.create_string_buffer(96)
    with contextlib.suppress(OSError, AttributeError):
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if not nvml.nvmlInit_v2() and not nvml.nvmlSystemGetDriverVersion(text, len(text)):
            return text.value.decode()
    return None


def replace_file(path: Path, content: bytes) -> None:
    """Writes a complete file or none, even if other processes write the same file."""
    handle, name = tempfile.mkstemp(".tmp", f"{path.stem}-", path.parent)
    try:
        with open(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One comparison: what it depends on, and the file that remembers it."""

    key: dict[str, Any]
    path: Path

    def read(self) -> dict[str, Any] | None:
        """Returns the file's contents: who compared, and when. None if the file does not hold this comparison."""
        record = _read_record(self.path)
        return record if record is not None and record["key"] == self.key else None

    def write(self, compared_by: str) -> None:
        """Writes a complete file or none. The log reports a failure."""
        at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        text = json.dumps({"key": self.key, "compared_by": compared_by, "at": at}, indent=1)
        try:
            replace_file(self.path, text.encode())
        except OSError as error:
            _logger.info("The first call's comparison is not remembered: %s", error)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """A context. The first process enters with a lock, and holds it until it leaves or dies. Then the others enter.

        The others do not hold the lock, so after a fault they all compare in parallel. A process waits for at most
        `WAIT_SECONDS`, and not at all where files cannot be locked.
        """
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                file = stack.enter_context(open(self.path.with_suffix(".lock"), "a+b"))
                if fcntl is not None and _lock_or_wait(file):
                    stack.callback(_unlock, file)  # closing is not enough: a forked child may have the file open
            yield


def _read_record(path: Path) -> dict[str, Any] | None:
    """Returns the contents of a file that `Comparison.write` has written; None if the file is damaged or missing."""
    try:
        record = json.loads(path.read_bytes())
        key, texts = record["key"], (record["compared_by"], record["at"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    return record if path.name == _name_file(key) and all(isinstance(text, str) for text in texts) else None


def _name_file(key: Any) -> str:
    return f"{PREFIX}{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]}.json"


def _lock_or_wait(file: IO[bytes]) -> bool:
    """Locks ``file`` and returns True; if another process has locked it, waits for that one and returns False."""
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    _logger.info("Another process compares the kernels with xla: this one waits up to %g s for it", WAIT_SECONDS)
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            _unlock(file)
            return False
        time.sleep(POLL_SECONDS)
    return False


def _unlock(file: IO[bytes]) -> None:
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_UN)


def find_comparison(device: Device, heads: int) -> Comparison | None:
    """Returns the comparison on ``device``; None if nothing is to be remembered, or if a part of its key is unknown."""
    folder = find_folder()
    software, driver = (None, None) if folder is None else (describe_software(), find_driver())
    if folder is None or software is None or driver is None:
        return None
    key = {"software": software, "device": device._asdict(), "driver": driver, "heads": heads}
    return Comparison(key, folder / _name_file(key))


def recall_or_compare(
    comparison: Comparison, compare: Callable[[], str | None], compared_by: str
) -> tuple[str | None, str | None]:
    """Returns what is wrong with the kernels. Runs ``compare()`` unless an earlier success is remembered.

    Args:
        comparison: describes the comparison that ``compare`` makes.
        compare: returns what is wrong, or None.
        compared_by: who compares: "JAX", or "PyTorch" for kernels that are launched directly.

    Returns:
        What is wrong, or None; and who compared, when, and the file that records it, or None if this process compared.
    """
    if recalled := comparison.read():
        return None, _describe_result(comparison, recalled)
    with comparison.lock():
        if recalled := comparison.read():
            return None, _describe_result(comparison, recalled)
        reason = compare()
        if reason is None:
            comparison.write(compared_by)
    return reason, None


def _describe_result(comparison: Comparison, record: dict[str, Any]) -> str:
    return f"{record['compared_by']} compared a small call on {record['at']} ({comparison.path})"


def report() -> Iterator[str]:
    """Yields where comparisons are remembered, whether this software and driver read them, and how to forget them."""
    folder = find_folder()
    if folder is None:
        yield f"First calls are not remembered: {VARIABLE} is empty or 0, or the user has no home."
        return
    records = [record for path in sorted(folder.glob(f"{PREFIX}*.json")) if (record := _read_record(path))]
    count = f"{len(records) or 'no'} comparison{'s' * (len(records) != 1)}"
    yield f"First calls remembered in {folder}: {count} ({VARIABLE} names another folder; 0: remember nothing)"
    yield from map(_describe_record, records)
    if records:
        yield f"To forget: rm {shlex.quote(str(folder))}/{PREFIX}*"


def _describe_record(record: dict[str, Any]) -> str:
    key, software = record["key"], record["key"]["software"]
    is_current = software == describe_software() and find_driver() in (key["driver"], None)
    versions = ", ".join(f"{name} {software[name]}" for name in DISTRIBUTIONS if name in software)
    return (
        f"- {key['device']['kind']}, {HEADS[key['heads']]}: compared by {record['compared_by']} on {record['at']} with "
        f"{versions}, driver {key['driver']}; {'read here' if is_current else 'not read here: other versions'}"
    )
