"""Eight processes at once whose CPU counts as an A100, the ranks of a host: each compares, or waits and reads.

``python -m tests.call.remember_worker FOLDER`` writes into a folder for each of `ACTIONS`: what is remembered, and two
files, with a line for each process that has compared, and for each that has ended its first call.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from lce_jax.call import _first_call, _remembered
from tests.devices import A100

ACTIONS = ("holds", "is off", "dies")  # what a comparison finds; the first process that compares dies
DRIVER = "580.95.05, CUDA 13.0"
COUNT, SECONDS = 8, 1.0  # what a comparison takes


def run(folder: Path, action: str, all_are_there: Any) -> None:
    """The first call of one process."""

    def compare() -> dict[str, float]:
        add_line(folder / "compared", str(os.getpid()))
        time.sleep(SECONDS)
        if action == "dies" and (folder / "compared").read_text().split() == [str(os.getpid())]:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"logprobs": float(action == "is off")}

    all_are_there.wait()
    add_line(folder / "ended", _first_call.check_once(A100, compare) or "holds")


def add_line(path: Path, text: str) -> None:
    with open(path, "a") as file:
        file.write(f"{text}\n")


def main(folder: Path) -> None:
    _remembered.find_driver = lambda: DRIVER  # type: ignore[assignment]
    fork = multiprocessing.get_context("fork")  # eight imports would take longer than all that is tested
    for action in ACTIONS:
        (folder / action).mkdir(parents=True)
        os.environ[_remembered.VARIABLE] = str(folder / action)
        arguments = folder / action, action, fork.Barrier(COUNT)
        processes = [fork.Process(target=run, args=arguments) for _ in range(COUNT)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
