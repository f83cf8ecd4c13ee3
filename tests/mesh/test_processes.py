"""Two JAX processes with a device each equal one process with both, bit by bit."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]
SECONDS = 240


def start(path: pathlib.Path, process: int, processes: int, port: int, **environment: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "tests.process_worker", str(path), str(process), str(processes), str(port)]
    return subprocess.Popen(
        command, cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        return int(taken.getsockname()[1])


def check_two_equal_one(folder: pathlib.Path, alone: dict[str, str], pair: list[dict[str, str]]) -> None:
    """Runs one process in the environment ``alone``, two in those of ``pair``, and compares all results."""
    port = free_port()
    running = [start(folder / "one.npz", 0, 1, port, **alone)]
    running += [start(folder / "two.npz", i, 2, port, **environment) for i, environment in enumerate(pair)]
    try:
        said = [process.communicate(timeout=SECONDS)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    for process, text in zip(running, said, strict=True):
        assert process.returncode == 0, text[-3000:]
    one, two = (np.load(folder / name) for name in ("one.npz", "two.npz"))
    assert len(one.files) == 4 * 6
    assert one.files == two.files
    for name in one.files:
        assert np.all(np.isfinite(one[name])), name
        assert np.array_equal(one[name], two[name]), name


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path: pathlib.Path) -> None:
    def devices(count: int) -> dict[str, str]:
        return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={count}"}

    check_two_equal_one(tmp_path, devices(2), [devices(1)] * 2)
