"""Compares the demo's head, fused and with stored logits: errors against float64, memory and time.

On GPUs it also times a head of a real model's size, because the demo's head is too small to show a difference there.
"""

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

from examples.demo import stored
from examples.demo.model import Transformer, put_on_mesh
from lce_jax import sharded_linear_logprobs

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax.sharding import Mesh

    from lce_jax.types._shapes import Array, Float, Int

_ROUNDS = 5
_ENTROPY_WEIGHT = 0.01  # not 0, so that the gradient depends on both outputs
_BLOCK = 256  # tokens in one block of the reference's logits
_REAL_SIZE = (4096, 4096, 151936)  # tokens, hidden size and vocabulary, of Qwen3-8B
_REAL_SIZE_BYTES = 24 << 30  # of GPU memory, more than stored logits of that size need


@dataclasses.dataclass(frozen=True)
class ProgramCost:
    """The cost and the errors of one compiled loss with its gradients."""

    temp_bytes: int  # peak temporary memory on a device
    seconds: float  # median, the two programs' runs interleaved
    loss_error: float  # nats
    logprob_error: float  # largest over the tokens, nats
    gradient_error: float  # the largest of both gradients, relative to the gradient's largest entry


@dataclasses.dataclass(frozen=True)
class RealSize:
    """Interleaved median times of a head of a real model's size, in seconds."""

    shape: tuple[int, int, int]  # tokens, hidden size, vocabulary
    fused_seconds: float
    materialised_seconds: float


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The shape of both programs, and the cost and errors of each."""

    num_tokens: int
    hidden_size: int
    vocab_size: int
    dtype: str
    fused: ProgramCost
    materialised: ProgramCost
    real_size: RealSize | None  # None if the devices are not GPUs, or have too little memory


def compare(model: Transformer, tokens: Int[np.ndarray, "B S"], mesh: Mesh) -> Comparison:
    """Compares loss, log-probabilities and gradients of the trained head on the hidden states of ``tokens``."""
    config = model.config
    inputs = put_on_mesh(mesh, tokens[:, :-1])
    hidden = nnx.jit(lambda model, inputs: model(inputs))(model, inputs)
    weight = jax.device_put(model.head.weight[...].astype(config.dtype), NamedSharding(mesh, P("tensor")))
    operands = (put_on_mesh(mesh, hidden), weight, put_on_mesh(mesh, tokens[:, 1:]))
    compiled = _compile_both(operands, config.vocab_size, mesh)
    reference = _compute_float64(*operands, config.vocab_size)
    seconds = _interleaved_medians(compiled, operands)
    fused, materialised = (
        ProgramCost(program.memory_analysis().temp_size_in_bytes, median, *_errors(program(*operands), reference))
        for program, median in zip(compiled, seconds, strict=True)
    )
    return Comparison(
        num_tokens=inputs.size,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        dtype=jnp.dtype(config.dtype).name,
        fused=fused,
        materialised=materialised,
        real_size=_time_real_size(mesh) if _fits_real_size(mesh) else None,
    )


def _fits_real_size(mesh: Mesh) -> bool:
    first = mesh.devices.flat[0]
    return first.platform == "gpu" and (first.memory_stats() or {}).get("bytes_limit", 0) >= _REAL_SIZE_BYTES


def _time_real_size(mesh: Mesh, shape: tuple[int, int, int] = _REAL_SIZE) -> RealSize:
    """Times both programs on random operands in bfloat16."""
    num_tokens, hidden_size, vocab_size = shape
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (num_tokens, hidden_size), jnp.bfloat16)
    weight = jax.random.normal(keys[1], (vocab_size, hidden_size), jnp.bfloat16) / hidden_size**0.5
    labels = jax.random.randint(keys[2], (num_tokens,), 0, vocab_size)
    split = jax.device_put(weight, NamedSharding(mesh, P("tensor")))
    operands = (put_on_mesh(mesh, hidden), split, put_on_mesh(mesh, labels))
    return RealSize(shape, *_interleaved_medians(_compile_both(operands, vocab_size, mesh), operands))


def _compile_both(operands: tuple[Array, Array, Array], vocab_size: int, mesh: Mesh) -> tuple[Any, Any]:
    """Compiles loss and gradients, fused and with stored logits."""

    def fused(hidden: Array, weight: Array, labels: Array) -> tuple[Array, Array | None]:
        axes: Any = {"mesh": mesh, "vocab_axis": "tensor", "batch_axes": "data"}
        out = sharded_linear_logprobs(hidden, weight, labels, vocab_size=vocab_size, **axes)
        return out.logprobs, out.entropy

    def materialised(hidden: Array, weight: Array, labels: Array) -> tuple[Array, Array]:
        logits = jnp.matmul(hidden, weight.T).astype(jnp.float32)
        logits = jnp.where(jnp.arange(logits.shape[-1]) < vocab_size, logits, -1e30)
        logprobs, entropy, _ = stored.logit_statistics(logits, labels)
        return logprobs, entropy

    return _compile(fused, operands), _compile(materialised, operands)


def _compile(function: Callable[..., tuple[Array, Any]], operands: tuple) -> Any:
    def loss(hidden: Array, weight: Array, labels: Array) -> tuple[Float[Array, ""], Array]:
        logprobs, entropy = function(hidden, weight, labels)
        return -jnp.mean(logprobs + _ENTROPY_WEIGHT * entropy), logprobs

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)).lower(*operands).compile()


def _compute_float64(hidden: Array, weight: Array, labels: Array, vocab_size: int) -> tuple[tuple, tuple]:
    """Computes the results of the compiled programs in NumPy and float64, with the gradient of eq. 4."""
    rows, columns = np.asarray(hidden, np.float64), np.asarray(weight, np.float64)[:vocab_size]
    flat, ids = rows.reshape(-1, rows.shape[-1]), np.asarray(labels).reshape(-1)
    logprobs, entropies, dflat, dcolumns = [], [], [], np.zeros(np.shape(weight))
    for start in range(0, len(flat), _BLOCK):
        block, block_ids = flat[start : start + _BLOCK], ids[start : start + _BLOCK]
        logits = block @ columns.T
        top = logits.max(axis=1, keepdims=True)
        logp = logits - top - np.log(np.exp(logits - top).sum(axis=1, keepdims=True))
        p = np.exp(logp)
        entropy = -(p * logp).sum(axis=1)
        dlogits = p * (1 + _ENTROPY_WEIGHT * (logp + entropy[:, None]))
        dlogits[np.arange(len(block)), block_ids] -= 1
        dlogits /= len(flat)
        logprobs.append(logp[np.arange(len(block)), block_ids])
        entropies.append(entropy)
        dflat.append(dlogits @ columns)
        dcolumns[:vocab_size] += dlogits.T @ block
    logprob = np.concatenate(logprobs)
    loss = -np.mean(logprob + _ENTROPY_WEIGHT * np.concatenate(entropies))
    return (loss, logprob.reshape(np.shape(labels))), (np.concatenate(dflat).reshape(rows.shape), dcolumns)


def _errors(results: tuple[tuple, tuple], reference: tuple[tuple, tuple]) -> tuple[float, float, float]:
    """Returns the largest errors of loss, log-probabilities and gradients, the last relative to the largest entry."""
    (loss, logprobs), gradients = results
    (exact_loss, exact_logprobs), exact_gradients = reference
    relative = (
        _largest_difference(*pair) / float(np.max(np.abs(pair[1])))
        for pair in zip(gradients, exact_gradients, strict=True)
    )
    return _largest_difference(loss, exact_loss), _largest_difference(logprobs, exact_logprobs), max(relative)


def _interleaved_medians(programs: tuple[Any, ...], operands: tuple) -> list[float]:
    """Returns the median seconds of each program. They run in turns, so other load on the machine affects both."""
    seconds: list[list[float]] = [[] for _ in programs]
    for _ in range(_ROUNDS):
        for program, samples in zip(programs, seconds, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(program(*operands))
            samples.append(time.perf_counter() - start)
    return [statistics.median(samples) for samples in seconds]


def _largest_difference(left: Array, right: Array | np.ndarray) -> float:
    return float(np.max(np.abs(np.asarray(left, np.float64) - np.asarray(right, np.float64))))
