"""The model, the batches and the ways to call the op that `wrapped_worker` compares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lce_torch_bridge import LogprobOutput, linear_logprobs
from tests.torch import problem as p

VALUE, GRADIENT = 2e-6, 1e-6  # as in test_parity
FAR = 0.3  # the least error of a wrong reduction
T, H, V = 6, 32, 102  # V divides by two ranks, not by four

type Outputs = tuple[torch.Tensor, ...]  # logprobs, entropy
type Measured = tuple[Outputs, dict[str, torch.Tensor]]  # and the gradient of every parameter


class Model(nn.Module):
    """Embedding, body, and a head that may be the embedding. The caller says what is done with the hidden states."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.body = nn.Embedding(V, H), nn.Linear(H, H)
        if not tied:
            self.head = nn.Linear(H, V, bias=False)

    @property
    def out(self) -> nn.Module:
        return getattr(self, "head", self.embed)

    def forward(self, tokens: torch.Tensor, then: Callable[..., Any]) -> Any:
        return then(self, torch.tanh(self.body(self.embed(tokens))))


class Batch:
    """Tokens, labels, temperature and cotangents of one data-parallel rank."""

    def __init__(self, rank: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        self.tokens, self.labels = torch.randint(0, V, (2, T), generator=generator)
        self.temperature = 0.5 + torch.rand(T, generator=generator)
        self.seeds = torch.randn(2, T, generator=generator)


def by_logits(model: nn.Module, batch: Batch) -> Outputs:
    """The stock path, all of it in the forward of the outermost module."""

    def head(inner: Model, hidden: torch.Tensor) -> torch.Tensor:
        return inner.head(hidden) if hasattr(inner, "head") else nn.functional.linear(hidden, inner.embed.weight)

    logp = (model(batch.tokens, head).double() / batch.temperature[:, None]).log_softmax(-1)
    return logp.gather(-1, batch.labels[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def inside(model: nn.Module, batch: Batch, **options: Any) -> LogprobOutput:
    """The op in the forward of the outermost module."""
    return model(batch.tokens, lambda inner, hidden: op(hidden, inner.out.weight, batch, **options))


def outside(model: nn.Module, batch: Batch, given: Callable[..., Any] | None = None, **options: Any) -> LogprobOutput:
    """The op after it, on the head's weight or what is ``given`` of it."""
    hidden = model(batch.tokens, lambda _inner, hidden: hidden)
    weight = getattr(model, "module", model).out.weight
    return op(hidden, weight if given is None else given(weight), batch, **options)


def op(hidden: torch.Tensor, weight: torch.Tensor, batch: Batch, **options: Any) -> LogprobOutput:
    return linear_logprobs(hidden, weight, batch.labels, temperature=batch.temperature, **options)


def measure(way: Callable[..., Any], model: nn.Module, batch: Batch, steps: int = 1, **options: Any) -> Measured:
    model.zero_grad()
    for _ in range(steps):
        out = way(model, batch, **options)
        sum((seed * x).sum() for seed, x in zip(batch.seeds, out[:2], strict=True)).backward()
    grads = {name.removeprefix("module."): whole(x.grad) for name, x in model.named_parameters()}
    return tuple(x.detach() for x in out[:2]), grads


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x.clone()


def errors(got: Measured, want: Measured) -> tuple[float, float]:
    """The errors of the values, and of the worst gradient."""
    assert got[1].keys() == want[1].keys()
    values = max(map(p.value_error, got[0], want[0]))
    return values, max(p.relative_norm(got[1][name], want[1][name]) for name in want[1])


def same(name: str, got: Measured, want: Measured) -> None:
    value, gradient = errors(got, want)
    print(name, "value", value, "gradient", gradient, flush=True)
    assert value < VALUE, (name, value)
    assert gradient < GRADIENT, (name, gradient)


def mesh_of(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])


def units(model: Model, mesh: DeviceMesh) -> Model:
    """FSDP2, each module with parameters a unit: outside of its own forward, the head's weight is a DTensor."""
    for unit in (*model.children(), model):
        fully_shard(unit, mesh=mesh)
    assert isinstance(model.out.weight, DTensor)
    return model
