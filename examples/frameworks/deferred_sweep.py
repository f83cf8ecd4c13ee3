"""Compares every class of Transformers that predicts tokens with deferred logits and without: loss and gradients.

``python -m examples.frameworks.deferred_sweep [class or model type …]`` prints a line for each class, in an environment
with transformers. ``--page`` runs all classes and writes the table of docs/recipes/hugging-face.md. Each class takes
three steps, in float32 and bfloat16, with the head tied to the embedding and not. After the first step the head's
weight grows eight times, because a missing cap, scale or factor shows in large logits.
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import contextlib
import copy
import dataclasses
import datetime
import json
import math
import re
import time
import traceback
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

import torch
import transformers
from torch import nn

from examples.frameworks.deferred_models import SPECIAL_IDS, list_classes, make_inputs, make_model
from lce_torch_bridge import defer_logits

STEPS, GROWTH, RATE = 3, 8.0, 0.05
LOSS_BOUND, GRADIENT_BOUND = 1e-4, 1e-3  # float32: relative to the loss, and to a gradient's norm
NOISE = 1e-6  # rounding, relative to the norm of all gradients (one may be only rounding) and to the largest logit
LARGEST = 10_000_000  # parameters: larger models would take most of the sweep's time
SMALL = 16  # a tensor with fewer numbers has a random error in bfloat16
ROUNDING = 2.0, 2.0**-8  # bfloat16: the factor of stock's own error, and the term added to it
PAGE = Path(__file__).parents[2] / "docs" / "recipes" / "hugging-face.md"
PLACE = re.compile(r"(<!-- sweep -->\n).*?(<!-- /sweep -->)", re.DOTALL)
TITLES = {"vision": "vision-language"}  # of kinds


@dataclasses.dataclass
class Result:
    """The comparison of one class in one dtype, tied or not, and how many logits were served and stored."""

    name: str
    kind: str
    dtype: str
    tied: bool | None
    error: str = ""  # why stock cannot train it
    refused: str = ""  # what `defer_logits` says
    differs: str = ""  # the first step and tensor that differ from stock, with both errors
    served: int = 0
    stored: int = 0
    reasons: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0


@dataclasses.dataclass
class Step:
    """The loss and the gradients of a step. A parameter without gradient has None."""

    loss: torch.Tensor
    largest: float  # the largest logit: the loss is a difference of two numbers of this size
    gradients: dict[str, torch.Tensor | None]


def run_step(model: Any, inputs: dict[str, Any], seed: int) -> Step:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)  # for jitter and masks that a model draws
    output = model(**inputs)
    output.loss.backward()
    logits = output.get("logits")
    largest = logits.detach().abs().max().item() if type(logits) is torch.Tensor else 0.0
    return Step(output.loss.detach(), largest, {name: x.grad for name, x in model.named_parameters()})


def measure_errors(got: Step, want: Step) -> dict[str, float]:
    """Returns the relative errors of the loss and of each gradient, by norm. A missing gradient's is infinite."""
    total = torch.stack(
        [x.double().norm() for x in want.gradients.values() if x is not None] or [torch.zeros(())]
    ).norm()
    loss = want.loss.double()
    size = loss.abs() + NOISE / LOSS_BOUND * want.largest + 1e-12
    errors = {"loss": ((got.loss.double() - loss).abs() / size).item()}
    for name, expected in want.gradients.items():
        gradient = got.gradients[name]
        if gradient is None or expected is None:
            present = gradient if expected is None else expected
            errors[name] = 0.0 if present is None or present.norm() == 0 else float("inf")
            continue
        size = expected.double().norm() + NOISE / GRADIENT_BOUND * total + 1e-12
        errors[name] = ((gradient.double() - expected.double()).norm() / size).item()
    return {name: float("inf") if error != error else error for name, error in errors.items()}


def copy_parameters(source: Any, *targets: Any) -> None:
    for target in targets:
        for x, y in zip(source.parameters(), target.parameters(), strict=True):
            y.data.copy_(x.data)


def find_difference(step: int, got: Step, stock: Step, exact: Step | None, added: float = ROUNDING[1]) -> str:
    """Returns the worst tensor beyond its bound, in words, or "". Without ``exact`` the error is the distance to stock.

    With ``exact``, of a model in a wider dtype, it is the distance to that model, compared with stock's distance. A
    tensor of few numbers (a scale, a router's bias) has a random error. So the bound, ``ROUNDING[0]`` times stock's
    error and ``added``, holds for all tensors together and for the worst of the larger tensors.
    """
    if exact is None:
        errors = measure_errors(got, stock)
        over = {name: x / (LOSS_BOUND if name == "loss" else GRADIENT_BOUND) for name, x in errors.items()}
        name = max(over, key=over.__getitem__)
        return f"step {step}: {name} is {errors[name]:.1e} off" if over[name] > 1 else ""
    errors, allowed = measure_errors(got, exact), measure_errors(stock, exact)
    large = {name for name, x in exact.gradients.items() if x is not None and x.numel() >= SMALL} | {"loss"}
    name = max(large, key=errors.__getitem__)
    for title, error, stock_error in (
        (name, errors[name], max(allowed[name] for name in large)),
        ("root mean square", measure_size(errors), measure_size(allowed)),
    ):
        if not error <= ROUNDING[0] * stock_error + added:
            return f"step {step}: {title} is {error:.1e} off, stock's {stock_error:.1e}"
    return ""


def measure_size(errors: dict[str, float]) -> float:
    return math.sqrt(sum(x * x for x in errors.values()) / len(errors))


def make_models(name: str, tied: bool | None, dtype: torch.dtype) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Returns stock, its copy, its float32 copy and inputs, after a step has shown that the inputs train stock."""
    model = make_model(name, tied)
    if (size := sum(x.numel() for x in model.parameters())) > LARGEST:
        raise ValueError(f"{size:,} parameters: CONFIGS must shrink it")
    inputs = make_inputs(model)
    model = model.to(dtype)
    inputs = {key: x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x for key, x in inputs.items()}
    copies = copy.deepcopy(model), copy.deepcopy(model).float()  # before a step, because some models keep its states
    step = run_step(model, inputs, 0)
    find_head(model)
    if not torch.isfinite(step.loss):
        raise ValueError(f"loss {step.loss.item()}")
    return model, *copies, inputs


def find_head(model: Any) -> Any:
    """Returns the model's head. If the model names none: its ``lm_head``, or its last layer with a row per token."""
    linear = [x for x in model.named_modules() if isinstance(x[1], nn.Linear) and x[1].out_features >= SPECIAL_IDS]
    return model.get_output_embeddings() or max(linear[::-1], key=lambda x: x[0].endswith("lm_head"))[1]


def is_tied(model: Any) -> bool:
    weight = getattr(find_head(model), "weight", None)
    return weight is not None and any(weight is x.weight for x in model.modules() if isinstance(x, nn.Embedding))


def compare(name: str, kind: str, dtype: torch.dtype, tied: bool | None) -> Result | None:
    """Compares three steps, each from stock's parameters. Returns None if ``tied`` changes nothing."""
    result = Result(name, kind, str(dtype).removeprefix("torch."), tied)
    start = time.perf_counter()
    try:
        stock, deferred, reference, inputs = make_models(name, tied, dtype)
    except Exception as error:
        result.error = describe(error)
        return result
    if tied is not None and is_tied(stock) != tied:
        return None
    result.tied = is_tied(stock)
    try:
        handle = defer_logits(deferred if deferred.get_output_embeddings() else find_head(deferred))
    except Exception as error:
        result.refused = describe(error)
        return result
    try:
        for step in range(STEPS):
            copy_parameters(stock, deferred, reference)
            want, got = run_step(stock, inputs, step), run_step(deferred, inputs, step)
            exact = None if dtype == torch.float32 else run_step(reference, upcast(inputs, torch.float32), step)
            difference = find_difference(step, got, want, exact)
            if difference and exact is None:  # stock's float32 gradients of saturated logits can be further off
                exact = run_step(copy.deepcopy(stock).double(), upcast(inputs, torch.float64), step)
                difference = find_difference(step, got, want, exact, added=0.0)
            result.differs = result.differs or difference
            update(stock, step)
    except Exception as error:
        result.differs = f"raises {describe(error)}"
    result.served, result.stored, result.reasons = handle.served, handle.stored, [*map(shorten, handle.places)]
    result.seconds = time.perf_counter() - start
    return result


def upcast(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {name: x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x for name, x in inputs.items()}


@torch.no_grad()
def update(model: Any, step: int) -> None:
    """Takes a step of descent. After the first step the head grows."""
    for x in model.parameters():
        if x.grad is not None:
            x -= RATE * x.grad / x.grad.norm().clamp(min=1.0)
    if step == 0:
        for x in find_head(model).parameters():
            x.mul_(GROWTH)


def describe(error: Exception) -> str:
    """Returns the error's type and first line, and the place in Transformers or the bridge that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    known = [x for x in frames if "/transformers/models/" in x.filename or "lce_torch_bridge" in x.filename]
    frame = (known or list(frames))[-1]
    line = (str(error).strip().splitlines() or [""])[0][:160]
    return f"{type(error).__name__}: {line} ({shorten(frame.filename)}:{frame.lineno})"


def shorten(place: str) -> str:
    """Returns the text without the folders of this machine."""
    return " ".join(word.split("site-packages/")[-1] for word in place.split(" "))


def sweep(names: Iterable[str] = (), file: TextIO | None = None) -> list[Result]:
    """Compares the classes whose name, model type or kind is in ``names``, or all if it is empty.

    Each result is printed, and written to ``file`` as a line of JSON.
    """
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    chosen, results = set(names), []
    for name, (model_type, kind) in list_classes().items():
        if chosen and not chosen & {name, model_type, kind}:
            continue
        for dtype in (torch.float32, torch.bfloat16):
            compared = [compare(name, kind, dtype, tied) for tied in (False, True)]
            rows = [row for row in compared if row] or [compare(name, kind, dtype, None)]
            rows = rows[:1] if rows[0].error else rows
            print(*map(format_row, rows), sep="\n", flush=True)
            results += rows
            for row in rows if file else ():
                print(json.dumps(dataclasses.asdict(row)), file=file, flush=True)
            if rows[0].error:
                break
    return results


def format_row(result: Result) -> str:
    verdict = next((f"{word} {x}" for word in ("error", "refused", "differs") if (x := getattr(result, word))), "equal")
    tied = {True: "tied", False: "untied", None: ""}[result.tied]
    counts = f"served {result.served}, stored {result.stored} {'; '.join(result.reasons)} {result.seconds:.1f} s"
    return f"{result.kind:16} {result.name:44} {result.dtype:9} {tied:7} {verdict} {'' if result.error else counts}"


def summarize(results: list[Result]) -> dict[str, Any]:
    """Counts by kind: classes that stock trains, classes equal in every case, classes that store no logits."""
    table: dict[str, Any] = {}
    for kind in dict.fromkeys(result.kind for result in results):
        names = dict.fromkeys(result.name for result in results if result.kind == kind)
        cases = {name: [r for r in results if r.name == name and not r.error] for name in names}
        trained = {name: rows for name, rows in cases.items() if rows}
        table[kind] = {
            "classes": len(names),
            "trained": len(trained),
            "equal": sum(not any(row.differs or row.refused for row in rows) for rows in trained.values()),
            "served": sum(all(row.served and not row.stored for row in rows) for rows in trained.values()),
            "refused": {name: rows[0].refused for name, rows in trained.items() if rows[0].refused},
            "differ": {name: [row.differs for row in rows if row.differs] for name, rows in trained.items()
                       if any(row.differs for row in rows)},
            "stored": {name: rows[0].reasons for name, rows in trained.items() if any(row.stored for row in rows)},
            "neither": [name for name, rows in trained.items()
                        if not rows[0].refused and any(not row.served + row.stored for row in rows)],
        }  # fmt: skip
    return table


def format_table(table: dict[str, Any]) -> str:
    """Returns a summary for the page: a row per kind, the classes that are not served, and the command."""
    lines = ["| kind | classes | stock trains | equal to stock | of these, no logits stored | differ |",
             "|---|---:|---:|---:|---:|---:|"]  # fmt: skip
    counts = {TITLES.get(kind, kind): [row["classes"], row["trained"], row["equal"], row["served"], len(row["differ"])]
              for kind, row in table.items()}  # fmt: skip
    counts["all"] = [sum(column) for column in zip(*counts.values(), strict=True)]
    lines += [f"| {' | '.join((kind, *map(str, row)))} |" for kind, row in counts.items()]
    for title, name in (("Refused", "refused"), ("Logits stored", "stored"), ("Different", "differ")):
        names = [f"`{each}`" for row in table.values() for each in row[name]]
        lines += ["", f"{title}: {', '.join(names)}."] if names else []
    versions = f"Transformers {transformers.__version__}, PyTorch {torch.__version__.partition('+')[0]}"
    command = "python -m examples.frameworks.deferred_sweep --page"
    return "\n".join([*lines, "", f"CPU, {versions}, {datetime.datetime.now(datetime.UTC).date()}: `{command}`"])


def write_page(summary: dict[str, Any]) -> None:
    PAGE.write_text(PLACE.sub(lambda match: f"{match[1]}{format_table(summary)}\n{match[2]}", PAGE.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--page", action="store_true", help="write the page's table, of all classes")
    options = parser.parse_args()
    if options.page and options.names:
        parser.error(f"--page is of all classes: leave out {' '.join(options.names)}")
    torch.set_num_threads(1)
    with options.json.open("w") if options.json else contextlib.nullcontext() as file:
        results = sweep(options.names, file=file)
    table = summarize(results)
    print(json.dumps(table, indent=1))
    if options.page:
        write_page(table)


if __name__ == "__main__":
    main()
