"""Before JAX is imported: eight CPU devices for meshes, unless the run is for GPUs (``make test-gpu``).

Most of the suite's time is XLA's, to compile small programs. On CPUs, two settings shorten it:

* JAX asks LLVM for no optimization: a quarter less CPU time. What XLA itself does with a program stays: fusion,
  layouts, partitioning, scheduling. Modules that judge the rounding of results ask for the fixture `optimized` instead.
* A program that has been compiled is read from ``.pytest_cache/programs``: one in seven that another test of a first
  run has compiled, and in a later run all that did not change. XLA's version and options are part of each name there.
  ``make clean`` removes them; what no run has read for a month goes by itself.

The workers fill the cores: libraries start no threads of their own. What a worker has imported and collected is not
searched for garbage again, and the rest seldom: tracing makes millions of objects, of which few are garbage.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("MPLBACKEND", "agg")

import contextlib
import gc
import pathlib
import re
import time
from collections.abc import Iterator

import pytest

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
    """A file of whose tests none will run is not imported: each says so itself."""
    expression = config.option.markexpr
    if not expression or collection_path.suffix != ".py":
        return None
    text = collection_path.read_text()
    if expression.startswith("site and"):
        return None if re.search(r"pytest\.mark\.site|^ *>>> ", text, re.MULTILINE) else True
    if expression.startswith("gpu"):  # other files build meshes of eight CPU devices when they are imported
        return None if re.search(r"pytest\.mark\.(multi_)?gpu\b", text) else True
    whole = re.search(r"^pytestmark = \[?pytest\.mark\.(site|slow|gpu|multi_gpu)\b", text, re.MULTILINE)
    return True if whole and f"not {whole[1]}" in expression else None


@pytest.hookimpl(tryfirst=True)  # before marks are looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Doctests are of the site. Skip what this machine cannot run, and leave combinations to `make test-all`."""
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
    """What there is now stays."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_unconfigure() -> None:
    """Else libraries report leaks at the end."""
    gc.unfreeze()


@pytest.fixture(scope="module")
def optimized() -> Iterator[None]:
    """Programs are compiled anew, as users compile them."""
    import jax

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()
    yield
    jax.config.update("jax_disable_most_optimizations", before)
