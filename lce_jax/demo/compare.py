"""The demo's own head, fused and with stored logits: how far their results differ, and the memory and time of each."""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from lce_jax import sharded_linear_logprobs
from lce_jax.demo.model import Transformer, put_on_mesh

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax.sharding import Mesh
    from jaxtyping import Array, Float, Int

_ROUNDS = 5
_ENTROPY_WEIGHT = 0.01  # so that the gradient runs through both outputs


@dataclasses.dataclass(frozen=True)
class Program:
    """One compiled loss and gradient."""

    temp_bytes: int  # peak temporary memory on a device
    seconds: float  # median, the two programs' runs interleaved


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The shape of both programs, how far their results differ, and what each costs."""

    num_tokens: int
    hidden_size: int
    vocab_size: int
    dtype: str
    logprob_difference: float  # largest over the tokens, nats
    loss_difference: float
    gradient_difference: float  # largest over both gradients, over the largest entry of the gradient
    fused: Program
    materialised: Program


def compare(model: Transformer, tokens: Int[np.ndarray, "B S"], mesh: Mesh, implementation: str | None) -> Comparison:
    """Loss, log-probabilities and gradients of the trained head on the hidden states of ``tokens``, both ways."""
    config = model.config
    inputs = put_on_mesh(mesh, tokens[:, :-1])
    hidden = nnx.jit(lambda model, inputs: model(inputs))(model, inputs)
    weight = jax.device_put(model.head.weight[...].astype(config.dtype), NamedSharding(mesh, P("tensor")))
    operands = (put_on_mesh(mesh, hidden), weight, put_on_mesh(mesh, tokens[:, 1:]))

    def fused(hidden: Array, weight: Array, labels: Array) -> tuple[Array, Array | None]:
        out = sharded_linear_logprobs(
            hidden, weight, labels,
            mesh=mesh, vocab_axis="tensor", batch_axes="data",
            vocab_size=config.vocab_size, implementation=implementation,
        )  # fmt: skip
        return out.logprobs, out.entropy

    def materialised(hidden: Array, weight: Array, labels: Array) -> tuple[Array, Array]:
        logits = jnp.matmul(hidden, weight.T).astype(jnp.float32)
        logits = jnp.where(jnp.arange(logits.shape[-1]) < config.vocab_size, logits, -1e30)
        lse = jax.nn.logsumexp(logits, axis=-1)
        logprobs = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0] - lse
        return logprobs, lse - jnp.sum(jnp.exp(logits - lse[..., None]) * logits, axis=-1)

    compiled: list[Any] = [_compile(function, operands) for function in (fused, materialised)]
    (ours, our_gradients), (theirs, their_gradients) = (program(*operands) for program in compiled)
    seconds = _interleaved_medians(compiled, operands)
    programs = [
        Program(program.memory_analysis().temp_size_in_bytes, median)
        for program, median in zip(compiled, seconds, strict=True)
    ]
    return Comparison(
        num_tokens=inputs.size,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        dtype=jnp.dtype(config.dtype).name,
        logprob_difference=_largest_difference(ours[1], theirs[1]),
        loss_difference=_largest_difference(ours[0], theirs[0]),
        gradient_difference=max(map(_relative_difference, our_gradients, their_gradients)),
        fused=programs[0],
        materialised=programs[1],
    )


def _compile(function: Callable[..., tuple[Array, Any]], operands: tuple) -> Any:
    def loss(hidden: Array, weight: Array, labels: Array) -> tuple[Float[Array, ""], Array]:
        logprobs, entropy = function(hidden, weight, labels)
        return -jnp.mean(logprobs + _ENTROPY_WEIGHT * entropy), logprobs

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)).lower(*operands).compile()


def _interleaved_medians(programs: list[Any], operands: tuple) -> list[float]:
    """Median seconds of each program. They run in turns, so that other load on the machine affects both."""
    seconds: list[list[float]] = [[] for _ in programs]
    for _ in range(_ROUNDS):
        for program, taken in zip(programs, seconds, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(program(*operands))
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in seconds]


def _largest_difference(left: Array, right: Array) -> float:
    return float(np.max(np.abs(np.asarray(left, np.float64) - np.asarray(right, np.float64))))


def _relative_difference(left: Array, right: Array) -> float:
    return _largest_difference(left, right) / float(np.max(np.abs(np.asarray(right, np.float64))))
