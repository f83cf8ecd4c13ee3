"""Compares a model under DDP, FSDP and FSDP2 with deferred logits and without, on every rank; prints JSON.

``torchrun --nproc-per-node 2 -m examples.frameworks.deferred_ranks_worker``, in an environment with transformers.
"""

from __future__ import annotations

import os

os.environ.update(JAX_PLATFORMS="cpu", HF_HUB_OFFLINE="1")

import copy
import json
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from examples.frameworks.deferred_models import make_inputs, make_model
from examples.frameworks.deferred_sweep import Step, describe, measure_errors, shorten
from lce_torch_bridge import defer_logits

STEPS = 3
Wrap = Callable[[Any], Any]


def wrap_ddp(**options: Any) -> Wrap:
    return lambda model: DistributedDataParallel(model, **options)


def wrap_fsdp(*modules: type[nn.Module]) -> Wrap:
    """Returns a wrapper by FSDP. Each layer, and each module of these types, is a unit."""
    return lambda model: FullyShardedDataParallel(
        model, device_id=torch.device("cpu"), use_orig_params=True,
        auto_wrap_policy=ModuleWrapPolicy({type(model.model.layers[0]), *modules}),
    )  # fmt: skip


def wrap_fsdp2(head: bool, reshard: bool | None = None) -> Wrap:
    """Returns a wrapper by FSDP2. ``head``: the head is a group. Without ``reshard`` only the root stays gathered."""

    def wrap(model: Any) -> Any:
        mesh = distributed.init_device_mesh("cpu", (distributed.get_world_size(),))
        for module in [*model.model.layers, *[model.lm_head] * head]:
            fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
        return fully_shard(model, mesh=mesh, reshard_after_forward=reshard)

    return wrap


CASES: dict[str, tuple[Wrap, dict[str, Any]]] = {  # how the model is wrapped, and whether its head is tied or frozen
    "DDP": (wrap_ddp(), {}),
    "DDP, find_unused_parameters": (wrap_ddp(find_unused_parameters=True), {}),
    "DDP, find_unused_parameters, unused": (wrap_ddp(find_unused_parameters=True), {"unused": True}),
    "DDP, static_graph": (wrap_ddp(static_graph=True), {}),
    "DDP, gradient_as_bucket_view, tied": (wrap_ddp(gradient_as_bucket_view=True), {"tied": True}),
    "FSDP": (wrap_fsdp(), {}),
    "FSDP, head of its own": (wrap_fsdp(nn.Linear), {}),
    "FSDP2": (wrap_fsdp2(False), {}),
    "FSDP2, root freed": (wrap_fsdp2(False, reshard=True), {}),
    "FSDP2, tied": (wrap_fsdp2(False), {"tied": True}),
    "FSDP2, frozen head": (wrap_fsdp2(False), {"frozen": True}),
    "FSDP2, head of its own": (wrap_fsdp2(True), {}),
    "FSDP2, head of its own, frozen": (wrap_fsdp2(True), {"frozen": True}),
    "FSDP2, head of its own, kept": (wrap_fsdp2(True, reshard=False), {}),
}


def make_local(tied: bool = False, frozen: bool = False, unused: bool = False) -> Any:
    model = make_model("LlamaForCausalLM", tied)
    model.lm_head.requires_grad_(not frozen)
    if unused:
        model.spare = nn.Linear(4, 4)
    return model


def take_step(model: Any, inputs: dict[str, Any]) -> Step:
    """Takes a step. Returns the loss, and this rank's part of each gradient."""
    model.zero_grad(set_to_none=True)
    loss = model(**inputs).loss
    loss.backward()
    gradients = {name: x.grad for name, x in model.named_parameters()}
    parts = {name: x.to_local() if isinstance(x, DTensor) else x for name, x in gradients.items()}
    parts = {name: x if x is None or x.numel() else None for name, x in parts.items()}
    return Step(loss.detach(), 0.0, {name: None if x is None else x.clone() for name, x in parts.items()})


@torch.no_grad()
def descend(model: Any, step: int) -> None:
    for name, x in model.named_parameters():
        if x.grad is not None:
            x -= 0.05 * x.grad
        if step == 0 and "lm_head" in name:
            x *= 8.0


def run_case(wrap: Wrap, options: dict[str, Any], defer_first: bool) -> dict[str, Any]:
    """Compares three steps. ``defer_first``: logits are deferred before the model is wrapped, otherwise after."""
    local = make_local(**options)
    other = copy.deepcopy(local)
    inputs = make_inputs(local)
    rank = distributed.get_rank()
    inputs = {name: x.roll(rank, 1) if name == "input_ids" else x for name, x in inputs.items()}
    stock = wrap(local)
    try:
        for step in range(STEPS):
            take_step(stock, inputs)
            descend(stock, step)
    except Exception as error:
        return {"stock": describe(error)}
    try:
        handle = defer_logits(other) if defer_first else None
        deferred = wrap(other)
        handle = handle or defer_logits(other)
    except Exception as error:
        return {"refused": describe(error)}
    stock, worst = wrap(make_local(**options)), {"": 0.0}
    for step in range(STEPS):
        want = take_step(stock, inputs)
        try:
            got = take_step(deferred, inputs)
        except Exception as error:
            return {"raises": describe(error), "step": step}
        worst = max(worst, measure_errors(got, want), key=lambda x: max(x.values()))
        descend(stock, step)
        descend(deferred, step)
    name = max(worst, key=worst.__getitem__)
    return {"error": worst[name], "of": name, "served": handle.served, "stored": handle.stored,
            "reasons": [*map(shorten, handle.places)]}  # fmt: skip


def main() -> None:
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    names = os.environ.get("CASES", "").split(";") if os.environ.get("CASES") else CASES
    for name in names:
        for defer_first in (True, False):
            by_rank: list[Any] = [None] * distributed.get_world_size()
            distributed.all_gather_object(by_rank, run_case(*CASES[name], defer_first))
            worst = max(by_rank, key=lambda x: x.get("error", float("inf")))
            if distributed.get_rank() == 0:
                title = f"{name}, {'before' if defer_first else 'after'}"
                print(json.dumps({"part": "ranks", "name": title} | worst), flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
