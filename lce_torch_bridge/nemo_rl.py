r"""NeMo RL with Megatron: after `install`, every worker that has Megatron uses this package's fused head.

On the command line, put this module before the script. The environments of all workers need this package::

    python -m lce_torch_bridge.nemo_rl examples/run_grpo.py \
        --config ... policy.megatron_cfg.enabled=true policy.megatron_cfg.use_fused_linear_logprobs=true
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import runpy
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.nn.functional

from lce_torch_bridge import _framework, rows
from lce_torch_bridge.ops._logprobs import linear_logprobs

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["install"]

_installed = _framework.Installed("nemo-rl", "0.6", "log-probabilities of the head come")


def install() -> _framework.Installed:
    """Puts this package's function into NeMo RL, in this process and each worker process that Ray starts afterwards.

    Call `install` before ``ray.init``, with NeMo RL's switch ``policy.megatron_cfg.use_fused_linear_logprobs=true``.

    Returns:
        The handle, which counts the calls in this process and has ``undo()``. A second call returns the same handle.

    Raises:
        NotImplementedError: NeMo RL's function has another name or other parameters; or, later, a module such as an
            adapter (LoRA) wraps the output layer.
        RuntimeError: Ray is running already.

    Example:
        >>> import lce_torch_bridge.nemo_rl
        >>> lce_torch_bridge.nemo_rl.install()  # doctest: +SKIP
    """
    return _framework.install_in_ray_workers(_installed, install_in_worker)


def install_in_worker() -> _framework.Installed:
    """Installs in this process only. Pass it to ``ray.init(runtime_env={"worker_process_setup_hook": ...})``.

    Does nothing in workers without Megatron, such as vLLM's, because they do not train a head.
    """
    if not _framework.is_importable("megatron.core"):
        return _installed
    model_utils = _installed.import_module("nemo_rl.distributed.model_utils")
    return _installed.replace_attributes(
        (model_utils, "from_parallel_hidden_states_to_logprobs", _logprobs),
        (model_utils, "from_parallel_logits_to_logprobs", _refuse_logits),
        hooks=(functools.partial(_framework.refuse_wrapped_head, ("output_layer",)),),
    )


def _logprobs(
    tensor_parallel_hidden_states: torch.Tensor, output_weight_layer: torch.Tensor, runtime_gather_output: bool,
    target: torch.Tensor, vocab_start_index: int, vocab_end_index: int, tp_group: dist.ProcessGroup,
    inference_only: bool = False, cp_group: dist.ProcessGroup | None = None, chunk_size: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Replaces ``from_parallel_hidden_states_to_logprobs``. Takes hidden states [s / CP / TP, b, h] and tokens [b, s].

    Returns [b, s - 1]. NeMo RL's function does so without context parallelism; with it, NeMo RL's
    ``from_parallel_logits_to_logprobs`` does.
    """
    del runtime_gather_output, chunk_size
    _framework.check_shard(output_weight_layer, vocab_start_index, vocab_end_index)
    with torch.no_grad() if inference_only else contextlib.nullcontext():
        labels = rows.next_tokens(target)
        logprobs = _compute_for_ranks(
            tensor_parallel_hidden_states, output_weight_layer, labels, tp_group, cp_group, None
        )
    return logprobs[:, :-1]


def packed_logprobs(
    tensor_parallel_hidden_states: torch.Tensor, output_weight_layer: torch.Tensor, target: torch.Tensor,
    cu_seqlens_padded: torch.Tensor, unpacked_seqlen: int, vocab_start_index: int, vocab_end_index: int,
    group: dist.ProcessGroup, inference_only: bool = False, cp_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:  # fmt: skip
    """Computes ``from_parallel_logits_to_logprobs_packed_sequences`` from hidden states, without logits.

    Hidden states are [T / CP / TP, 1, h], tokens [1, T]. Returns [n, unpacked_seqlen - 1], with one row for each
    sequence. NeMo RL does not call this function yet.
    """
    _framework.check_shard(output_weight_layer, vocab_start_index, vocab_end_index)
    with torch.no_grad() if inference_only else contextlib.nullcontext():
        labels = rows.next_tokens(target, cu_seqlens=cu_seqlens_padded)
        states = tensor_parallel_hidden_states, output_weight_layer
        (logprobs,) = _compute_for_ranks(*states, labels, group, cp_group, cu_seqlens_padded)
    length = unpacked_seqlen - 1
    ends = itertools.pairwise(cu_seqlens_padded.tolist())
    # The last token of a sequence has no next token.
    sequences = [logprobs[begin : max(end - 1, begin)][:length] for begin, end in ends]
    return torch.stack([torch.nn.functional.pad(row, (0, length - len(row))) for row in sequences])


def _compute_for_ranks(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, tp_group: dist.ProcessGroup,
    cp_group: dist.ProcessGroup | None, cu_seqlens: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Returns log-probabilities [b, s] of labels [b, s], gathered over context-parallel ranks.

    As in NeMo RL, the backward of this gather sums the gradients of the context-parallel ranks.
    """
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    _installed.count_call()
    cp_size = 1 if cp_group is None else cp_group.size()
    cp_rank = 0 if cp_group is None else cp_group.rank()
    local_labels = rows.of_rank(labels, cp_rank, cp_size, cu_seqlens=cu_seqlens)
    hidden = gather_from_sequence_parallel_region(hidden, True, tp_group)  # its backward reduce-scatters
    out = linear_logprobs(hidden, weight, local_labels.t(), tp_group=tp_group, entropy=False, ignore_index=-100)
    logprobs = out.logprobs.t().contiguous()  # [s / CP, b] to [b, s / CP]
    if cp_size > 1:
        logprobs = torch.cat(torch.distributed.nn.functional.all_gather(logprobs, cp_group), -1)
    return rows.in_sequence_order(logprobs, cp_size, cu_seqlens=cu_seqlens)


def _refuse_logits(*_: Any, **__: Any) -> Any:
    """Raises. It replaces the function that NeMo RL's Megatron workers call if NeMo RL's switch is off."""
    raise RuntimeError(
        "NeMo RL passes logits: set policy.megatron_cfg.use_fused_linear_logprobs=true, or undo "
        "lce_torch_bridge.nemo_rl"
    )


def _main() -> None:
    """Runs a script of NeMo RL with its arguments, after `install`."""
    from lce_torch_bridge import nemo_rl

    sys.argv = sys.argv[1:]
    with nemo_rl.install():
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    _main()
