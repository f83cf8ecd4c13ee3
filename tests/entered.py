"""The functions of packages that a call enters: what a reader follows."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NamedTuple


class Entered(NamedTuple):
    functions: list[tuple[str, str]]  # file and name; a lambda or a comprehension is part of its function

    @property
    def files(self) -> list[str]:
        return sorted({file for file, _ in self.functions})

    def __str__(self) -> str:
        return f"{len(self.functions)} functions in {len(self.files)} files"


def entered(call: Callable[[], Any], *packages: ModuleType) -> Entered:
    """Those of ``packages``, in autograd's threads too."""
    folders, found = tuple(str(Path(str(package.__file__)).parent) for package in packages), set()

    def watch(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(folders) and not code.co_name.startswith("<"):
            found.add((code.co_filename, code.co_qualname))

    before = sys.getprofile()
    threading.setprofile_all_threads(watch)
    try:
        call()
    finally:
        threading.setprofile_all_threads(before)
    return Entered(sorted(found))
