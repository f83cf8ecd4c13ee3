r"""A replacement of verl's ``linear_cross_entropy``, with the same positional signature. `install` puts it into verl.

Instead of calling `install`, you can name this module in VERL_USE_EXTERNAL_MODULES. verl then imports it on the driver
and in Ray's workers, and the module installs itself::

    export VERL_USE_EXTERNAL_MODULES=lce_torch_bridge.verl
    python -m verl.trainer.main_ppo \
        actor_rollout_ref.model.use_fused_kernels=True \
        actor_rollout_ref.model.fused_kernel_options.impl_backend=triton ...
"""

from __future__ import annotations

import functools
import os
import sys
from typing import TYPE_CHECKING, Any

import torch

from lce_jax.types import scalars
from lce_torch_bridge import _framework
from lce_torch_bridge._types import Reduction
from lce_torch_bridge.call import _checks
from lce_torch_bridge.ops._logprobs import linear_logprobs

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["install", "linear_cross_entropy"]

FUNCTION = "verl.utils.kernel.linear_cross_entropy"
CALLERS_AT_IMPORT = ("verl.models.mcore.model_forward_fused", "verl.models.mcore.model_forward_1f1b_overlap")
_installed = _framework.Installed("verl", "0.9", "log-probabilities of the head come")


def install() -> _framework.Installed:
    """Puts `linear_cross_entropy` into verl, in this process and each worker process that Ray starts afterwards.

    Call `install` before ``ray.init``, with verl's switches ``use_fused_kernels=True`` and ``impl_backend=triton``.

    Returns:
        The handle, which counts the calls in this process and has ``undo()``. A second call returns the same handle.

    Raises:
        NotImplementedError: verl's function has another name; or, later, a module such as an adapter (LoRA) wraps a
            head, or a head has a bias.
        RuntimeError: Ray is running already.

    Example:
        >>> import lce_torch_bridge.verl
        >>> lce_torch_bridge.verl.install()  # doctest: +SKIP
    """
    return _framework.install_in_ray_workers(_installed, install_in_worker)


def install_in_worker() -> _framework.Installed:
    """Installs in this process only, as VERL_USE_EXTERNAL_MODULES=lce_torch_bridge.verl does.

    Five modules of verl import the function whenever they call it. Two others, for Megatron, import it only once and
    may have done so already.
    """
    kernel = _installed.import_module(FUNCTION)
    modules = [kernel, *(sys.modules[name] for name in CALLERS_AT_IMPORT if name in sys.modules)]
    return _installed.replace_attributes(
        *((module, "linear_cross_entropy", _counting_cross_entropy) for module in modules),
        hooks=(_refuse_bias, functools.partial(_framework.refuse_wrapped_head, ("lm_head", "output_layer"))),
    )


def _counting_cross_entropy(*args: Any, **kwargs: Any) -> Any:
    """Replaces verl's function: counts the call, and computes `linear_cross_entropy`."""
    _installed.count_call()
    return linear_cross_entropy(*args, **kwargs)


def _refuse_bias(_model: torch.nn.Module, name: str, module: torch.nn.Module | None) -> None:
    """Refuses a head with a bias, because verl passes only the weight. torch calls this hook for each new child."""
    if name == "lm_head" and isinstance(module, torch.nn.Linear) and module.bias is not None:
        raise NotImplementedError(
            "lm_head has a bias, which verl drops here: set use_fused_kernels=False, without lce_torch_bridge.verl"
        )


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    temperature: float | None = 1.0,
    reduction: Reduction | None = "none",
    dist_process_group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ``(logprobs, entropy)``, with the positional signature of verl's ``linear_cross_entropy``.

    As in verl, the first result is a log-probability, ``z[label] - lse ≤ 0``: the loss is its negative.

    Args:
        hidden: ``[..., H]`` hidden states with any leading shape, including an empty one. bfloat16, float16 or float32,
            on a GPU or the CPU.
        weight: ``[V, H]``, this rank's rows of the head. A weight that is not contiguous is copied in each call. Matrix
            products run in the weight's dtype. Under ``torch.autocast`` the weight is first cast to autocast's dtype,
            and all calls within the context share this copy, as with ``torch.nn.functional.linear``.
        labels: vocabulary ids of hidden's leading shape, or flat. Dimensions of size 1 may be elsewhere (``[1, T]`` for
            ``[T, 1, H]``), but ``[b, s]`` for ``[s, b, H]`` is refused. A label outside the vocabulary has logprob 0
            (in verl's kernel it is ``-lse`` with a process group, and undefined without one).
        temperature: a positive number that divides the float32 logits. None: 1.
        reduction: how log-probabilities are reduced, in upper or lower case: "none" for one per token, "sum", or "mean"
            over all tokens, including those with a label out of vocabulary. The entropy is never reduced. None: "none".
        dist_process_group: the group over which the vocabulary is split. Each rank gets its own term of dhidden, and
            the caller sums the terms, as with verl's kernel.

    Returns:
        Log-probabilities, ``[tokens]`` or a scalar, and entropies ``[tokens]``; both float32 and differentiable.

    Raises:
        lce_jax.UnsupportedError: the chosen implementation does not support the call; the message says why.
        ValueError, TypeError: shapes, dtypes, devices or options do not fit; the message has their values.
        NotImplementedError, RuntimeError: in the cases that `linear_logprobs` lists.

    Memory:
        The call takes the memory of `linear_logprobs`.

    Example:
        >>> import torch
        >>> from lce_torch_bridge.verl import linear_cross_entropy
        >>> logprobs, entropy = linear_cross_entropy(torch.ones(2, 3, 8), torch.zeros(100, 8), torch.ones(2, 3).long())
        >>> logprobs.shape, round(logprobs[0].item(), 3), round(entropy[0].item(), 3)
        (torch.Size([6]), -4.605, 4.605)
    """
    reduction = "none" if reduction is None else reduction
    reduction = reduction.lower() if isinstance(reduction, str) else reduction  # type: ignore[assignment]
    scalars.check_choice("reduction", reduction, ("none", "sum", "mean"))
    temperature = 1.0 if temperature is None else temperature
    out = linear_logprobs(
        _reshape_like(labels, hidden), weight, labels, tp_group=dist_process_group, temperature=temperature
    )
    logprobs = out.logprobs.reshape(-1)
    if reduction == "sum":
        logprobs = logprobs.sum()
    elif reduction == "mean":
        logprobs = logprobs.mean()
    return logprobs, out.entropy.reshape(-1)


def _reshape_like(labels: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Returns ``hidden`` with the leading shape of labels, if both must have their tokens in the same order."""
    _checks.hidden(hidden)
    _checks.integers("labels", labels)
    if hidden.shape[:-1] == labels.shape:
        return hidden
    hidden_sizes, label_sizes = ([size for size in shape if size != 1] for shape in (hidden.shape[:-1], labels.shape))
    flat = min(len(hidden_sizes), len(label_sizes)) < 2 and hidden.shape[:-1].numel() == labels.numel()
    if hidden_sizes == label_sizes or flat:
        return hidden.reshape(*labels.shape, hidden.shape[-1])
    if hidden_sizes == label_sizes[::-1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} and labels {tuple(labels.shape)} hold their tokens in another order: pass "
            "hidden.transpose(0, 1)"
        )
    return hidden


if __name__ in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(","):
    install_in_worker()
