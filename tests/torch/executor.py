"""Stand-ins for programs: float64's stored logits in place of JAX's, and JAX's in place of those launched directly.

The tests of arguments, autograd, graphs, hooks and groups run in float64: what they judge lies before and after the
programs, and a program of JAX costs a second to compile. `test_parity` and its like judge the programs themselves.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch

from lce_torch_bridge._types import NO_SUMS, Sums, Tensors, TorchCall
from lce_torch_bridge.launched_directly import _launch_with, _passes
from lce_torch_bridge.launched_directly._launch_with import Way
from lce_torch_bridge.operators import _operators
from lce_torch_bridge.tensors import _padding, _tensor_parallel
from lce_torch_bridge.tensors._weight import empty_sparse_like
from lce_torch_bridge.through_jax import _logprobs
from lce_torch_bridge.through_jax._programs import DweightSum
from tests.torch import problem as p


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Inside, nothing is run by JAX."""
    others = {
        name: other._replace(forward=forward, gradients=other.gradients and gradients)
        for name, other in _operators.JAX_FUNCTIONS.items()
    }
    with (
        mock.patch.object(_logprobs, "forward", forward),
        mock.patch.object(_logprobs, "gradients", gradients),
        mock.patch.dict(_operators.JAX_FUNCTIONS, others),
    ):
        yield


def forward(x: Tensors, call: TorchCall, keep: bool, lend_cache: bool = True) -> list[Any]:
    """As `_operators.run_forward`. What is kept holds what each token comes with; a cache holds zeros."""
    del lend_cache
    other = _operators.JAX_FUNCTIONS.get(call.jax.function)
    found = _logprobs.make_empty(x, call, keep) if other is None else other.make_empty(x, call, keep)
    with torch.no_grad():
        for name, out in zip(call.fields, found, strict=False):
            out.copy_(results(products(x.hidden, x.weight, call), x, call)[name])
    for kept in found[len(call.fields) :]:
        kept.zero_()
    if call.jax.function in ("linear_logprobs", "linear_kl"):
        columns = [y.view(torch.int32)[:, None] for y in per_token(x, call) if y is not None]
        if call.jax.function == "linear_logprobs":
            columns.insert(0, x.labels.long().clamp(-1, call.jax.vocab_size).int()[:, None])
        if x.candidates is not None:
            columns.append(_padding.candidate_ids(x.candidates, call.jax.vocab_size))
        saved, bits = found[len(call.fields)], torch.cat([x.labels.int()[:, None][:, :0], *columns], 1)
        saved.T[:, : bits.shape[1]] = bits
    return found


def per_token(x: Tensors, call: TorchCall) -> list[torch.Tensor | None]:
    return [x.temperature, x.floor if call.jax.function == "linear_logprobs" else x.teacher_temperature]


def unpacked(x: Tensors, saved: torch.Tensor, call: TorchCall) -> Tensors:
    """The operands with what each token came with."""
    if call.jax.function == "linear_kl":
        columns = list(saved[: call.num_temperatures].view(torch.float32))
        own = columns.pop(0) if call.has_temperature else None
        return x._replace(temperature=own, teacher_temperature=columns[0] if columns else None)
    labels, *others = saved[: len(saved) - sum(_logprobs.merged_fields(call).values())]
    candidates = torch.stack(others[len(others) - call.jax.num_candidates :], 1) if call.jax.num_candidates else None
    floats = [y.view(torch.float32) for y in others[: len(others) - call.jax.num_candidates]]
    floor = floats.pop() if call.jax.has_floor else None
    return x._replace(labels=labels, temperature=floats[0] if floats else None, floor=floor, candidates=candidates)


def gradients(
    x: Tensors, kept: Sequence[Any], cotangents: dict[str, torch.Tensor], wanted: tuple[bool, ...], call: TorchCall,
    sums: Sums = NO_SUMS,
) -> list[torch.Tensor]:  # fmt: skip
    """As `_operators.run_backward`: this rank's columns alone, dhidden summed over the group if that is asked for."""
    x = unpacked(x, kept[0], call) if call.jax.function in ("linear_logprobs", "linear_kl") else x
    _, rank = _tensor_parallel.size_and_rank(call.group)
    with concurrent.futures.ThreadPoolExecutor(1) as other:  # what watches or transforms this thread does not there
        d = other.submit(of_products, x, cotangents, call).result()
    d = d[:, rank * len(x.weight) :][:, : len(x.weight)]
    hidden = x.hidden.to(x.weight.dtype).double()
    found = [(d @ x.weight.double()).to(torch.float32 if call.reduce_grad_hidden else x.hidden.dtype), d.T @ hidden]
    if wanted[0] and call.reduce_grad_hidden:
        found[0] = _tensor_parallel.sum_dhidden(found[0], x.hidden.dtype, call.group)
    if sums.total is None:
        found[1] = found[1].to(x.weight.dtype)
    else:
        sums.total._tensor = sums.total._new() if sums.total._tensor is None else sums.total._tensor
        sums.total._tensor.add_(found[1])
    grads = [*found, *([] if x.bias is None else [d.sum(0).to(x.bias.dtype)])]
    return [y for i, y in enumerate(grads) if wanted[i] and not (i == 1 and sums.total is not None)]


def of_products(x: Tensors, cotangents: dict[str, torch.Tensor], call: TorchCall) -> torch.Tensor:
    """The derivative in ``hidden · weight`` of all columns."""
    leaf = products(x.hidden, x.weight, call).requires_grad_()
    found = results(leaf, x, call)
    return torch.autograd.grad(sum((seed.double() * found[name]).sum() for name, seed in cotangents.items()), leaf)[0]


def everywhere(x: torch.Tensor | None, call: TorchCall) -> torch.Tensor | None:
    """All ranks' rows."""
    if x is None or call.group == _tensor_parallel.NO_GROUP:
        return x
    return _tensor_parallel.gather(x.detach().contiguous(), call.group).flatten(0, 1)


def products(hidden: torch.Tensor, weight: torch.Tensor, call: TorchCall) -> torch.Tensor:
    whole: Any = everywhere(weight, call)
    return hidden.detach().to(weight.dtype).double() @ whole.detach().double().T


def results(z: torch.Tensor, x: Tensors, call: TorchCall) -> dict[str, torch.Tensor]:
    """The call's fields by name, from the products of all columns."""
    of_logits: Any = dict(
        logit_scale=call.jax.logit_scale, logit_softcap=call.jax.logit_softcap, vocab_size=call.jax.vocab_size
    )
    of_logits |= dict(bias=everywhere(x.bias, call), temperature=x.temperature)
    if call.jax.function == "linear_logprobs":
        out = p.of_products(z, x.labels, candidates=x.candidates, logit_floor=x.floor, **of_logits)
        if call.megatron:
            outside = (x.labels < 0) | (x.labels >= call.jax.vocab_size)
            out = out._replace(logprobs=torch.where(outside, out.max_logit.detach() - out.lse, out.logprobs))
        return out._asdict()
    z = p.capped(z, **of_logits)
    if call.jax.function == "linear_logits":
        return {"linear_logits": p.at_ids(z, x.candidates)}
    if call.jax.function == "linear_topk":
        found, lse = z.sort(dim=-1, descending=True, stable=True), z.logsumexp(-1)
        logprobs = found.values[:, : call.jax.top_k] - lse[:, None]
        return {"ids": found.indices[:, : call.jax.top_k], "logprobs": logprobs, "lse": lse}
    _, teacher = call.jax.heads
    teachers: Any = dict(logit_scale=teacher.logit_scale, logit_softcap=teacher.logit_softcap)
    teachers |= dict(bias=everywhere(x.teacher_bias, call), temperature=x.teacher_temperature)
    y = products(x.teacher_hidden, x.teacher_weight, call)
    log_p = p.capped(y, vocab_size=call.jax.vocab_size, **teachers).log_softmax(-1)
    return {"linear_kl": divergence(log_p, z.log_softmax(-1), call)}


def divergence(log_p: torch.Tensor, log_q: torch.Tensor, call: TorchCall) -> torch.Tensor:
    def kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a.exp() * (a - b)).sum(-1)

    if call.jax.direction == "tv":
        return (log_p.exp() - log_q.exp()).abs().sum(-1) / 2
    if call.beta is not None:
        beta = torch.tensor(call.beta, dtype=torch.float64)
        log_m = torch.logaddexp(log_p + beta.log(), log_q + (1 - beta).log())
        return call.beta * kl(log_p, log_m) + (1 - call.beta) * kl(log_q, log_m)
    return kl(log_p, log_q) if call.jax.direction == "forward" else kl(log_q, log_p)


@contextlib.contextmanager
def launched_directly() -> Iterator[None]:
    """Inside, all calls are run as if their kernels were launched directly."""
    with (
        mock.patch.object(_launch_with, "is_on_gpu", return_value=True),
        mock.patch.object(_passes, "forward", direct_forward),
        mock.patch.object(_passes, "gradients", direct_gradients),
    ):
        yield


def direct_forward(x: Tensors, call: TorchCall, keep_cache: bool, _: Way) -> list[Any]:
    return _operators.run_forward(x, call, keep_cache, _launch_with.JAX)


def direct_gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    saved: torch.Tensor,
    cache: Sequence[torch.Tensor],
    cotangents: dict[str, torch.Tensor],
    wanted: tuple[bool, ...],
    call: TorchCall,
    sums: Sums,
    _: Way,
) -> list[torch.Tensor] | None:
    """dweight is added where a sum is given. A cache that may be overwritten is NaN afterwards."""
    into = sums.main_grad if sums.total is None else sums.total.tensor()
    own = None if into is None else DweightSum(weight)
    x: Any = Tensors(hidden, weight, None, None)  # type: ignore[arg-type]
    found = _operators.run_backward(x, [saved, *cache], cotangents, wanted, call, _launch_with.JAX, Sums(own))
    if own is not None and into is not None:
        into.add_(own.finish())
    if sums.owns_cache:
        for x in cache:
            if x.is_floating_point():
                x.fill_(torch.nan)
    return found if sums.main_grad is None else [*found, empty_sparse_like(sums.main_grad, weight.dtype)]
