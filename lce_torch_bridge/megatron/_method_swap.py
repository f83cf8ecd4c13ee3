"""Methods of one module, not of its class, replaced for a while: for all threads, or for the one that asks."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

_changing = threading.Lock()


@contextlib.contextmanager
def replaced(module: torch.nn.Module, **methods: Callable[..., Any]) -> Iterator[None]:
    """Inside, methods of a module are others, in all threads: autograd runs a checkpoint's forward in one of its own.

    Raises:
        RuntimeError: they have been replaced already.
    """
    with _changing:
        for name in methods:
            if name in vars(module):
                raise _already(module, name)
        for name, method in methods.items():
            vars(module)[name] = method if isinstance(method, OfThreads) else Replacement(method)
    try:
        yield
    finally:
        for name in methods:
            del vars(module)[name]


@contextlib.contextmanager
def replaced_here(module: torch.nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside, a module's ``forward`` is another one in this thread. Other threads may replace it too, or not.

    Raises:
        RuntimeError: it has been replaced already in this thread, or in all.
    """
    thread = threading.get_ident()
    with _changing:
        shared = vars(module).get("forward") or OfThreads(module.forward)
        if not isinstance(shared, OfThreads) or thread in shared.others:
            raise _already(module, "forward")
        shared.others[thread] = forward
        vars(module)["forward"] = shared
    try:
        yield
    finally:
        with _changing:
            del shared.others[thread]
            if not shared.others and not shared.stays:
                del vars(module)["forward"]


class Replacement:
    """A method in the place of another. A copy of the module would go on calling the original: it cannot be made."""

    def __init__(self, own: Callable[..., Any]) -> None:
        self.own = own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.own(*args, **kwargs)

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        raise TypeError(
            "inside of fused_output_layer, fused_losses and output_processor, methods of a model are replaced by some "
            "that call this very model: copy or pickle it outside of the block, or pass on its state_dict()"
        )


class OfThreads(Replacement):
    """A method that is another one in some threads. It ``stays`` on the module where a `replaced` put it there."""

    def __init__(self, own: Callable[..., Any], *, stays: bool = False) -> None:
        super().__init__(own)
        self.stays = stays
        self.others: dict[int, Callable[..., Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.others.get(threading.get_ident(), self.own)(*args, **kwargs)


def _already(module: torch.nn.Module, name: str) -> RuntimeError:
    return RuntimeError(
        f"{type(module).__name__}.{name} has been replaced already, which would be bypassed. If an enclosing "
        "fused_output_layer, fused_losses or other code has replaced it, leave one of the two; if another thread is "
        "inside of fused_output_layer with this model, let threads take turns"
    )
