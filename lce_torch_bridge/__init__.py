"""`lce_jax` for PyTorch and Megatron: a language-model head's log-probability and entropy, without stored logits.

JAX and torch's compiler are imported when the first name is used, which takes 3 to 5 seconds.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lce_torch_bridge import losses, rows
    from lce_torch_bridge._framework import Installed
    from lce_torch_bridge._types import LogprobOutput, TopK
    from lce_torch_bridge.deferred._deferral import Deferral
    from lce_torch_bridge.deferred._heads import defer_logits
    from lce_torch_bridge.deferred._tensor import DeferredLogits
    from lce_torch_bridge.launched_directly._launch_with import launch_with
    from lce_torch_bridge.ops._cross_entropy import LinearCrossEntropyLoss, linear_cross_entropy, linear_entropy
    from lce_torch_bridge.ops._explain import Explanation, explain
    from lce_torch_bridge.ops._kl import linear_kl
    from lce_torch_bridge.ops._logits import linear_logits, masked_logprobs
    from lce_torch_bridge.ops._logprobs import linear_logprobs
    from lce_torch_bridge.ops._loss import linear_loss
    from lce_torch_bridge.ops._topk import linear_topk
    from lce_torch_bridge.through_jax._runtime import init, release

if importlib.util.find_spec("torch") is None:
    raise ModuleNotFoundError(
        "lce_torch_bridge needs PyTorch 2.11 or newer: in the checkout, pip install '.[torch]'", name="torch"
    )

__all__ = [
    "Deferral",
    "DeferredLogits",
    "Explanation",
    "Installed",
    "LinearCrossEntropyLoss",
    "LogprobOutput",
    "TopK",
    "defer_logits",
    "explain",
    "init",
    "launch_with",
    "linear_cross_entropy",
    "linear_entropy",
    "linear_kl",
    "linear_logits",
    "linear_logprobs",
    "linear_loss",
    "linear_topk",
    "losses",
    "masked_logprobs",
    "release",
    "rows",
]

_MODULES = {
    "_framework": ("Installed",),
    "_types": ("LogprobOutput", "TopK"),
    "deferred._heads": ("defer_logits",),
    "deferred._deferral": ("Deferral",),
    "deferred._tensor": ("DeferredLogits",),
    "launched_directly._launch_with": ("launch_with",),
    "losses": ("losses",),
    "ops._cross_entropy": ("LinearCrossEntropyLoss", "linear_cross_entropy", "linear_entropy"),
    "ops._explain": ("Explanation", "explain"),
    "ops._kl": ("linear_kl",),
    "ops._logits": ("linear_logits", "masked_logprobs"),
    "ops._logprobs": ("linear_logprobs",),
    "ops._loss": ("linear_loss",),
    "ops._topk": ("linear_topk",),
    "rows": ("rows",),
    "through_jax._runtime": ("init", "release"),
}
_FRAMEWORKS = ("areal", "megatron", "nemo_rl", "skyrl", "torchtitan", "transformers", "trl", "verl")
_module_of = {name: module for module, names in _MODULES.items() for name in names} | {x: x for x in _FRAMEWORKS}


def __getattr__(name: str) -> Any:
    if name not in _module_of:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_module_of[name]}")
    value = module if name == _module_of[name] else getattr(module, name)
    globals()[name] = value  # the next access does not call this function
    return value


def __dir__() -> list[str]:
    # `_FRAMEWORKS` are left out, because tab completion accesses each name, which would import Megatron.
    return [*__all__, "__doc__"]
