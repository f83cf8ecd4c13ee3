"""The calculator of docs/memory.md shows the numbers that `lce-jax explain` prints."""

from __future__ import annotations

import re

import pytest

from lce_jax.explain import __main__ as command
from lce_jax.types.scalars import format_bytes
from tests.doc_blocks import ROOT
from tests.site.test_figures import script

pytestmark = pytest.mark.site
memory = script("memory")


@pytest.mark.parametrize(("model", "tokens", "shards"), [("qwen3-8b", 8192, 1), ("gemma2-2b", 1024, 8)])
def test_its_numbers_are_those_of_the_command(
    model: str, tokens: int, shards: int, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", model, "--tokens", str(tokens), "--tensor-parallel", str(shards), "--spare-gib", "1000"]
    assert command.main(arguments) == 0
    printed = capsys.readouterr().out.splitlines()
    sizes = iter(map(format_bytes, memory.compute_bytes(model, tokens, shards)))
    for way, forward, both in zip(memory.WAYS, sizes, sizes, strict=False):
        name = way.replace(", full cache", r", cache_bytes=\d\d+").replace(", no cache", ", cache_bytes=0")
        (line,) = [x for x in printed if re.match(rf"{name}(, linear_cross_entropy)?  ", x)]
        assert f"{forward}  " in line
        assert re.search(rf"\s{re.escape(both)}\s", line)


def test_its_page_has_what_its_script_fills() -> None:
    page, code = ((ROOT / "docs" / name).read_text() for name in ("memory.md", "assets/memory.js"))
    for name in re.findall(r"form\.elements\.(\w+)", code):
        assert f'<select name="{name}">' in page
    for name in re.findall(r"(?:getElementById\(\"|querySelector\(\"#)([\w-]+)", code):
        assert f'id="{name}"' in page
    assert page.index("memory-numbers.js") < page.index("memory.js")


def test_without_its_script_the_page_has_the_first_choice() -> None:
    """GitHub runs no script."""
    page, code = ((ROOT / "docs" / name).read_text() for name in ("memory.md", "assets/memory.js"))
    chosen = re.findall(r'fill\(form\.elements\.\w+, MEMORY\.\w+, "?([\w-]+)"?\)', code)
    assert [option.replace(",", "") for option in re.findall(r"<option>(.*?)</option>", page)] == chosen
    assert chosen == [str(each) for each in memory.FIRST]
    assert page.count("<tr><td>") == len(memory.WAYS)  # `docs/_build/tables.py` writes them
