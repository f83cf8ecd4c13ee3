"""Digests of results and gradients on a CPU. A change of structure must not change a bit of them.

    python -m tests.digests > before.json          # on one commit
    python -m tests.digests before.json            # on another: prints what differs

Public functions only, so that it runs on any commit: ``PYTHONPATH=there python -m tests.digests``.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lce_jax
import lce_torch_bridge
from lce_jax import losses

T, H, V = 48, 32, 1304
RNG = np.random.default_rng(0)
HIDDEN, TEACHER = RNG.standard_normal((2, T, H), np.float32)
WEIGHT, TEACHERS = (RNG.standard_normal((2, V, H), np.float32) * 2 / H**0.5).astype(np.float32)
LABELS = RNG.integers(0, V, T).astype(np.int32)
LABELS[::9] = -100
WHERE, TEMPERATURE = RNG.random(T) < 0.7, RNG.uniform(0.5, 2, T).astype(np.float32)
IDS, BIAS, SEED = RNG.integers(-1, V, (T, 5)).astype(np.int32), RNG.standard_normal(V).astype(np.float32), RNG.random(T)
SEED = SEED.astype(np.float32)

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "where": {"where": WHERE},
    "temperature": {"temperature": TEMPERATURE},
    "cap, scale": {"logit_softcap": 9.0, "logit_scale": 0.5, "temperature": 0.7},
    "stats": {"stats": True},
    "no entropy": {"entropy": False},
    "padded": {"vocab_size": 1301},
    "cache": {"cache_bytes": 1 << 30},
    "part of a cache": {"cache_bytes": 1 << 15},
    "bias": {"bias": BIAS},
    "candidates": {"candidates": IDS},
    "floor": {"logit_floor": np.float32(-1.5), "stats": True},
    "parts": {"vocab_part_size": 163 * 8},
}
NOT_OF_LOSS = {"stats", "entropy", "cache_bytes", "candidates", "vocab_part_size"}


def digest(x: Any) -> str:
    array = np.asarray(x.detach().float() if isinstance(x, torch.Tensor) else jnp.asarray(x).astype(jnp.float32))
    return hashlib.sha256(f"{x.dtype} {array.shape}".encode() + np.ascontiguousarray(array).tobytes()).hexdigest()[:12]


def total(out: Any) -> Any:
    """Returns a sum that gives each differentiable result another cotangent."""
    fields = [out.logprobs, out.entropy, out.lse, out.candidate_logprobs]
    weighted = [x * (SEED[:, None] if x.ndim == 2 else SEED) * (i + 1) for i, x in enumerate(fields) if x is not None]
    return sum(jnp.sum(x) for x in weighted)


def functions() -> dict[str, Callable[..., Any]]:
    """Returns functions ``(hidden, weight, **options) -> a scalar, all results`` by name."""

    def logprobs(h: Any, w: Any, **options: Any) -> Any:
        out = lce_jax.linear_logprobs(h, w, LABELS, **options)
        return total(out), out

    def loss(h: Any, w: Any, **options: Any) -> Any:
        loss_options = {name: x for name, x in options.items() if name not in NOT_OF_LOSS}
        return lce_jax.linear_loss(
            losses.with_entropy_bonus(losses.ppo_clip, 0.1), h, w, LABELS, SEED - 8, SEED, **loss_options
        )

    def cross_entropy(h: Any, w: Any, **options: Any) -> Any:
        loss_options = {name: x for name, x in options.items() if name not in ("stats", "entropy", "candidates")}
        loss = lce_jax.linear_cross_entropy(h, w, LABELS, z_loss=1e-2, **loss_options)
        return loss, loss

    def kl(h: Any, w: Any, direction: str = "forward", **options: Any) -> Any:
        kl_options = {
            name: x for name, x in options.items() if name in ("where", "temperature", "vocab_size", "cache_bytes")
        }
        divergence = lce_jax.linear_kl(h, w, TEACHER, TEACHERS.astype(w.dtype), direction=direction, **kl_options)
        return jnp.sum(divergence * SEED), divergence

    return {
        "linear_logprobs": logprobs, "linear_loss": loss, "linear_cross_entropy": cross_entropy, "linear_kl": kl,
        "jsd": lambda h, w, **options: kl(h, w, "jsd", **options),
    }  # fmt: skip


def compute_in_jax() -> Iterator[tuple[str, Any]]:
    for dtype in ("float32", "bfloat16"):
        h, w = jnp.asarray(HIDDEN), jnp.asarray(WEIGHT, dtype)
        for name, function in functions().items():
            for option, options in OPTIONS.items():
                step = jax.jit(
                    jax.value_and_grad(lambda h, w, f=function, o=options: f(h, w, **o), (0, 1), has_aux=True)
                )
                yield f"{name}, {dtype}, {option}", step(h, w)
        yield f"linear_topk, {dtype}", jax.jit(lambda h, w: lce_jax.linear_topk(h, w, 7, where=WHERE))(h, w)[1:]
        logits = jax.value_and_grad(lambda h, w: jnp.sum(lce_jax.linear_logits(h, w, IDS) * SEED[:, None]), (0, 1))
        yield f"linear_logits, {dtype}", jax.jit(logits)(h, w)
        yield (
            f"masked_logprobs, {dtype}",
            lce_jax.masked_logprobs(lce_jax.linear_logits(h, w, IDS), IDS, IDS[:, 0]).logprobs[IDS[:, 0] >= 0],
        )


def compute_on_meshes() -> Iterator[tuple[str, Any]]:
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(kind,) * 2)
        with jax.set_mesh(mesh):
            h = jax.device_put(HIDDEN, NamedSharding(mesh, P("data")))
            w = jax.device_put(WEIGHT.astype(jnp.bfloat16), NamedSharding(mesh, P("tensor")))
            for name, function in functions().items():
                for option in ("plain", "where", "temperature", "cap, scale"):
                    options = OPTIONS[option]
                    step = jax.value_and_grad(lambda h, w, f=function, o=options: f(h, w, **o), (0, 1), has_aux=True)
                    yield f"{name}, {kind}, {option}", jax.jit(step)(h, w)


def compute_in_torch() -> Iterator[tuple[str, Any]]:
    def make_tensors(options: dict[str, Any]) -> dict[str, Any]:
        tensors = {name: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
        return {name: float(x) if isinstance(x, np.floating) else x for name, x in tensors.items()}

    for dtype in (torch.float32, torch.bfloat16):
        for option, options in OPTIONS.items():
            h, w = torch.tensor(HIDDEN, requires_grad=True), torch.tensor(WEIGHT).to(dtype).requires_grad_()
            out = lce_torch_bridge.linear_logprobs(h, w, torch.from_numpy(LABELS).long(), **make_tensors(options))
            fields = [x for x in (out.logprobs, out.entropy, out.lse, out.candidate_logprobs) if x is not None]
            sum(x.sum() * (i + 1) for i, x in enumerate(fields)).backward()
            yield f"torch, linear_logprobs, {dtype}, {option}", [*(x for x in out if x is not None), h.grad, w.grad]
        h, w = torch.tensor(HIDDEN, requires_grad=True), torch.tensor(WEIGHT).to(dtype).requires_grad_()
        labels = torch.from_numpy(LABELS).long()
        summed, out = lce_torch_bridge.linear_loss(lambda lp, entropy, lse: lse - 2 * lp - entropy, h, w, labels)
        yield f"torch, linear_loss, {dtype}", [summed, out.logprobs, *torch.autograd.grad(summed, (h, w))]
        kl = lce_torch_bridge.linear_kl(h, w, torch.tensor(TEACHER), torch.tensor(TEACHERS).to(dtype))
        yield f"torch, linear_kl, {dtype}", [kl, *torch.autograd.grad(kl.sum(), (h, w))]
        yield f"torch, linear_topk, {dtype}", list(lce_torch_bridge.linear_topk(h, w, 7)[1:])


def digests() -> dict[str, str]:
    digests_by_name = {}
    for generate in (compute_in_jax, compute_on_meshes, compute_in_torch):
        for name, tree in generate():
            leaves = tree if isinstance(tree, list) else jax.tree.leaves(tree)
            digests_by_name |= {f"{name}, {i}": digest(x) for i, x in enumerate(leaves)}
    return digests_by_name


if __name__ == "__main__":
    after = digests()
    if sys.argv[1:]:
        before = json.loads(pathlib.Path(sys.argv[1]).read_text())
        names = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
        print("\n".join([*names, f"{len(names)} of {len({*before, *after})} differ"]))
        sys.exit(bool(names))
    print(json.dumps(after, indent=0))
