r"""torchtitan without logits: its override `without_logits` puts this package's loss in place of torchtitan's.

From the command line::

    torchrun --nproc-per-node=8 -m torchtitan.train --module llama3 --config llama3_8b \
        --override.imports lce_torch_bridge.torchtitan.without_logits --training.disable_cuda_graphs
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from lce_torch_bridge import _framework
from lce_torch_bridge.ops._cross_entropy import linear_cross_entropy

__all__ = ["install"]

OVERRIDE = f"{__name__}.without_logits"
_installed = _framework.Installed("torchtitan", "0.3", "the loss comes")


def install() -> _framework.Installed:
    """Every trainer that torchtitan builds then has the override, as ``--override.imports`` says it for one run.

    Returns:
        What counts the calls in this process, and undoes it; a second call returns the same.

    Raises:
        NotImplementedError: torchtitan's trainer has another name. And then, when a trainer is built: its loss is not
            the cross entropy, or its head is more than a linear layer, as with an adapter (LoRA).

    Example:
        >>> import lce_torch_bridge.torchtitan
        >>> lce_torch_bridge.torchtitan.install()  # doctest: +SKIP
        >>> torchtitan.train.main()  # doctest: +SKIP
    """
    Trainer = _installed.module("torchtitan.trainer").Trainer
    _override()
    return _installed.put((Trainer, "__init__", _framework.around(Trainer.__init__, _init)))


@functools.cache
def _init(stock: Any) -> Any:
    @functools.wraps(stock)
    def init(self: Any, config: Any, *arguments: Any, **named: Any) -> None:
        if OVERRIDE not in config.override.imports:
            config.override.imports = [*config.override.imports, OVERRIDE]
        stock(self, config, *arguments, **named)

    return init


@functools.cache
def _override() -> Any:
    """Registers the override, for which torchtitan looks under this module's name."""
    from torchtitan.components.loss import BaseLoss
    from torchtitan.config.override import override

    description = "cross entropy of lce_torch_bridge, without logits"
    return override(target=BaseLoss.Config, fqns=["loss"], description=description)(without_logits)


def without_logits(config: Any) -> Any:
    """In place of torchtitan's cross entropy, in chunks or of all logits: what ``--override.imports`` names."""
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss

    _installed.check_version()
    stock = config.loss_fn if type(config) is ChunkedLossWrapper.Config else config
    if type(stock) is not CrossEntropyLoss.Config:
        raise NotImplementedError(f"loss is {type(stock).__qualname__}: this replaces CrossEntropyLoss alone")
    return _head_loss().Config(loss_fn=stock)


def _loss_of(lm_head: torch.nn.Linear, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The sum of this rank's losses. Called as the head's forward, within which FSDP2 has gathered the weight."""
    from torchtitan.distributed.spmd_types import current_spmd_mesh, spmd_mesh_size

    _installed.count()
    if isinstance(hidden, DTensor) or isinstance(lm_head.weight, DTensor):
        raise NotImplementedError("the head's tensors are DTensors: set --parallelism.spmd_backend spmd_types")
    mesh = current_spmd_mesh()
    split = {"tp_group": mesh.get_group("tp")} if mesh is not None and spmd_mesh_size("tp") > 1 else {}
    return linear_cross_entropy(
        hidden, lm_head.weight, labels, bias=lm_head.bias, reduction="sum",
        reduce_grad_hidden=False, **split,  # the norm before the head sums the gradients of the ranks
    )  # fmt: skip


@functools.cache
def _head_loss() -> Any:
    """The class of the loss, a torchtitan's."""
    from torchtitan.components.loss import ChunkedLossWrapper

    class HeadLoss(ChunkedLossWrapper):  # type: ignore[misc] # not installed here
        """The trainer leaves the head out of the model's forward, and hands it to this loss."""

        @dataclass(kw_only=True, slots=True)
        class Config(ChunkedLossWrapper.Config):  # type: ignore[misc]
            pass

        def set_lm_head(self, lm_head: torch.nn.Linear) -> None:
            if type(lm_head).forward is not torch.nn.Linear.forward:
                raise NotImplementedError(
                    f"lm_head is {type(lm_head)}, and its weight and bias alone are read: leave it out of LoRA "
                    "(target_modules=) and of a quantization (filter_fqns=)"
                )
            lm_head.forward = functools.partial(_loss_of, lm_head)  # type: ignore[method-assign]
            self.lm_head = lm_head

        def __call__(
            self, pred: torch.Tensor, labels: torch.Tensor, global_valid_tokens: torch.Tensor | None = None, **_: Any
        ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            assert self.lm_head is not None, "the trainer has not set the head"
            loss = self.lm_head(pred, labels)
            return (loss if global_valid_tokens is None else loss / global_valid_tokens), {}

    return HeadLoss


if "torchtitan.config.override" in sys.modules:  # torchtitan imports this module to find the override
    _override()
