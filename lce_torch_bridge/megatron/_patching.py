"""The temporary replacement of a module's methods, in all threads or in one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

_lock = threading.Lock()


@contextlib.contextmanager
def replace_methods(module: torch.nn.Module, **methods: Callable[..., Any]) -> Iterator[None]:
    """Replaces methods of a module in all threads, because autograd reruns a checkpoint's forward in its own thread.

    Raises:
        RuntimeError: a method is already replaced.
    """
    with _lock:
        for name in methods:
            if name in vars(module):
                raise _make_replaced_error(module, name)
        for name, method in methods.items():
            vars(module)[name] = method if isinstance(method, PerThreadMethod) else Replacement(method)
    try:
        yield
    finally:
        for name in methods:
            del vars(module)[name]


@contextlib.contextmanager
def replace_forward_in_thread(module: torch.nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replaces a module's ``forward`` in this thread only. Every other thread may have a replacement of its own.

    Raises:
        RuntimeError: ``forward`` is already replaced, in this thread or in all threads.
    """
    thread = threading.get_ident()
    with _lock:
        shared = vars(module).get("forward") or PerThreadMethod(module.forward)
        if not isinstance(shared, PerThreadMethod) or thread in shared.overrides:
            raise _make_replaced_error(module, "forward")
        shared.overrides[thread] = forward
        vars(module)["forward"] = shared
    try:
        yield
    finally:
        with _lock:
            del shared.overrides[thread]
            if not shared.overrides and not shared.persistent:
                del vars(module)["forward"]


class Replacement:
    """A function that replaces a method. It refuses to be copied, because the copy would call the original module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        raise TypeError(
            "inside fused_output_layer, fused_losses and output_processor, methods of a model are replaced by "
            "functions that call this model and not its copy: copy or pickle it outside of the block, or pass on its "
            "state_dict()"
        )


class PerThreadMethod(Replacement):
    """A method with overrides in some threads. ``persistent`` keeps it on the module when no override is left."""

    def __init__(self, function: Callable[..., Any], *, persistent: bool = False) -> None:
        super().__init__(function)
        self.persistent = persistent
        self.overrides: dict[int, Callable[..., Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.overrides.get(threading.get_ident(), self.function)(*args, **kwargs)


def _make_replaced_error(module: torch.nn.Module, name: str) -> RuntimeError:
    return RuntimeError(
        f"{type(module).__name__}.{name} has been replaced already, and that replacement would not be called. If an "
        "enclosing fused_output_layer, fused_losses or other code has replaced it, remove one of the two; if another "
        "thread is inside fused_output_layer with this model, let threads take turns"
    )
