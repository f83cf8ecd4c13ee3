"""What depends on shapes and options alone: planned once, and found again by one key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MOST = 4096  # of all shapes together; each takes about two KiB

_plans: dict[Any, Any] = {}


def plan_of[T](key: Any, make: Callable[[], T]) -> T:
    """What ``make()`` is, or was when this key came first. A text says why kernels do not serve such calls."""
    plan: T | None = _plans.get(key)  # a key is long: its hash is taken once
    if plan is None:
        if len(_plans) >= MOST:
            _plans.clear()
        plan = _plans[key] = make()
    return plan
