"""Settings before JAX is imported: eight CPU devices for meshes, unless the run is for GPUs (``make test-gpu``).

Most of the suite's time goes to XLA, which compiles small programs. On CPUs, two settings shorten it:

* JAX asks LLVM for no optimization, which saves a quarter of the CPU time. XLA still does its own part: fusion,
  layouts, partitioning, scheduling. Modules that judge the rounding of results use the fixture `optimized` instead.
* Compiled programs are read from ``.pytest_cache/programs``. In a first run one program in seven was compiled by
  another test before; a later run finds all programs that did not change. A program's name there contains XLA's version
  and options. ``make clean`` removes the programs; those that no run reads for a month are removed automatically.

The workers fill the cores, so libraries start no threads. The garbage collector waits until the tests are collected,
skips what is there by then, and runs seldom, because tracing makes millions of objects, of which few are garbage.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("MPLBACKEND", "agg")
os.environ["LCE_JAX_CACHE_DIR"] = "0"  # what one test's first call has found is not another's

import atexit
import contextlib
import gc
import pathlib
import re
import time
from collections.abc import Iterator

import pytest

gc.disable()  # until the tests are collected: little of what is imported becomes garbage

PROGRAMS = pathlib.Path(__file__).parent / ".pytest_cache" / "programs"
MONTH = 30 * 24 * 3600  # seconds


def forget_old_programs() -> None:
    """Removes the programs that no run has read for a month."""
    for program in PROGRAMS.glob("*"):
        with contextlib.suppress(OSError):  # another run has removed it
            if time.time() - program.stat().st_atime > MONTH:
                program.unlink()


if os.environ["JAX_PLATFORMS"] == "cpu":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # xdist's workers find it there
        forget_old_programs()
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(PROGRAMS)
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    """Skips the import of a file if the marks in its text say that none of its tests will run."""
    expression = config.option.markexpr
    if not expression or collection_path.suffix != ".py":
        return None
    text = collection_path.read_text()
    if expression.startswith("site and"):
        return None if re.search(r"pytest\.mark\.site|^ *>>> ", text, re.MULTILINE) else True
    if expression.startswith("gpu"):  # other files build meshes of eight CPU devices when they are imported
        return None if re.search(r"pytest\.mark\.(multi_)?gpu\b", text) else True
    mark = re.search(r"^pytestmark = \[?pytest\.mark\.(site|slow|gpu|multi_gpu)\b", text, re.MULTILINE)
    return True if mark and f"not {mark[1]}" in expression else None


@pytest.hookimpl(tryfirst=True)  # before marks are looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks doctests as ``site`` and combinations as ``slow``, and skips what this machine cannot run."""
    import jax

    from tests.pairs import mark_slow

    mark_slow(items)
    count = sum(device.platform == "gpu" for device in jax.devices())
    for item in items:
        if isinstance(item, pytest.DoctestItem):
            item.add_marker("site")
        for marker, needed in (("gpu", 1), ("multi_gpu", 2)):
            if item.get_closest_marker(marker) and count < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA GPU(s), JAX sees {count}: make test-gpu"))


def pytest_collection_finish() -> None:
    """Excludes all objects so far from garbage collection."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()
    atexit.register(gc.unfreeze)  # otherwise libraries report leaks; pytest's own collections come before


@pytest.fixture(scope="module")
def optimized() -> Iterator[None]:
    """Compiles programs anew, with the optimizations that users have."""
    import jax

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()
    yield
    jax.config.update("jax_disable_most_optimizations", before)
