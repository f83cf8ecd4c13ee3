"""`lce_jax` for PyTorch and Megatron: log-probability and entropy of a language-model head, logits never stored."""

from lce_torch_bridge import rows
from lce_torch_bridge._types import LogprobOutput, TopK
from lce_torch_bridge._way import launch_with
from lce_torch_bridge.ops._cross_entropy import linear_cross_entropy, linear_cross_entropy_loss, linear_entropy
from lce_torch_bridge.ops._explain import Explanation, explain
from lce_torch_bridge.ops._logits import linear_logits, masked_logprobs
from lce_torch_bridge.ops._logprobs import linear_logprobs
from lce_torch_bridge.ops._loss import linear_loss
from lce_torch_bridge.ops._topk import linear_topk
from lce_torch_bridge.through_jax._release import release
from lce_torch_bridge.through_jax._runtime import init

__all__ = [
    "Explanation",
    "LogprobOutput",
    "TopK",
    "explain",
    "init",
    "launch_with",
    "linear_cross_entropy",
    "linear_cross_entropy_loss",
    "linear_entropy",
    "linear_logits",
    "linear_logprobs",
    "linear_loss",
    "linear_topk",
    "masked_logprobs",
    "release",
    "rows",
]
