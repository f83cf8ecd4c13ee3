"""The bridge on real GPUs: results, memory, ranks, all functions. ``pytest -s`` prints the figures."""

from __future__ import annotations

import dataclasses
import gc
import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from lce_torch_bridge import linear_kl, linear_logits, linear_logprobs, linear_loss, linear_topk
from lce_torch_bridge.tensors import _device
from lce_torch_bridge.through_jax import _runtime as runtime
from lce_torch_bridge.through_jax._dlpack import GPU_ALIGNMENT, to_jax
from tests import cases
from tests.torch import problem as p
from tests.torch import test_kernels_threshold as threshold
from tests.torch.gpu_problem import draw
from tests.torch.processes import ranks, run, torchrun
from tests.torch.sanitized import described_as
from tests.torch.test_parity import NOT_SERVED

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("vocab_size", [None, 8000])
def test_parity(implementation: str, vocab_size: int | None) -> None:
    problem = draw(700, 512, 8192)
    seeds = p.seeds_like(problem.labels)
    options = dict(temperature=0.8, logit_softcap=5.0, vocab_size=vocab_size)
    want, wanted = p.exact(problem, seeds, **options)
    _, plain = p.gradients(problem, seeds, call=p.stored, dtype=torch.bfloat16, **options)
    for cache_bytes in (0, 1 << 30):
        out, grads = p.gradients(
            problem, seeds, implementation=implementation, stats=True, cache_bytes=cache_bytes, **options
        )
        assert max(map(p.value_error, out[:5], want[:5])) < 1e-5
        for got, path, true in zip(grads, plain, wanted, strict=True):
            assert p.relative_norm(got, true) < 1.02 * p.relative_norm(path, true)


def test_float32_is_exact_where_torch_is_set_so() -> None:
    assert torch.get_float32_matmul_precision() == "highest"
    problem = draw(300, 256, 4096, torch.float32)
    seeds = p.seeds_like(problem.labels)
    out, grads = p.gradients(problem, seeds)
    want, wanted = p.exact(problem, seeds)
    assert max(map(p.value_error, out[:3], want[:3])) < 5e-6
    assert max(map(p.relative_norm, grads, wanted)) < 2e-6


def test_kept_rows_have_the_bits_of_the_full_call(implementation: str) -> None:
    problem = draw(9000, 512, 8192)
    told = dict(implementation=implementation, stats=True)
    full = linear_logprobs(*problem, **told)
    for count in (1, 100, 4096, 8999):
        rows = torch.randperm(9000, device="cuda")[:count]
        out = linear_logprobs(*problem, where=rows, **told)
        assert all(torch.equal(got[rows], want[rows]) for got, want in zip(out[:5], full[:5], strict=True))


def test_zero_copy_and_alignment() -> None:
    x = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)
    assert to_jax(x).unsafe_buffer_pointer() == x.data_ptr()
    shifted = torch.zeros(64 * 64 + 1, device="cuda", dtype=torch.bfloat16)[1:]
    assert shifted.data_ptr() % GPU_ALIGNMENT
    assert to_jax(shifted).unsafe_buffer_pointer() % GPU_ALIGNMENT == 0


def test_memory_is_flat_over_fifty_steps(implementation: str) -> None:
    problem = draw(2048, 512, 32768)
    seeds = p.seeds_like(problem.labels)
    device = runtime.find_jax_device(problem.hidden.device)
    torches, jaxes = [], []
    for _ in range(50):
        p.gradients(problem, seeds, implementation=implementation)
        torch.cuda.synchronize()  # memory that the GPU still reads is held until then
        torches.append(torch.cuda.memory_allocated())
        jaxes.append(device.memory_stats()["bytes_in_use"])
    gc.collect()
    peak = device.memory_stats()["peak_bytes_in_use"]
    print(
        f"{implementation}: JAX {jaxes[9] >> 20} MiB after 10 steps, {jaxes[-1] >> 20} MiB after 50, peak {peak >> 20}"
    )
    # JAX frees what it read once it learns that the GPU is done: after any one step some may still be held.
    assert min(torches[40:]) <= min(torches[10:20])
    assert min(jaxes[40:]) <= min(jaxes[10:20])
    assert device.memory_stats()["bytes_in_use"] <= jaxes[-1]


@pytest.mark.parametrize("last", ["hidden.grad = weight.grad = out = None", "pass"])
def test_nothing_is_preallocated_and_the_process_ends_well(way: str, last: str) -> None:
    done = run(
        f"""
        import torch, lce_torch_bridge, jax
        lce_torch_bridge.launch_with("{way}")
        torch.cuda.set_device(torch.cuda.device_count() - 1)
        hidden = torch.randn(1000, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(32000, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3):
            out = lce_torch_bridge.linear_logprobs(hidden, weight, torch.arange(1000, device="cuda"))
            (out.logprobs.sum() + out.entropy.sum()).backward()
        assert torch.cuda.current_device() == torch.cuda.device_count() - 1
        stats = lce_torch_bridge.through_jax._runtime.find_jax_device(hidden.device).memory_stats()
        assert stats.get("pool_bytes", 0) < 4 << 30, stats
        lce_torch_bridge.launch_with(None)
        cpu = lce_torch_bridge.linear_logprobs(hidden.detach().cpu(), weight.detach().cpu(), torch.arange(1000))
        assert (cpu.logprobs - out.logprobs.cpu()).abs().max() < 1e-3
        {last}
        """,
        timeout=300,
        JAX_PLATFORMS="cuda,cpu",
    )
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout}\n{done.stderr}"


def test_a_process_may_end_while_the_gpu_works(way: str) -> None:
    done = run(
        f"""
        import torch, lce_torch_bridge
        lce_torch_bridge.launch_with("{way}")
        hidden = torch.randn(16384, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(131072, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        held = torch.cuda.memory_allocated()
        for _ in range(2):
            labels = torch.arange(16384, device="cuda")
            total, _ = lce_torch_bridge.linear_loss(lambda logprobs, *_: logprobs, hidden, weight, labels)
            torch.autograd.grad(total, (hidden, weight))
        peak = torch.cuda.max_memory_allocated() - held
        if "{way}" == "jax":
            device = lce_torch_bridge.through_jax._runtime.find_jax_device(hidden.device)
            peak = device.memory_stats()["peak_bytes_in_use"]
        print("peak", peak >> 20)
        assert peak < 4 << 30, peak  # one chunk's exponentials, 1 GiB of four, and dweight in float32, 2 GiB
        """,
        timeout=300,
        JAX_PLATFORMS="cuda,cpu",
    )
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout}\n{done.stderr}"


@pytest.mark.multi_gpu
def test_two_ranks_that_see_every_gpu(tmp_path: Path) -> None:
    """NCCL on the caller's group; the same bits on both ranks; torch's current device stays as it was."""
    checks = (
        "class_weights", "foreign_labels", "negative_controls", "collectives", "kept_rows", "uneven", "rounding",
        "every_function", "more_of_every_function", "of_dtensors",
        "chosen_on_one_rank", "rows_that_differ", "in_16_bits", "whole_weights", "right_groups", "other_options",
    )  # fmt: skip
    command = ["-W", "error", "-m", "tests.torch.shards_worker", *checks]
    for said in ranks(2, command, tmp_path / "logs", 400, torchrun, DEVICE="cuda", JAX_PLATFORMS="cuda,cpu"):
        assert said.count("done ") == len(checks)


def test_jnp_is_on_the_gpu_that_torch_uses() -> None:
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    x = torch.ones(4, 256, device=device, dtype=torch.bfloat16)
    weight = torch.ones(1024, 256, device=device, dtype=torch.bfloat16)
    out = linear_logprobs(x, weight, torch.zeros(4, dtype=torch.int64, device=device))
    assert out.lse.device == device
    assert jnp.allclose(to_jax(out.entropy), np.log(1024), atol=1e-4)


VALUE = 1e-5
OF_OTHER_KERNELS = {"negative scale", "float32 hidden, bfloat16 weight", "bfloat16 hidden, float32 weight"}


def fitted(test: cases.TestCase) -> cases.TestCase:
    """The case in 16 bits and in shapes that the Hopper kernels take, few so that the cases share programs."""
    dtype = "float16" if test.dtype == "float16" else "bfloat16"
    return dataclasses.replace(test, dtype=dtype, H=128, V=384)


CASES = [
    fitted(test)
    for test in cases.MATRIX
    if not NOT_SERVED & {name for name, _ in test.options} and test.name not in OF_OTHER_KERNELS
]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("test", CASES, ids=str)
def test_case(test: cases.TestCase) -> None:
    check_case(test)


@pytest.mark.usefixtures("direct")
@pytest.mark.parametrize("capability", ["8.0", "12.0"])
@pytest.mark.parametrize("test", CASES, ids=str)
def test_case_on_other_generations(test: cases.TestCase, capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hopper GPU runs their kernels too."""
    monkeypatch.setattr(_device, "_describe_gpu", described_as(capability))
    check_case(test)


def check_case(test: cases.TestCase) -> None:
    """Results near float64's, and gradients as near as those of torch's own products."""
    problem, options, seeds = p.from_case(test)
    problem, seeds = problem.to("cuda"), [seed.cuda() for seed in seeds]
    options = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    out, (dhidden, dweight) = p.gradients(problem, seeds, **options)

    keep = options.get("where", torch.ones_like(problem.labels, dtype=torch.bool))
    temperature = options.get("temperature", 1.0)
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.expand(problem.labels.shape)[keep]
    told: Any = {name: options[name] for name in ("logit_scale", "logit_softcap", "vocab_size") if name in options}
    told["temperature"] = temperature
    true = p.Problem(problem.hidden[keep], problem.weight, problem.labels[keep])
    if out.entropy is None:
        seeds[1] = 0 * seeds[1]
    kept = [seed[keep] for seed in seeds]
    want, wanted = p.exact(true, kept, **told)
    _, plain = p.gradients(true, kept, call=p.stored, dtype=problem.weight.dtype, **told)
    scale = 1 + test.spread**2 / 10  # as in test_parity
    for got, exact in zip(out[:5], want[:5], strict=True):
        if got is not None:
            assert p.value_error(got[keep], exact) < VALUE * scale
            assert not got[~keep].any()
    assert not dhidden[~keep].any()
    for got, exact, path in zip((dhidden[keep], dweight), wanted, plain, strict=True):
        assert p.relative_norm(got, exact) <= 1.02 * p.relative_norm(path, exact)


def twice(call: Any) -> Any:
    """The results of a call, which a second one must have in the same bits."""
    first, second = call(), call()
    assert all(map(torch.equal, first, second))
    return first


@pytest.mark.parametrize("cache_bytes", [0, 1 << 30])
def test_candidates(implementation: str, cache_bytes: int) -> None:
    problem = draw(3000, 512, 16000)
    seeds, ids = p.seeds_like(problem.labels, K=64), p.candidates_like(problem.labels, K=64, V=16000)
    options: Any = dict(candidates=ids, vocab_size=15993)
    want, wanted = p.exact(problem, seeds, **options)
    _, plain = p.gradients(problem, seeds, call=p.stored, dtype=torch.bfloat16, **options)

    def call() -> Any:
        out, grads = p.gradients(problem, seeds, implementation=implementation, cache_bytes=cache_bytes, **options)
        return *out[:3], out.candidate_logprobs, *grads

    *fields, dhidden, dweight = twice(call)
    assert max(map(p.value_error, fields, (*want[:3], want.candidate_logprobs))) < VALUE
    for got, path, true in zip((dhidden, dweight), plain, wanted, strict=True):
        assert p.relative_norm(got, true) < 1.02 * p.relative_norm(path, true)


@pytest.mark.parametrize("options", threshold.OPTIONS, ids=str)
def test_a_threshold(implementation: str, options: dict[str, Any]) -> None:
    """With candidates and with a floor, in several batches."""
    if implementation != "mosaic_gpu":
        pytest.skip("leaves nothing out")
    V = 16000
    options = {**options, "vocab_size": V - 7}
    problem = threshold.peaked(3000, V, V - 7).to("cuda")
    twice(lambda: threshold.check(problem, implementation=implementation, **options))


def test_logits_at_ids() -> None:
    problem = draw(3000, 512, 16000)
    ids, seed = p.candidates_like(problem.labels, K=64, V=16000), p.seeds_like(problem.labels, K=64)[3]
    true = problem.hidden.double().requires_grad_(), problem.weight.double().requires_grad_()
    want = p.stored_logits(*true, ids)
    wanted = torch.autograd.grad((seed * want).sum(), true)

    def call() -> Any:
        leaves = problem.leaves()
        z = linear_logits(*leaves[:2], ids)
        return z, *torch.autograd.grad((seed * z).sum(), leaves[:2])

    z, *grads = twice(call)
    assert p.value_error(z, want) < VALUE
    assert max(map(p.relative_norm, grads, wanted)) < 2e-3  # of one rounding to bfloat16


@pytest.mark.parametrize("cache_bytes", [0, 1 << 30])
@pytest.mark.parametrize("direction", ["forward", "reverse", "jsd", "tv"])
def test_divergences(direction: Any, cache_bytes: int) -> None:
    """Kernels that JAX runs: no further from float64 than one rounding of the gradient in the logits."""
    own, teachers = draw(3000, 512, 16000), p.draw(3000, 256, 16000, torch.bfloat16, seed=1).to("cuda")
    (seed, *_), told = p.seeds_like(own.labels), dict(direction=direction, vocab_size=15993)

    def exact(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        heads = (hidden, weight), (teachers.hidden.double(), teachers.weight.double())
        log_q, log_p = ((x @ w.T)[:, :15993].log_softmax(-1) for x, w in heads)
        if direction == "jsd":
            log_m = torch.logaddexp(log_q, log_p) - math.log(2)
            return ((log_p.exp() * (log_p - log_m) + log_q.exp() * (log_q - log_m)) / 2).sum(-1)
        if direction == "tv":
            return (log_p.exp() - log_q.exp()).abs().sum(-1) / 2
        d = log_p - log_q
        return (log_p.exp() * d if direction == "forward" else log_q.exp() * -d).sum(-1)

    true = [x.double().requires_grad_() for x in own[:2]]
    want = exact(*true)
    wanted = torch.autograd.grad((seed * want).sum(), true)

    def call() -> Any:
        leaves = own.leaves()[:2]
        kl = linear_kl(*leaves, *teachers[:2], cache_bytes=cache_bytes, implementation="mosaic_gpu", **told)
        return kl, *torch.autograd.grad((seed * kl).sum(), leaves)

    kl, *grads = twice(call)
    assert p.value_error(kl, want) < VALUE
    assert max(map(p.relative_norm, grads, wanted)) < (5e-3 if cache_bytes else 4e-3)  # as tests/gpu/test_kl.py


@pytest.mark.parametrize("rows", [128, 2048, None], ids=["forty chunks", "three chunks", "one chunk"])
def test_a_loss_in_the_forward(implementation: str, rows: int | None) -> None:
    """No further from float64 than two passes are, with the losses scaled inside."""
    problem = draw(5000, 512, 16000)
    advantages = torch.linspace(-1, 1, 5000, device=problem.hidden.device)

    def loss_fn(logprobs: torch.Tensor, entropy: torch.Tensor, lse: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (-torch.exp(logprobs / 8) * x - 0.1 * entropy + 0.01 * lse**2) / 37

    double = p.Problem(problem.hidden.double(), problem.weight.double(), problem.labels).leaves()
    true = loss_fn(*p.stored(*double)[:3], advantages).sum()
    wanted = torch.autograd.grad(true, double[:2])
    leaves = problem.leaves()
    out = linear_logprobs(*leaves, implementation=implementation)
    two_passes = torch.autograd.grad(loss_fn(*out[:3], advantages).sum(), leaves[:2])

    def call() -> Any:
        chunk_bytes = None if rows is None else p.bytes_of(rows, problem.weight)
        told: Any = dict(implementation=implementation, chunk_bytes=chunk_bytes)
        total, _ = linear_loss(loss_fn, *leaves, advantages, **told)
        return total, *torch.autograd.grad(total, leaves[:2])

    total, *grads = twice(call)
    assert abs((total / true).item() - 1) < VALUE
    for got, path, want in zip(grads, two_passes, wanted, strict=True):
        assert p.relative_norm(got, want) < 1.02 * p.relative_norm(path, want)


def test_the_most_likely_tokens() -> None:
    """Their logits are the largest of the stored ones but for rounding, which may change places of neighbours."""
    problem = draw(1000, 512, 16000)
    top = linear_topk(*problem[:2], 64)
    z = problem.hidden.double() @ problem.weight.double().T
    want = z.topk(64)
    assert p.value_error(z.gather(1, top.ids), want.values) < VALUE
    assert p.value_error(top.logprobs, want.values - z.logsumexp(1, keepdim=True)) < VALUE
    assert (top.ids == want.indices).double().mean() > 0.999


def test_logits_are_float32_and_never_rounded(implementation: str) -> None:
    problem = draw(1000, 1024, 16000)
    problem = problem._replace(weight=2 * problem.weight)  # logits whose rounding is well above the bound
    z = torch.mm(problem.hidden, problem.weight.t(), out_dtype=torch.float32)
    out = linear_logprobs(*problem, implementation=implementation)

    def scores(z: torch.Tensor) -> list[torch.Tensor]:
        logp = z.log_softmax(-1)
        return [logp.gather(-1, problem.labels[:, None])[:, 0], -(logp.exp() * logp).sum(-1)]

    for got, want, rounded in zip(out[:2], scores(z), scores(z.bfloat16().float()), strict=True):
        assert got is not None
        assert p.value_error(got, want) < VALUE
        assert p.value_error(rounded, want) > 100 * VALUE
