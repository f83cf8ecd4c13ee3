"""Log-probability and entropy of a language-model head, straight from hidden states, without storing the logits."""

from lce_jax import floors, losses, rows
from lce_jax.explain import explain  # hides the module of this name, which is only run as a command
from lce_jax.ops._cross_entropy import linear_cross_entropy
from lce_jax.ops._kl import linear_kl
from lce_jax.ops._logits import linear_logits, masked_logprobs
from lce_jax.ops._logprobs import linear_logprobs
from lce_jax.ops._loss import linear_loss
from lce_jax.ops._sharded import (
    sharded_linear_cross_entropy,
    sharded_linear_kl,
    sharded_linear_logits,
    sharded_linear_logprobs,
    sharded_linear_loss,
    sharded_linear_topk,
)
from lce_jax.ops._topk import linear_topk
from lce_jax.types._types import LogprobOutput, Plan, TopK, UnsupportedError

__all__ = [
    "LogprobOutput",
    "Plan",
    "TopK",
    "UnsupportedError",
    "explain",
    "floors",
    "linear_cross_entropy",
    "linear_kl",
    "linear_logits",
    "linear_logprobs",
    "linear_loss",
    "linear_topk",
    "losses",
    "masked_logprobs",
    "rows",
    "sharded_linear_cross_entropy",
    "sharded_linear_kl",
    "sharded_linear_logits",
    "sharded_linear_logprobs",
    "sharded_linear_loss",
    "sharded_linear_topk",
]
__version__ = "0.1.0"


def __dir__() -> list[str]:
    return [*__all__, "__doc__", "__version__"]
