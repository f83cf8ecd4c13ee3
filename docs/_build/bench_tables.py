"""The tables of rows that the bench wrote on a card: ``benchmarks/h100.json`` and ``h200.json``."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from lce_jax.types.scalars import format_bytes  # noqa: E402
from benchmarks import records  # noqa: E402
from benchmarks.records import find_row, timed  # noqa: E402

CARD = "h100"  # the card whose numbers the pages show, unless they name another
BOTH = "forward+backward"
SHAPE = "4096,4096,151936"  # of the options, the divergences and the other packages
LONG, TEXT = "32768,4096,151936 --no-peers", "8192,4096,151936 --data text"
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
IN_FORWARD = "ours in forward", "ours full cache"
GRADIENTS = ", + backward"  # the end of the names of programs with gradients
LOSSES = {
    "`linear_cross_entropy`, no gradient": "linear_cross_entropy",
    "`linear_cross_entropy`": f"linear_cross_entropy{GRADIENTS}",
    "`linear_cross_entropy`, frozen weight": f"linear_cross_entropy, frozen weight{GRADIENTS}",
    "`linear_cross_entropy`, `jax.checkpoint`": f"linear_cross_entropy, checkpointed{GRADIENTS}",
    "`linear_cross_entropy`, `cache_bytes=0`": f"linear_cross_entropy, cache_bytes=0{GRADIENTS}",
    "logits stored, no gradient": "cross entropy, stored",
    "logits stored": f"cross entropy, stored{GRADIENTS}",
    "logits stored, frozen weight": f"cross entropy, stored, frozen weight{GRADIENTS}",
    "`linear_logprobs` and entropy": f"linear_logprobs{GRADIENTS}",
    "the same, `cache_bytes=0`": f"linear_logprobs, cache_bytes=0{GRADIENTS}",
    "the same, logits stored": f"logprobs, stored{GRADIENTS}",
}
PEERS = "ours", "torch.compile", "Liger fused linear CE", "Apple CCE"  # rows of the table of packages
CACHES = {
    "ours": "no cache",
    "ours half cache": "half a cache",
    "ours full cache": "full cache",
    "ours in forward": "`linear_loss`",
}
ON_TEXT = {
    "ours": "exact",
    "ours full cache": "exact, full cache",
    "materialised": "logits stored, autodiff",
    "ours threshold": "`gradient_threshold` 2⁻¹²",
    "ours threshold without entropy": "`gradient_threshold` 2⁻¹², `entropy=False`",
    "Apple CCE": "Apple CCE, its default threshold, no entropy",
    "Apple CCE exact": "Apple CCE exact, no entropy",
}
CANDIDATES = {
    "none": "linear_logprobs",
    "8": "linear_logprobs, 8 candidates",
    "64": "linear_logprobs, 64 candidates",
    "64, logits stored": "linear_logprobs, 64 candidates, stored",
}
FLOORS = {
    "no floor": "linear_logprobs",
    "half of the logits reach it": "linear_logprobs, a floor",
    "the same, logits stored": "linear_logprobs, a floor, stored",
}
IDS = {
    "8": "linear_logits, 8 ids",
    "64": "linear_logits, 64 ids",
    "64, logits stored": "linear_logits, 64 ids, stored",
}
PRECISIONS = {
    f"`{precision}`{end}": f"{way}, {precision.strip('"')}"
    for precision in ("TF32_TF32_F32", "BF16_BF16_F32_X3", "BF16_BF16_F32_X6", '"highest"')
    for end, way in (("", "linear_logprobs"), (", logits stored", "stored logits"))
}
PIPELINES = {
    "wgmma (Hopper's)": "wgmma",
    "mma.sync by TMA (RTX 50)": "mma.sync by TMA",
    "mma.sync by cp.async (Ampere, Ada)": "mma.sync by cp.async",
    "`xla`, whose products are wgmma's here": "xla",
}
LIGER = {"liger-kernel": "Liger Kernel", "nvidia-cutlass-dsl": "nvidia-cutlass-dsl"}
VERSIONS = {  # packages whose versions a line names after JAX's
    "heads": {"torch": "PyTorch", "triton": "Triton", **LIGER, "cut-cross-entropy": "CCE"},
    "kl": {"torch": "PyTorch", "triton": "Triton", "trl": "TRL"},
}

type Run = dict[str, Any]


def load(name: str) -> Run:
    """Reads a file of ``benchmarks``."""
    return json.loads((ROOT / "benchmarks" / f"{name}.json").read_text())


def markdown(head: list[str], rows: list[list[str]], left: int = 1) -> str:
    """Returns a table whose first ``left`` columns are aligned left, the others right."""
    rule = "|".join(["---"] * left + ["---:"] * (len(head) - left))
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    return "\n".join([f"| {' | '.join(head)} |", f"|{rule}|", *lines])


def jobs(part: str, card: str = CARD) -> list[Run]:
    """Returns the jobs of a part of the bench on a card."""
    return list(records.jobs(load(card), part))


def job(key: str, card: str = CARD) -> Run:
    """Returns the job with a key, the arguments of its command."""
    words = shlex.split(key)
    return next(one for one in jobs(words[0], card) if one["arguments"] == words)


def heads() -> list[Run]:
    """Returns the jobs of heads that have random logits and no other packages."""
    other = {"--data", "--implementation"}
    return [one for one in jobs("heads") if "--no-peers" in one["arguments"] and not other & {*one["arguments"]}]


def newest(jobs: list[Run]) -> Run:
    """Returns the newest run of the rows of ``jobs``; of two runs on one day, the run with more rows."""
    runs = [row["run"] for one in jobs for row in one["rows"]]
    return max(runs, key=lambda run: (run["date"], runs.count(run)))


def shape_of(measured: Run) -> str:
    """Returns tokens, hidden size and vocabulary."""
    shape = measured["shape"]
    return f"{shape['T']}, {shape['H']}, {shape['V']:,}"


def ratio(row: Run | None) -> str:
    """Returns a row's time as a multiple of the product's."""
    return "–" if row is None or row["ratio_to_gemm"] is None else f"{row['ratio_to_gemm']:.2f}"


def ms(row: Run | None, missing: str = "–") -> str:
    """Returns a row's time in milliseconds."""
    return missing if row is None else f"{row['median_seconds'] * 1e3:.2f}"


def add_provenance(name: str, made: str, measured: Run, card: str = CARD) -> dict[str, str]:
    """Returns a table and the line that says how it was measured, by name."""
    part, *words = measured["arguments"]
    packages = {} if "--no-peers" in words else VERSIONS.get(part, {})
    by = measured_by(newest([measured]), records.command(measured), card, packages)
    return {name: made, f"{name} by": by}


def measured_by(run: Run, command: str, file: str, packages: Mapping[str, str]) -> str:
    """Returns device, versions, date, rounds, command and file of a run."""
    device = run["device"]
    known = {"jax": "JAX", **packages}
    versions = ", ".join(f"{label} {device[name]}" for name, label in known.items() if name in device)
    rounds = run.get("rounds", 0)
    medians = {0: "", 1: ", one round"}.get(rounds, f", medians of {rounds} rounds")
    return f"{device['device_kind']}, {versions}, {run['date']}{medians}: `{command}` (`benchmarks/{file}.json`)"


def summary() -> str:
    """Returns a table with a row per shape: no cache, a full cache, `linear_loss`, stored logits."""
    head = ["tokens, hidden, vocabulary", "forward", "+ backward", "full cache", "`linear_loss`", "logits stored"]
    ways = [("ours", "forward")] + [(key, BOTH) for key in ("ours", "ours full cache", "ours in forward")]
    lines = []
    for one in heads():
        stored = find_row(one, "materialised", BOTH)
        last = ratio(stored) if stored else failure(one)
        lines.append([shape_of(one), *(ratio(find_row(one, *way)) for way in ways), last])
    return markdown(head, lines)


def summary_by() -> str:
    """Returns how `summary` was measured."""
    return measured_by(newest(heads()), "python -m benchmarks heads --no-peers --shape T,H,V", CARD, {})


def failure(job: Run) -> str:
    """Returns why stored logits were not timed."""
    reasons = [row["left_out"] for row in job["rows"] if row["name"].startswith("XLA, stored") and "left_out" in row]
    return "out of memory" if reasons and all("RESOURCE_EXHAUSTED" in reason for reason in reasons) else "–"


def named(measured: Run, name: str) -> Run:
    """Returns the row of a program."""
    return next(row for row in timed(measured["rows"]) if row["name"] == name)


def losses(measured: Run) -> str:
    """Returns a table with a row per call."""
    rows = [(label, named(measured, name)) for label, name in LOSSES.items()]
    lines = [[label, ms(row), ratio(row), format_bytes(row["temp_bytes"])] for label, row in rows]
    return markdown([shape_of(measured), "ms", "÷ product", "temporary memory"], lines)


def peers(measured: Run, keys: Iterable[str]) -> str:
    """Returns a table with a row per key, of both directions. A package that was not timed has the reason."""
    head = [shape_of(measured), "forward, ms", "forward + backward, ms", "÷ product", "temporary memory"]
    lines = []
    for row in (row for row in timed(measured["rows"]) if row["direction"] == BOTH and row["key"] in keys):
        label = row["label"] if "lce_jax" in row["label"] else NAMES.get(row["key"]) or row["label"]
        alone = find_row(measured, row["key"], "forward")
        lines.append([label, ms(alone), ms(row), ratio(row), format_bytes(row["temp_bytes"])])
    reasons = {row["name"].partition(", forward")[0]: row["left_out"] for row in measured["rows"] if "left_out" in row}
    lines += [[label, f"not timed: {why.partition('. ')[0]}", "–", "–", "–"] for label, why in reasons.items()]
    return markdown(head, lines)


def both_passes(measured: Run, keys: Mapping[str, str], what: str = "") -> str:
    """Returns a table of forward and backward of some rows."""
    rows = [(label, find_row(measured, key, BOTH)) for key, label in keys.items()]
    lines = [[label, ms(row), ratio(row), format_bytes(row["temp_bytes"])] for label, row in rows if row]
    head = f"{shape_of(measured)}{what and f', {what}'}, forward + backward"
    return markdown([head, "ms", "÷ product", "temporary memory"], lines)


def threshold(measured: Run) -> str:
    """Returns a table of what a threshold leaves out, gains and costs, compared with other packages."""

    def share(x: float | None) -> str:
        return "–" if x is None else f"{100 * x:.2g} %"

    lines = []
    for label, row in ((label, find_row(measured, key, BOTH)) for key, label in ON_TEXT.items()):
        assert row, label
        errors = [f"{row['errors'][name]:.1e}" for name in ("dhidden", "dweight")]
        left_out = [share(row[name]) for name in ("skipped", "dropped_mass")]
        lines.append([label, ms(row), ratio(row), format_bytes(row["temp_bytes"]), *left_out, *errors])
    head = ["forward + backward, ms", "÷ product", "temporary memory"]
    head += ["tiles left out", "probability in them, mean", "dhidden off by", "dweight off by"]
    return markdown([shape_of(measured), *head], lines)


def topk(measured: Run) -> str:
    """Returns a table with a row per way to find the most likely tokens."""
    rows = [
        [row["label"].partition(", k ")[0], ms(row), ratio(row), format_bytes(row["temp_bytes"])]
        for row in timed(measured["rows"])
        if row["direction"] == "top-k"
    ]
    return markdown([f"{shape_of(measured)}; k 64", "ms", "÷ product", "temporary memory"], rows)


def passes(measured: Run, programs: Mapping[str, str], what: str, apart: str = "") -> str:
    """Returns a table with a row per program: forward, both passes, and its distance under the title ``apart``."""
    rows = {row["name"]: row for row in timed(measured["rows"])}
    lines = []
    for label, name in programs.items():
        alone, both = rows[name], rows[f"{name}{GRADIENTS}"]
        cells = [label, ms(alone), ratio(alone), ms(both), ratio(both), format_bytes(both["temp_bytes"])]
        lines.append(cells + ([f"{both['apart']:.1e}" if "apart" in both else "–"] if apart else []))
    head = [f"{shape_of(measured)}: {what}", "forward, ms", "÷ product", "forward + backward, ms", "÷ product"]
    return markdown([*head, "temporary memory", *([apart] if apart else [])], lines)


def divergences(measured: Run) -> str:
    """Returns a table with a row per divergence and way: times, products and memory."""
    rows, lines = {row["name"]: row for row in timed(measured["rows"])}, []
    ending = ((name.removesuffix(GRADIENTS), row) for name, row in rows.items() if name.endswith(GRADIENTS))
    for name, both in ending:
        missing = "as without" if "cache" in name else "–"  # a peer is timed only with its backward
        lines.append([name, ms(rows.get(name), missing), ms(both), ratio(both), format_bytes(both["temp_bytes"])])
    return markdown(
        [shape_of(measured), "forward, ms", "forward + backward, ms", "÷ product", "temporary memory"], lines
    )


def pipelines(measured: Run) -> str:
    """Returns a table with a row per generation's kernels: the time of each call, in products."""
    calls = {"forward": "", "+ backward": GRADIENTS, "+ backward, full cache": f", full cache{GRADIENTS}"}
    calls |= {"two heads": ", two heads", "two heads, + backward": f", two heads{GRADIENTS}"}
    product = ms(named(measured, "one product"))
    lines = [
        [label, *(ratio(named(measured, f"{name}{end}")) for end in calls.values())]
        for label, name in PIPELINES.items()
    ]
    return markdown([f"{shape_of(measured)}; ÷ product, {product} ms", *calls], lines)


def steps(jobs: list[Run]) -> str:
    """Returns a table with a row per objective and batch: tokens per second, and memory."""
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
        [objective, f"{tokens:,}", *cells(by_head.get("logits stored")), *cells(by_head.get("lce_jax"))]
        for (objective, tokens), by_head in by_batch.items()
    ]
    return markdown(head, lines)


def steps_by(jobs: list[Run]) -> str:
    """Returns how `steps` was measured, as one command for all batches."""
    batches = dict.fromkeys(row["batch"] for one in jobs for row in one["rows"])
    run = newest(jobs)
    command = f"python -m benchmarks step --batch {','.join(map(str, batches))} --rounds {run['rounds']}"
    return measured_by(run, command, CARD, {})


def made() -> dict[str, str]:
    """Returns all tables by name, and the lines that say how each was measured."""
    packages, defaults, options, precision, kl = (
        job(f"{part} --shape {SHAPE}") for part in ("heads", "losses", "options", "precision", "kl")
    )
    alone, xla = (job(f"heads --shape {SHAPE} --no-peers{more}") for more in ("", " --implementation xla"))
    long, text = (job(f"heads --shape {words}") for words in (LONG, TEXT))
    generations = job(f"pipelines --shape {SHAPE}", "h200")
    tables = {"step": steps(jobs("step")), "step by": steps_by(jobs("step"))}
    tables |= {"summary": summary(), "summary by": summary_by()}
    tables |= add_provenance("losses", losses(defaults), defaults)
    tables |= add_provenance("peers", peers(packages, PEERS), packages)
    tables |= add_provenance("top k", topk(alone), alone)
    tables |= add_provenance("pipelines", pipelines(generations), generations, "h200")
    tables |= add_provenance("xla cache", both_passes(xla, CACHES, '`implementation="xla"`'), xla)
    tables |= add_provenance("linear_loss", both_passes(long, {key: NAMES[key] for key in IN_FORWARD}), long)
    tables |= add_provenance("threshold", threshold(text), text)
    tables |= add_provenance("candidates", passes(options, CANDIDATES, "candidates"), options)
    tables |= add_provenance("floor", passes(options, FLOORS, "`linear_logprobs`"), options)
    tables |= add_provenance("linear_logits", passes(options, IDS, "ids per token"), options)
    tables |= add_provenance("precision", passes(precision, PRECISIONS, "`precision=`", "distance"), precision)
    return tables | add_provenance("kl", divergences(kl), kl)
