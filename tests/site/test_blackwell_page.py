"""What docs/blackwell.md says, beside the files that it is said of."""

from __future__ import annotations

import pathlib
import re

import pytest

from lce_jax.mosaic.common._tiles import SMEM_LIMIT
from lce_jax.mosaic.sm100._tuning import ALONE, PAIRS
from tests.mosaic.test_blackwell import FAULTS

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "blackwell.md").read_text()
TABLES = sorted((ROOT / "tests" / "compiled").glob("kernels-*-b[23]00.txt"))


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_no_kernel_spills(table: pathlib.Path) -> None:
    rows = [line[56:].split() for line in table.read_text().splitlines()[2:]]
    assert len(rows) > 100
    assert {tuple(row[1:4]) for row in rows} == {("0", "0", "0")}  # stack, stores, loads
    (most,) = re.findall(r"no spills; (\d+) registers at most", PAGE)
    assert max(int(row[0]) for row in rows) <= int(most)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_a_refusal_counts_the_shared_memory_that_a_launch_asks_for(table: pathlib.Path) -> None:
    lines = table.read_text().splitlines()

    def asked(kernel: str, call: str) -> set[int]:
        return {int(line.split()[-1]) for line in lines if line.startswith(f"{kernel:20} {call:34} ")}

    assert asked("statistics", "qwen3-8b") == {ALONE.smem_bytes(2, staged=False)}
    for kernel in ("dlogits", "update_dhidden", "write_dweight"):
        assert asked(kernel, "qwen3-8b") == {ALONE.smem_bytes(2, staged=True)}
        assert asked(kernel, "qwen3-8b, pairs") == {PAIRS.smem_bytes(2, staged=True)} != {ALONE.smem_bytes(2, True)}
    assert max(one.smem_bytes(2, staged=True) for one in (ALONE, PAIRS)) <= SMEM_LIMIT


def test_both_architectures_have_a_table() -> None:
    assert {"kernels-0.12.0.1-b200.txt", "kernels-0.12.0.1-b300.txt"} <= {table.name for table in TABLES}


def test_the_page_says_how_many_faults_are_planted() -> None:
    assert {10: "ten"}[len(FAULTS)] in re.findall(r"planted faults \| (\w+),", PAGE)
