"""What the small benchmarks share: a command line, programs timed in turn beside one product, a table and a file."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax.bench.measure import Run, compile_jax, interleave, median
from lce_jax.explain import _arguments

if TYPE_CHECKING:
    from lce_jax._shapes import Array

PRODUCT = "one product"


@dataclasses.dataclass(frozen=True)
class Program:
    """One line of the table."""

    function: Callable[..., Any]
    like: str | None = None  # the program with stored logits whose results it should have


@dataclasses.dataclass(frozen=True)
class Row:
    """What was measured of a program."""

    name: str
    seconds: float  # per call, the median
    ratio: float  # to one product
    temp_bytes: int
    apart: float | None = None  # from stored logits: the largest over the results, by norm
    same_ids: float | None = None  # share of the ids that are those from stored logits; None: it returns none


@dataclasses.dataclass(frozen=True)
class Table:
    """All that a command measured."""

    module: str
    arguments: list[str]
    shape: dict[str, int]
    dtype: str
    rounds: int
    rows: list[Row]

    def row(self, name: str) -> Row:
        """The row of that name."""
        return next(row for row in self.rows if row.name == name)

    def write(self, path: Path | None) -> None:
        """Prints the table; with a path, also a file of JSON that says what repeats it."""
        device, shape = jax.devices()[0].device_kind, ", ".join(f"{name} {size}" for name, size in self.shape.items())
        print(f"{device}, JAX {jax.__version__}, {self.dtype}, {shape}")
        for row in self.rows:
            times = f"{row.seconds * 1e3:9.2f} ms {row.ratio:6.2f} products {row.temp_bytes / 2**20:8.0f} MiB"
            apart = "" if row.apart is None else f"   {row.apart:.1e} from stored logits"
            apart += "" if row.same_ids is None else f", {row.same_ids:.2%} of ids equal"
            print(f"{row.name:50s}{times}{apart}")
        if path is None:
            return
        from lce_jax.bench.report import provenance  # needs what only files of the large benchmark need

        run = provenance(self.arguments, self.rounds, self.module)
        found = {"shape": self.shape, "dtype": self.dtype, "rows": [dataclasses.asdict(row) for row in self.rows]}
        path.write_text(json.dumps(run | found, indent=1, ensure_ascii=False) + "\n")
        print(f"written: {path}")


def parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """The arguments that all have."""
    out = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    shape = "tokens, hidden size, vocabulary (default 1024,512,32768)"
    out.add_argument("--shape", type=_arguments.shape, default=(1024, 512, 32768), metavar="T,H,V", help=shape)
    out.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), help="default: float32 on CPU, else bfloat16"
    )
    out.add_argument(
        "--rounds", type=_arguments.positive, default=5, help="timings of each row; the median is shown (default 5)"
    )
    out.add_argument("--out", type=Path, metavar="FILE", help="a file of JSON with the rows")
    return out


def dtype_of(options: argparse.Namespace) -> Any:
    """The one asked for, or the device's."""
    return jnp.dtype(options.dtype or ("bfloat16" if jax.default_backend() == "gpu" else "float32"))


def measure(programs: Mapping[str, Program], operands: Sequence[Array], rounds: int) -> list[Row]:
    """The rows of ``programs``, of which the first is one product; a program that fails has none, and says why."""
    runs = {}
    for name, program in programs.items():
        try:
            runs[name] = compile_jax(program.function, *operands)
            runs[name].wait(runs[name].launch())
        except jax.errors.JaxRuntimeError as failure:  # stored logits do not fit everywhere
            runs.pop(name, None)
            print(f"not timed: {name}: {str(failure).splitlines()[0][:120]}")
    apart = {
        name: _beside(runs[name], runs[program.like])
        for name, program in programs.items()
        if name in runs and program.like in runs
    }
    samples = interleave(runs, rounds, jax.default_backend() == "gpu")
    product = median(samples[PRODUCT])
    return [
        Row(name, median(samples[name]), median(samples[name]) / product, run.temp_bytes, *apart.get(name, ()))
        for name, run in runs.items()
    ]


def product(hidden: Array, weight: Array, *_: Array) -> Array:
    """Of hidden states and weight, and nothing else: the unit of the table."""
    return lax.dot_general(hidden, weight, (((1,), (1,)), ((), ())))


def draw_model(key: Array, tokens: int, hidden_size: int, vocab_size: int, dtype: Any, spread: float) -> list[Array]:
    """Normal hidden states, and a weight with which logits have the standard deviation ``spread``."""
    of_hidden, of_weight = jax.random.split(key)
    scale = jnp.asarray(spread * hidden_size**-0.5, dtype)
    weight = jax.random.normal(of_weight, (vocab_size, hidden_size), dtype) * scale
    return [jax.random.normal(of_hidden, (tokens, hidden_size), dtype), weight]


def _beside(ours: Run, stored: Run) -> tuple[float, float | None]:
    """How far the numbers lie apart, and the share of equal ids: of two that are nearly equal, rounding decides."""
    found, right = (jax.tree.leaves(run.wait(run.launch())) for run in (ours, stored))
    pairs = list(zip(found, right, strict=True))
    numbers = [[x.astype(jnp.float32) for x in pair] for pair in pairs if jnp.issubdtype(pair[1].dtype, jnp.floating)]
    ids = [jnp.mean(a == b) for a, b in pairs if jnp.issubdtype(b.dtype, jnp.integer)]
    apart = max(float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in numbers)
    return apart, float(ids[0]) if ids else None
