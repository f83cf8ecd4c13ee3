"""What a PyTorch user would pick, if it is installed: one function per peer.

A missing package raises ImportError when a peer is compiled. The tensors share memory with the JAX arrays (DLPack), so
every row of a table works on the same operands.

Peers compute different things. Those that return no entropy are timed on log-probabilities alone, those that return
one scalar on that sum. They do less work than the other rows, and their labels say so.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.candidates import BOTH, FORWARD, Candidate
from benchmarks.measure import Run
from benchmarks.problem import GRADIENTS, Objective, Problem, cotangents
from lce_jax import UnsupportedError

type Tensors = dict[str, Any]


class Peer(NamedTuple):
    """A function of (hidden, weight, labels) tensors to outputs by name, and the objective that it can differentiate.

    The outputs are "logprobs" and "entropy", "logprobs", or "loss" (the sum of the log-probabilities).
    """

    label: str
    objective: Objective
    function: Callable[[Any, Any, Any], Tensors]


def torch_compile(hidden: Any, weight: Any, labels: Any) -> Tensors:
    """Stored logits, fp32 log-softmax, all in one ``torch.compile``."""
    return dict(zip(("logprobs", "entropy"), _compiled()(hidden, weight, labels), strict=True))


@functools.cache
def _compiled() -> Any:
    import torch

    def logprobs(hidden: Any, weight: Any, labels: Any) -> tuple[Any, Any]:
        logp = torch.log_softmax((hidden @ weight.t()).float(), -1)
        return logp.gather(1, labels[:, None])[:, 0], -(logp.exp() * logp).sum(-1)

    return torch.compile(logprobs, dynamic=False)


def liger_scaled(hidden: Any, weight: Any, labels: Any) -> Tensors:
    """Liger's per-token kernel for reinforcement learning: negative log-likelihood and entropy."""
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction as Function

    temperature, ignore_index, tiles_per_cluster, with_entropy = 1.0, -100, 1, True
    nll, entropy = Function.apply(hidden, weight, labels, temperature, ignore_index, tiles_per_cluster, with_entropy)
    return {"logprobs": -nll, "entropy": entropy}


def liger_cross_entropy(hidden: Any, weight: Any, labels: Any) -> Tensors:
    """Liger's fused linear cross entropy, whose forward computes the gradients of a scalar loss."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return {"loss": -liger_fused_linear_cross_entropy(hidden, weight, labels, reduction="sum")}


def apple(hidden: Any, weight: Any, labels: Any, **options: Any) -> Tensors:
    """Apple's Cut Cross-Entropy, which leaves out gradients below a threshold, its ``filter_eps``."""
    from cut_cross_entropy import linear_cross_entropy

    return {"logprobs": -linear_cross_entropy(hidden, weight, labels, reduction="none", impl="cce", **options)}


PEERS = {
    "torch.compile": Peer("torch.compile, stored logits", "logprob+entropy", torch_compile),
    "Liger scaled cross entropy": Peer("Liger scaled cross entropy", "logprob+entropy", liger_scaled),
    "Liger fused linear CE": Peer("Liger fused linear CE, loss only", "sum of logprobs", liger_cross_entropy),
    "Apple CCE": Peer("Apple CCE, no entropy", "logprob", apple),
    "Apple CCE exact": Peer("Apple CCE exact, no entropy", "logprob", functools.partial(apple, filter_eps=None)),
}


def peer_candidates(problem: Problem) -> list[Candidate]:
    """The rows of every peer. One that cannot run here says why when it is compiled."""
    return [
        Candidate(
            key, peer.label, direction, functools.partial(_compile, peer, problem, direction),
            as_jax, peer.objective, logits_rounded=True,
        )
        for key, peer in PEERS.items()
        for direction in (FORWARD, BOTH)
    ]  # fmt: skip


def trl_divergence(direction: str, *operands: Any) -> Any:
    """TRL's divergence of two heads, tile by tile with Triton; it computes the student's entropy too."""
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction as Function

    hidden, weight, teacher_hidden, teacher_weight = operands
    beta = {"forward": 0.0, "reverse": 1.0, "jsd": 0.5}[direction]
    return Function.apply(hidden, weight, None, teacher_hidden, teacher_weight, None, beta)[0]


def compile_divergence(function: Callable[..., Any], *operands: jax.Array) -> Run:
    """``function`` of tensors, and its gradients in the student's, weighted by the last operand."""
    torch = _torch()
    *arrays, seed = (torch.utils.dlpack.from_dlpack(x).detach() for x in operands)
    student = [x.requires_grad_() for x in arrays[:2]]

    def launch() -> tuple[Any, ...]:
        kl = function(*student, *arrays[2:])
        return kl.detach(), *torch.autograd.grad((seed * kl).sum(), student)

    return _measured_by_torch(launch)


def release() -> None:
    """Gives PyTorch's unused memory back to the device, for JAX to use."""
    if jax.default_backend() == "gpu" and "torch" in sys.modules:
        import torch

        torch.compiler.reset()
        torch.cuda.empty_cache()


def as_jax(results: Any) -> Any:
    """Tensors as arrays."""
    return jax.tree.map(lambda x: jnp.from_dlpack(x.detach().contiguous()), results)


def _torch() -> Any:
    """The module, where it sees the GPU."""
    if jax.default_backend() != "gpu":
        raise UnsupportedError(f"peers are timed on CUDA GPUs, this is {jax.default_backend()}")
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedError(f"torch {torch.__version__} sees no CUDA GPU")
    return torch


def _compile(peer: Peer, problem: Problem, direction: str) -> Run:
    """Its forward, or both passes."""
    torch = _torch()
    hidden, weight, labels, a, b = (
        torch.utils.dlpack.from_dlpack(x) for x in (*problem[:3], *cotangents(problem, peer.objective))
    )
    hidden, weight, labels = hidden.detach().requires_grad_(), weight.detach().requires_grad_(), labels.long()

    def forward() -> Tensors:
        with torch.no_grad():
            return peer.function(hidden, weight, labels)

    def forward_backward() -> Tensors:
        outputs = peer.function(hidden, weight, labels)
        weights = {"logprobs": a, "entropy": b, "loss": 1.0}
        loss = sum((outputs[name] * weights[name]).sum() for name in outputs)
        gradients = torch.autograd.grad(loss, (hidden, weight))
        return {name: x.detach() for name, x in outputs.items()} | dict(zip(GRADIENTS, gradients, strict=True))

    return _measured_by_torch(forward if direction == FORWARD else forward_backward)


def _measured_by_torch(launch: Callable[[], Any]) -> Run:
    """A first call, which compiles, and a second one, whose peak above operands and results is the memory."""
    import torch

    def wait(results: Any) -> Any:
        torch.cuda.synchronize()
        return results

    start = time.perf_counter()
    wait(launch())
    compile_seconds = time.perf_counter() - start
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = wait(launch())
    kept = sum(x.numel() * x.element_size() for x in jax.tree.leaves(results))
    return Run(launch, wait, max(0, torch.cuda.max_memory_allocated() - before - kept), compile_seconds)
