"""Deferred logits under DDP and FSDP2, beside stored ones: the loss in the model's forward, and after it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lce_torch_bridge import defer_logits
from tests.torch import problem as p
from tests.torch.ranks import run_in_float64

B, S, H, V = 2, 5, 16, 34
VALUE, GRADIENT = 2e-6, 2e-6

type Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Model(nn.Module):
    """Like a causal language model of Transformers; ``spare`` has no gradient."""

    def __init__(self, frozen: bool = False, spare: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.body, self.lm_head = nn.Embedding(V, H), nn.Linear(H, H), nn.Linear(H, V, bias=False)
        self.lm_head.requires_grad_(not frozen)
        if spare:
            self.spare = nn.Linear(4, 4)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, tokens: torch.Tensor, labels: Any = None, loss: Loss | None = None) -> dict[str, Any]:
        logits = self.lm_head(torch.tanh(self.body(self.embed(tokens))))
        return {"loss": None if loss is None else loss(logits, labels), "logits": logits}


def served(z: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logp = nn.functional.log_softmax(z / 0.7, -1)
    entropy = -(logp.exp() * logp).sum(-1)
    return nn.functional.cross_entropy(z.flatten(0, 1), labels.flatten()) + entropy.mean()


def stored(z: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return served(z, labels) + z.softmax(-1).square().sum(-1).mean()


def take_step(model: nn.Module, loss: Loss, is_inside: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens, labels = torch.randint(0, V, (2, B, S), generator=generator)
    model.zero_grad()
    out = model(tokens, labels=labels, loss=loss) if is_inside else model(tokens)
    value = out["loss"] if is_inside else loss(out["logits"], labels)
    value.backward()
    grads = {name.removeprefix("module."): x.grad for name, x in model.named_parameters()}
    whole = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in grads.items()}
    return value.detach(), {name: None if x is None else x.clone() for name, x in whole.items()}


def compare(name: str, wrap: Callable[[Any], Any], has_sink: bool = False, **options: Any) -> None:
    """Two steps of stored logits and of deferred ones, in and after the forward; the head grows after the first.

    ``has_sink``: a function of DDP takes all outputs, so that a loss of them is one of stored logits.
    """
    for loss in (served, stored):
        for is_inside in (True, False):
            local = Model(**options)
            other = copy.deepcopy(local)
            handle = defer_logits(other if is_inside else other.lm_head)
            models = wrap(local), wrap(other)
            for step in range(2):
                want, got = (take_step(model, loss, is_inside) for model in models)
                where = (name, loss.__name__, is_inside, step)
                assert p.value_error(got[0], want[0]) < VALUE, where
                for of, grad in want[1].items():
                    assert (grad is None) == (got[1][of] is None), (where, of)
                    assert grad is None or p.relative_norm(got[1][of], grad) < GRADIENT, (where, of)
                for model in models:
                    with torch.no_grad():
                        for of, x in model.named_parameters():
                            x.mul_(4.0 if "lm_head" in of else 1.0)
            is_stored = loss is stored or (has_sink and not is_inside)
            assert (handle.stored > 0, is_stored or handle.served > 0) == (is_stored, True), (name, handle)


def ddp() -> None:
    for option in ("gradient_as_bucket_view", "find_unused_parameters", "static_graph"):
        has_sink = option != "gradient_as_bucket_view"
        compare(f"DDP {option}", functools.partial(DistributedDataParallel, **{option: True}), has_sink)
    compare("unused", functools.partial(DistributedDataParallel, find_unused_parameters=True), True, spare=True)
    compare("frozen", DistributedDataParallel, frozen=True)


def fsdp2() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def wrap(head: bool, reshard: bool | None) -> Callable[[Any], Any]:
        def shard(model: Any) -> Any:
            for module in [*[model.lm_head] * head, model]:
                fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
            return model

        return shard

    for head in (False, True):
        for reshard in (None, True):
            compare(f"FSDP2 {head=} {reshard=}", wrap(head, reshard))
    compare("FSDP2, frozen", wrap(True, None), frozen=True)


def fsdp() -> None:
    """FSDP1 frees a head of its own, which computes its logits and says so; the root's is there until the backward."""
    device = torch.device("cpu")
    model, stock = Model(), Model()
    handle = defer_logits(model)
    for each in (model, stock):
        each.lm_head = FullyShardedDataParallel(each.lm_head, device_id=device, use_orig_params=True)
    models = [FullyShardedDataParallel(each, device_id=device, use_orig_params=True) for each in (stock, model)]
    want, got = (take_step(each, served, True)[0] for each in models)
    assert p.value_error(got, want) < VALUE
    assert handle.served == 0
    assert any("FSDP frees its weight after the head's forward" in place for place in handle.places), handle


def main() -> None:
    torch.set_num_threads(1)
    run_in_float64(globals())


if __name__ == "__main__":
    main()
