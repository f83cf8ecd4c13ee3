"""Lowered kernels, remembered in the user's cache folder, so that later processes do not lower them again.

Lowering one kernel takes Python 0.1 to 1 s, and a first call through PyTorch needs up to 15 kernels. A file holds the
compressed module of one kernel. The file's name is a digest of what the module depends on: this package's sources, the
versions of JAX and of NVIDIA's compilers, the settings of Pallas and Mosaic, and the kernel with its shapes and
options. A file that is damaged or cannot be read counts as missing.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import shlex
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lce_jax.call import _remembered
from lce_jax.mosaic import _compiler, _generations
from lce_jax.mosaic._compiler import Kernel
from lce_jax.types._types import Call, Device

PREFIX = "kernel-"
UNREAD_SECONDS = 3 * 30 * 24 * 3600  # a file that no process reads for so long is removed
DIGEST = hashlib.sha256
SETTINGS = ("pallas", "mosaic", "checks", "matmul_precision", "promotion", "debug_nans", "debug_infs")
DESCRIBED = (bool, int, float, str, type(None), np.dtype, jax.ShapeDtypeStruct, Call)  # types whose repr is complete
VARIABLES = ("MOSAIC_", "JAX_PALLAS_", "JAX_MOSAIC_")

_logger = logging.getLogger("lce_jax")


class LoweredKernels:
    """The files of kernels that one set of versions of this package, JAX and NVIDIA's compilers has lowered."""

    def __init__(self, folder: Path, software: dict[str, str]) -> None:
        self.folder = folder
        self._software = json.dumps([software, _describe_settings()], sort_keys=True)

    def read(self, key: str) -> bytes | None:
        """Returns the module that was written with ``key``; None if the file is missing or damaged."""
        path = self._name_file(key)
        with contextlib.suppress(OSError, zlib.error):
            digest, module = _split(zlib.decompress(path.read_bytes()))
            if digest == self._digest(key, module):
                with contextlib.suppress(OSError):
                    os.utime(path)
                return module
        return None

    def write(self, key: str, module: bytes) -> None:
        """Writes a complete file with the module, or no file. The log reports a failure."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _remembered.replace_file(self._name_file(key), zlib.compress(self._digest(key, module) + module))
        except OSError as error:
            _logger.info("A lowered kernel is not remembered: %s", error)

    def _name_file(self, key: str) -> Path:
        return self.folder / f"{PREFIX}{DIGEST((self._software + key).encode()).hexdigest()[:32]}.bin"

    def _digest(self, key: str, module: bytes) -> bytes:
        return DIGEST((self._software + key).encode() + b"\0" + module).digest()


def _split(content: bytes) -> tuple[bytes, bytes]:
    size = DIGEST().digest_size
    return content[:size], content[size:]


def recall_or_lower(files: LoweredKernels | None, kernel: Kernel, device: Device) -> bytes:
    """Returns a kernel's module: from ``files``, or lowered now and written there."""
    key = describe_kernel(kernel, device)
    if files is None or key is None:
        return _compiler.module(kernel, device)
    module = files.read(key)
    if module is None:
        module = _compiler.module(kernel, device)
        files.write(key, module)
    return module


def describe_kernel(kernel: Kernel, device: Device) -> str | None:
    """Returns text that describes only this kernel; None if the repr of one of its operands is incomplete.

    A generation is named by its compute capabilities alone, because its tiles and functions are in this package's
    sources.
    """
    launch, tree, leaves = kernel.launch
    generations = {id(one): f"generation {one.compute_capabilities}" for one in _generations.RELEASED}
    if not all(id(leaf) in generations or isinstance(leaf, DESCRIBED) for leaf in leaves):
        return None
    texts = [generations.get(id(leaf)) or repr(leaf) for leaf in leaves]
    text = "\n".join([device.compute_capability, launch.__module__, launch.__qualname__, str(tree), *texts])
    return text if launch.__module__.startswith("lce_jax.") and " at 0x" not in text else None


def find_lowered_kernels() -> LoweredKernels | None:
    """Returns the user's lowered kernels; None if nothing is to be remembered, or the package's sources are unknown."""
    folder = _remembered.find_folder()
    software = None if folder is None else _remembered.describe_software()
    if folder is None or software is None:
        return None
    remove_unread(folder)
    return LoweredKernels(folder, software)


def _describe_settings() -> dict[str, str]:
    """Returns the settings of JAX and the environment variables that may change a module."""
    values: Any = jax.config.values
    settings = {name: repr(value) for name, value in values.items() if any(part in name for part in SETTINGS)}
    return settings | {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)}


def list_files(folder: Path) -> list[Path]:
    """Returns the lowered kernels' files, whatever versions of the software wrote them."""
    return sorted(folder.glob(f"{PREFIX}*.bin"))


@functools.cache
def remove_unread(folder: Path) -> None:
    """Removes the files that no process has read for three months. Once in a process is enough."""
    for path in list_files(folder):
        with contextlib.suppress(OSError):  # another process has removed it
            if time.time() - path.stat().st_mtime > UNREAD_SECONDS:
                path.unlink()


def report() -> Iterator[str]:
    """Yields how many lowered kernels are remembered, and how to forget them. Yields nothing if there are none."""
    folder = _remembered.find_folder()
    sizes = [] if folder is None else [path.stat().st_size for path in list_files(folder)]
    if sizes:
        yield f"Lowered kernels remembered there: {len(sizes)}, {sum(sizes) / 2**20:.1f} MiB, of all versions"
        yield f"To forget: rm {shlex.quote(str(folder))}/{PREFIX}*"
