"""Phase 1: next-token training with the cross entropy of ``model.head.loss``."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import optax
from flax import nnx

from examples.demo.model import Transformer, put_on_mesh, round_up
from examples.demo.text import sample_windows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jax.sharding import Mesh

    from examples.demo.text import Corpus
    from lce_jax._shapes import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class SftConfig:
    """Batch, schedule and regularisation of phase 1."""

    steps: int
    batch: int = 8
    length: int = 128
    learning_rate: float = 4e-3
    weight_decay: float = 0.1
    z_loss: float = 1e-4  # keeps lse near 0
    gradient_threshold: float = 0.0  # of the head's gradients; 0 is exact
    implementation: str | None = None

    def on(self, mesh: Mesh) -> SftConfig:
        """A copy whose batch divides by the mesh's data axis."""
        return dataclasses.replace(self, batch=round_up(self.batch, mesh.shape["data"]))


def train(model: Transformer, corpus: Corpus, config: SftConfig, mesh: Mesh, seed: int) -> Iterator[float]:
    """Trains ``model`` in place, one step per item; each item is the step's loss."""
    warmup = max(1, config.steps // 10)
    schedule = optax.warmup_cosine_decay_schedule(0.0, config.learning_rate, warmup, config.steps + 1)
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=config.weight_decay)
    optimizer = nnx.Optimizer(model, optax.chain(optax.clip_by_global_norm(1.0), adamw), wrt=nnx.Param)

    @nnx.jit
    def step(model: Transformer, optimizer: nnx.Optimizer, tokens: Int[Array, "B S"]) -> Float[Array, ""]:
        def loss_function(model: Transformer) -> Float[Array, ""]:
            return model.head.loss(
                model(tokens[:, :-1]), tokens[:, 1:], z_loss=config.z_loss,
                gradient_threshold=config.gradient_threshold, implementation=config.implementation,
            )  # fmt: skip

        loss, gradients = nnx.value_and_grad(loss_function)(model)
        optimizer.update(model, gradients)
        return loss

    rng = np.random.default_rng((seed, 1))
    for _ in range(config.steps):
        windows = sample_windows(corpus.train, rng, config.batch, config.length + 1)
        yield float(step(model, optimizer, put_on_mesh(mesh, windows)))
