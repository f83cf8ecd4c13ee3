"""Phase 1 once more from the same seed, its gradients without the tiles whose every probability is small."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
from flax import nnx

from examples.demo import sft
from examples.demo.model import Transformer, put_on_mesh

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jax.sharding import Mesh

    from examples.demo.text import Corpus
    from lce_jax import Plan
    from lce_jax._shapes import Array, Float, Int

THRESHOLD = 2.0**-12


@dataclasses.dataclass(frozen=True)
class SecondRun:
    """The losses of the same steps, exact and with the threshold, and what the threshold leaves out."""

    exact: list[float]  # nats per token
    losses: list[float]
    dropped_mass: float  # the probability in the tiles left out, mean over tokens of held-out files

    @property
    def difference(self) -> float:
        """The largest difference of a step's loss, nats per token."""
        return float(np.max(np.abs(np.subtract(self.exact, self.losses))))

    @property
    def last(self) -> tuple[float, float]:
        """Mean loss of the last tenth of the steps, exact and with the threshold."""
        count = -(-len(self.losses) // 10)
        return float(np.mean(self.exact[-count:])), float(np.mean(self.losses[-count:]))


def leaves_out(plan: Plan) -> bool:
    """Whether the implementation has tiles that a threshold can leave out; the others' gradients are exact anyway."""
    return plan.implementation == "mosaic_gpu"


def train(model: Transformer, corpus: Corpus, config: sft.SftConfig, mesh: Mesh, seed: int) -> Iterator[float]:
    """`sft.train` with the threshold: the same batches and learning rates."""
    return sft.train(model, corpus, dataclasses.replace(config, gradient_threshold=THRESHOLD), mesh, seed)


def second_run(
    model: Transformer,
    exact: list[float],
    losses: list[float],
    tokens: Int[np.ndarray, "B S"],
    mesh: Mesh,
    implementation: str,
) -> SecondRun:
    """What the tables show of a ``model`` trained with the threshold, its ``losses`` beside the exact ones."""
    return SecondRun(exact, losses, float(_dropped_mass(model, put_on_mesh(mesh, tokens), implementation)))


@nnx.jit(static_argnums=2)
def _dropped_mass(model: Transformer, tokens: Int[Array, "B S"], implementation: str) -> Float[Array, ""]:
    out = model.head.logprobs(
        model(tokens[:, :-1]), tokens[:, 1:], stats=True, gradient_threshold=THRESHOLD, implementation=implementation
    )
    assert out.dropped_mass is not None  # for the type checker: it was asked for
    return jnp.mean(out.dropped_mass)
