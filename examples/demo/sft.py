"""Phase 1: next-token training with the cross entropy of ``model.head.loss``.

It runs a second time from the same seed with stored logits. On a GPU with kernels it runs a third time with a
``gradient_threshold`` of `THRESHOLD`, which leaves out tiles of the gradients whose every probability is below it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from examples.demo.model import Transformer, put_on_mesh, round_up
from examples.demo.text import sample_windows
from lce_jax.flax.nnx import LMHead

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jax.sharding import Mesh

    from examples.demo.text import Corpus
    from lce_jax import Plan
    from lce_jax.types._shapes import Array, Float, Int


THRESHOLD = 2.0**-12
loss_with_threshold = functools.partial(LMHead.loss, gradient_threshold=THRESHOLD)


@dataclasses.dataclass(frozen=True)
class SftConfig:
    """Batch, schedule and regularisation of phase 1."""

    steps: int
    batch: int = 8
    length: int = 128
    learning_rate: float = 4e-3
    weight_decay: float = 0.1
    z_loss: float = 1e-4  # keeps lse near 0

    def fit_to_mesh(self, mesh: Mesh) -> SftConfig:
        """Returns a copy whose batch divides by the mesh's data axis."""
        return dataclasses.replace(self, batch=round_up(self.batch, mesh.shape["data"]))


def train(
    model: Transformer, corpus: Corpus, config: SftConfig, mesh: Mesh, seed: int,
    head_loss: Callable[..., Array] = LMHead.loss,
) -> Iterator[float]:  # fmt: skip
    """Trains ``model`` in place. Each item is the loss of one step."""
    warmup = max(1, config.steps // 10)
    schedule = optax.warmup_cosine_decay_schedule(0.0, config.learning_rate, warmup, config.steps + 1)
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=config.weight_decay)
    optimizer = nnx.Optimizer(model, optax.chain(optax.clip_by_global_norm(1.0), adamw), wrt=nnx.Param)

    @nnx.jit
    def step(model: Transformer, optimizer: nnx.Optimizer, tokens: Int[Array, "B S"]) -> Float[Array, ""]:
        def loss_function(model: Transformer) -> Float[Array, ""]:
            return head_loss(model.head, model(tokens[:, :-1]), tokens[:, 1:], z_loss=config.z_loss)

        loss, gradients = nnx.value_and_grad(loss_function)(model)
        optimizer.update(model, gradients)
        return loss

    rng = np.random.default_rng((seed, 1))
    for _ in range(config.steps):
        windows = sample_windows(corpus.train, rng, config.batch, config.length + 1)
        yield float(step(model, optimizer, put_on_mesh(mesh, windows)))


@dataclasses.dataclass(frozen=True)
class SecondRun:
    """The losses of the same steps with `LMHead.loss` and with another loss of the head."""

    fused: list[float]  # nats per token
    losses: list[float]
    dropped_mass: float = 0.0  # probability in the tiles that a threshold leaves out, mean over held-out tokens

    @property
    def difference(self) -> float:
        """The largest difference of a step's loss, nats per token."""
        return float(np.max(np.abs(np.subtract(self.fused, self.losses))))

    @property
    def last(self) -> tuple[float, float]:
        """The mean loss of both runs over the last tenth of the steps."""
        count = -(-len(self.losses) // 10)
        return float(np.mean(self.fused[-count:])), float(np.mean(self.losses[-count:]))


def supports_threshold(plan: Plan) -> bool:
    """Whether the implementation can leave out tiles by a threshold. The gradients of all others are exact."""
    return plan.implementation == "mosaic_gpu"


@nnx.jit
def dropped_mass(model: Transformer, tokens: Int[Array, "B S"]) -> Float[Array, ""]:
    """Returns the probability in the tiles that `THRESHOLD` leaves out of the gradients, mean over the tokens."""
    out = model.head.logprobs(model(tokens[:, :-1]), tokens[:, 1:], stats=True, gradient_threshold=THRESHOLD)
    assert out.dropped_mass is not None  # for the type checker: the call asks for it
    return jnp.mean(out.dropped_mass)
