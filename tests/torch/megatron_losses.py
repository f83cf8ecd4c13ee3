"""The checks of the losses that a model computes itself: multi-token prediction's, and that of its labels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import gpt_model
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, MTPLossLoggingHelper

from lce_torch_bridge import rows
from lce_torch_bridge.megatron import fused_losses, fused_output_layer
from tests.torch.megatron_calls import Gradients, Subject, call, draw, fused, stock, subject, value_error, worst
from tests.torch.megatron_checks import Options, Result, whole
from tests.torch.megatron_models import VOCAB, Batch
from tests.torch.megatron_refusals import Adapter, message

SCALE = 3.0  # of the loss, as a gradient scaler sets it


def megatron_loss(tp: int, model: Options, _options: Options) -> Result:
    """Megatron-core's own vocab_parallel_cross_entropy, its junk labels too, by the processor and by `fused_losses`."""
    it = subject(tp, **model)
    batch, _ = draw(foreign=True)
    seed = batch.seeds[0]

    def gradients(loss: torch.Tensor) -> dict[str, torch.Tensor]:
        it.model.zero_grad()
        (seed * loss).sum().backward()
        return {name: p.grad.clone() for name, p in it.model.named_parameters()}

    want = it.model(*batch.inputs, labels=batch.labels)
    true = gradients(want)
    with fused_losses(it.model):
        ours = (
            -call(it.model, batch, out_of_vocab="megatron", entropy=False).logprobs,
            it.model(*batch.inputs, labels=batch.labels),
        )
    error, parameter = max(worst(gradients(got), true) for got in ours)
    return {"logprobs": max(value_error(got, want) for got in ours), "gradient": error, "worst": parameter}


def losses(tp: int, model: Options, options: Options) -> Result:
    """``model(..., labels=labels, loss_mask=loss_mask)`` with logits and without: values, logs, every gradient."""
    it = subject(tp, **model)
    for name, value in options.items():
        setattr(it.model.config, name, value)
    batch = of_rank(likely(it, draw(foreign=True)[0]))
    want = trained(it, batch, contextlib.nullcontext())
    with mock.patch.object(it.model.output_layer, "_forward_impl", None):  # there is nothing to compute logits with
        got = trained(it, batch, fused_losses(it.model))
    error, parameter = worst(got[1], want[1])
    it.model.eval()  # nothing is logged
    evaluated = [trained(it, batch, inside) for inside in (fused_losses(it.model), contextlib.nullcontext())]
    it.model.train()
    logged = {name: got[2][name].equal(want[2][name]) for name in ("correct_values", "total_values")}
    accepted = want[2]["correct_values"] / want[2]["total_values"]
    return {
        "loss": max(value_error(got[0], want[0]), value_error(evaluated[0][0], evaluated[1][0])),
        "gradient": error,
        "worst": parameter,
        "logged loss": value_error(got[2]["loss_values"], want[2]["loss_values"]),
        "logged counts": all(logged.values()) and not evaluated[0][2],
        "some accepted": bool(((accepted > 0.1) & (accepted < 0.9)).all()),
        "depths move the gradient": moved(it, batch, want[1]),
    }


def of_rank(batch: Batch) -> Batch:
    """The part of this rank of a context-parallel group."""
    rank, size = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
    parts = {name: rows.of_rank(getattr(batch, name), rank, size) for name in ("tokens", "positions", "labels")}
    return batch._replace(**parts)


def likely(it: Subject, batch: Batch) -> Batch:
    """Half of the labels are the token that the output layer's bias makes the most likely one, if it has a bias."""
    bias = it.model.output_layer.bias
    if bias is None:
        return batch
    with torch.no_grad():
        bias.mul_(3)
    favourite = whole(bias.detach(), it.model.tp_group).argmax()
    even = torch.arange(batch.labels.shape[1], device=batch.labels.device) % 2 == 0
    drawn = (batch.labels >= 0) & (batch.labels < VOCAB)  # the others stay out of vocabulary
    return batch._replace(labels=favourite.where(even & drawn, batch.labels))


def trained(it: Subject, batch: Batch, inside: Any) -> tuple[torch.Tensor, Gradients, dict[str, torch.Tensor]]:
    """The loss, all gradients, and what Megatron has logged."""
    it.model.zero_grad()
    MTPLossLoggingHelper.tracker.clear()
    mask = (torch.rand(batch.labels.shape, generator=torch.Generator().manual_seed(5)) < 0.7).to(batch.labels.device)
    with inside, mock.patch.object(MTPLossAutoScaler, "main_loss_backward_scale", torch.tensor(SCALE)):
        loss = it.model(*batch.inputs, labels=batch.labels, loss_mask=mask.float())
        (SCALE * (loss * mask)).sum().backward()
    grads = {name: p.grad.clone() for name, p in it.model.named_parameters() if p.grad is not None}
    logged = {name: x.clone() for name, x in MTPLossLoggingHelper.tracker.items() if isinstance(x, torch.Tensor)}
    return loss.detach(), grads, logged


def moved(it: Subject, batch: Batch, want: Gradients) -> bool:
    """The control: without the depths' losses the comparison must notice."""
    factor, it.model.config.mtp_loss_scaling_factor = it.model.config.mtp_loss_scaling_factor, 0.0
    _, grads, _ = trained(it, batch, contextlib.nullcontext())
    it.model.config.mtp_loss_scaling_factor = factor
    return worst(grads, want)[0] > 0.1


def predictions_dropped(tp: int, model: Options, _options: Options) -> Result:
    """A megatron-core before 0.19, which has no labels for the predictions of a model without labels."""
    it = subject(tp, **model)
    batch, _ = draw()
    before = gpt_model.process_mtp_loss
    gpt_model.process_mtp_loss = lambda hidden_states, **_: hidden_states.chunk(2)[0]
    try:
        with torch.no_grad():
            with fused(it, batch) as outputs:
                got = outputs[0]
            with stock(it, batch) as outputs:
                return {"logprobs": value_error(got, outputs[0])}
    finally:
        gpt_model.process_mtp_loss = before


def losses_refused(tp: int, _model: Options, _options: Options) -> Result:
    """What `fused_losses` does not serve, with messages that say why."""
    batch, _ = draw()
    model = subject(tp, mtp=1).model

    def inside(call: Callable[..., Any], **options: Any) -> str:
        def enter() -> None:
            with fused_losses(model, **options):
                call()

        return message(enter)

    def train(labels: torch.Tensor = batch.labels) -> None:
        model(*batch.inputs, labels=labels)

    def ask(function: Callable[[Any], Any]) -> Callable[[], Any]:
        return lambda: function(model.output_layer(torch.zeros(32, 3, 64))[0])

    adapted = subject(tp).model
    adapted.output_layer = Adapter(64, 128, config=adapted.config, init_method=torch.nn.init.zeros_, bias=False)
    return {
        "no labels": inside(lambda: model(*batch.inputs)),
        "labels of another shape": inside(lambda: train(batch.labels.t())),
        "an option of another kind": inside(train, temperature=0.7),
        "a negative cache": inside(train, cache_bytes=-1),
        "gathered output": inside(lambda: model(*batch.inputs, labels=batch.labels, runtime_gather_output=True)),
        "another use": inside(ask(lambda logits: logits.float())),
        "another function": inside(ask(lambda logits: torch.softmax(logits, -1))),
        "a largest logit before the loss": inside(ask(lambda logits: torch.argmax(logits, -1))),
        "nested": inside(lambda: inside_of_another(model, batch)),
        "another forward": message(fused_losses(adapted).__enter__),
    }


def inside_of_another(model: Any, batch: Batch) -> None:
    with fused_output_layer(model, batch.labels):
        model(*batch.inputs)
