"""The kernels as machine code for GPUs that are not there: registers, spills and shared memory.

``python -m tests.compiled.machine_code [h200|a100|l40s|rtx5090]`` prints a table that stands beside this file, one for
each GPU and version of JAX. It needs the wheels of ``make test-compile``: JAX's CUDA plugin, which describes a GPU that
is not there, and ptxas.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import torch

from lce_jax import linear_kl
from lce_jax.explain._compile_targets import TARGETS
from lce_jax.explain._models import MODELS
from lce_jax.mosaic import _compiler, _generations, mma, sm90
from lce_jax.mosaic._compiler import Kernel
from lce_jax.mosaic._host import Traced
from lce_jax.mosaic._pallas import lowering_for
from lce_jax.run.kernels import Call, LaunchedCall, trace_for_device
from lce_jax.types._types import Device
from lce_torch_bridge.launched_directly import _passes
from lce_torch_bridge.launched_directly._launches import Tape, find_needed_steps
from lce_torch_bridge.tensors import _tensor_parallel
from tests.devices import A100, H200

HERE = pathlib.Path(__file__).parent
DEVICES = {
    "h200": H200,
    "a100": A100,
    "l40s": Device("gpu", "NVIDIA L40S", "8.9", 142),
    "rtx5090": Device("gpu", "NVIDIA GeForce RTX 5090", "12.0", 170),
}
GENERATIONS = {"h200": sm90.HOPPER, "a100": mma.SM80, "l40s": mma.SM89, "rtx5090": mma.SM120}
PREFIX = "lce kernel"  # of a line that this file prints before ptxas prints its own
USED = re.compile(rb"ptxas info *: Used (\d+) registers")
SPILLED = re.compile(rb"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


class Entry(NamedTuple):
    """What ptxas says of a kernel."""

    kernel: str
    of: str  # the call
    registers: int  # of a thread
    stack: int  # bytes
    spill_stores: int  # bytes
    spill_loads: int  # bytes
    shared: int  # bytes of a block that a launch asks for

    def __str__(self) -> str:
        """A line of the table."""
        return (
            f"{self.kernel:20} {self.of:34} {self.registers:>9} {self.stack:>5} {self.spill_stores:>6} "
            f"{self.spill_loads:>6} {self.shared:>7}"
        )


def table_of(target: str) -> pathlib.Path:
    """Where a table stands."""
    return HERE / f"kernels-{jax.__version__}{'' if target == 'h200' else '-' + target}.txt"


HEADER = f"{'kernel':20} {'call':34} {'registers':>9} {'stack':>5} {'stores':>6} {'loads':>6} {'shared':>7}"


def _head(model: str, device: Device, rows: int = 4096, has_temperature: bool = False, **changed: Any) -> LaunchedCall:
    """A model's head, for 4096 tokens."""
    of = MODELS[model]
    columns = -(-of.vocab_size // 8) * 8
    given: Any = dict(num_tokens=4096, hidden_size=of.hidden_size, columns=columns, vocab_size=of.vocab_size)
    given |= dict(dtype=jnp.dtype("bfloat16"), device=device, logit_softcap=of.logit_softcap)
    return LaunchedCall(call=Call(**given | changed), rows=rows, start=0, has_temperature=has_temperature)


def calls(device: Device) -> dict[str, LaunchedCall]:
    """The calls whose kernels are compiled, by name: models, then options."""
    head = functools.partial(_head, device=device)
    everything: Any = dict(stats=True, has_temperature=True, vocab_size=151643, caller_dtype=jnp.dtype("float32"))
    threshold: Any = dict(gradient_threshold=2.0**-12, stats=True)
    return {
        **{
            name: head(name)
            for name in ("qwen3-8b", "llama3-70b", "gpt-oss", "gemma2-9b", "mixtral-8x7b", "qwen2.5-0.5b")
        },
        "qwen3-8b, 128 tokens": head("qwen3-8b", num_tokens=100, rows=128),
        "qwen3-8b, every option": head("qwen3-8b", **everything),
        "qwen3-8b, no entropy, float16": head("qwen3-8b", entropy=False, dtype=jnp.dtype("float16")),
        "qwen3-8b, a full cache": head("qwen3-8b", cache_bytes=1 << 40),
        "qwen3-8b, parts": head("qwen3-8b", vocab_part_size=18992, stats=True, has_temperature=True, vocab_size=151643),
        "qwen3-8b, a threshold": head("qwen3-8b", **threshold),
        "qwen3-8b, a floor": head("qwen3-8b", has_floor=True),
        "gemma2-9b, a floor": head("gemma2-9b", has_floor=True),
        "qwen3-8b, a floor, full cache": head("qwen3-8b", has_floor=True, stats=True, cache_bytes=1 << 40),
        "qwen3-8b, a floor, a threshold": head("qwen3-8b", has_floor=True, **threshold),
    }


def tapes(of: LaunchedCall) -> Iterator[Tape]:
    """The passes of a call."""
    caches = bool(of.call.cache_bytes) or of.call.gradient_threshold > 0
    seeds = "logprobs", *["entropy"] * of.call.entropy
    for group in ("", "8 ranks"):
        with mock.patch.object(_tensor_parallel, "size_and_rank", lambda name: (8, 0) if name else (1, 0)):
            yield _passes.forward_tape(of, caches, seeds, group)
    kept = _passes.forward_tape(of, caches, seeds).outputs[1 + len(seeds) :]
    dtype = getattr(torch, of.call.hidden_dtype.name)
    yield _passes.gradients_tape(of, seeds, (True, True), dtype, kept, owns_cache=caches)


def kernels(device: Device) -> list[tuple[Kernel, str]]:
    """Every kernel once, with the first call that has it; of other generations than Hopper those that differ."""
    found: dict[bytes, tuple[Kernel, str]] = {}  # calls of other shapes may share one
    for name, of in calls(device).items():
        for tape in tapes(of):
            for kernel in (step.run for step in find_needed_steps(tape) if isinstance(step.run, Kernel)):
                found.setdefault(_compiler.module(kernel, device), (kernel, name))
    scale = _passes.scale_tape(torch.Size([4096 * 151936]), "float32", torch.bfloat16).steps[0].run
    assert isinstance(scale, Kernel)
    for kernel, name in of_two_heads(device):
        found.setdefault(_compiler.module(kernel, device), (kernel, name))
    every = [*found.values(), (scale, "qwen3-8b")]
    own = "statistics", "dlogits", "dhidden", "dweight"
    return every if device == H200 else [each for each in every if each[0].name.endswith(own)]


DIVERGENCES = [  # and cache_bytes
    ("forward", 0), ("forward", 1 << 40), ("reverse", 0), ("jsd", 0), ("jsd", 1 << 40), ("tv", 0), ("tv", 1 << 40),
]  # fmt: skip


def of_two_heads(device: Device) -> Iterator[tuple[Kernel, str]]:
    """The kernels of `linear_kl`."""
    head = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16), jax.ShapeDtypeStruct((151936, 4096), jnp.bfloat16)
    found: list[Kernel] = []

    def launch(_: Any, kernel: Any, *operands: Any) -> Any:
        leaves, tree = jax.tree.flatten(operands)
        given = (jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array) else x for x in leaves)
        found.append(_compiler.traced(kernel, tree, tuple(given)))
        return kernel(*operands)

    with mock.patch.object(Traced, "launch", launch), trace_for_device(device):
        for direction, cache_bytes in DIVERGENCES:
            loss = functools.partial(_divergence, direction=direction, cache_bytes=cache_bytes)
            jax.eval_shape(jax.grad(loss, (0, 1)), *head, *head)
            name = f"two heads, {direction}{', a full cache' if cache_bytes else ''}"
            yield from ((kernel, name) for kernel in dict.fromkeys(found) if "kl" in kernel.name)
            found.clear()


def _divergence(*heads: Any, **options: Any) -> Any:
    return jnp.sum(linear_kl(*heads, implementation="mosaic_gpu", **options))


def shared_bytes(kernel: Kernel, device: Device) -> int:
    """The shared memory that a launch asks for: its last operand, a constant."""
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir

    context = mlir.make_ir_context()
    context.allow_unregistered_dialects = True
    with context:
        importlib.import_module("jax.experimental.mosaic.gpu").dialect.register_dialect(context)
        text = str(ir.Module.parse(_compiler.module(kernel, device)))
    (operands,) = re.findall(r'"stable_mosaic_gpu.gpu.launch"\(([^)]*)\)', text)
    name = operands.split(", ")[-1]
    return int(re.findall(rf"{name} = .*value = (\d+) :", text)[0])


def compile_all(target: str) -> None:
    """Compiles every kernel; ptxas prints what it finds after each line of ours."""
    device, described = DEVICES[target], TARGETS[target].mesh(1, 1).devices.flat[0]
    sharding = jax.sharding.SingleDeviceSharding(described)
    for kernel, name in kernels(device):
        print(f"{PREFIX} {kernel.name}|{name}|{shared_bytes(kernel, device)}", flush=True)
        given = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in kernel.arrays]
        with trace_for_device(device), lowering_for(device.compute_capability):
            lowered = jax.jit(lambda *x, kernel=kernel: kernel.function(*x)).trace(*given)
            lowered.lower(lowering_platforms=("cuda",)).compile()


def entries(target: str) -> list[Entry]:
    """The table, from a process of its own: ptxas writes to its standard error."""
    told = os.environ | {"MOSAIC_GPU_DUMP_PTXAS": "1", "JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "0"}
    command = [sys.executable, "-m", "tests.compiled.machine_code", target, "compile"]
    done = subprocess.run(command, env=told, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        raise RuntimeError(done.stdout.decode(errors="replace")[-6000:])
    first, *parts = re.split(rb"^" + PREFIX.encode() + rb" ", done.stdout, flags=re.MULTILINE)
    del first
    return [_entry(part) for part in parts]


def _entry(said: bytes) -> Entry:
    name, of, shared = said.split(b"\n", 1)[0].decode().split("|")
    (registers,), (spilled,) = USED.findall(said), SPILLED.findall(said)
    return Entry(name, of, int(registers), *map(int, spilled), int(shared))


def table(target: str, found: list[Entry]) -> str:
    """The text of the table."""
    ptxas, device = importlib.metadata.version("nvidia-cuda-nvcc"), DEVICES[target]
    architecture = f"sm_{device.compute_capability.replace('.', '')}{'a' if target in ('h200', 'rtx5090') else ''}"
    versions = f"JAX {jax.__version__}, ptxas {ptxas}, {device.kind} ({architecture})"
    first = f"{versions}: registers of a thread, the others in bytes"
    return "\n".join([first, HEADER, *map(str, found)]) + "\n"


if __name__ == "__main__":
    target = sys.argv[1] if sys.argv[1:] else "h200"
    with _generations.using(GENERATIONS[target]):
        compile_all(target) if sys.argv[2:] == ["compile"] else print(table(target, entries(target)), end="")
