"""The functions of RL frameworks that compute a head's log-probabilities, with the arguments that these pass.

Put ours in their place before the trainer is built, on every rank:

    import skyrl.backends.skyrl_train.distributed.megatron.model_utils as skyrl_model_utils
    skyrl_model_utils._fused_lm_head_logprob_apply = rl_frameworks.skyrl_logprobs

    import nemo_rl.distributed.model_utils as nemo_rl_model_utils
    nemo_rl_model_utils.from_parallel_hidden_states_to_logprobs = rl_frameworks.nemo_rl_logprobs

    import trl.trainer.utils as trl_utils
    trl_utils._ChunkedLogProbFunction = rl_frameworks.TrlLogprobs

    import verl.models.mcore.model_forward_fused as verl_forward
    verl_forward.linear_cross_entropy = lce_torch_bridge.verl.linear_cross_entropy
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional

from lce_torch_bridge import linear_logprobs, rows


def skyrl_logprobs(
    backend: str, hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, vocab_start_index: int,
    vocab_end_index: int, chunk_size: int, tp_group: dist.ProcessGroup, inference_only: bool,
) -> torch.Tensor:  # fmt: skip
    """SkyRL 0.3.0 with Megatron: ``_fused_lm_head_logprob_apply``. [b, s]; the caller sums dhidden over the ranks."""
    del backend, chunk_size
    _check_shard(weight, vocab_start_index, vocab_end_index)
    with torch.no_grad() if inference_only else contextlib.nullcontext():
        return linear_logprobs(hidden, weight, target, tp_group=tp_group, entropy=False).logprobs


def nemo_rl_logprobs(
    tensor_parallel_hidden_states: torch.Tensor, output_weight_layer: torch.Tensor, runtime_gather_output: bool,
    target: torch.Tensor, vocab_start_index: int, vocab_end_index: int, tp_group: dist.ProcessGroup,
    inference_only: bool = False, cp_group: dist.ProcessGroup | None = None, chunk_size: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """NeMo RL: ``from_parallel_hidden_states_to_logprobs``. Hidden states [s / CP / TP, b, h], all tokens [b, s].

    Returns [b, s - 1], as its function without context parallelism, and ``from_parallel_logits_to_logprobs`` with it.
    """
    del runtime_gather_output, chunk_size
    _check_shard(output_weight_layer, vocab_start_index, vocab_end_index)
    with torch.no_grad() if inference_only else contextlib.nullcontext():
        labels = rows.next_tokens(target)
        logprobs = _over_ranks(tensor_parallel_hidden_states, output_weight_layer, labels, tp_group, cp_group, None)
    return logprobs[:, :-1]


def nemo_rl_packed_logprobs(
    tensor_parallel_hidden_states: torch.Tensor, output_weight_layer: torch.Tensor, target: torch.Tensor,
    cu_seqlens_padded: torch.Tensor, unpacked_seqlen: int, vocab_start_index: int, vocab_end_index: int,
    group: dist.ProcessGroup, inference_only: bool = False, cp_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:  # fmt: skip
    """``from_parallel_logits_to_logprobs_packed_sequences`` from hidden states [T / CP / TP, 1, h]; tokens [1, T].

    Returns [n, unpacked_seqlen - 1]: each sequence in a row of its own.
    """
    _check_shard(output_weight_layer, vocab_start_index, vocab_end_index)
    with torch.no_grad() if inference_only else contextlib.nullcontext():
        labels = rows.next_tokens(target, cu_seqlens=cu_seqlens_padded)
        states = tensor_parallel_hidden_states, output_weight_layer
        (logprobs,) = _over_ranks(*states, labels, group, cp_group, cu_seqlens_padded)
    length = unpacked_seqlen - 1
    ends = itertools.pairwise(cu_seqlens_padded.tolist())
    found = [logprobs[begin : max(end - 1, begin)][:length] for begin, end in ends]  # the last token has no next one
    return torch.stack([torch.nn.functional.pad(row, (0, length - len(row))) for row in found])


def _over_ranks(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, tp_group: dist.ProcessGroup,
    cp_group: dist.ProcessGroup | None, cu_seqlens: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """[b, s], from the labels [b, s] of all rows. As in NeMo RL, cotangents of context-parallel ranks are summed."""
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    cp_size = 1 if cp_group is None else cp_group.size()
    cp_rank = 0 if cp_group is None else cp_group.rank()
    mine = rows.of_rank(labels, cp_rank, cp_size, cu_seqlens=cu_seqlens)
    hidden = gather_from_sequence_parallel_region(hidden, True, tp_group)  # and its reverse
    out = linear_logprobs(hidden, weight, mine.t(), tp_group=tp_group, entropy=False, ignore_index=-100)
    logprobs = out.logprobs.t().contiguous()  # as the hidden states lie, [s / CP, b], and back
    if cp_size > 1:
        logprobs = torch.cat(torch.distributed.nn.functional.all_gather(logprobs, cp_group), -1)
    return rows.in_sequence_order(logprobs, cp_size, cu_seqlens=cu_seqlens)


class TrlLogprobs:
    """TRL 1.16: ``trl.trainer.utils._ChunkedLogProbFunction``."""

    @staticmethod
    def apply(
        hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor,
        temperature: float, chunk_size: int, final_logit_softcapping: float | None = None, logit_scale: float = 1.0,
        outputs: tuple[str, ...] = ("entropy", "mean_logits", "is_top1"),
    ) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
        """[N] each: log-probabilities, entropy, log Σ p², mean logit, whether the target's logit is the largest."""
        del chunk_size
        out = linear_logprobs(
            hidden, weight.to(hidden.dtype), targets, bias=bias, temperature=temperature,
            logit_softcap=final_logit_softcapping, logit_scale=logit_scale,
            entropy="entropy" in outputs,
            stats=bool({"is_top1", "log_sum_sq_probs"} & set(outputs)), mean_logit="mean_logits" in outputs,
        )  # fmt: skip
        mean = None if out.mean_logit is None else out.mean_logit.detach()
        squares = out.sum_p_squared.log() if "log_sum_sq_probs" in outputs else None
        return out.logprobs, out.entropy, squares, mean, _is_largest(out) if "is_top1" in outputs else None


def _is_largest(out: Any) -> torch.Tensor:
    """Whether the label's logit is the largest. Logits closer than float32 sees beside lse count as equal."""
    rounding = 4 * torch.finfo(torch.float32).eps * torch.maximum(out.lse.abs(), out.max_logit.abs())
    return out.logprobs >= out.max_logit - out.lse - rounding


def _check_shard(weight: torch.Tensor, start: int, end: int) -> None:
    if end - start != weight.shape[0]:
        raise ValueError(f"vocab_start_index={start} and vocab_end_index={end} are not of weight {tuple(weight.shape)}")
