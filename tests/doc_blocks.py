"""The code blocks of a page of documentation, and what they print.

A ``python`` block is a complete program: it is pasted into a fresh interpreter. On a page that says `IN_ORDER`, all
blocks are pasted into one interpreter, in order. A ``text`` block right after a block is what the block prints. The
comment ``<!-- needs a GPU -->`` marks a block with a Megatron model: without a GPU, the line `WITHOUT_A_GPU`, which the
page shows, runs first. A block that begins with `HUGGING_FACE` runs with `SMALL_MODEL`, so nothing is downloaded.

``python -m tests.doc_blocks docs/mesh.md`` checks a page; with ``--write`` it writes what the blocks print into it.
"""

from __future__ import annotations

import contextlib
import gc
import io
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
IN_ORDER = "Paste the blocks of this page in order: each needs the blocks above it."
HUGGING_FACE = "from transformers import AutoModelForCausalLM\n"
SMALL_MODEL = """
import sys, types, torch
class AutoModelForCausalLM(torch.nn.Sequential):
    from_pretrained = classmethod(lambda cls, name: cls(torch.nn.Embedding(512, 64), torch.nn.Linear(64, 512)))
    def get_output_embeddings(self):
        return self[-1]

sys.modules["transformers"] = types.ModuleType("transformers")
vars(sys.modules["transformers"]).update(__version__="5", AutoModelForCausalLM=AutoModelForCausalLM)
"""
WITHOUT_A_GPU = "from examples.megatron_grpo import stand_in_for_cuda; stand_in_for_cuda()"
PART = re.compile(
    r"(?P<gpu>^<!-- needs a GPU -->\n)?"
    r"^```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^```$(?:\n+(?:<!-- /program -->\n+)?^```text\n(?P<printed>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    language: str
    code: str
    line: int
    printed: str | None  # the ``text`` block after it
    gpu: bool  # whether the page says that it needs a GPU

    def program(self) -> str:
        """Returns the code that is pasted on this machine."""
        if self.code.startswith(HUGGING_FACE):
            return f"{SMALL_MODEL}{self.code}"
        return f"{WITHOUT_A_GPU}\n{self.code}" if self.gpu and not shutil.which("nvidia-smi") else self.code


def parts(page: Path) -> Iterator[Block]:
    """Yields the blocks of a page in order."""
    text = page.read_text()
    for match in PART.finditer(text):
        line = text.count("\n", 0, match.start("language")) + 1
        yield Block(match["language"], match["code"], line, match["printed"], match["gpu"] is not None)


def runs_in_order(page: Path) -> bool:
    """Returns whether the blocks of a page are pasted into one interpreter."""
    return IN_ORDER in " ".join(page.read_text().split())


def run(page: Path) -> Iterator[tuple[Block, str]]:
    """Runs the Python blocks of a page in one interpreter. Yields each with what it printed."""
    name = page.relative_to(ROOT).as_posix()
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in parts(page):
        if block.language == "python":
            printed = io.StringIO()
            padded = "\n" * block.line + block.program()  # so that a traceback names the line of the page
            with contextlib.redirect_stdout(printed):
                exec(compile(padded, name, "exec"), namespace)
            yield block, printed.getvalue()


def check(page: Path) -> int:
    """Runs a page and returns its number of blocks. Raises an error if a block does not print what the page says."""
    count = 0
    for block, printed in run(page):
        assert printed == (block.printed or ""), f"{page.name}:{block.line} prints\n{printed}"
        count += 1
    return count


def write(page: Path) -> None:
    """Writes what the blocks print into the page."""
    text = page.read_text()
    for block, printed in run(page):
        if block.printed is not None:
            head, code, tail = text.partition(f"{block.code}```\n")
            assert code, block
            text = head + code + tail.replace(f"```text\n{block.printed}```", f"```text\n{printed}```", 1)
    page.write_text(text)


if __name__ == "__main__":
    gc.set_threshold(50_000, 20, 20)  # as in conftest.py
    names = [argument for argument in sys.argv[1:] if argument != "--write"]
    for path in [(ROOT / name).resolve() for name in names]:
        write(path) if "--write" in sys.argv else print(path.name, check(path), "blocks")
