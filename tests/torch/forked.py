"""Ranks on a CPU that share what is the same in all: ``python -m tests.torch.forked SIZE LOGS MODULE ARGUMENT...``.

Each runs ``MODULE.main()`` in the environment that torchrun gives. One process imports the module and is forked, and of
ranks that need the same program at the same time one compiles it, so four cost less than two under torchrun. The first
to fail ends the others. What they print goes to ``LOGS/<rank>``.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import os
import pathlib
import signal
import sys
from typing import Any, NoReturn

import jax
from jax._src import compiler
from torch.distributed import TCPStore


def main() -> None:
    size, logs, module = int(sys.argv[1]), pathlib.Path(sys.argv[2]), importlib.import_module(sys.argv[3])
    gc.freeze()  # as in conftest.py: a sixth of the ranks' time was a search for garbage
    gc.set_threshold(50_000, 20, 20)
    pids: list[int] = []
    read, write = os.pipe()
    for rank in range(size):
        pid = os.fork()
        if not pid:
            os.close(write)
            return run(module, rank, size, logs, int(os.read(read, 5)))
        pids.append(pid)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # it has threads, so after the forks
    os.write(write, f"{store.port:05}".encode() * size)
    signal.signal(signal.SIGTERM, stop)
    try:
        while pids:
            pid, status = os.wait()
            pids.remove(pid)
            if status:
                sys.exit(f"process {pid} ended with code {os.waitstatus_to_exitcode(status)}")
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)


def stop(*_: Any) -> NoReturn:
    sys.exit("ended from outside")


def run(module: Any, rank: int, size: int, logs: pathlib.Path, port: int) -> None:
    """This process from here on: a rank, which ends as any program does."""
    sys.argv = [module.__name__, *sys.argv[4:]]
    (logs / str(rank)).mkdir()
    for stream in (1, 2):
        name = {1: "stdout.log", 2: "stderr.log"}[stream]
        os.dup2(os.open(logs / str(rank) / name, os.O_WRONLY | os.O_CREAT), stream)
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    os.environ.update(MASTER_ADDR="localhost", TORCHELASTIC_USE_AGENT_STORE="True")
    compile_once(logs)
    module.main()


def compile_once(logs: pathlib.Path) -> None:
    """A program that another rank is compiling is read from the file that it writes."""
    jax.config.update("jax_compilation_cache_dir", str(logs / "programs"))
    jax.config.update("jax_enable_compilation_cache", True)
    compiled = compiler.compile_or_get_cached

    def one_at_a_time(*args: Any, **kwargs: Any) -> Any:
        with open(logs / "lock", "w") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)
            return compiled(*args, **kwargs)

    compiler.compile_or_get_cached = one_at_a_time


if __name__ == "__main__":
    main()
