"""Programs of `lce_jax.launch` on the CPU: generated code by the machine's C++ compiler, kernels by NumPy."""

from __future__ import annotations

import ctypes
import functools
import pathlib
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lce_jax import launch
from lce_jax.launch import _program, _source
from lce_jax.launch._schedule import Stage

COMPILER = shutil.which("g++") or shutil.which("clang++")
ON_CPU = """
#include <barrier>
#include <cmath>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>
#define DEVICE static inline
#define PART DEVICE
#define STAGE(name) \\
  static void name##_block(const Buffers& b, int block, int thread); \\
  extern "C" void name(const Buffers& b, int block) { \\
    std::barrier all(THREADS); \\
    at_barrier = [&] { all.arrive_and_wait(); }; \\
    std::vector<std::thread> threads; \\
    for (int i = 0; i < THREADS; ++i) \\
      threads.emplace_back([&, i] { name##_block(b, block, i); all.arrive_and_drop(); }); \\
    for (auto& each : threads) each.join(); \\
  } \\
  extern "C" void name##_apart(const Buffers& b, int first, int last) { \\
    for (int i = first * THREADS; i < last * THREADS; ++i) name##_block(b, i / THREADS, i % THREADS); \\
  } \\
  static void name##_block(const Buffers& b, int block, int thread)
#define WHERE
static std::function<void()> at_barrier;
#define SHARED static
#define SYNCHRONIZE at_barrier();
#define UNROLLED
#define EACH
DEVICE float bits_to_float(unsigned int x) { float y; std::memcpy(&y, &x, 4); return y; }
DEVICE unsigned int float_to_bits(float x) { unsigned int y; std::memcpy(&y, &x, 4); return y; }
DEVICE float of_f16(unsigned short x) { _Float16 y; std::memcpy(&y, &x, 2); return (float)y; }
DEVICE unsigned short to_f16(float x) { _Float16 h = (_Float16)x; unsigned short y; std::memcpy(&y, &h, 2); return y; }
using std::isfinite;
static int row_in_tile(int thread, int u) { return (thread + u * 8) / 64; }
static int column_in_tile(int thread, int u) { return (thread + u * 8) % 64; }
template <class Strip, class Convert>
void multiply(Strip left, Strip right, float* sums, int thread, Convert of) {
  for (int u = 0; u < 64 * 64 / 8; ++u) for (int k = 0; k < 64; ++k)
    sums[u] += of(left[row_in_tile(thread, u)][k]) * of(right[column_in_tile(thread, u)][k]);
}
#define multiply_bf16(left, right, sums, thread) multiply(left, right, sums, thread, of_bf16)
#define multiply_f16(left, right, sums, thread) multiply(left, right, sums, thread, of_f16)
"""
THREADS = 8  # of a block; they run at the same time, as on a GPU
FILL = 0xFF  # every byte of memory that nothing has written: NaN as a float of any size


def run(
    program: launch.Program, operands: Sequence[Any], folder: pathlib.Path, updated: Mapping[int, int] | None = None
) -> list[np.ndarray]:
    """The program's results. The blocks of generated code have `THREADS` threads.

    ``updated`` says which results have the memory of which operand.
    """
    inputs = [np.asarray(x) for x in jax.tree.leaves(operands)]
    outputs = [np.full(x.size * x.dtype.itemsize, FILL, np.uint8) for x in program.outputs]
    for result, operand in (updated or {}).items():
        outputs[result] = inputs[operand].copy().reshape(-1).view(np.uint8)
    workspace = np.full(program.workspace_bytes, FILL, np.uint8)
    addresses = [x.ctypes.data for x in (*outputs, *inputs)]
    loaded(program, folder)(0, workspace.ctypes.data, (), addresses)
    return [x.view(s.dtype).reshape(s.shape) for x, s in zip(outputs, program.outputs, strict=True)]


def loaded(program: launch.Program, folder: pathlib.Path) -> Callable[..., None]:
    """What `launch.Program.load` returns, for memory of the CPU."""
    library = _compiled(program.source, folder)
    table = _program._Table(program)
    steps: list[Any] = []
    for step in program.schedule.steps:
        if isinstance(step, Stage):
            name = f"stage_{sum(place == -1 for _, place in steps)}"
            steps.append((_later(_run_stage, library[name], library[f"{name}_apart"], step), -1))
        else:
            steps.append((_later(_emulate, step), table.add(step.arrays)))
    return table.runner(steps)


def _later(function: Callable[..., None], *known: Any) -> Any:
    """What makes a launch of ``function``, given a stream and an address."""
    return functools.partial(functools.partial, function, *known)


def _run_stage(together: Any, apart: Any, step: Any, stream: int, address: int) -> None:
    """Block by block. Threads run at the same time where they wait for each other, otherwise one after the other."""
    del stream
    buffers, first = ctypes.c_void_p.from_address(address), 0
    for segment in step.segments:
        last = first + segment.num_blocks
        if any(map(_source.is_apart, segment.nodes)):
            for block in range(first, last):
                together(buffers, block)
        else:
            apart(buffers, first, last)
        first = last


def _compiled(source: str, folder: pathlib.Path) -> Any:
    assert COMPILER is not None
    assert _source.THREADS == THREADS
    (folder / "stages.cpp").write_text(ON_CPU + source)
    flags = ["-O1", "-w", "-std=c++20", "-pthread", "-shared", "-fPIC", "-ffp-contract=off"]
    command = [COMPILER, *flags, "-o", "stages.so", "stages.cpp"]
    subprocess.run(command, cwd=folder, check=True, timeout=120)
    return ctypes.CDLL(str(folder / "stages.so"))


def _emulate(step: Any, stream: int, address: int) -> None:
    """What a kernel does, told by its operands. No statistics of dead rows are written."""
    del stream
    count = len(step.arrays) - len(step.kernel.results)
    addresses = (ctypes.c_uint64 * len(step.arrays)).from_address(address)
    memory = [
        np.frombuffer((ctypes.c_ubyte * storage.num_bytes).from_address(at), np.uint8)
        for storage, at in zip(step.arrays, addresses, strict=True)
    ]
    (shape, dtype), *_ = step.kernel.results
    output = memory[count].view(dtype).reshape(shape)
    if count == OPERANDS_OF_COPY:
        _copy(memory, output)
    elif count == OPERANDS_OF_TILES:
        (_statistics if output.ndim == 3 else _dlogits)(memory, output)
    else:
        (_join if memory[2].size == 4 * NUMBERS_OF_JOIN else _product)(memory, output)


OPERANDS_OF_COPY = 2
OPERANDS_OF_TILES = 8  # of the kernels that walk over tiles of logits
NUMBERS_OF_JOIN = 3
GROUP = 16  # tiles that are joined first
TILE = 256
HIDDEN_SIZE = 128  # of every call here
PADDED_TOKENS = 304  # unless a test says otherwise


def _matrix(memory: np.ndarray) -> np.ndarray:
    return memory.view(jnp.bfloat16).reshape(-1, HIDDEN_SIZE).astype(np.float32)


def _statistics(memory: list[np.ndarray], output: np.ndarray) -> None:
    hidden, weight = _matrix(memory[0]), _matrix(memory[1])
    targets, scale, span = memory[2].view(np.int32), memory[3].view(np.float32), memory[6].view(np.int32)
    rows, columns, first, tiles, _, _, slot, _ = map(int, span[:8])
    assert _mark_targets(memory[4].view(np.int32), targets)
    for n in range(tiles):
        start = first + n * TILE
        x = hidden[:rows] @ weight[start : min(start + TILE, columns)].T
        highest = x.max(1)
        u = (x - highest[:, None]) * scale[:rows, None]
        e = np.exp2(u)
        local = targets[:rows] - start
        owned = (local >= 0) & (local < x.shape[1])
        at = np.where(owned, np.take_along_axis(u, np.where(owned, local, 0)[:, None], 1)[:, 0], -np.inf)
        for i, field in enumerate((highest, e.sum(1), (e * u).sum(1), at)):
            output[slot + n, i, :rows] = field


def _join(memory: list[np.ndarray], output: np.ndarray) -> None:
    fields, tokens = output.shape[1:]
    parts, scale = memory[0].view(np.float32).reshape(-1, fields, tokens), memory[1].view(np.float32)
    rows, count, first = map(int, memory[2].view(np.int32))
    groups = max(-(-len(parts) // GROUP), 1)
    group = GROUP if len(output) >= first + groups and groups > 1 else len(parts)
    for n in range(-(-len(parts) // group)):
        of_group = parts[n * group : min((n + 1) * group, count), :, :rows]
        m, s, q, t = of_group.swapaxes(0, 1)
        highest = m.max(0)
        d = (m - highest) * scale[:rows]
        a = np.exp2(d)
        for i, field in enumerate((highest, (s * a).sum(0), ((q + d * s) * a).sum(0), (t + d).max(0))):
            output[first + n, i, :rows] = field


def _copy(memory: list[np.ndarray], output: np.ndarray) -> None:
    weight, (first, rows) = _matrix(memory[0]), map(int, memory[1].view(np.int32)[:2])
    rows = min(rows, TILE)
    copied = output.reshape(TILE, HIDDEN_SIZE)
    copied[:rows], copied[rows:] = weight[8 * first : 8 * first + rows], 0


def _mark_targets(flags: np.ndarray, targets: np.ndarray) -> bool:
    """Whether exactly the tiles that hold a target are marked."""
    wanted = np.zeros((targets.size // 128, flags.size * 128 // targets.size), np.int32)
    rows = np.flatnonzero(targets >= 0)
    wanted[rows // 128, targets[rows] // TILE] = 1
    return bool((flags == wanted.reshape(-1)).all())


def _dlogits(memory: list[np.ndarray], output: np.ndarray) -> None:
    hidden, weight = _matrix(memory[0]), _matrix(memory[1])
    targets, scale, span = memory[2].view(np.int32), memory[3].view(np.float32), memory[7].view(np.int32)
    rows, columns, first, tiles, _, offset = map(int, span[:6])
    highest, target, constant, slope = memory[6].view(np.float32).reshape(4, -1)[:, :rows, None]
    width = min(first + tiles * TILE, columns) - first
    u = (hidden[:rows] @ weight[offset : offset + width].T - highest) * scale[:rows, None]
    e = np.exp2(u)
    d = np.where(np.arange(first, first + width) == targets[:rows, None], target, constant * e + slope * (u * e))
    output[:rows, : tiles * TILE] = 0
    output[:rows, :width] = d


def _product(memory: list[np.ndarray], output: np.ndarray) -> None:
    span = memory[2].view(np.int32)
    rows, _, _, tiles, depth, offset, _, adds = map(int, span[:8])
    if output.ndim == 3:
        d = memory[0].view(jnp.bfloat16).reshape(PADDED_TOKENS, -1).astype(np.float32)
        found = np.zeros(output.shape, np.float32)
        found[0, :rows, :HIDDEN_SIZE] = d[:rows, :depth] @ _matrix(memory[1])[offset : offset + depth]
        output[...] = output + found if adds else found
    else:
        hidden = _matrix(memory[1])
        d = memory[0].view(jnp.bfloat16).reshape(len(hidden), -1).astype(np.float32)
        stop = min(offset + tiles * TILE, len(output))
        found = d[:rows, : stop - offset].T @ hidden[:rows]
        output[offset:stop] = output[offset:stop] + found if output.dtype == np.float32 else found
