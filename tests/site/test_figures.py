"""Figures in README.md and the pages: every table, picture and number agrees with ``benchmarks/*.json``."""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import re

import pytest

from benchmarks import peers
from tests.doc_blocks import ROOT

pytestmark = pytest.mark.site


def script(name):
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / "_build" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tables, figures = script("tables"), script("figures")
bench = tables.bench_tables

DRAWN = {"speed-and-memory": figures.RECORDED, "step": figures.FILE}  # "way" is a diagram


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_tables_show_the_data(page):
    assert page.read_text() == tables.render(page, tables.tables()), "run: python docs/_build/tables.py"


def test_every_table_is_shown():
    shown = {name for page in tables.PAGES for _, name, *_ in tables.PLACE.findall(page.read_text())}
    assert shown == set(tables.tables())


def test_no_table_is_both_recorded_and_of_a_card():
    assert not set(bench.load("recorded")["runs"]) & set(bench.made())


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_readers_see_the_file_of_each_table_and_picture_beside_it(page):
    made = tables.tables()
    files = {name.removesuffix(" by"): tables.source_of(by) for name, by in made.items() if name.endswith(" by")}
    no_figures = {"functions", "options", "support", "bounds", "memory"}
    for section in re.split(r"^##? .*$", page.read_text(), flags=re.MULTILINE):
        seen = re.sub(r"<!--.*?-->", "", section, flags=re.DOTALL)
        shown = {name.removesuffix(" by") for _, name, *_ in tables.PLACE.findall(section)} - no_figures
        needed = {files[name] for name in shown}
        needed |= {file for picture, file in DRAWN.items() if f"assets/{picture}-" in section}
        missing = [name for name in needed if f"`{name}`" not in seen]
        assert not missing, f"{page.name}: {missing} of {sorted(shown)}"


@pytest.mark.parametrize("picture", [*DRAWN, "way"])
@pytest.mark.parametrize("mode", figures.THEMES)
def test_pictures_are_drawn_from_the_data(picture, mode):
    text = (figures.ASSETS / f"{picture}-{mode}.svg").read_text()
    assert figures.drawn_from() in text, "run: python docs/_build/figures.py"


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("*.json")), ids=lambda path: path.stem)
def test_every_run_says_what_repeats_it(path):
    data = json.loads(path.read_text())
    for run in data.get("runs", {"": data}).values():
        assert "jobs" in data or run["command"].startswith("python ")  # the key of a job is its command
        assert run["date"]
        assert {"device_kind", "jax"} <= set(run["device"])


def test_what_losses_take_by_default():
    for shape in (bench.SHAPE, "8192,4096,131072"):
        job = bench.job(f"losses --shape {shape}")
        names = (
            "`linear_cross_entropy`",
            "`linear_cross_entropy`, frozen weight",
            "`linear_cross_entropy`, no gradient",
        )
        took = [round(bench.named(job, bench.LOSSES[name])["ratio_to_gemm"], 1) for name in names]
        assert took == [3.1, 2.1, 1.0]


def recorded_column(run, column):
    """Returns a column of a run in ``recorded.json``, by the entries of the first column."""
    recorded_run = bench.load("recorded")["runs"][run]
    index = recorded_run["columns"].index(column)
    return {row[0]: row[index] for row in recorded_run["rows"]}


def test_how_much_longer_ligers_kernels_for_hopper_take():
    took = {name: float(x) for name, x in recorded_column("hopper", "ms").items()}
    assert round(100 * (took["loss: Liger's for Hopper"] / took["loss: `linear_cross_entropy`"] - 1)) == 5  # %
    ways = ("the same, `cache_bytes=0`", "`linear_logprobs`", "the same, full cache")
    longer = [round(100 * (took["with entropy: Liger's"] / took[f"with entropy: {way}"] - 1)) for way in ways]
    assert longer == [6, 21, 41]  # %


def test_the_memory_of_ligers_kernels_for_hopper():
    gib = {name: float(x) for name, x in recorded_column("hopper", "GiB, gradients included").items()}
    assert min(gib, key=gib.__getitem__) == "with entropy: Liger's"
    ways = ("Liger's", "`linear_logprobs`", "the same, `cache_bytes=0`")
    assert [gib[f"with entropy: {way}"] for way in ways] == [1.31, 2.36, 1.38]
    assert gib["loss: Liger's for Hopper"] == pytest.approx(gib["loss: `linear_cross_entropy`"], abs=0.02)


def test_what_ligers_loss_for_hopper_refuses():
    took = recorded_column("hopper qwen", "ms")
    assert took["loss: Liger's for Hopper"] == "refused: 151,936 is no multiple of 256"
    assert 151_936 % 256 != 0 == 131_072 % 256


def test_what_readme_says_of_other_packages():
    text = " ".join((ROOT / "README.md").read_text().split())
    took = recorded_column("hopper qwen", "ms")
    assert f"our loss takes {took['loss: `linear_cross_entropy`']} ms" in text
    assert f"Liger's Triton loss {took["loss: Liger's by Triton"]} ms" in text
    ours, ligers = (took[f"with entropy: {name}"] for name in ("`linear_logprobs`", "Liger's"))
    assert f"with the entropy ours takes {ours} ms, Liger's {ligers} ms" in text
    errors = [
        float(row[-1]) for row in bench.load("recorded")["runs"]["exactness"]["rows"] if "probability, Liger" in row[0]
    ]
    assert [round(100 * (math.exp(error) - 1), 1) for error in errors] == [1.8]  # % of a ratio of probabilities


def test_what_readme_says_of_stored_logits_and_the_least_memory():
    took = {name: float(x) for name, x in recorded_column("hopper", "ms").items()}
    assert took["logits stored in torch"] < took["with entropy: the same, `cache_bytes=0`"]
    for job in bench.heads():
        stored, ours = (bench.find_row(job, key, bench.BOTH) for key in ("materialised", "ours"))
        if job["shape"]["H"] == 4096 and stored:
            assert stored["median_seconds"] < ours["median_seconds"]


def runs_that_lack_a_package():
    """Yields jobs in which another package was not installed or did not load, and the packages' timed rows."""
    others = {key for key in peers.PEERS if not key.startswith("ours")}
    for card in ("h100", "h200"):
        for job in bench.jobs("heads", card):
            reasons = [row["left_out"] for row in job["rows"] if "left_out" in row]
            if any("RESOURCE_EXHAUSTED" not in reason for reason in reasons):
                yield job["arguments"], [row for row in bench.timed(job["rows"]) if row["key"] in others]


def test_no_figure_of_the_readme_is_of_a_run_that_lacks_a_package():
    readme = (ROOT / "README.md").read_text()
    lacking = list(runs_that_lack_a_package())
    assert lacking
    for arguments, others in lacking:
        assert others, arguments
        for row in others:
            for text in (f"{1e3 * row['median_seconds']:.{digits}f}" for digits in (1, 2)):
                assert not re.search(rf"(?<![\d.]){re.escape(text)}(?![\d.])", readme), (arguments, row["label"], text)
    assert not {"peers", "peers by"} & {name for _, name, *_ in tables.PLACE.findall(readme)}


def test_a_package_that_was_not_timed_has_a_row_that_says_why():
    table = bench.made()["peers"]
    for name in ("torch F.linear_cross_entropy", "QuACK", "Liger scaled cross entropy"):
        assert re.search(rf"^\| {re.escape(name)} \| not timed: \w", table, re.MULTILINE)


def test_what_stored_logits_take_on_both_cards():
    def took(card):
        row = bench.find_row(bench.job("heads --shape 8192,4096,131072 --no-peers", card), "materialised", bench.BOTH)
        return round(row["temp_bytes"] / 2**30, 1)

    assert [took("h200"), took("h100")] == [10.0, 6.0]  # GiB


def test_what_candidates_and_a_floor_cost():
    rows = bench.job(f"options --shape {bench.SHAPE}")["rows"]
    seconds = {row["name"]: row["median_seconds"] for row in rows}

    def added(what, end=""):
        return round(100 * (seconds[f"linear_logprobs, {what}{end}"] / seconds[f"linear_logprobs{end}"] - 1))  # %

    both = ", + backward"
    assert [added("64 candidates"), added("64 candidates", both), added("8 candidates", both)] == [12, 3, 4]
    assert added("8 candidates") <= 0
    assert [added("a floor"), added("a floor", both)] == [2, 1]


def test_how_many_tokens_linear_loss_takes_with_less_memory():
    long = bench.job(f"heads --shape {bench.LONG}")
    ours, cached = (bench.find_row(long, key, bench.BOTH) for key in bench.IN_FORWARD)
    assert ours["temp_bytes"] < cached["temp_bytes"] / 2
    assert ours["median_seconds"] == pytest.approx(cached["median_seconds"], rel=0.03)


def test_how_much_faster_uv_installs():
    both = [(pip, uv) for _, pip, uv, _ in tables.load("install")["rows"] if uv]
    assert [round(pip / uv) for pip, uv in both] == [5, 5]


def test_what_a_training_step_gains():
    fits, steps = {"logits stored": 0, "lce_jax": 0}, {}
    card = figures.TARGETS[bench.CARD].memory_bytes / 2**30
    room = figures.SHARE * card
    assert round(room) == 59  # GiB
    for row in (row for job in bench.jobs("step") for row in job["rows"]):
        steps[row["objective"], row["head"], row["tokens"]] = row
        needs = row["memory_bytes"] / 2**30
        assert (row["seconds"] is None) == (needs > room)
        fits[row["head"]] = max(fits[row["head"]], row["tokens"] if row["seconds"] else 0)
    assert fits == {"logits stored": 16_384, "lce_jax": 131_072}
    assert fits["lce_jax"] == 8 * fits["logits stored"]
    stored, ours = steps["cross entropy", "logits stored", 16_384], steps["cross entropy", "lce_jax", 131_072]
    assert round(100 * (8 * stored["seconds"] / ours["seconds"] - 1)) == 9  # %: tokens per second
    assert steps["cross entropy", "logits stored", 32_768]["memory_bytes"] / 2**30 < card


UNIT = r" ?(?:[KMG]iB|GB|ms|nats|%|per cent)(?!\w)"
FIGURE = re.compile(rf"(?<![\w.])\d[\d,]*(?:\.\d+(?:e-\d+)?|e-\d+|(?={UNIT}))(?![\d.])")
VERSIONED = "CUPTI|Python|PyTorch|Llama|JAX|megatron-core|Megatron|capability|GPTModel before|tunix|TRL"
VERSION = re.compile(rf"\"[\d.]+\"|(?:{VERSIONED})\W{{1,6}}\d[\d.]*")
COMPUTED = {  # GiB
    58.0: 205_000 * 76_000 * 4 / 2**30,  # tokens, vocabulary, bytes of a float32
    3.0: (4096 * 4 + 2048 * 2) * 151_936 / 2**30,  # of dweight in float32, and of 2,048 tokens in bfloat16
}


def sections(text):
    """Yields each section, and its prose without generated tables, code and versions."""
    text = re.sub(r"<!-- table: .+? -->\n.*?<!-- /table -->|^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    for section in re.split(r"^#+ .*$", text, flags=re.MULTILINE):
        yield section, VERSION.sub("", re.sub(r"`[^`]*`|\]\([^)]*\)", "", section))


def numbers_of(sources):
    """Returns every number in files of data and of tests, also times 100: a share may be written in per cent."""
    numbers = set()
    for path in sources:
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            if file.suffix == ".json":
                numbers |= {
                    float(x) for x in re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?:e-\d+)?(?![\w.])", file.read_text())
                }
            else:
                values = (
                    node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)
                )
                numbers |= {float(x) for x in values if isinstance(x, int | float)}
    return numbers | {100 * x for x in numbers}


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_figure_is_in_a_file_named_beside_it(page):
    for section, prose in sections(page.read_text()):
        figures_here = [float(match[0].replace(",", "")) for match in FIGURE.finditer(prose)]
        named = [ROOT / name for name in re.findall(r"`((?:benchmarks/|examples/frameworks/|tests/)[\w/.]+)`", section)]
        known = numbers_of(named) | {x for x, exact in COMPUTED.items() if x == round(exact)} if figures_here else set()
        missing = [x for x in figures_here if not any(abs(x - y) <= 1e-9 * abs(x) for y in known)]
        assert not missing, f"{page.name}: {missing} in {section.strip()[:300]!r}, which names {named}"
