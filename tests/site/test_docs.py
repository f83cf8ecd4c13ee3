"""The documentation as readers use it: Python blocks run and print what the page says, and commands exist."""

from __future__ import annotations

import codeop
import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib

import pytest

import lce_jax
import lce_torch_bridge
from benchmarks import __main__ as bench
from examples.demo.cli import _parser as demo_parser
from lce_jax import floors, losses, rows
from lce_jax.explain.__main__ import parser as explain_parser
from lce_jax.flax import linen, nnx
from lce_jax.mosaic._call import Generation
from lce_torch_bridge import areal, megatron, nemo_rl, skyrl, torchtitan, transformers, trl, verl
from tests.doc_blocks import HUGGING_FACE, IN_ORDER, PAGES, ROOT, WITHOUT_A_GPU, parts, runs_in_order
from tests.site.test_figures import script

pytestmark = pytest.mark.site
LANGUAGES = {"python", "sh", "text", "diff"}  # tests/recipes/test_migration.py runs the diffs
FIRST_PAGES = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("index", "quick-start", "memory"))]
TRACKED = set(subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True, cwd=ROOT).stdout.split())
BLOCKS = {page: [block for block in parts(page) if block.language == "python"] for page in PAGES}
TOGETHER = [page for page in PAGES if runs_in_order(page)]
ALONE = [
    pytest.param(block, id=f"{page.name}:{block.line}")
    for page in PAGES
    for block in BLOCKS[page]
    if page not in TOGETHER
]
COMMANDS = [(page, line) for page in PAGES for block in parts(page) if block.language == "sh"
            for lines in block.code.splitlines() for line in lines.split(" && ") if line.strip()]  # fmt: skip
IN_PROSE = re.compile(r"`(python -m (?:benchmarks|examples\.demo)(?: [^`]*)?)`")  # in the text and above tables
COMMANDS += sorted(
    {(page, line.replace("T,H,V", "1,2,3")) for page in PAGES for line in IN_PROSE.findall(page.read_text())}
)


def pasted(*arguments, code=None):
    """Returns what a fresh interpreter prints when it runs pages, or the code that is pasted into it.

    It uses no cache of programs, because JAX would warn of an entry that another worker is writing.
    """
    environment = {name: x for name, x in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    command = [sys.executable, *(["-m", "tests.doc_blocks", *arguments] if code is None else ["-c", code])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr or "megatron" in done.stderr  # Megatron warns at its import
    return done.stdout


def needs_megatron(blocks):
    if any("megatron.core" in block.code for block in blocks):
        pytest.importorskip("megatron.core")


@pytest.mark.parametrize("block", ALONE)
def test_a_block_runs_alone(block):
    needs_megatron([block])
    assert pasted(code=block.program()) == (block.printed or "")


@pytest.mark.parametrize("page", TOGETHER, ids=lambda page: page.name)
def test_the_blocks_of_a_page_run_in_order(page):
    needs_megatron(BLOCKS[page])
    assert pasted(page.relative_to(ROOT).as_posix()) == f"{page.name} {len(BLOCKS[page])} blocks\n"


@pytest.mark.parametrize("page", FIRST_PAGES, ids=lambda page: page.name)
def test_a_block_can_be_pasted_into_the_prompt(page):
    """Python's prompt reads a line at a time, and an empty line ends a class, a function or a ``with``."""
    for block in BLOCKS[page]:
        entered = []
        for number, line in enumerate([*block.code.splitlines(), ""], block.line + 1):
            entered.append(line)
            try:
                complete = codeop.compile_command("\n".join(entered), symbol="single")
            except SyntaxError as error:
                pytest.fail(f"{page.name}:{number} {line!r}: {error}")
            entered = [] if complete else entered
        assert not entered, f"{page.name}:{block.line} does not end"


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs" / "index.md"], ids=lambda page: page.name)
def test_the_line_for_hugging_face_serves_the_loss(page):
    (block,) = (block for block in BLOCKS[page] if block.code.startswith(HUGGING_FACE))
    loss = "torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())"
    handle = "from lce_torch_bridge import defer_logits; handle = defer_logits(model)"
    seen = "print(handle.served, handle.stored)"
    code = "\n".join(
        [block.program(), "import torch; tokens = torch.arange(8)[None]", f"{loss}.backward()", handle, seen]
    )
    assert pasted(code=code) == "1 0\n"


@pytest.mark.parametrize("page", FIRST_PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_of_the_repository_and_to_their_headings(page):
    """GitHub shows the same pages, without the files that are made for the site alone."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    links = re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"", text)
    targets = [link or other for link, other in links if not re.match(r"https?:", link or other)]
    for path, _, anchor in (target.partition("#") for target in targets):
        file = (page.parent / path).resolve() if path else page
        if path != "assets/memory-numbers.js":  # made for the site; elsewhere the page has a table
            assert file.relative_to(ROOT).as_posix() in TRACKED, f"{page.name}: {path}"
        if anchor and not anchor.startswith("gh-"):
            assert anchor in headings(file), f"{page.name}: {path}#{anchor}"


def headings(page):
    """Returns the anchors of a page's headings, as GitHub and the site name them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_a_page_shows_what_runs_before_its_blocks():
    for page in PAGES:
        text = page.read_text()
        assert "given:" not in text
        assert (f"`{WITHOUT_A_GPU}`" in text) == any(block.gpu for block in BLOCKS[page]), page
        assert text.count("<!-- needs a GPU -->") == sum(block.gpu for block in BLOCKS[page]), page
        where = " ".join(text.split()).find(IN_ORDER)
        assert where == -1 or where < " ".join(text.split()).index("```python")


def test_no_block_is_left_out():
    languages = {block.language for page in PAGES for block in parts(page)}
    assert languages <= LANGUAGES
    for page in PAGES:  # the pattern misses no fence
        fences = len(re.findall(r"^\s*```", page.read_text(), re.MULTILINE))
        written = sum(1 + (block.printed is not None) for block in parts(page))
        assert fences == 2 * written, page


@pytest.mark.parametrize(
    ("page", "holds", "count"), [("docs/pytorch.md", "init_process_group", 24), ("README.md", "fused_output_layer", 6)]
)
def test_a_step_takes_as_many_lines_as_the_page_says(page, holds, count):
    (block,) = (block for block in BLOCKS[ROOT / page] if holds in block.code)
    yours = block.code[block.code.index("labels = ") if page == "README.md" else 0 :]
    assert sum(bool(line.strip()) for line in yours.splitlines()) == count
    words = {24: "of 24 lines", 6: "six lines"}[count]
    assert words in (ROOT / page).read_text()


def test_grpo_takes_thirty_lines():
    blocks = [block for block in BLOCKS[ROOT / "docs" / "grpo.md"] if "losses.grpo" in block.code]
    assert len(blocks) == 3
    assert all(sum(bool(line.strip()) for line in block.code.splitlines()) <= 30 for block in blocks)


MODULES = [
    lce_jax,
    losses,
    floors,
    rows,
    lce_torch_bridge,
    lce_torch_bridge.losses,
    lce_torch_bridge.rows,
    megatron,
    areal,
    nemo_rl,
    skyrl,
    torchtitan,
    transformers,
    trl,
    verl,
    nnx,
    linen,
]
api = script("api")


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_public_name_has_an_api_page_and_a_link_to_it(module):
    made = api.pages()
    names = [f"{module.__name__}.{name}" for name in api.names_of(module.__name__)]
    assert names
    for path in names:
        assert made[f"{path}.md"].count(":::") == 1
        assert f"]({path}.md)" in made["SUMMARY.md"]
        assert sum(f"]({path}.md)" in text for name, text in made.items() if name != "SUMMARY.md") == 1


def test_api_pages_are_of_the_modules_that_are_tested():
    listed = {module for section in api.SECTIONS.values() for module in section.modules.values()}
    assert listed == {module.__name__ for module in MODULES}


def test_names_in_docstrings_are_links():
    pytest.importorskip("griffe", reason="needs the extra docs")
    add_links, public = script("docstrings").add_links, json.loads(api.pages()["names.json"])
    text = "As `linear_logprobs`, with `explain`, ``linear_loss`` and `temperature`."
    jax = "As [`linear_logprobs`][lce_jax.linear_logprobs], with [`explain`][lce_jax.explain.explain], "
    assert add_links(text, "lce_jax.losses", public) == jax + "``linear_loss`` and `temperature`."
    assert add_links(text, "lce_torch_bridge", public).count("][lce_torch_bridge.") == 2


def test_the_page_on_gpu_generations_names_every_field():
    table = (
        (ROOT / "docs" / "adding-a-gpu-generation.md").read_text().partition("The steps:")[0].partition("| field")[2]
    )
    named = set(re.findall(r"^\| (.*?) \|", table, re.MULTILINE))
    assert set(re.findall(r"`(\w+)`", " ".join(named))) == {field.name for field in dataclasses.fields(Generation)}


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=lambda value: getattr(value, "name", value))
def test_commands_exist(page, line):
    del page
    words = shlex.split(line, comments=True)
    if words[0] == "lce-jax":
        words = ["python", "-m", f"lce_jax.{words[1]}", *words[2:]]
    if words[1:] in (["-m", "venv", ".venv"], [".venv/bin/activate"]) or words[0] in ("git", "cd"):
        return
    if words[0] == "make":
        target = next(word for word in words[1:] if "=" not in word)
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif words[:2] == ["pip", "install"]:
        extras = re.fullmatch(r"\.(?:\[(.*)\])?", words[2])[1]
        known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert set(filter(None, (extras or "").split(","))) <= set(known)
    else:
        assert words[:2] == ["python", "-m"], line
        parsers = {"examples.demo": demo_parser, "lce_jax.explain": explain_parser}
        if words[2] == "benchmarks":
            part = words.pop(3) if words[3:] and words[3] in bench.PARTS else "heads"
            parser, _ = bench.parser(part)
        else:
            parser = parsers[words[2]]()
        parser.parse_args(words[3:])
