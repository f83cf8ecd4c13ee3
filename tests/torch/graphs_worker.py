"""One of two ranks, each with its part of the vocabulary: CUDA graphs with NCCL in them, Megatron's among them.

`test_gpu_ranks` starts them: ``torchrun --nproc-per-node 2 -m tests.torch.graphs_worker <name of a check>...``
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from lce_torch_bridge import launch_with, linear_logprobs
from tests.torch import problem as p
from tests.torch.gpu_problem import capture_graph, draw
from tests.torch.ranks import same_on_all_ranks, shard

REPLAYS = 100
STEPS = 4  # that are queued together


def replays(group: dist.ProcessGroup) -> None:
    """Replays with new contents have the bits of eager runs, and results are the same bits on both ranks."""
    problem = draw(1000, 512, 8192)
    seeds = p.seeds_like(problem.labels)
    weight = shard(problem.weight, group).requires_grad_()
    hidden = problem.hidden.requires_grad_()
    generator = torch.Generator("cuda").manual_seed(0)  # the same numbers on both ranks
    for cache_bytes in (0, 1 << 30):

        def step(cache_bytes: int = cache_bytes) -> list[torch.Tensor]:
            out = linear_logprobs(
                hidden, weight, problem.labels, tp_group=group, reduce_grad_hidden=True, cache_bytes=cache_bytes
            )
            grads = torch.autograd.grad(p.objective(out, seeds), (hidden, weight))
            return [*(x.detach() for x in out[:3]), *grads]

        graph, results = capture_graph(step)
        for _ in range(REPLAYS):
            with torch.no_grad():
                hidden.normal_(generator=generator)
                problem.labels.random_(0, 8192, generator=generator)
            graph.replay()
            assert all(map(torch.equal, results, step()))
        assert all(same_on_all_ranks(x, group) for x in results[:4])
        whole = p.Problem(hidden.detach(), problem.weight, problem.labels)
        want, wanted = p.exact(whole, seeds)
        _, plain = p.gradients(whole, seeds, call=p.stored, dtype=torch.bfloat16)
        assert max(map(p.value_error, results[:3], want[:3])) < 1e-5
        shards = [wanted[0], shard(wanted[1], group)], [plain[0], shard(plain[1], group)]
        for got, true, path in zip(results[3:], *shards, strict=True):
            assert p.relative_norm(got, true) < 1.02 * p.relative_norm(path, true)


def losses(batches: Iterator[Any], model: Any) -> Any:
    """Megatron's ``forward_step_func``."""
    from lce_torch_bridge.megatron import output_processor

    given = next(batches)
    inputs = (given[name] for name in ("tokens", "positions", "mask"))
    context = {"labels": given["labels"]}
    out = model(*inputs, output_processor=output_processor, output_processor_context=context)
    # Float16Module makes a plain tuple of a named one.
    return out, lambda out: ((out[0] + 0.1 * out[1]).mean(), {"logprobs": out[0].detach()})


def megatron(group: dist.ProcessGroup) -> None:
    """Megatron's graph of a whole iteration with the head inside: the bits of its eager iterations."""
    from megatron.core import parallel_state
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper, get_shared_capture_stream
    from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

    from tests.torch import megatron_models

    del group
    torch.cuda.set_stream(get_shared_capture_stream())  # autograd remembers on which stream it began
    megatron_models.HIDDEN, megatron_models.VOCAB = 128, 1024  # what the kernels serve
    megatron_models.prepare()
    config: Any = dict(tp=2, dtype="bfloat16", fusion=True)
    models = [megatron_models.data_parallel(megatron_models.build(**config)) for _ in range(2)]

    in_graph = FullCudaGraphWrapper(forward_backward_no_pipelining, cuda_graph_warmup_steps=2)
    for iteration in range(12):
        found, batches = [], [megatron_models.batch(2 * iteration + i, vocab_size=1024) for i in range(2)]
        given = [
            {name: getattr(batch, name) for name in ("tokens", "positions", "mask", "labels")} for batch in batches
        ]
        for run, model in zip((in_graph, forward_backward_no_pipelining), models, strict=True):
            model.zero_grad_buffer()
            told: Any = dict(model=[model], num_microbatches=2, seq_length=megatron_models.SEQUENCE)
            told |= dict(micro_batch_size=megatron_models.BATCH, forward_only=False)
            results = run(forward_step_func=losses, data_iterator=iter(given), **told)
            found.append([x["logprobs"] for x in results] + [y.main_grad for y in model.parameters()])
        assert all(map(torch.equal, *found)), iteration
        assert found[0][-1].any()  # of the output layer
        tp = parallel_state.get_tensor_model_parallel_group()
        assert all(same_on_all_ranks(x, tp) for x in found[0][:2])
        with torch.no_grad():
            stock = models[0](*batches[0].inputs, labels=batches[0].labels)
        # Its logits, below 8, are rounded to bfloat16: by 2⁻⁶ at most.
        assert (found[0][0] + stock).abs().max() < 2**-6
    assert FullCudaGraphWrapper.cuda_graph["training"] is not None
    in_graph.reset_cuda_graph()  # NCCL waits for the graphs that hold its collectives before it ends


def time(group: dist.ProcessGroup) -> None:
    """Forward and backward over half the vocabulary, in a loop whose host runs ahead, as in training.

    They take what they take without a group, and the collective of dhidden; 0.52 of what all of the vocabulary takes.
    All are the slower rank's times: a group is as fast as its slowest card.
    """
    T, H, V = 4096, 4096, 151_936
    problem = draw(T, H, V)
    seeds = p.seeds_like(problem.labels)
    hidden, weight = problem.hidden.requires_grad_(), problem.weight.requires_grad_()
    part = shard(problem.weight.detach(), group).requires_grad_()
    summed = torch.zeros(T, H, device="cuda")

    def step(weight: torch.Tensor, **options: Any) -> None:
        out = linear_logprobs(hidden, weight, problem.labels, **options)
        torch.autograd.grad(p.objective(out, seeds), (hidden, weight))

    def measure(call: Callable[[], Any]) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dist.barrier(group)
        torch.cuda.synchronize()
        call()  # the collectives in it bring the ranks' streams together, and the host runs ahead of them
        start.record()
        for _ in range(STEPS):
            call()
        stop.record()
        torch.cuda.synchronize()
        taken = torch.tensor(start.elapsed_time(stop) / STEPS, device="cuda")
        dist.all_reduce(taken, dist.ReduceOp.MAX, group=group)  # the clocks of two cards differ
        return taken.item()

    for cache_bytes in (0, 1 << 31):
        cached: Any = dict(cache_bytes=cache_bytes)
        split = cached | dict(tp_group=group, reduce_grad_hidden=True)
        calls: list[Callable[[], Any]] = [
            lambda told=cached: step(weight, **told),
            lambda told=cached: step(part, **told),
            lambda told=split: step(part, **told),
            lambda: dist.all_reduce(summed, group=group),
        ]
        rounds = [list(map(measure, calls)) for _ in range(8)][2:]
        whole, half, on_two, collective = (sorted(times)[len(times) // 2] for times in zip(*rounds, strict=True))
        print(
            f"TP 2, cache {cache_bytes >> 20} MiB: {on_two:.2f} of {whole:.2f} ms, {on_two / whole:.3f}; half of the "
            f"vocabulary alone {half:.2f}, the collective alone {collective:.2f}",
            flush=True,
        )
        assert on_two <= 1.02 * (half + collective)
        if not cache_bytes:  # with one, the rest is a larger part of less time
            assert on_two <= 0.52 * whole


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    launch_with("direct")
    group = dist.new_group(list(range(dist.get_world_size())))
    for name in sys.argv[1:]:
        globals()[name](group)
        print("done", name, flush=True)
    torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
