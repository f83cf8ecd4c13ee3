"""NeMo RL (7ea279a) with Megatron, without logits: its fused head is this package's, in each worker that has Megatron.

In front of the script that starts the run, with this file on the path of every node, and lce_torch_bridge in the
environments of all workers:

    PYTHONPATH=$PWD/examples python -m nemo_rl_head examples/run_grpo.py \
        --config ... policy.megatron_cfg.enabled=true policy.megatron_cfg.use_fused_linear_logprobs=true
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import runpy
import sys
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.nn.functional

from lce_torch_bridge import linear_logprobs, rows

calls = 0  # in this process


def logprobs(
    tensor_parallel_hidden_states: torch.Tensor, output_weight_layer: torch.Tensor, runtime_gather_output: bool,
    target: torch.Tensor, vocab_start_index: int, vocab_end_index: int, tp_group: dist.ProcessGroup,
    inference_only: bool = False, cp_group: dist.ProcessGroup | None = None, chunk_size: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """In place of ``from_parallel_hidden_states_to_logprobs``. Hidden states [s / CP / TP, b, h], all tokens [b, s].

    Returns [b, s - 1], as its function without context parallelism, and ``from_parallel_logits_to_logprobs`` with it.
    """
    del runtime_gather_output, chunk_size
    check_shard(output_weight_layer, vocab_start_index, vocab_end_index)
    with torch.no_grad() if inference_only else contextlib.nullcontext():
        labels = rows.next_tokens(target)
        found = over_ranks(tensor_parallel_hidden_states, output_weight_layer, labels, tp_group, cp_group, None)
    return found[:, :-1]


def packed_logprobs(
    tensor_parallel_hidden_states: torch.Tensor, output_weight_layer: torch.Tensor, target: torch.Tensor,
    cu_seqlens_padded: torch.Tensor, unpacked_seqlen: int, vocab_start_index: int, vocab_end_index: int,
    group: dist.ProcessGroup, inference_only: bool = False, cp_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:  # fmt: skip
    """``from_parallel_logits_to_logprobs_packed_sequences`` from hidden states [T / CP / TP, 1, h]; tokens [1, T].

    Returns [n, unpacked_seqlen - 1]: each sequence in a row of its own. NeMo RL has no call of it yet.
    """
    check_shard(output_weight_layer, vocab_start_index, vocab_end_index)
    with torch.no_grad() if inference_only else contextlib.nullcontext():
        labels = rows.next_tokens(target, cu_seqlens=cu_seqlens_padded)
        states = tensor_parallel_hidden_states, output_weight_layer
        (found,) = over_ranks(*states, labels, group, cp_group, cu_seqlens_padded)
    length = unpacked_seqlen - 1
    ends = itertools.pairwise(cu_seqlens_padded.tolist())
    each = [found[begin : max(end - 1, begin)][:length] for begin, end in ends]  # the last token has no next one
    return torch.stack([torch.nn.functional.pad(row, (0, length - len(row))) for row in each])


def over_ranks(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, tp_group: dist.ProcessGroup,
    cp_group: dist.ProcessGroup | None, cu_seqlens: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """[b, s], from the labels [b, s] of all rows. As in NeMo RL, cotangents of context-parallel ranks are summed."""
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    global calls
    if calls == 0:
        print("nemo_rl_head: log-probabilities of the head come from lce_torch_bridge", flush=True)
    calls += 1
    cp_size = 1 if cp_group is None else cp_group.size()
    cp_rank = 0 if cp_group is None else cp_group.rank()
    mine = rows.of_rank(labels, cp_rank, cp_size, cu_seqlens=cu_seqlens)
    hidden = gather_from_sequence_parallel_region(hidden, True, tp_group)  # and its reverse
    out = linear_logprobs(hidden, weight, mine.t(), tp_group=tp_group, entropy=False, ignore_index=-100)
    found = out.logprobs.t().contiguous()  # as the hidden states lie, [s / CP, b], and back
    if cp_size > 1:
        found = torch.cat(torch.distributed.nn.functional.all_gather(found, cp_group), -1)
    return rows.in_sequence_order(found, cp_size, cu_seqlens=cu_seqlens)


def check_shard(weight: torch.Tensor, vocab_start_index: int, vocab_end_index: int) -> None:
    """The weight holds the rows that NeMo RL names."""
    if vocab_end_index - vocab_start_index != weight.shape[0]:
        raise ValueError(f"{vocab_start_index=} and {vocab_end_index=} are not of weight {tuple(weight.shape)}")


def refuse_logits(*_: Any, **__: Any) -> Any:
    """In place of the function that NeMo RL's Megatron workers call where its switch is off."""
    raise RuntimeError("NeMo RL passes logits: set policy.megatron_cfg.use_fused_linear_logprobs=true")


def refuse_wrapped_head(model: torch.nn.Module, name: str, module: torch.nn.Module | None) -> None:
    """Torch calls it before a module becomes part of another, as when an adapter (LoRA) is put around a layer.

    NeMo RL hands over the output layer's weight alone: an adapter around the layer would neither count nor train.
    """
    head = model._modules.get(name) if name == "output_layer" else None
    if module is not None and any(layer is head for layer in module.children()):
        raise NotImplementedError(
            f"{type(module)} around output_layer, whose weight alone is read: leave output_layer out of the "
            "adapter's target_modules"
        )


def install() -> None:
    """Puts `logprobs` into NeMo RL, except in workers without Megatron, as vLLM's are: they compute no training head.

    To be called before the policy's workers are imported, as `main` has Ray do.
    """
    if importlib.util.find_spec("megatron") and importlib.util.find_spec("megatron.core"):
        from nemo_rl.distributed import model_utils

        model_utils.from_parallel_hidden_states_to_logprobs = logprobs
        model_utils.from_parallel_logits_to_logprobs = refuse_logits
        torch.nn.modules.module.register_module_module_registration_hook(refuse_wrapped_head)


def init_with_install(init: Any, *arguments: Any, runtime_env: Any = None, **named: Any) -> Any:
    """``ray.init``, after which each worker process calls `install` before it does anything else."""
    runtime_env = {**(runtime_env or {}), "worker_process_setup_hook": "nemo_rl_head.install"}
    return init(*arguments, runtime_env=runtime_env, **named)


def main() -> None:
    """Runs a script of NeMo RL with its own arguments."""
    import ray

    sys.argv = sys.argv[1:]
    with mock.patch.object(ray, "init", functools.partial(init_with_install, ray.init)):
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
