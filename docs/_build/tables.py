"""``python docs/_build/tables.py``: writes the tables of README.md and of the pages from ``benchmarks/*.json``.

What has run where is in ``support.json`` beside this file.

A table stands between ``<!-- table: NAME -->`` and ``<!-- /table -->``. A test checks that they are up to date.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import lce_jax  # noqa: E402
import lce_torch_bridge  # noqa: E402
from lce_jax._plans import format_bytes  # noqa: E402
from lce_jax.bench import records  # noqa: E402
from lce_jax.bench.records import row_of, timed  # noqa: E402

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "recipes").glob("*.md"))]
PLACE = re.compile(r"(<!-- table: (.+?) -->\n)(.*?)(<!-- /table -->)", re.DOTALL)
BOTH = "forward+backward"
NAMES = {
    "gemm": "one product hidden · weightᵀ, alone",
    "ours": "lce_jax",
    "ours half cache": "lce_jax, half a cache",
    "ours full cache": "lce_jax, full cache",
    "ours in forward": "lce_jax, `linear_loss`",
    "chunked": "lce_jax (xla)",
    "materialised": "logits stored, autodiff",
    "materialised by hand": "logits stored, gradient by hand",
}

SUPERSEDED = {"linear_kl"}  # of recorded.json: the file of a card has the same as rows of the bench

type Run = dict[str, Any]


def load(name: str) -> Run:
    """A file of ``benchmarks``."""
    return json.loads((ROOT / "benchmarks" / f"{name}.json").read_text())


def markdown(head: list[str], rows: list[list[str]], left: int = 1) -> str:
    """A table, its first ``left`` columns to the left and the others to the right."""
    rule = "|".join(["---"] * left + ["---:"] * (len(head) - left))
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    return "\n".join([f"| {' | '.join(head)} |", f"|{rule}|", *lines])


def shape_of(measured: Run) -> str:
    """Tokens, hidden size, vocabulary."""
    head = measured["shape"]["head"]
    return f"{measured['shape']['tokens']}, {head['hidden_size']}, {head['vocab_size']:,}"


def ratio(row: Run | None) -> str:
    """Its time as a multiple of the product's."""
    return "–" if row is None else f"{row['ratio_to_gemm']:.2f}"


def jobs(part: str, card: str = "h200") -> list[Run]:
    """Those of a part of the bench on a card."""
    return list(records.jobs(load(card), part))


def heads(packages: bool = False, card: str = "h200") -> list[Run]:
    """The jobs of heads on a card, with random logits: alone, or beside other packages."""
    plain = [
        one
        for one in jobs("heads", card)
        if not {"--data", "--implementation", "--devices", "--model"} & {*one["arguments"]}
    ]
    return [one for one in plain if ("--no-peers" not in one["arguments"]) is packages]


def newest(jobs: list[Run]) -> Run:
    """The run that the newest of their rows are of; of two on one day, that of more rows."""
    runs = [row["run"] for one in jobs for row in one["rows"]]
    return max(runs, key=lambda run: (run["date"], runs.count(run)))


def summary(card: str = "h200") -> str:
    """A line per shape: ours without a cache, with a full one, in the forward; and stored logits. * is an earlier run."""
    head = ["tokens, hidden, vocabulary", "forward", "+ backward", "full cache", "`linear_loss`", "logits stored"]
    ways = [("ours", "forward")] + [(key, BOTH) for key in ("ours", "ours full cache", "ours in forward")]
    lines, found = [], heads(card=card)
    for one in found:
        stored = row_of(one, "materialised", BOTH)
        mark = "" if one["rows"][0]["run"] == newest(found) else "*"
        last = ratio(stored) if stored else failure(one)
        lines.append([shape_of(one) + mark, *(ratio(row_of(one, *way)) for way in ways), last])
    return markdown(head, lines)


def summary_by(card: str = "h200") -> str:
    """When, on what, and how: of the newest run, and of the starred ones."""
    found, earlier = heads(card=card), {}
    run = newest(found)
    for other in (one["rows"][0]["run"] for one in found):
        if other != run:
            rounds = "" if other["rounds"] == run["rounds"] else f", medians of {other['rounds']} rounds"
            earlier[other["date"] + rounds] = other.get("note", "")
    stars = [f" A star: {when}. {note}".rstrip() for when, note in earlier.items()]
    by = measured_by(run, "python -m lce_jax.bench heads --no-peers --shape T,H,V", card)
    return by + "." * bool(stars) + "".join(stars)


def first() -> str:
    """The README's shape, forward and backward: time and memory, without logits and with."""
    keys = {
        "materialised": "logits stored (JAX)",
        "ours": "lce_jax",
        "ours full cache": "lce_jax, with a cache",
    }
    one = first_job()
    found = {key: row_of(one, key, BOTH) for key in keys}
    rows = [
        [label, f"{found[key]['median_seconds'] * 1e3:.1f} ms", format_bytes(found[key]["temp_bytes"])]
        for key, label in keys.items()
    ]
    return markdown(["forward and backward", "time", "temporary memory"], rows)


def first_job() -> Run:
    """That shape's."""
    return next(one for one in heads() if shape_of(one) == "8192, 4096, 131,072")


def failure(job: Run) -> str:
    """Why stored logits were not timed."""
    reasons = [row["left_out"] for row in job["rows"] if row["name"].startswith("XLA, stored") and "left_out" in row]
    return "out of memory" if reasons and all("RESOURCE_EXHAUSTED" in reason for reason in reasons) else "–"


def details() -> str:
    """A table per shape of the newest run: time, speed, memory."""
    head = ["", "", "ms", "÷ product", "useful TFLOP/s", "temporary memory"]
    parts = []
    for one in (one for one in heads() if one["rows"][0]["run"] == newest(heads())):
        rows = [
            detail(row)
            for way in ("gemm", "forward", "top-k", BOTH)
            for row in timed(one["rows"])
            if row["direction"] == way
        ]
        parts.append(f"### {shape_of(one)}, {one['dtype']}\n\n{markdown(head, rows, left=2)}")
    return "\n\n".join(parts)


def detail(row: Run) -> list[str]:
    """One row of `details`."""
    return [
        NAMES.get(row["key"]) or row["label"],
        "" if row["direction"] == "gemm" else row["direction"].replace("+", " + "),
        f"{row['median_seconds'] * 1e3:.2f}",
        ratio(row),
        f"{row['useful_flops_per_second'] / 1e12:.0f}",
        format_bytes(row["temp_bytes"]),
    ]


def peers() -> str:
    """A line per package and way: both directions of one shape."""
    (job,) = heads(packages=True)
    head = ["", "forward, ms", "forward + backward, ms", "÷ product", "temporary memory"]
    lines = []
    for row in (row for row in timed(job["rows"]) if row["direction"] == BOTH):
        alone = row_of(job, row["key"], "forward")
        label = row["label"] if "lce_jax" in row["label"] else NAMES.get(row["key"]) or row["label"]
        forward = "–" if alone is None else f"{alone['median_seconds'] * 1e3:.2f}"
        both = f"{row['median_seconds'] * 1e3:.2f}"
        lines.append([label, forward, both, ratio(row), format_bytes(row["temp_bytes"])])
    return markdown(head, lines)


def topk(job: Run) -> str:
    """A line per way to find the most likely tokens."""
    rows = [
        [
            row["label"].partition(", k ")[0],
            f"{row['median_seconds'] * 1e3:.2f}",
            ratio(row),
            format_bytes(row["temp_bytes"]),
        ]
        for row in timed(job["rows"])
        if row["direction"] == "top-k"
    ]
    return markdown([f"{shape_of(job)}; k 64", "ms", "÷ product", "temporary memory"], rows)


def of_both(job: Run) -> str:
    """`linear_loss` beside a full cache."""
    rows = [detail(row_of(job, key, BOTH)) for key in ("ours in forward", "ours full cache")]
    chosen = [[name, ms, times, memory] for name, _, ms, times, _, memory in rows]
    return markdown([f"{shape_of(job)}, forward + backward", "ms", "÷ product", "temporary memory"], chosen)


def steps(jobs: list[Run]) -> str:
    """A line per objective and batch: tokens per second, and memory."""
    by_batch: dict[tuple[str, int], dict[str, Run]] = {}
    for row in (row for one in jobs for row in timed(one["rows"])):
        by_batch.setdefault((row["objective"], row["tokens"]), {})[row["head"]] = row

    def cells(row: Run | None) -> list[str]:
        if row is None:
            return ["–", "–"]
        speed = f"{row['tokens'] / row['seconds']:,.0f}" if row["seconds"] else "out of memory"
        return [speed, format_bytes(row["memory_bytes"]) if row["memory_bytes"] else "–"]

    head = ["objective", "tokens a step", "stored: tokens/s", "memory", "lce_jax: tokens/s", "memory"]
    lines = [
        [objective, f"{tokens:,}", *cells(found.get("logits stored")), *cells(found.get("lce_jax"))]
        for (objective, tokens), found in by_batch.items()
    ]
    return markdown(head, lines)


def divergences(job: Run) -> str:
    """A line per direction and way: both directions of time, products, and memory."""
    found = {row["name"]: row for row in timed(job["rows"])}
    product = found.pop("one product")
    lines = [["one product", f"{product['median_seconds'] * 1e3:.2f}", "–", "–", "–"]]
    end = ", + backward"
    for name, both in ((name.removesuffix(end), row) for name, row in found.items() if name.endswith(end)):
        missing = "as without" if "cache" in name else "–"  # a peer is timed with its backward alone
        times = (f"{row['median_seconds'] * 1e3:.2f}" if row else missing for row in (found.get(name), both))
        lines.append([name, *times, ratio(both), format_bytes(both["temp_bytes"])])
    return markdown(["one process", "forward, ms", "forward + backward, ms", "÷ product", "temporary memory"], lines)


def errors(run: Run) -> str:
    """A line per way to compute: the errors of results and gradients, by dtype."""
    rows = [[name, *(f"{error:.1e}" for error in found)] for name, *found in run["rows"]]
    return markdown(run["columns"], rows)


def recorded(run: Run) -> str:
    """A table as it was printed."""

    def cell(value: Any) -> str:
        if isinstance(value, list):
            return ", ".join(f"{number}" for number in value)
        return "–" if value is None else value if isinstance(value, str) else f"{value:g}"

    return markdown(run["columns"], [[cell(value) for value in row] for row in run["rows"]], run.get("left", 2))


def provenance(run: Run, file: str) -> str:
    """Device, versions, date, command and file, where the run names its command."""
    return measured_by(run, run["command"], file)


def measured_by(run: Run, command: str, file: str = "h200") -> str:
    """Device, versions, date, command and file."""
    device = run["device"]
    known = {"jax": "JAX"} | (
        {} if "--no-peers" in command else {"torch": "PyTorch", "triton": "Triton", "trl": "TRL", "cuda": "CUDA"}
    )
    versions = ", ".join(f"{label} {device[name]}" for name, label in known.items() if name in device)
    rounds = run.get("rounds", 0)
    of_rounds = {0: "", 1: ", one round"}.get(rounds, f", medians of {rounds} rounds")
    return f"{device['device_kind']}, {versions}, {run['date']}{of_rounds}: `{command}` (`benchmarks/{file}.json`)"


def functions() -> str:
    """Every public function, and the packages that have it."""
    by_name = {name: [name in module.__all__ for module in (lce_jax, lce_torch_bridge)] for name in public_functions()}
    rows = [[f"`{name}`", *("yes" if there else "–" for there in found)] for name, found in sorted(by_name.items())]
    return markdown(["function", "`lce_jax`", "`lce_torch_bridge`"], rows, left=3)


def public_functions() -> set[str]:
    """Their names, in both packages."""
    modules = (lce_jax, lce_torch_bridge)
    return {name for each in modules for name in each.__all__ if inspect.isfunction(getattr(each, name))}


def options() -> str:
    """The keyword arguments of `linear_logprobs`, with their defaults."""
    found = [inspect.signature(module.linear_logprobs).parameters for module in (lce_jax, lce_torch_bridge)]
    names = [name for each in found for name, x in each.items() if x.kind is x.KEYWORD_ONLY]
    rows = [
        [f"`{name}`", *(f"`{each[name].default!r}`" if name in each else "–" for each in found)]
        for name in dict.fromkeys(names)
    ]
    return markdown(["option", "`lce_jax`", "`lce_torch_bridge`"], rows, left=3)


def tables() -> dict[str, str]:
    """All tables by name."""
    accuracy, step = load("accuracy"), jobs("step")
    beside = heads(packages=True)
    made = {
        "first": first(),
        "summary": summary(),
        "summary by": summary_by(),
        "summary h100": summary("h100"),
        "summary h100 by": summary_by("h100"),
        "details": details(),
        "functions": functions(),
        "options": options(),
        "errors": errors(accuracy),
        "errors by": f"CPU, JAX {accuracy['device']['jax']}, {accuracy['date']}: `{accuracy['command']}` (`benchmarks/accuracy.json`)",
        "peers": peers(),
        "peers by": measured_by(newest(beside), records.command(beside[0])),
        "step": steps(step),
        "step by": measured_by(newest(step), "python -m lce_jax.bench step --batch 8,16,32"),
    }
    (divergence,) = jobs("kl", "h100")
    made |= {"kl": divergences(divergence)}
    made |= {"kl by": measured_by(newest([divergence]), records.command(divergence), "h100")}
    tpu, support = load("tpu"), json.loads((ROOT / "docs" / "_build" / "support.json").read_text())
    made |= {"tpu": recorded(tpu), "tpu by": f"libtpu {tpu['device']['libtpu']}; {provenance(tpu, 'tpu')}"}
    made |= {"support": recorded(support)}
    for name in ("install", "frameworks"):
        made |= {name: recorded(load(name)), f"{name} by": provenance(load(name), name)}
    (tokens,) = (one for one in heads(card="h100") if shape_of(one) == "4096, 4096, 151,936")
    made |= {"top k": topk(tokens), "top k by": measured_by(newest([tokens]), records.command(tokens), "h100")}
    for name, run in load("recorded")["runs"].items():
        if name not in (*made, *SUPERSEDED):
            made |= {name: recorded(run), f"{name} by": provenance(run, "recorded")}
    return made | long_calls()


def long_calls() -> dict[str, str]:
    """What 32,768 tokens take, from the file of a card that has both ways with their memory."""
    for card in ("h200", "h100"):
        for one in (one for one in heads(card=card) if shape_of(one) == "32768, 4096, 151,936"):
            found = [row_of(one, key, BOTH) or {} for key in ("ours in forward", "ours full cache")]
            if all({"median_seconds", "temp_bytes"} <= {*row} for row in found):
                return {
                    "linear_loss": of_both(one),
                    "linear_loss by": measured_by(newest([one]), records.command(one), card),
                }
    return {}


def source_of(by: str) -> str:
    """The file that a line of provenance names."""
    return re.findall(r"`(benchmarks/\w+\.json)`", by)[-1]


def written(page: Path, made: dict[str, str]) -> str:
    """The text of a page with its tables as they should be."""
    return PLACE.sub(lambda found: f"{found[1]}{made[found[2]]}\n{found[4]}", page.read_text())


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(written(path, tables()))
