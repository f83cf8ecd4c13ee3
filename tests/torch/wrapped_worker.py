"""The model, the batches and the ways to call the op that `wrapped_worker` compares."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from lce_torch_bridge import (
    LogprobOutput,
    linear_cross_entropy,
    linear_logits,
    linear_logprobs,
    linear_loss,
    linear_topk,
)
from tests.torch import problem as p
from tests.torch.ranks import run_in_float64

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


def fsdp() -> None:
    batch = Batch(dist.get_rank())
    for mesh, tied in ((mesh_of(4), False), (mesh_of(4), True), (mesh_of(2, 2), False)):  # the last one is HSDP
        name = f"FSDP2 {tuple(mesh.shape)} {'tied' if tied else ''}"
        want = measure(by_logits, fully_shard(Model(tied), mesh=mesh), batch)
        model = units(Model(tied), mesh)
        same(name + " outside", measure(outside, model, batch), want)
        same(name + " inside", measure(inside, model, batch), want)
        same(name + " inside, one unit", measure(inside, fully_shard(Model(tied), mesh=mesh), batch), want)
    twice = measure(outside, model, batch, steps=2)[1]
    same("two micro-batches", (want[0], {name: grad / 2 for name, grad in twice.items()}), want)
    mean = [Partial("avg")] * 2
    same("by hand", measure(outside, model, batch, given=lambda w: w.full_tensor(grad_placements=mean)), want)
    value, gradient = errors(measure(outside, model, batch, given=lambda w: w.full_tensor()), want)
    assert value < VALUE
    assert gradient > FAR, "the control: a gradient that nobody reduces must be noticed"


def freed() -> None:
    """FSDP1 frees what it has gathered. The head is refused then, and each advice of the message serves."""
    batch, model = Batch(dist.get_rank()), FullyShardedDataParallel(Model(), device_id=torch.device("cpu"))
    want = measure(by_logits, model, batch)
    same("FSDP1 inside", measure(inside, model, batch), want)
    seen = []
    model(batch.tokens, lambda inner, hidden: seen.extend([hidden, inner.out.weight]) or hidden).sum().backward()
    hidden, weight = (x.detach() for x in seen)
    with pytest.raises(
        RuntimeError, match=r"weight \(102, 32\) has no memory, .* inside the forward of the FSDP module"
    ):
        op(hidden, weight, batch)
    with torch.no_grad(), FullyShardedDataParallel.summon_full_params(model):
        summoned = op(hidden, model.module.out.weight, batch)
    assert max(map(p.value_error, summoned[:2], want[0])) < VALUE


def other_reductions() -> None:
    """Gradients that FSDP2 sums are refused; in the module's forward, as the message advises, FSDP2 sums them."""
    mesh, batch = mesh_of(4), Batch(dist.get_rank())

    def summed(model: Any) -> Any:
        for unit in model.modules():
            if isinstance(unit, FSDPModule):
                unit.set_gradient_divide_factor(1.0)
                unit.set_force_sum_reduction_for_comms(True)  # gloo supports no other
        return model

    refused = r"set_gradient_divide_factor\(1\), .* inside the forward of the FSDP module that holds it"
    for given in (None, lambda weight: weight.to(torch.bfloat16)):
        with pytest.raises(ValueError, match=refused):
            outside(summed(units(Model(), mesh)), batch, given=given)
    want = measure(by_logits, summed(fully_shard(Model(), mesh=mesh)), batch)
    same("summed", measure(inside, summed(fully_shard(Model(), mesh=mesh)), batch), want)


def tensor_parallel() -> None:
    """Two ranks have the same tokens and half of the vocabulary each; two such pairs shard their halves by FSDP2."""
    mesh = mesh_of(2, 2)
    batch = Batch(mesh.get_local_rank("dp"))

    def parallel() -> Model:
        return parallelize_module(Model(), mesh["tp"], {"head": ColwiseParallel(output_layouts=Replicate())})

    want = measure(by_logits, fully_shard(parallel(), mesh=mesh["dp"]), batch)
    told: dict[str, Any] = dict(tp_group=mesh.get_group("tp"), reduce_grad_hidden=True)
    model = units(parallel(), mesh["dp"])
    same("FSDP2 + TP outside", measure(outside, model, batch, **told), want)
    same("FSDP2 + TP inside", measure(inside, model, batch, **told), want)
    same("FSDP2 + TP gathered whole", measure(outside, model, batch), want)
    same("FSDP2 + TP one unit", measure(inside, fully_shard(parallel(), mesh=mesh["dp"]), batch, **told), want)
    same("TP, then FSDP2 by hand", measure(outside, manual(mesh), batch, **told), cut(want, mesh))
    world = dist.new_group(range(4))
    with pytest.raises(ValueError, match=r"ranks \[0, 1, 2, 3\], .*mesh \[\[0, 1\], \[2, 3\]\]: .*get_group\(dim\)"):
        outside(model, batch, tp_group=world)
    with pytest.raises(ValueError, match=r"hidden differs between the ranks 0 and 1 of tp_group, in 1\d of 16"):
        outside(model, batch, tp_group=mesh.get_group("dp"))  # which splits the weight too, but has other tokens
    ragged = distribute_tensor(torch.ones(V + 1, H), mesh["tp"], [Shard(0)])
    with pytest.raises(ValueError, match=r"103 rows, which do not divide into 2 equal parts .* pad the vocabulary"):
        outside(model, batch, given=lambda _: ragged, **told)
    with pytest.raises(ValueError, match=r"wgrad='main_grad': weight is a DTensor, .* use wgrad=\"return\""):
        outside(model, batch, wgrad="main_grad", **told)


def manual(mesh: DeviceMesh) -> Model:
    """A model whose head is this rank's half, as in Megatron, in FSDP2 over the ranks with the same half."""
    model = Model()
    half = model.head.weight.detach().chunk(2)[mesh.get_local_rank("tp")]
    model.head = nn.Linear(H, V // 2, bias=False)
    model.head.weight = nn.Parameter(half.clone())
    return units(model, mesh["dp"])


def cut(measured: Measured, mesh: DeviceMesh) -> Measured:
    outputs, grads = measured
    return outputs, grads | {"head.weight": grads["head.weight"].chunk(2)[mesh.get_local_rank("tp")]}


def placements() -> None:
    """DTensors throughout. If one is refused, the advice in the message must give right numbers."""
    mesh, problem = mesh_of(2, 2)["tp"], p.draw(T, H, V)
    batch, whole_ones = Batch(0), [Replicate()]
    seeds = [*batch.seeds, torch.zeros(T)]
    want, (dhidden, dweight) = p.exact(problem, seeds, temperature=batch.temperature)
    tp = dict(tp_group=mesh.get_group())
    cases: list[tuple[list[Placement], list[Placement], list[Placement], dict[str, Any], str]] = [
        (whole_ones, [Shard(0)], whole_ones, tp, ""),
        (whole_ones, [Shard(0)], whole_ones, {}, ""),
        (whole_ones, [Shard(1)], whole_ones, {}, ""),
        (whole_ones, whole_ones, whole_ones, {}, ""),
        (whole_ones, whole_ones, whole_ones, tp, "weight"),
        (whole_ones, [Shard(1)], whole_ones, tp, "weight"),
        (whole_ones, [Partial()], whole_ones, tp, "weight"),
        (whole_ones, [Partial()], whole_ones, {}, "weight"),
        ([Shard(0)], [Shard(0)], whole_ones, tp, "hidden"),
        ([Shard(1)], [Shard(0)], whole_ones, {}, "hidden"),
        ([Partial()], [Shard(0)], whole_ones, tp, "hidden"),
        (whole_ones, [Shard(0)], [Shard(0)], tp, "labels"),
    ]
    for *places, told, refused in cases:
        leaves = {name: place(x, mesh, at) for name, x, at in zip(problem._fields, problem, places, strict=True)}
        given: dict[str, Any] = leaves | {"temperature": distribute_tensor(batch.temperature, mesh, whole_ones)}
        if refused:
            given[refused] = eval(advice(refused, given | told), globals() | given)
        out = linear_logprobs(**given, **told)
        sum((seed * x).sum() for seed, x in zip(seeds, out[:2], strict=False)).backward()
        assert not isinstance(out.logprobs, DTensor)
        found = {"hidden": whole(leaves["hidden"].grad), "weight": whole(leaves["weight"].grad)}
        same(f"{places} {refused} {bool(told)}", (out[:3], found), (want[:3], {"hidden": dhidden, "weight": dweight}))


def further_functions() -> None:
    """Candidates, logits at ids, losses with their gradients in the forward, and the most likely tokens."""
    mesh, problem, seed = mesh_of(2, 2)["dp"], p.draw(T, H, V), Batch(0).seeds[0]  # ranks 0 and 2, 1 and 3
    ids = p.candidates_like(problem.labels, V=V)
    true = p.Problem(problem.hidden.double(), problem.weight.double(), problem.labels).leaves()
    want = p.stored(*true, candidates=ids)
    z = p.stored_logits(*true[:2], ids)
    of_each = want.candidate_logprobs.sum() + z.sum() + (seed * want.logprobs).sum()
    grads = torch.autograd.grad(of_each - want.logprobs.mean(), true[:2])
    top = linear_topk(*problem[:2], 5)
    for told in ({"tp_group": mesh.get_group()}, {}):
        everywhere = (problem.hidden, problem.labels, seed, ids)
        hidden, labels, own, chosen = (place(x, mesh, [Replicate()]) for x in everywhere)
        weight = place(problem.weight, mesh, [Shard(0)])
        out = linear_logprobs(hidden, weight, labels, candidates=chosen, **told)
        logits = linear_logits(hidden, weight, chosen, **told)
        total, _ = linear_loss(lambda logprobs, *given: given[2] * logprobs, hidden, weight, labels, own, **told)
        mean = linear_cross_entropy(hidden, weight, labels, **told)
        (out.candidate_logprobs.sum() + logits.sum() + total + mean).backward()
        assert p.value_error(out.candidate_logprobs, want.candidate_logprobs) < VALUE
        assert p.value_error(logits, z) < VALUE
        assert max(map(p.relative_norm, (whole(hidden.grad), whole(weight.grad)), grads)) < 1e-6, told
        assert torch.equal(linear_topk(hidden, weight, 5, **told).ids, top.ids)


def place(x: torch.Tensor, mesh: DeviceMesh, at: list[Placement]) -> torch.Tensor:
    """A leaf. Of a sum, each rank has a part of its own."""
    if at == [Partial()]:
        x = DTensor.from_local(x * (0.25, 0.75)[mesh.get_local_rank()], mesh, at)
    else:
        x = distribute_tensor(x, mesh, at)
    return x.requires_grad_() if x.is_floating_point() else x


def advice(name: str, given: dict[str, Any]) -> str:
    """What the refusal says to pass."""
    with pytest.raises(ValueError, match=rf"^{name} .* is a DTensor .*: pass {name}\.redistribute") as refusal:
        linear_logprobs(**given)
    found = re.search(r": pass (.*)$", str(refusal.value))
    assert found is not None
    return found[1]


def biases() -> None:
    """A head with a bias: FSDP2, two ranks with half of the vocabulary each, and a placement that is refused."""
    mesh, batch = mesh_of(4), Batch(dist.get_rank())

    def with_bias() -> Model:
        model = Model()
        model.head.bias = nn.Parameter(torch.linspace(-1, 1, V))
        return model

    def outside_with_bias(model: Model, batch: Batch) -> LogprobOutput:
        return outside(model, batch, bias=model.head.bias)

    want = measure(by_logits, fully_shard(with_bias(), mesh=mesh), batch)
    assert "head.bias" in want[1]
    same("FSDP2 with a bias", measure(outside_with_bias, units(with_bias(), mesh), batch), want)
    split, problem, bias = mesh_of(2, 2)["tp"], p.draw(T, H, V), torch.linspace(-1, 1, V)
    plain = bias.double().requires_grad_()
    true = p.stored(problem.hidden, problem.weight, problem.labels, bias=plain)
    (dbias,) = torch.autograd.grad(true.logprobs.sum(), plain)
    for told in ({"tp_group": split.get_group()}, {}):
        leaf, refused = place(bias, split, [Shard(0)]), place(bias, split, [Partial()])
        given: dict[str, Any] = problem._asdict() | {"weight": place(problem.weight, split, [Shard(0)])}
        out = linear_logprobs(**given, bias=leaf, **told)
        out.logprobs.sum().backward()
        same(f"bias, {list(told)}", (out[:3], {"bias": whole(leaf.grad)}), (true[:3], {"bias": dbias}))
        line = advice("bias", given | {"bias": refused} | told)
        out = linear_logprobs(**given, bias=eval(line, globals() | {"bias": refused}), **told)
        assert max(map(p.value_error, out[:3], true[:3])) < VALUE, line


def ddp() -> None:
    batch, models = Batch(dist.get_rank()), [nn.parallel.DistributedDataParallel(Model()) for _ in range(3)]
    want = measure(by_logits, models[0], batch)
    same("DDP inside", measure(inside, models[1], batch), want)
    same("DDP outside", measure(outside, models[2], batch), want)


def main() -> None:
    run_in_float64(globals())


if __name__ == "__main__":
    main()
