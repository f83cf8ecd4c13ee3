"""The bridge on real GPUs: results, memory, ranks. ``pytest -s`` prints the figures."""

from __future__ import annotations

import gc
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from lce_torch_bridge import linear_logprobs
from lce_torch_bridge.through_jax import _runtime as runtime
from lce_torch_bridge.through_jax._runtime import GPU_ALIGNMENT, to_jax
from tests.torch import problem as p
from tests.torch.gpu_problem import draw
from tests.torch.processes import ranks, run, torchrun

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
    device = runtime.jax_device(problem.hidden.device)
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
        stats = lce_torch_bridge.through_jax._runtime.jax_device(hidden.device).memory_stats()
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
            peak = lce_torch_bridge.through_jax._runtime.jax_device(hidden.device).memory_stats()["peak_bytes_in_use"]
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
        "foreign_labels", "negative_controls", "collectives", "kept_rows", "uneven", "rounding",
        "every_function", "of_dtensors",
        "chosen_on_one_rank", "rows_that_differ", "in_16_bits", "whole_weights", "right_groups",
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
