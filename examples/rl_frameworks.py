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
from typing import Any

import torch
import torch.distributed as dist

from lce_torch_bridge import linear_logprobs


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
    """NeMo RL: ``from_parallel_hidden_states_to_logprobs``. Hidden states [s / TP, b, h], tokens [b, s]; [b, s - 1]."""
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    del runtime_gather_output, chunk_size
    if cp_group is not None and dist.get_world_size(cp_group) > 1:
        raise NotImplementedError("context parallelism: split labels and hidden states alike, and call linear_logprobs")
    _check_shard(output_weight_layer, vocab_start_index, vocab_end_index)
    with torch.no_grad() if inference_only else contextlib.nullcontext():
        hidden = gather_from_sequence_parallel_region(tensor_parallel_hidden_states, True, tp_group)  # and its reverse
        labels = target.roll(-1, dims=-1).t()  # [s, b], as the hidden states lie
        out = linear_logprobs(hidden, output_weight_layer, labels, tp_group=tp_group, entropy=False)
    return out.logprobs.t()[:, :-1]


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
        if "log_sum_sq_probs" in outputs:
            raise NotImplementedError("lce_jax does not compute log Σ p²: keep TRL's own function for this trainer")
        out = linear_logprobs(
            hidden, weight.to(hidden.dtype), targets, bias=bias, temperature=temperature,
            logit_softcap=final_logit_softcapping, logit_scale=logit_scale,
            entropy="entropy" in outputs,
            stats="is_top1" in outputs, mean_logit="mean_logits" in outputs,
        )  # fmt: skip
        mean = None if out.mean_logit is None else out.mean_logit.detach()
        return out.logprobs, out.entropy, None, mean, _is_largest(out) if "is_top1" in outputs else None


def _is_largest(out: Any) -> torch.Tensor:
    """Whether the label's logit is the largest. Logits closer than float32 sees beside lse count as equal."""
    rounding = 4 * torch.finfo(torch.float32).eps * torch.maximum(out.lse.abs(), out.max_logit.abs())
    return out.logprobs >= out.max_logit - out.lse - rounding


def _check_shard(weight: torch.Tensor, start: int, end: int) -> None:
    if end - start != weight.shape[0]:
        raise ValueError(f"vocab_start_index={start} and vocab_end_index={end} are not of weight {tuple(weight.shape)}")
