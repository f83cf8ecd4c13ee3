"""torchtitan (0.3.0) without logits: an override that puts this package's loss in place of torchtitan's.

With this file on the path of every rank:

    export PYTHONPATH=$PWD/examples
    torchrun --nproc-per-node=8 -m torchtitan.train --module llama3 --config llama3_8b \
        --override.imports torchtitan_head.without_logits --training.disable_cuda_graphs
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.config.override import override
from torchtitan.distributed.spmd_types import current_spmd_mesh, spmd_mesh_size

from lce_torch_bridge import linear_cross_entropy

calls = 0  # in this process


def loss_of(lm_head: torch.nn.Module, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The sum of this rank's losses. Called as the head's forward, within which FSDP2 has gathered the weight."""
    global calls
    if calls == 0:
        print("torchtitan_head: the loss comes from lce_torch_bridge", flush=True)
    calls += 1
    if isinstance(hidden, DTensor) or isinstance(lm_head.weight, DTensor):
        raise NotImplementedError("the head's tensors are DTensors: set --parallelism.spmd_backend spmd_types")
    mesh = current_spmd_mesh()
    split = {"tp_group": mesh.get_group("tp")} if mesh is not None and spmd_mesh_size("tp") > 1 else {}
    return linear_cross_entropy(
        hidden, lm_head.weight, labels, bias=lm_head.bias, reduction="sum",
        reduce_grad_hidden=False, **split,  # the norm before the head sums the gradients of the ranks
    )  # fmt: skip


class HeadLoss(ChunkedLossWrapper):
    """The trainer leaves the head out of the model's forward, and hands it to this loss."""

    @dataclass(kw_only=True, slots=True)
    class Config(ChunkedLossWrapper.Config):
        pass

    def set_lm_head(self, lm_head: torch.nn.Module) -> None:
        if type(lm_head).forward is not torch.nn.Linear.forward:
            raise NotImplementedError(
                f"lm_head is {type(lm_head)}, and its weight and bias alone are read: leave it out of LoRA "
                "(target_modules=) and of a quantization (filter_fqns=)"
            )
        lm_head.forward = functools.partial(loss_of, lm_head)
        self.lm_head = lm_head

    def __call__(
        self, pred: torch.Tensor, labels: torch.Tensor, global_valid_tokens: torch.Tensor | None = None, **_: Any
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        assert self.lm_head is not None, "the trainer has not set the head"
        loss = self.lm_head(pred, labels)
        return (loss if global_valid_tokens is None else loss / global_valid_tokens), {}


@override(target=BaseLoss.Config, fqns=["loss"], description="cross entropy of lce_torch_bridge, without logits")
def without_logits(config: BaseLoss.Config) -> HeadLoss.Config:
    """In place of torchtitan's cross entropy, in chunks or of all logits."""
    stock = config.loss_fn if type(config) is ChunkedLossWrapper.Config else config
    if type(stock) is not CrossEntropyLoss.Config:
        raise NotImplementedError(f"loss is {type(stock).__qualname__}: this recipe replaces CrossEntropyLoss alone")
    return HeadLoss.Config(loss_fn=stock)
