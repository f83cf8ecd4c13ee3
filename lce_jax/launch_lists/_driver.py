"""Functions of the CUDA driver, which is there wherever a kernel runs."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

NON_BLOCKING = 1  # a stream that does not wait for the default one
RELAXED = 2  # a capture that forbids no call of the driver, in this thread or another

type Launches = Sequence[Callable[[], Any]]


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def call(function: str, *arguments: Any) -> None:
    """Calls a function of the driver.

    Raises:
        RuntimeError: it returns an error.
    """
    check(function, getattr(_driver(), function)(*arguments))


def check(function: str, status: int) -> None:
    """Raises RuntimeError if a status is an error."""
    if status:
        raise RuntimeError(f"the CUDA driver's {function} returned error {status}")


def current_context() -> ctypes.c_void_p:
    """The CUDA context of this thread."""
    found = ctypes.c_void_p()
    call("cuCtxGetCurrent", ctypes.byref(found))
    return found


def enter(context: ctypes.c_void_p) -> None:
    """Makes a context this thread's."""
    call("cuCtxSetCurrent", context)


class Graph:
    """Launches as one CUDA graph, which costs the host one call of the driver."""

    def __init__(self, bound: Callable[[int], Launches], stream: int) -> None:
        """Records ``bound(s)``, the launches on a stream s, without running them; ``stream`` is where they will run."""
        executable = ctypes.c_void_p(_recorded(bound))
        self._launch = functools.partial(_driver().cuGraphLaunch, executable, ctypes.c_void_p(stream))
        # The driver keeps what still runs.
        weakref.finalize(self, call, "cuGraphExecDestroy", executable).atexit = False

    def launch(self) -> None:
        """Launches all of it."""
        check("cuGraphLaunch", self._launch())


def _recorded(bound: Callable[[int], Launches]) -> int | None:
    """The handle of the executable graph."""
    stream, graph, executable = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    with _beside_captures():
        call("cuStreamCreate", ctypes.byref(stream), NON_BLOCKING)
        try:
            call("cuStreamBeginCapture_v2", stream, RELAXED)
            try:
                for launch in bound(stream.value or 0):
                    launch()
            finally:
                call("cuStreamEndCapture", stream, ctypes.byref(graph))
            call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
            call("cuGraphDestroy", graph)
        finally:
            call("cuStreamDestroy_v2", stream)
    return executable.value


@contextlib.contextmanager
def _beside_captures() -> Iterator[None]:
    """Inside, another thread's capture does not forbid what this one calls."""
    mode = ctypes.c_int(RELAXED)
    call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
