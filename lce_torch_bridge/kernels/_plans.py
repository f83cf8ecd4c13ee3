"""What depends on shapes and options alone: planned once, and found again by one key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lce_torch_bridge import _launch_with

MOST = 4096  # of all shapes together; each takes about two KiB

_known: dict[Any, Any] = {}


def found(key: Any, plan: Callable[[], Any]) -> Any:
    """What ``plan()`` is; None if JAX is to run such calls, because it is the reason, a text."""
    planned = known(key, plan)
    if isinstance(planned, str):
        _launch_with.refused(planned)
        return None
    return planned


def known(key: Any, plan: Callable[[], Any]) -> Any:
    """What ``plan()`` is."""
    planned = _known.get(key)  # a key is long: its hash is taken once
    if planned is None:
        if len(_known) >= MOST:
            _known.clear()
        planned = _known[key] = plan()
    return planned
