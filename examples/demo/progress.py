"""Prints lines of progress, each with an estimate of the remaining time."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rich.console import Console

# The work of each part, compilation included. The unit is one step of phase 1 on a CPU.
TEXT, EVALUATION, COMPARISON = 20, 10, 30
FIRST_STEP, FIRST_RL_STEP, RL_STEP = 15, 25, 2


@dataclasses.dataclass
class Progress:
    """The work done so far, and all work. The estimate assumes the same pace for the rest."""

    console: Console
    work: int
    done: int = 0
    start: float = dataclasses.field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        """The time since the start."""
        return time.perf_counter() - self.start

    def seconds_left(self) -> float:
        """Returns the time of the remaining work at the pace so far."""
        return self.seconds * (self.work - self.done) / self.done

    def print(self, line: str) -> None:
        """Prints the line and the estimate, which is rounded up to 5 s."""
        left = 5 * -(-self.seconds_left() // 5)
        self.console.print(f"{line}; about {left:.0f} s left", highlight=False, soft_wrap=True)

    def collect[T](
        self, name: str, items: Iterable[T], total: int, work: tuple[int, int], describe: Callable[[T], str]
    ) -> list[T]:
        """Collects the items in a list, and prints a line after each tenth of them.

        ``work`` has the work of the first item and that of each later item.
        """
        items_so_far: list[T] = []
        for item in items:
            self.done += work[min(len(items_so_far), 1)]
            items_so_far.append(item)
            count = len(items_so_far)
            if 10 * count // total > 10 * (count - 1) // total:
                self.print(f"{name}: {count} of {total}, {describe(item)}")
        return items_so_far
