r"""torchtitan without stored logits: torchtitan passes the head to this package's loss, not to its own chunked loss.

On the command line::

    torchrun --nproc-per-node=8 -m torchtitan.train --module llama3 --config llama3_8b \
        --override.imports lce_torch_bridge.torchtitan.without_logits --training.disable_cuda_graphs
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from lce_torch_bridge import _framework
from lce_torch_bridge.ops._cross_entropy import linear_cross_entropy

__all__ = ["install"]

_installed = _framework.Installed("torchtitan", "0.3", "the loss comes")


def install() -> _framework.Installed:
    """Makes torchtitan's `ChunkedLossWrapper` compute this package's cross entropy.

    Returns:
        The handle, which counts the calls in this process and has ``undo()``. A second call returns the same handle.

    Raises:
        NotImplementedError: torchtitan's loss has another name; or, later, a trainer is built whose chunked loss is not
            the cross entropy, or whose head is more than a linear layer, such as one with an adapter (LoRA).

    Example:
        >>> import lce_torch_bridge.torchtitan
        >>> lce_torch_bridge.torchtitan.install()  # doctest: +SKIP
        >>> torchtitan.train.main()  # doctest: +SKIP
    """
    wrapper = _installed.import_module("torchtitan.components.loss").ChunkedLossWrapper
    _register_override()
    return _installed.replace_attributes((wrapper, "set_lm_head", _set_lm_head), (wrapper, "__call__", _call))


def without_logits(config: Any) -> Any:
    """Calls `install`, and wraps a plain cross entropy so that it gets the head. Use it in ``--override.imports``."""
    from torchtitan.components.loss import ChunkedLossWrapper

    install()
    is_chunked = type(config) is ChunkedLossWrapper.Config
    _refuse_other_loss((config.loss_fn if is_chunked else config).__class__)
    return config if is_chunked else ChunkedLossWrapper.Config(loss_fn=config)


def _refuse_other_loss(config: type) -> None:
    from torchtitan.components.loss import CrossEntropyLoss

    if config is not CrossEntropyLoss.Config:
        raise NotImplementedError(f"loss is {config.__qualname__}: this replaces CrossEntropyLoss alone")


def _set_lm_head(self: Any, lm_head: torch.nn.Linear) -> None:
    """Replaces `ChunkedLossWrapper.set_lm_head`."""
    _refuse_other_loss(type(self.loss_fn).Config)
    if type(lm_head).forward is not torch.nn.Linear.forward:
        raise NotImplementedError(
            f"lm_head is {type(lm_head)}, but only its weight and bias are used: leave it out of LoRA "
            "(target_modules=) and of a quantization (filter_fqns=)"
        )
    lm_head.forward = functools.partial(_compute_loss, lm_head)  # type: ignore[method-assign]
    self.lm_head = lm_head


def _call(self: Any, pred: Any, labels: Any, global_valid_tokens: Any = None, **loss_inputs: Any) -> Any:
    """Replaces `ChunkedLossWrapper.__call__`. Returns the loss, and no metrics."""
    del loss_inputs
    loss = self.lm_head(pred, labels)
    return (loss if global_valid_tokens is None else loss / global_valid_tokens), {}


def _compute_loss(lm_head: torch.nn.Linear, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns the sum of this rank's losses. It replaces the head's forward, so FSDP2 has gathered the weight."""
    from torchtitan.distributed.spmd_types import current_spmd_mesh, spmd_mesh_size

    _installed.count_call()
    if isinstance(hidden, DTensor) or isinstance(lm_head.weight, DTensor):
        raise NotImplementedError("the head's tensors are DTensors: set --parallelism.spmd_backend spmd_types")
    mesh = current_spmd_mesh()
    tp_options = {"tp_group": mesh.get_group("tp")} if mesh is not None and spmd_mesh_size("tp") > 1 else {}
    return linear_cross_entropy(
        hidden, lm_head.weight, labels, bias=lm_head.bias, reduction="sum",
        reduce_grad_hidden=False, **tp_options,  # the norm layer before the head sums dhidden over the ranks
    )  # fmt: skip


@functools.cache
def _register_override() -> Any:
    """Registers `without_logits` as torchtitan's override, which torchtitan finds by this module's name."""
    from torchtitan.components.loss import BaseLoss
    from torchtitan.config.override import override

    description = "cross entropy of lce_torch_bridge, without logits"
    return override(target=BaseLoss.Config, fqns=["loss"], description=description)(without_logits)


if "torchtitan.config.override" in sys.modules:  # torchtitan imports this module to find the override
    _register_override()
