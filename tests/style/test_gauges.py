"""How much a reader follows from a call to its gradients: the functions that Python enters, in how many files.

The first call is cold: its programs are not traced yet. Each number is a ceiling, and what the call enters today. It
may fall, and then the number here falls too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

import lce_jax
import lce_torch_bridge
from lce_jax import explain, linear_cross_entropy, linear_kl, linear_logprobs, linear_loss, linear_topk
from lce_torch_bridge.launched_directly import _host
from tests.entered import Entered, entered
from tests.torch import problem as p
from tests.torch.as_gpu import as_gpu

HIDDEN, WEIGHT, LABELS = jnp.ones((5, 11)), jnp.ones((37, 11)), jnp.arange(5)


def gradient(of: Callable[..., Any]) -> Callable[[], Any]:
    return lambda: jax.value_and_grad(of, (0, 1))(HIDDEN, WEIGHT)


ON_A_CPU = {
    "linear_logprobs": (gradient(lambda h, w: jnp.sum(linear_logprobs(h, w, LABELS).logprobs)), 151, 18),
    "linear_cross_entropy": (gradient(lambda h, w: linear_cross_entropy(h, w, LABELS)), 237, 21),
    "linear_loss": (gradient(lambda h, w: linear_loss(lambda logprob, *_: -logprob, h, w, LABELS)[0]), 202, 20),
    "linear_kl": (gradient(lambda h, w: jnp.sum(linear_kl(h, w, HIDDEN, WEIGHT))), 173, 22),
    "linear_topk": (lambda: linear_topk(HIDDEN, WEIGHT, 3), 84, 18),
    "explain": (lambda: explain(HIDDEN, WEIGHT, LABELS), 69, 13),
}


@pytest.mark.fast("linear_cross_entropy", "linear_kl", "explain")
@pytest.mark.parametrize("name", ON_A_CPU)
def test_on_a_cpu(name: str) -> None:
    call, functions, files = ON_A_CPU[name]
    forget_programs()  # what is traced already is not entered again
    check(name, entered(call, lce_jax), functions, files)


@pytest.mark.usefixtures("hopper")
def test_traced_for_hopper() -> None:
    def loss(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
        out = linear_logprobs(hidden, weight, labels)
        return jnp.sum(out.logprobs + out.entropy)

    shapes = (jax.ShapeDtypeStruct((512, 256), jnp.bfloat16), jax.ShapeDtypeStruct((4096, 256), jnp.bfloat16))
    labels = jax.ShapeDtypeStruct((512,), jnp.int32)
    jax.clear_caches()

    step = jax.jit(jax.value_and_grad(loss, (0, 1)))
    check("linear_logprobs for Hopper", entered(lambda: step.trace(*shapes, labels), lce_jax), 297, 37)


def of_torch(leaves: p.Problem) -> None:
    out = lce_torch_bridge.linear_logprobs(*leaves)
    torch.autograd.grad((out.logprobs + out.entropy).sum(), leaves[:2])


def loss_of_torch(leaves: p.Problem) -> None:
    total, _ = lce_torch_bridge.linear_loss(lambda logprobs, *_: -logprobs, *leaves)
    torch.autograd.grad(total, leaves[:2])


def topk_of_torch(leaves: p.Problem) -> None:
    lce_torch_bridge.linear_topk(*leaves[:2], 4)


# The first call, then one that finds its programs.
IN_TORCH = {
    "through JAX": {
        of_torch: ((206, 29), (50, 15)), loss_of_torch: ((241, 30), (73, 16)), topk_of_torch: ((159, 33), (47, 14))
    },
    "directly": {of_torch: ((329, 40), (38, 13)), loss_of_torch: ((347, 41), (57, 15))},
}  # fmt: skip


@pytest.mark.fast("loss_of_torch")
@pytest.mark.parametrize(
    ("way", "call"),
    [pytest.param(way, call, id=f"{call.__name__} {way}") for way, calls in IN_TORCH.items() for call in calls],
)
def test_in_torch(way: str, call: Callable[[p.Problem], None], monkeypatch: pytest.MonkeyPatch) -> None:
    leaves = p.draw(16, 128, 784, torch.bfloat16).leaves()
    if way == "directly":
        as_gpu(monkeypatch)  # it launches nothing
    call(leaves)  # what a process does once is not counted
    forget_programs()
    monkeypatch.setattr(_host, "_plans", {})
    first = entered(lambda: call(leaves), lce_jax, lce_torch_bridge)
    cold, warm = IN_TORCH[way][call]
    check(f"{call.__name__} {way}, first", first, *cold)
    check(f"{call.__name__} {way}, again", entered(lambda: call(leaves), lce_jax, lce_torch_bridge), *warm)


def forget_programs() -> None:
    """What the packages keep of earlier calls."""
    jax.clear_caches()
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("lce_jax", "lce_torch_bridge"):
            for found in vars(module).values():
                if hasattr(found, "cache_clear"):
                    found.cache_clear()


def check(name: str, found: Entered, functions: int, files: int) -> None:
    print(f"{name}: {found}")
    assert len(found.functions) <= functions, found.functions
    assert len(found.files) <= files, found.files
