"""What a caller has set for arrays of JAX: torch's tensors have nothing to do with it, in either pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import torch
from jax.sharding import AbstractMesh, AxisType

from lce_torch_bridge import linear_kl, linear_logits, linear_logprobs, linear_loss, linear_topk
from lce_torch_bridge.through_jax import _runtime as runtime
from tests.pairs import pairs_of
from tests.torch import problem as p

T = 37
TEMPERATURE = torch.linspace(0.5, 2, T)
H200 = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")


def over(count: int, kind: AxisType) -> Any:
    """`jax.set_mesh` of devices that hold no tensor: these are on the first."""
    return jax.set_mesh(jax.make_mesh((count,), ("x",), (kind,), devices=jax.devices()[1 : 1 + count]))


CONTEXTS: dict[str, Callable[[], Any]] = {
    "Auto": lambda: over(2, AxisType.Auto),
    "Explicit": lambda: over(2, AxisType.Explicit),
    "another device": lambda: over(1, AxisType.Auto),
    "GPUs": lambda: jax.sharding.use_abstract_mesh(AbstractMesh((2,), ("x",), abstract_device=H200)),
    "disable_jit": jax.disable_jit,
    "debug_nans": lambda: jax.debug_nans(True),
}


def logprobs(hidden: Any, weight: Any, labels: Any) -> list[torch.Tensor]:
    return list(linear_logprobs(hidden, weight, labels, temperature=TEMPERATURE, cache_bytes=1 << 30)[:3])


def loss(hidden: Any, weight: Any, labels: Any) -> list[torch.Tensor]:
    return [linear_loss(lambda logprobs, *_: -logprobs, hidden, weight, labels)[0]]


def kl(hidden: Any, weight: Any, _labels: Any) -> list[torch.Tensor]:
    return [linear_kl(hidden, weight, hidden.detach() / 2, weight.detach(), cache_bytes=1 << 30)]


def logits(hidden: Any, weight: Any, labels: Any) -> list[torch.Tensor]:
    return [linear_logits(hidden, weight, labels[:, None], temperature=TEMPERATURE)]


def topk(hidden: Any, weight: Any, _labels: Any) -> list[torch.Tensor]:
    return list(linear_topk(hidden, weight, 4, temperature=TEMPERATURE))


def run(call: Any, forward: Any = contextlib.nullcontext, backward: Any = contextlib.nullcontext) -> list[torch.Tensor]:
    """The results and the gradients of their sum, each pass inside of a context."""
    leaves = p.draw(T).leaves()
    with forward():
        found = call(*leaves)
    total = sum(x.sum() for x in found if x.requires_grad)
    with backward():
        return [*found, *(torch.autograd.grad(total, leaves[:2]) if isinstance(total, torch.Tensor) else [])]


@pairs_of(1, call=[logprobs, loss, kl, logits, topk], context=list(CONTEXTS))
def test_the_bits_of_a_call_outside(call: Any, context: str) -> None:
    want, inside = run(call), CONTEXTS[context]
    for passes in ({"forward": inside}, {"backward": inside}, {"forward": inside, "backward": inside}):
        runtime.shapes_on.cache_clear()
        found = run(call, **passes)
        assert all(map(torch.equal, found, want)), passes
