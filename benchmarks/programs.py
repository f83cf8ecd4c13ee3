"""What the small benchmarks share: options, programs timed in turns beside one product, and a table."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.measure import Run, compile_jax, first_line, interleave, median
from benchmarks.records import Measured
from lce_jax.explain import _arguments

if TYPE_CHECKING:
    from lce_jax._shapes import Array

PRODUCT = "one product"
DTYPES = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True)
class Program:
    """One line of the table."""

    function: Callable[..., Any]
    like: str | None = None  # the program with stored logits whose results it should have
    compile: Callable[..., Run] = compile_jax  # of the function and its operands; raises ImportError without a package


@dataclasses.dataclass(frozen=True)
class Row:
    """What was measured of a program."""

    name: str
    seconds: float  # per call, the median
    ratio: float | None  # to one product; None: the product itself was left out
    temp_bytes: int
    apart: float | None = None  # from the program that it should be like: the largest over the results, by norm
    same_ids: float | None = None  # share of the ids that are that program's; None: it returns none

    @property
    def fields(self) -> dict[str, Any]:
        """As in the file."""
        found = {"median_seconds": self.seconds, "ratio_to_gemm": self.ratio, "temp_bytes": self.temp_bytes}
        beside = {"apart": self.apart, "same_ids": self.same_ids}
        return found | {name: x for name, x in beside.items() if x is not None}

    def __str__(self) -> str:
        ratio = "     –" if self.ratio is None else f"{self.ratio:6.2f}"
        times = f"{self.seconds * 1e3:9.2f} ms {ratio} products {self.temp_bytes / 2**20:8.0f} MiB"
        apart = "" if self.apart is None else f"   {self.apart:.1e} from stored logits"
        apart += "" if self.same_ids is None else f", {self.same_ids:.2%} of ids equal"
        return f"{self.name:50s}{times}{apart}"


def add_arguments(command: argparse.ArgumentParser, with_dtype: bool = True) -> None:
    """The options that all have."""
    shape = "tokens, hidden size, vocabulary (default 1024,512,32768; on a GPU 4096,4096,151936); repeatable"
    command.add_argument(
        "--shape", type=_arguments.shape, action="append", default=[], metavar="T,H,V", help=shape
    )  # fmt: skip
    if with_dtype:
        command.add_argument("--dtype", choices=DTYPES, help="default: float32 on CPU, bfloat16 elsewhere")


def shapes_of(options: argparse.Namespace) -> list[tuple[int, int, int]]:
    """Those asked for, or the device's."""
    return options.shape or [(4096, 4096, 151936) if jax.default_backend() == "gpu" else (1024, 512, 32768)]


def words(part: str, shape: tuple[int, int, int], dtype: Any = None) -> list[str]:
    """The arguments that repeat a job."""
    return [part, "--shape", ",".join(map(str, shape)), *([] if dtype is None else dtype_arguments(dtype))]


def dtype_arguments(dtype: Any) -> list[str]:
    """Nothing for the device's own."""
    return [] if dtype == default_dtype() else ["--dtype", jnp.dtype(dtype).name]


def default_dtype() -> Any:
    """Of operands on this device."""
    return jnp.dtype("float32" if jax.default_backend() == "cpu" else "bfloat16")


def dtype_of(options: argparse.Namespace) -> Any:
    """The one asked for, or the device's."""
    return jnp.dtype(options.dtype) if options.dtype else default_dtype()


def measure(
    programs: Mapping[str, Program], operands: Sequence[Array], rounds: int, shape: dict[str, int], dtype: Any
) -> Measured:
    """Times ``programs``, of which the first is one product, prints their rows, and says why one has none."""
    print(f"{dtype.name}, {', '.join(f'{name} {size}' for name, size in shape.items())}")
    runs, left_out = {}, {}
    for name, program in programs.items():
        try:
            runs[name] = program.compile(program.function, *operands)
            runs[name].wait(runs[name].launch())
        except ImportError as missing:
            left_out[name] = {"left_out": str(missing)}
        except (jax.errors.JaxRuntimeError, ValueError) as failure:
            if isinstance(failure, ValueError) and "not supported" not in str(failure):
                raise
            runs.pop(name, None)  # stored logits do not fit everywhere, and not every device multiplies in every way
            left_out[name] = {"left_out": first_line(failure)}
    apart = {
        name: _beside(runs[name], runs[program.like])
        for name, program in programs.items()
        if name in runs and program.like in runs
    }

    def leave_out(name: str, failure: Exception) -> None:
        left_out[name] = {"left_out": first_line(failure)}

    samples = interleave(runs, rounds, jax.default_backend() == "gpu", on_failure=leave_out)
    times = {name: median(each) for name, each in samples.items()}
    unit = times.get(PRODUCT)
    rows = [
        Row(name, took, took / unit if unit else None, runs[name].temp_bytes, *apart.get(name, ()))
        for name, took in times.items()
    ]
    print(*rows, *(f"not timed: {name}: {why['left_out']}" for name, why in left_out.items()), sep="\n", flush=True)
    return Measured({row.name: row.fields for row in rows} | left_out, {"shape": shape, "dtype": dtype.name})


def product(hidden: Array, weight: Array, *_: Array) -> Array:
    """Of hidden states and weight, and nothing else: the unit of the table."""
    return lax.dot_general(hidden, weight, (((1,), (1,)), ((), ())))


def with_gradients(
    results: Callable[..., Any], seeds: Sequence[Array], hidden: Array, weight: Array
) -> tuple[Any, ...]:
    """``results(hidden, weight)``, and the gradients of their sum weighted by ``seeds``."""

    def loss(hidden: Array, weight: Array) -> Any:
        out = results(hidden, weight)
        return sum(jnp.sum(seed * x) for seed, x in zip(seeds, out, strict=True)), out

    gradients, out = jax.grad(loss, argnums=(0, 1), has_aux=True)(hidden, weight)
    return *out, *gradients


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
