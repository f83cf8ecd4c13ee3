"""The derivative, as a ``torch.autograd.Function`` over two operators.

    forward    hidden [T, H], weight [V, H], labels [T]  ->  outputs [T], merged statistics [F, T], cache
    gradients  those, and cotangents [T]                 ->  dhidden [T, H], dweight [V, H], as wanted

The operators are opaque to ``torch.compile``, which traces the Function and would else trace into DLPack. All that the
backward needs travels as tensors: autograd owns it, frees it, and notices when an operand has changed in between.
"""

from __future__ import annotations

from typing import Any

import torch

from lce_torch_bridge import _execute
from lce_torch_bridge._types import CALL_SCHEMA, Call, Operands

OPERANDS_SCHEMA = "Tensor hidden, Tensor weight, Tensor labels, Tensor? temperature"


class LinearLogprobs(torch.autograd.Function):
    """``(hidden, weight, labels, temperature, keep_cache, *call) -> Call.fields``."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[torch.Tensor, ...]:
        """Runs the operator and keeps what the backward needs."""
        call = Call(*inputs[5:])
        found = forward(*inputs)
        outputs, kept = found[: len(call.fields)], found[len(call.fields) :]
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*outputs[call.num_differentiable :])
        ctx.save_for_backward(*inputs[:4], *kept)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Those of dhidden and dweight that are wanted."""
        hidden, weight, labels, temperature, merged, *cache = ctx.saved_tensors
        cotangents = dict(zip(ctx.call.fields[: ctx.call.num_differentiable], grads, strict=False))
        dlogprobs, dentropy, dlse = (cotangents.get(name) for name in ("logprobs", "entropy", "lse"))
        want_hidden, want_weight = ctx.needs_input_grad[:2]
        dhidden = dweight = None
        if dlogprobs is not None or dentropy is not None or dlse is not None:
            found = gradients(
                hidden, weight, labels, temperature, merged, cache, dlogprobs, dentropy, dlse, want_hidden, want_weight,
                *ctx.call,
            )  # fmt: skip
            if want_hidden:
                dhidden, *found = found
            if want_weight:
                dweight = found[0]
        return dhidden, dweight, *(None,) * (3 + len(ctx.call))


@torch.library.custom_op(
    "lce_torch_bridge::forward",
    mutates_args=(),
    schema=f"({OPERANDS_SCHEMA}, bool keep_cache, {CALL_SCHEMA}) -> Tensor[]",
)
def forward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    temperature: torch.Tensor | None,
    keep_cache: bool,
    *call: Any,
) -> list[torch.Tensor]:
    """``Call.fields``, the merged statistics, and the leaves of the cache."""
    return _execute.forward(Operands(hidden, weight, labels, temperature), Call(*call), keep_cache)


@forward.register_fake
def _(*inputs: Any) -> list[torch.Tensor]:
    return _execute.forward_structs(Operands(*inputs[:4]), Call(*inputs[5:]), keep_cache=inputs[4])


@torch.library.custom_op(
    "lce_torch_bridge::gradients",
    mutates_args=(),
    schema=f"({OPERANDS_SCHEMA}, Tensor merged, Tensor[] cache, Tensor? dlogprobs, Tensor? dentropy, Tensor? dlse, "
    f"bool want_hidden, bool want_weight, {CALL_SCHEMA}) -> Tensor[]",
)
def gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    temperature: torch.Tensor | None,
    merged: torch.Tensor,
    cache: list[torch.Tensor],
    dlogprobs: torch.Tensor | None,
    dentropy: torch.Tensor | None,
    dlse: torch.Tensor | None,
    want_hidden: bool,
    want_weight: bool,
    *call: Any,
) -> list[torch.Tensor]:
    """Those of dhidden and dweight that are wanted."""
    named = {"logprobs": dlogprobs, "entropy": dentropy, "lse": dlse}
    cotangents = {name: cotangent for name, cotangent in named.items() if cotangent is not None}
    operands = Operands(hidden, weight, labels, temperature)
    return _execute.gradients(operands, merged, cache, cotangents, (want_hidden, want_weight), Call(*call))


@gradients.register_fake
def _(hidden: torch.Tensor, weight: torch.Tensor, *rest: Any) -> list[torch.Tensor]:
    wanted = rest[7:9]
    return [x.new_empty(x.shape) for x, want in zip((hidden, weight), wanted, strict=True) if want]


def _refuse(ctx: Any, *_: Any) -> None:
    del ctx
    raise NotImplementedError(
        "lce_torch_bridge computes first derivatives only, and this is a derivative of a gradient (create_graph=True): "
        "differentiate plain PyTorch code that stores the logits instead"
    )


gradients.register_autograd(_refuse)
