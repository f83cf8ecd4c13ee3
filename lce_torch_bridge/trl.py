"""TRL's GRPO, RLOO, SFT, KTO, DPO and distillation trainers with this package's head. Call `install` before training.

TRL has no switch. The models of the first five trainers have a fused head, which calls one function; the distillation
trainer calls another. `install` replaces both functions.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from lce_torch_bridge import _framework
from lce_torch_bridge.ops._cross_entropy import linear_entropy
from lce_torch_bridge.ops._kl import linear_kl
from lce_torch_bridge.ops._logprobs import linear_logprobs

__all__ = ["install"]

_installed = _framework.Installed("trl", "1.16", "log-probabilities and divergences of the head come")


def install() -> _framework.Installed:
    """Puts this package's functions into TRL, which looks them up at each call. Call `install` in each process.

    Returns:
        The handle, which counts the calls in this process and has ``undo()``. A second call returns the same handle.

    Raises:
        NotImplementedError: TRL's functions have other names or parameters; or, later, a module such as an adapter
            (LoRA) wraps a head.

    Example:
        >>> import lce_torch_bridge.trl
        >>> lce_torch_bridge.trl.install()  # doctest: +SKIP
    """
    utils, distillation_trainer = map(
        _installed.import_module, ("trl.trainer.utils", "trl.trainer.distillation_trainer")
    )
    return _installed.replace_attributes(
        (utils, "_ChunkedLogProbFunction", _Logprobs),
        (distillation_trainer, "ChunkedDivergenceFunction", _Divergence),
        hooks=(functools.partial(_framework.refuse_wrapped_head, ()),),
    )


class _Logprobs:
    """Replaces ``trl.trainer.utils._ChunkedLogProbFunction``."""

    @staticmethod
    def apply(
        hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor,
        temperature: float, chunk_size: int, final_logit_softcapping: float | None = None, logit_scale: float = 1.0,
        outputs: tuple[str, ...] = ("entropy", "mean_logits", "is_top1"),
    ) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
        """Returns [N] tensors or None: log-probability, entropy, log Σ p², mean logit, whether the target is top-1."""
        del chunk_size
        _installed.count_call()
        out = linear_logprobs(
            hidden, weight.to(hidden.dtype), targets, bias=bias, temperature=temperature,
            logit_softcap=final_logit_softcapping, logit_scale=logit_scale,
            entropy="entropy" in outputs,
            stats=bool({"is_top1", "log_sum_sq_probs"} & set(outputs)), mean_logit="mean_logits" in outputs,
        )  # fmt: skip
        mean = None if out.mean_logit is None else out.mean_logit.detach()
        squares = None
        if "log_sum_sq_probs" in outputs:
            assert out.sum_p_squared is not None
            squares = out.sum_p_squared.log()
        return out.logprobs, out.entropy, squares, mean, _is_largest(out) if "is_top1" in outputs else None


def _is_largest(out: Any) -> torch.Tensor:
    """Whether the label's logit is the largest. Logits that differ by less than float32's rounding count as equal."""
    rounding = 4 * torch.finfo(torch.float32).eps * torch.maximum(out.lse.abs(), out.max_logit.abs())
    return out.logprobs >= out.max_logit - out.lse - rounding


class _Divergence:
    """Replaces ``trl.kernels.chunked_divergence.ChunkedDivergenceFunction``."""

    @staticmethod
    def apply(
        student_hidden: torch.Tensor, student_weight: torch.Tensor, student_bias: torch.Tensor | None,
        teacher_hidden: torch.Tensor, teacher_weight: torch.Tensor, teacher_bias: torch.Tensor | None,
        beta: float, temperature: float = 1.0,
        student_logit_scale: float = 1.0, student_final_logit_softcapping: float | None = None,
        teacher_logit_scale: float = 1.0, teacher_final_logit_softcapping: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Returns two [N] tensors: the divergence, and the student's entropy without a gradient."""
        _installed.count_call()
        weight, teacher_weight = student_weight.to(student_hidden.dtype), teacher_weight.to(teacher_hidden.dtype)
        student_options: dict[str, Any] = {
            "bias": student_bias, "temperature": temperature, "logit_scale": student_logit_scale,
            "logit_softcap": student_final_logit_softcapping,
        }  # fmt: skip
        kl = linear_kl(
            student_hidden, weight, teacher_hidden, teacher_weight, teacher_bias=teacher_bias, **student_options,
            direction="forward" if beta == 0.0 else "reverse" if beta == 1.0 else "jsd",
            beta=beta if 0.0 < beta < 1.0 else None,
            teacher_logit_scale=teacher_logit_scale, teacher_logit_softcap=teacher_final_logit_softcapping,
        )  # fmt: skip
        with torch.no_grad():
            entropy, _ = linear_entropy(student_hidden, weight, **student_options)
        return kl, entropy
