"""The functions of packages that a call enters, which a reader has to follow.

`python -m tests.entered` prints how many they are, and in how many files, for a few calls and their gradients. Programs
are traced anew for each first call.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
import torch

import lce_jax
import lce_torch_bridge
from lce_jax import explain, linear_cross_entropy, linear_kl, linear_logprobs, linear_loss, linear_topk
from lce_jax.call import _dispatch
from lce_torch_bridge.launched_directly import _launches
from tests.devices import H200
from tests.torch import problem as p
from tests.torch.as_gpu import as_gpu


class Entered(NamedTuple):
    functions: list[tuple[str, str]]  # file and name; a lambda or a comprehension is part of its function

    @property
    def files(self) -> list[str]:
        return sorted({file for file, _ in self.functions})

    def __str__(self) -> str:
        return f"{len(self.functions)} functions in {len(self.files)} files"


def entered(call: Callable[[], Any], *packages: ModuleType) -> Entered:
    """Returns the functions of ``packages`` that ``call`` enters, also in autograd's threads."""
    folders, functions = tuple(str(Path(str(package.__file__)).parent) for package in packages), set()

    def watch(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(folders) and not code.co_name.startswith("<"):
            functions.add((code.co_filename, code.co_qualname))

    before = sys.getprofile()
    threading.setprofile_all_threads(watch)
    try:
        call()
    finally:
        threading.setprofile_all_threads(before)
    return Entered(sorted(functions))


HIDDEN, WEIGHT, LABELS = jnp.ones((5, 11)), jnp.ones((37, 11)), jnp.arange(5)


def gradient(function: Callable[..., Any]) -> Callable[[], Any]:
    return lambda: jax.value_and_grad(function, (0, 1))(HIDDEN, WEIGHT)


ON_A_CPU = {
    "linear_logprobs": gradient(lambda h, w: jnp.sum(linear_logprobs(h, w, LABELS).logprobs)),
    "linear_cross_entropy": gradient(lambda h, w: linear_cross_entropy(h, w, LABELS)),
    "linear_loss": gradient(lambda h, w: linear_loss(lambda logprob, *_: -logprob, h, w, LABELS)[0]),
    "linear_kl": gradient(lambda h, w: jnp.sum(linear_kl(h, w, HIDDEN, WEIGHT))),
    "linear_topk": lambda: linear_topk(HIDDEN, WEIGHT, 3),
    "explain": lambda: explain(HIDDEN, WEIGHT, LABELS),
}


def trace_for_hopper() -> None:
    def loss(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
        out = linear_logprobs(hidden, weight, labels)
        return jnp.sum(out.logprobs + out.entropy)

    shapes = (jax.ShapeDtypeStruct((512, 256), jnp.bfloat16), jax.ShapeDtypeStruct((4096, 256), jnp.bfloat16))
    jax.jit(jax.value_and_grad(loss, (0, 1))).trace(*shapes, jax.ShapeDtypeStruct((512,), jnp.int32))


def differentiate_logprobs(leaves: p.Problem) -> None:
    out = lce_torch_bridge.linear_logprobs(*leaves)
    torch.autograd.grad((out.logprobs + out.entropy).sum(), leaves[:2])


def differentiate_loss(leaves: p.Problem) -> None:
    total, _ = lce_torch_bridge.linear_loss(lambda logprobs, *_: -logprobs, *leaves)
    torch.autograd.grad(total, leaves[:2])


def forget_programs() -> None:
    """Clears what the packages cache."""
    jax.clear_caches()
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("lce_jax", "lce_torch_bridge"):
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


def print_all() -> None:
    for name, call in ON_A_CPU.items():
        forget_programs()  # a cached trace would not be entered again
        print(f"{name}, JAX on a CPU: {entered(call, lce_jax)}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_dispatch, "current_device", lambda *_, **__: H200)
        forget_programs()
        print(f"linear_logprobs, JAX traced for an H200: {entered(trace_for_hopper, lce_jax)}")
    for way in ("through JAX", "launched directly"):
        for call in (differentiate_logprobs, differentiate_loss):
            print_in_torch(way, call)


def print_in_torch(way: str, call: Callable[[p.Problem], None]) -> None:
    leaves = p.draw(16, 128, 784, torch.bfloat16).leaves()
    with pytest.MonkeyPatch.context() as patch:
        if way == "launched directly":
            as_gpu(patch)  # it launches nothing
        call(leaves)  # what a process does once is not counted
        forget_programs()
        patch.setattr(_launches, "_plans", {})
        for when in ("first", "again"):
            print(f"{call.__name__} {way}, {when}: {entered(lambda: call(leaves), lce_jax, lce_torch_bridge)}")


if __name__ == "__main__":
    print_all()
