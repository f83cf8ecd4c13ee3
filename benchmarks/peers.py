"""Candidates that run in PyTorch: one function per peer, and this package through `lce_torch_bridge`.

The tensors share memory with the JAX arrays (DLPack), so all rows of a table have the same operands.

Peers compute different things. A peer without entropy is timed on log-probabilities alone, and a peer that returns one
scalar on their sum. Such peers do less work than the other rows, and their labels say so. If a peer is not installed,
or refuses this device or shape, its row has the reason.
"""

from __future__ import annotations

import functools
import importlib
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.candidates import BOTH, FORWARD, UNLIMITED, Candidate
from benchmarks.measure import Run
from benchmarks.problem import GRADIENTS, Objective, Problem, cotangents
from lce_jax import UnsupportedError

HOPPER = (9, 0)  # the compute capability that Liger's and QuACK's kernels need

type Tensors = dict[str, Any]


class Peer(NamedTuple):
    """A function of (hidden, weight, labels) tensors to outputs by name, and the objective that it can differentiate.

    The outputs are "logprobs" and "entropy", "logprobs", or "loss" (the sum of the log-probabilities).
    """

    label: str
    objective: Objective
    function: Callable[[Any, Any, Any], Tensors]
    logits_rounded: bool = True


def ours(hidden: Any, weight: Any, labels: Any, **options: Any) -> Tensors:
    """Calls this package for log-probability and entropy, by default with a cache of at most 1 GiB on a GPU."""
    from lce_torch_bridge import linear_logprobs

    out = linear_logprobs(hidden, weight, labels, **options)
    return {"logprobs": out.logprobs, "entropy": out.entropy}


def our_loss(hidden: Any, weight: Any, labels: Any) -> Tensors:
    """Calls this package's loss, whose forward computes the gradients."""
    from lce_torch_bridge import linear_cross_entropy

    return {"loss": -linear_cross_entropy(hidden, weight, labels, reduction="sum")}


def stored(hidden: Any, weight: Any, labels: Any) -> Tensors:
    """Computes a float32 log-softmax of stored logits, as one writes it by hand."""
    return dict(zip(("logprobs", "entropy"), _stored(hidden, weight, labels), strict=True))


def torch_compile(hidden: Any, weight: Any, labels: Any) -> Tensors:
    """Computes the same under ``torch.compile``."""
    return dict(zip(("logprobs", "entropy"), _compiled()(hidden, weight, labels), strict=True))


def _stored(hidden: Any, weight: Any, labels: Any) -> tuple[Any, Any]:
    import torch

    logp = torch.log_softmax((hidden @ weight.t()).float(), -1)
    return logp.gather(1, labels[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@functools.cache
def _compiled() -> Any:
    import torch

    return torch.compile(_stored, dynamic=False)


def torch_linear_cross_entropy(hidden: Any, weight: Any, labels: Any) -> Tensors:
    """Calls PyTorch's own function, which works in chunks of tokens and computes the gradients in its forward."""
    import torch

    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        raise UnsupportedError(
            f"PyTorch {torch.__version__} has no chunked linear_cross_entropy: install 2.14 or later"
        )
    options = torch.nn.LinearCrossEntropyOptions()
    sums = torch.nn.functional.linear_cross_entropy(hidden, weight, labels, reduction="sum", options=options)
    return {"loss": -sums}


def liger_scaled(hidden: Any, weight: Any, labels: Any) -> Tensors:
    """Calls Liger's per-token kernel for reinforcement learning: negative log-likelihood and entropy."""
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction as Function

    if _capability(hidden) != HOPPER:
        raise UnsupportedError("Liger's kernel is for Hopper: elsewhere its function stores the logits of 512 tokens")
    temperature, ignore_index, tiles_per_cluster, with_entropy = 1.0, -100, 1, True
    nll, entropy = Function.apply(hidden, weight, labels, temperature, ignore_index, tiles_per_cluster, with_entropy)
    return {"logprobs": -nll, "entropy": entropy}


def liger_hopper(hidden: Any, weight: Any, labels: Any) -> Tensors:
    """Calls Liger's loss for Hopper, which refuses other devices, and shapes that its tiles do not divide."""
    from liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90 import (
        LigerFusedLinearCrossEntropySM90Function as Function,
    )

    ignore_index, reduction = -100, "sum"
    return {"loss": -Function.apply(hidden, weight, labels, ignore_index, reduction)}


def liger_cross_entropy(hidden: Any, weight: Any, labels: Any) -> Tensors:
    """Calls Liger's fused linear cross entropy in Triton. Its forward computes the gradients of a scalar loss."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return {"loss": -liger_fused_linear_cross_entropy(hidden, weight, labels, reduction="sum")}


def quack(hidden: Any, weight: Any, labels: Any) -> Tensors:
    """Calls QuACK's chunked linear cross entropy."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return {"loss": -chunked_linear_cross_entropy(hidden, weight, labels, reduction="sum")}


def apple(hidden: Any, weight: Any, labels: Any, **options: Any) -> Tensors:
    """Calls Apple's Cut Cross-Entropy, which skips gradients below a threshold, its ``filter_eps``."""
    from cut_cross_entropy import linear_cross_entropy

    return {"logprobs": -linear_cross_entropy(hidden, weight, labels, reduction="none", impl="cce", **options)}


def _ours(label: str, **options: Any) -> Peer:
    return Peer(label, "logprob+entropy", functools.partial(ours, **options), logits_rounded=False)


PEERS = {
    "ours in torch": _ours("lce_torch_bridge"),
    "ours in torch, no cache": _ours("lce_torch_bridge, no cache", cache_bytes=0),
    "ours in torch, full cache": _ours("lce_torch_bridge, full cache", cache_bytes=UNLIMITED),
    "ours in torch, loss": Peer("lce_torch_bridge, loss only", "sum of logprobs", our_loss, logits_rounded=False),
    "torch": Peer("torch, stored logits", "logprob+entropy", stored),
    "torch.compile": Peer("torch.compile, stored logits", "logprob+entropy", torch_compile),
    "torch linear CE": Peer("torch linear_cross_entropy, loss only", "sum of logprobs", torch_linear_cross_entropy),
    "Liger scaled cross entropy": Peer("Liger scaled cross entropy", "logprob+entropy", liger_scaled),
    "Liger Hopper linear CE": Peer("Liger linear CE for Hopper, loss only", "sum of logprobs", liger_hopper),
    "Liger fused linear CE": Peer("Liger fused linear CE, loss only", "sum of logprobs", liger_cross_entropy),
    "QuACK": Peer("QuACK chunked linear CE, loss only", "sum of logprobs", quack),
    "Apple CCE": Peer("Apple CCE, no entropy", "logprob", apple),
    "Apple CCE exact": Peer("Apple CCE exact, no entropy", "logprob", functools.partial(apple, filter_eps=None)),
}


def peer_candidates(problem: Problem, is_timed: bool = True) -> list[Candidate]:
    """Returns the candidates of all peers, timed only on GPUs. A peer that cannot run raises when it is compiled."""
    return [
        Candidate(
            key, peer.label, direction, functools.partial(_compile, peer, problem, direction, is_timed),
            to_jax, peer.objective, peer.logits_rounded,
        )
        for key, peer in PEERS.items()
        for direction in (FORWARD, BOTH)
    ]  # fmt: skip


TRL_BETAS = {"forward": 0.0, "reverse": 1.0, "jsd": 0.5}  # TRL has no total variation


def trl_divergence(direction: str, *operands: Any) -> Any:
    """Calls TRL's divergence of two heads in Triton, which computes the student's entropy too."""
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction as Function

    hidden, weight, teacher_hidden, teacher_weight = operands
    beta = TRL_BETAS[direction]
    return Function.apply(hidden, weight, None, teacher_hidden, teacher_weight, None, beta)[0]


def compile_divergence(function: Callable[..., Any], *operands: jax.Array) -> Run:
    """Prepares ``function`` of tensors with its gradients in the student's operands, weighted by the last operand."""
    torch = _torch()
    *arrays, seed = (torch.utils.dlpack.from_dlpack(x).detach() for x in operands)
    student = [x.requires_grad_() for x in arrays[:2]]

    def launch() -> tuple[Any, ...]:
        kl = function(*student, *arrays[2:])
        return kl.detach(), *torch.autograd.grad((seed * kl).sum(), student)

    return _measure_memory(launch)


def release() -> None:
    """Returns PyTorch's unused memory to the device, so that JAX can use it."""
    if jax.default_backend() == "gpu" and "torch" in sys.modules:
        import torch

        torch.compiler.reset()
        torch.cuda.empty_cache()


def to_jax(results: Any) -> Any:
    """Converts tensors to JAX arrays that share their memory."""
    return jax.tree.map(lambda x: jnp.from_dlpack(x.detach().contiguous()), results)


def _torch() -> Any:
    """Returns the module ``torch``, or refuses a machine whose GPU it does not see."""
    if jax.default_backend() != "gpu":
        raise UnsupportedError(f"peers are timed on CUDA GPUs, this is {jax.default_backend()}")
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedError(f"torch {torch.__version__} sees no CUDA GPU")
    return torch


def _capability(tensor: Any) -> tuple[int, int] | None:
    """Returns the compute capability of the tensor's GPU."""
    import torch

    return torch.cuda.get_device_capability(tensor.device) if tensor.is_cuda else None


def _compile(peer: Peer, problem: Problem, direction: str, is_timed: bool) -> Run:
    """Compiles a peer's forward, or both passes. Raises an error with the reason for its row."""
    try:
        torch = _torch() if is_timed else importlib.import_module("torch")
        return _measure_memory(_program(torch, peer, problem, direction))
    except ImportError as missing:
        raise UnsupportedError(f"not installed: {missing}") from missing
    except NotImplementedError as refusal:
        raise UnsupportedError(f"refused: {refusal}") from refusal


def _program(torch: Any, peer: Peer, problem: Problem, direction: str) -> Callable[[], Tensors]:
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

    return forward if direction == FORWARD else forward_backward


def _measure_memory(launch: Callable[[], Any]) -> Run:
    """Calls ``launch`` twice: the first call compiles, and the second measures the GPU's peak memory.

    The peak is counted without operands and results.
    """
    import torch

    on_gpu = torch.cuda.is_available()

    def wait(results: Any) -> Any:
        if on_gpu:
            torch.cuda.synchronize()
        return results

    start = time.perf_counter()
    wait(launch())
    compile_seconds = time.perf_counter() - start
    if not on_gpu:
        return Run(launch, wait, 0, compile_seconds)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = wait(launch())
    result_bytes = sum(x.numel() * x.element_size() for x in jax.tree.leaves(results))
    return Run(launch, wait, max(0, torch.cuda.max_memory_allocated() - before - result_bytes), compile_seconds)
