"""What a PyTorch user would pick, if it is installed: one function per peer.

Each takes the shape and returns a `Peer`, or the reason why it cannot run; a missing package raises ImportError. The
tensors share memory with the JAX arrays (DLPack), so every row of a table works on the same operands.

Peers compute different things. Those that return no entropy are timed on log-probabilities alone, those that return
one scalar on that sum. They do less work than the other rows, and their labels say so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks import shapes
from benchmarks.candidates import Candidate
from benchmarks.measure import Run
from benchmarks.problem import Objective, Problem, cotangents
from benchmarks.shapes import BOTH, FORWARD, Shape

type Tensors = dict[str, Any]


class Peer(NamedTuple):
    """A function of (hidden, weight, labels) tensors to outputs by name, and the objective that it can differentiate.

    The outputs are "logprobs" and "entropy", "logprobs", or "loss" (the sum of the log-probabilities).
    """

    label: str
    objective: Objective
    function: Callable[[Any, Any, Any], Tensors]


def torch_compile(shape: Shape) -> Peer | str:
    """Stored logits, fp32 log-softmax, all in one ``torch.compile``."""
    import torch

    softcap = shape.head.logit_softcap

    def logprobs(hidden: Any, weight: Any, labels: Any) -> tuple[Any, Any]:
        z = (hidden @ weight.t()).float()
        if softcap is not None:
            z = softcap * torch.tanh(z / softcap)
        logp = torch.log_softmax(z, -1)
        return logp.gather(1, labels[:, None])[:, 0], -(logp.exp() * logp).sum(-1)

    compiled = torch.compile(logprobs, dynamic=False)

    def function(hidden: Any, weight: Any, labels: Any) -> Tensors:
        return dict(zip(("logprobs", "entropy"), compiled(hidden, weight, labels), strict=True))

    return Peer("torch.compile, stored logits", "logprob+entropy", function)


def torch_linear_cross_entropy(shape: Shape) -> Peer | str:
    """PyTorch's own, chunked over tokens where this version has the option for it."""
    import torch

    if not hasattr(torch.nn.functional, "linear_cross_entropy"):
        return f"torch {torch.__version__} has no torch.nn.functional.linear_cross_entropy"
    if shape.head.logit_softcap is not None:
        return "has no softcap"
    chunked = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    options = {"options": chunked()} if chunked else {}

    def function(hidden: Any, weight: Any, labels: Any) -> Tensors:
        loss = torch.nn.functional.linear_cross_entropy(hidden, weight, labels, reduction="sum", **options)
        return {"loss": -loss}

    return Peer("torch F.linear_cross_entropy, loss only", "sum of logprobs", function)


def liger_scaled(shape: Shape) -> Peer | str:
    """Liger's per-token kernel for reinforcement learning: negative log-likelihood and entropy."""
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction as Function

    if shape.head.logit_softcap is not None:
        return "has no softcap"

    def function(hidden: Any, weight: Any, labels: Any) -> Tensors:
        temperature, ignore_index, tiles_per_cluster, with_entropy = 1.0, -100, 1, True
        nll, entropy = Function.apply(
            hidden, weight, labels, temperature, ignore_index, tiles_per_cluster, with_entropy
        )
        return {"logprobs": -nll, "entropy": entropy}

    return Peer("Liger scaled cross entropy", "logprob+entropy", function)


def liger_cross_entropy(shape: Shape) -> Peer | str:
    """Liger's fused linear cross entropy, whose forward computes the gradients of a scalar loss."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    softcap = shape.head.logit_softcap

    def function(hidden: Any, weight: Any, labels: Any) -> Tensors:
        return {"loss": -liger_fused_linear_cross_entropy(hidden, weight, labels, reduction="sum", softcap=softcap)}

    return Peer("Liger fused linear CE, loss only", "sum of logprobs", function)


def apple(shape: Shape) -> Peer | str:
    """Apple's Cut Cross-Entropy, which leaves out gradients below a threshold."""
    return _apple("Apple CCE, no entropy", shape, {})


def apple_exact(shape: Shape) -> Peer | str:
    """Apple's Cut Cross-Entropy without that threshold."""
    return _apple("Apple CCE exact, no entropy", shape, {"filter_eps": None})


def _apple(label: str, shape: Shape, options: dict[str, Any]) -> Peer | str:
    from cut_cross_entropy import linear_cross_entropy

    softcap = shape.head.logit_softcap

    def function(hidden: Any, weight: Any, labels: Any) -> Tensors:
        nll = linear_cross_entropy(hidden, weight, labels, softcap=softcap, reduction="none", impl="cce", **options)
        return {"logprobs": -nll}

    return Peer(label, "logprob", function)


def quack(shape: Shape) -> Peer | str:
    """QuACK's linear cross entropy, chunked over tokens, whose forward computes the gradients of a scalar loss."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    if shape.head.logit_softcap is not None:
        return "has no softcap"

    def function(hidden: Any, weight: Any, labels: Any) -> Tensors:
        return {"loss": -chunked_linear_cross_entropy(hidden, weight, labels, chunk_size=4096, reduction="sum")}

    return Peer("QuACK chunked linear CE, loss only", "sum of logprobs", function)


BUILDERS = (
    torch_compile, torch_linear_cross_entropy, liger_scaled, liger_cross_entropy, apple, apple_exact, quack,
)  # fmt: skip
PEERS: dict[str, Callable[[Shape], Peer | str]] = dict(zip(shapes.PEERS, BUILDERS, strict=True))


def peer_candidates(problem: Problem, wanted: Sequence[str] | None = None) -> tuple[list[Candidate], dict[str, str]]:
    """The rows of every peer that can run here, and why the others cannot. ``wanted`` are their keys; None: all."""
    reason = _no_torch_gpu()
    chosen = {key: build for key, build in PEERS.items() if wanted is None or key in wanted}
    if reason is not None:
        return [], dict.fromkeys(chosen, reason)
    rows: list[Candidate] = []
    skipped: dict[str, str] = {}
    for key, build in chosen.items():
        try:
            peer = build(problem.shape)
        except ImportError as missing:
            peer = f"not installed: {missing}"
        except Exception as failure:  # someone else's package may fail to load in any way, and must not end the run
            peer = f"does not load: {type(failure).__name__}: {failure}"
        if isinstance(peer, str):
            skipped[key] = peer
        else:
            rows += [_candidate(key, peer, problem, direction) for direction in (FORWARD, BOTH)]
    return rows, skipped


def trl_divergence(direction: str) -> Callable[..., Any]:
    """TRL's divergence of two heads, tile by tile with Triton; it computes the student's entropy too."""

    def function(*arrays: Any) -> Any:
        from trl.kernels.chunked_divergence import ChunkedDivergenceFunction as Function

        hidden, weight, teacher_hidden, teacher_weight = arrays
        beta = {"forward": 0.0, "reverse": 1.0, "jsd": 0.5}[direction]
        return Function.apply(hidden, weight, None, teacher_hidden, teacher_weight, None, beta)[0]

    return function


def compile_divergence(function: Callable[..., Any], *operands: jax.Array) -> Run:
    """``function`` of tensors, and its gradients in the student's, weighted by the last operand."""
    reason = _no_torch_gpu()
    if reason is not None:
        raise ImportError(reason)
    import torch

    *arrays, seed = (torch.utils.dlpack.from_dlpack(x).detach() for x in operands)
    student = [x.requires_grad_() for x in arrays[:2]]

    def launch() -> tuple[Any, ...]:
        kl = function(*student, *arrays[2:])
        return kl.detach(), *torch.autograd.grad((seed * kl).sum(), student)

    def wait(results: tuple[Any, ...]) -> Any:
        torch.cuda.synchronize()
        return [jnp.from_dlpack(x.contiguous()) for x in results]

    return _measured_by_torch(launch, wait)


def release() -> None:
    """Gives PyTorch's unused memory back to the device, for JAX to use."""
    if _no_torch_gpu() is None:
        import torch

        torch.compiler.reset()
        torch.cuda.empty_cache()


def _no_torch_gpu() -> str | None:
    if jax.default_backend() != "gpu":
        return f"peers are timed on CUDA GPUs, this is {jax.default_backend()}"
    try:
        import torch
    except ImportError as missing:
        return f"not installed: {missing}"
    return None if torch.cuda.is_available() else f"torch {torch.__version__} sees no CUDA GPU"


def _candidate(key: str, peer: Peer, problem: Problem, direction: str) -> Candidate:
    return Candidate(
        key,
        peer.label,
        direction,
        lambda: _compile(peer, problem, direction),
        results=lambda outputs: {name: jnp.from_dlpack(x.detach().contiguous()) for name, x in outputs.items()},
        objective=peer.objective,
        logits_rounded=True,
    )


def _compile(peer: Peer, problem: Problem, direction: str) -> Run:
    """Its forward, or both passes."""
    import torch

    hidden, weight, labels, a, b = (
        torch.utils.dlpack.from_dlpack(x) for x in (*problem.arrays[:3], *cotangents(problem, peer.objective))
    )
    hidden, weight, labels = hidden.detach().requires_grad_(), weight.detach().requires_grad_(), labels.long()

    def forward() -> Tensors:
        with torch.no_grad():
            return peer.function(hidden, weight, labels)

    def forward_backward() -> Tensors:
        outputs = peer.function(hidden, weight, labels)
        weights = {"logprobs": a, "entropy": b, "loss": 1.0}
        loss = sum((outputs[name] * weights[name]).sum() for name in outputs)
        dhidden, dweight = torch.autograd.grad(loss, (hidden, weight))
        return {name: x.detach() for name, x in outputs.items()} | {"dhidden": dhidden, "dweight": dweight}

    def wait(outputs: Tensors) -> Tensors:
        torch.cuda.synchronize()
        return outputs

    return _measured_by_torch(forward if direction == FORWARD else forward_backward, wait)


def _measured_by_torch(launch: Callable[[], Any], wait: Callable[[Any], Any]) -> Run:
    """A first call, which compiles, and a second one, whose peak above operands and results is the memory."""
    import torch

    start = time.perf_counter()
    wait(launch())
    compile_seconds = time.perf_counter() - start
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = launch()
    wait(results)
    kept = sum(x.numel() * x.element_size() for x in jax.tree.leaves(results))
    return Run(launch, wait, max(0, torch.cuda.max_memory_allocated() - before - kept), compile_seconds)
