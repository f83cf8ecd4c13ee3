"""Processes on a CPU that share what is the same in all: a server that imports once, and forks (`processes`).

A line of JSON is a request: how many ranks, their words, a directory for what they print, a time limit in seconds and
their environment. The words are a module and its arguments: each rank runs its ``main()`` in the environment that
torchrun gives. Or they are "-c" and code. The answer is a line with the exit codes, or with what went wrong: the first
to fail ends the others. Of ranks that need the same program at the same time one compiles it.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import os
import pathlib
import signal
import sys
import time
import traceback
import warnings
from typing import Any

import jax
from jax._src import compiler
from torch.distributed import TCPStore

import tests.torch.problem  # noqa: F401  (so that no child imports it)


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), flush=True)


def answer(size: int, words: list[str], logs: str, seconds: float, environment: dict[str, str]) -> list[int] | str:
    if words[0] != "-c":
        try:
            importlib.import_module(words[0])
        except ImportError:
            return traceback.format_exc()
    gc.freeze()  # as in conftest.py: a sixth of the ranks' time was a search for garbage
    gc.set_threshold(50_000, 20, 20)
    read, write = os.pipe()
    store, pids, codes = child(hold_a_store, size, write), {}, [0] * size
    for rank in range(size):
        pids[child(run, rank, size, words, pathlib.Path(logs), environment, read)] = rank
    os.close(read)
    os.close(write)
    end = time.monotonic() + seconds
    try:
        while pids:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                if time.monotonic() > end:
                    return "the ranks were not done in time"
                time.sleep(0.02)
            elif pid in pids:
                codes[pids.pop(pid)] = os.waitstatus_to_exitcode(status)
                if status and pids:
                    return f"a rank ended with code {os.waitstatus_to_exitcode(status)}"
    finally:
        for pid in (store, *pids):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return codes


def child(call: Any, *given: Any) -> int:
    """Its process id. It ends as any program does, after the call."""
    pid = os.fork()
    if not pid:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        call(*given)
        sys.exit()
    return pid


def hold_a_store(size: int, write: int) -> None:
    """In a process of its own, because it has threads."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    os.write(write, f"{store.port:05}".encode() * size)
    signal.pause()


def run(rank: int, size: int, words: list[str], logs: pathlib.Path, environment: dict[str, str], read: int) -> None:
    for stream, name in ((1, "stdout.log"), (2, "stderr.log")):
        (logs / str(rank)).mkdir(exist_ok=True)
        os.dup2(os.open(logs / str(rank) / name, os.O_WRONLY | os.O_CREAT), stream)
    os.environ.update(environment)
    for name, value in environment.items():
        if name.startswith("JAX_"):
            jax.config.update(name.lower(), value)
    if words[0] == "-c":
        warnings.simplefilter("error")
        exec(compile(words[1], "<code>", "exec"), {"__name__": "__main__"})
        return
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(int(os.read(read, 5))))
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True")
    compile_once(logs)
    sys.argv = words
    sys.modules[words[0]].main()


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
