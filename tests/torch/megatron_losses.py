"""The checks of the losses that a model computes itself, and of refusals: the message says what to do."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import gpt_model
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, MTPLossLoggingHelper

from lce_torch_bridge import rows
from lce_torch_bridge.megatron import fused_losses, fused_output_layer, output_processor
from tests.torch.megatron_checks import (
    Gradients,
    Options,
    Result,
    Subject,
    call,
    draw,
    fused,
    stock,
    subject,
    whole,
    worst,
)
from tests.torch.megatron_models import VOCAB, Batch
from tests.torch.problem import value_error


def message(function: Callable[[], Any]) -> str:
    """The exception's type and text."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def refusals(tp: int, _model: Options, _options: Options) -> Result:
    batch, _ = draw()
    gpt, hybrid = (subject(tp, kind=kind).model for kind in ("gpt", "hybrid"))
    return {
        **of_layers(tp, gpt, batch),
        **of_arguments(gpt, batch),
        **of_predictions(tp, hybrid, batch),
        **of_the_context_manager(tp, gpt, hybrid, batch),
    }


def processor(model: Any, batch: Any, **context: Any) -> str:
    return message(lambda: call(model, batch, **context))


def processor_directly(gpt: Any, batch: Any, **kwargs: Any) -> str:
    base: Options = dict(
        hidden_states=torch.zeros(1), output_layer=gpt.output_layer, output_weight=None, labels=batch.labels,
        context=None, scale_logits=gpt._scale_logits, config=gpt.config,
    )  # fmt: skip
    return message(lambda: output_processor(**base | kwargs))


def wrapper(model: Any, batch: Any, **options: Any) -> str:
    def enter() -> None:
        with fused_output_layer(model, batch.labels, **options):
            model(*batch.inputs)

    return message(enter)


class Adapter(ColumnParallelLinear):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def of_layers(tp: int, gpt: Any, batch: Any) -> Result:
    """Output layers that the op cannot stand in for."""

    def head(**attributes: Any) -> Any:
        """A GPTModel whose output layer has other attributes."""
        model = subject(tp).model
        for name, value in attributes.items():
            setattr(model.output_layer, name, value)
        return model

    adapted = subject(tp).model
    adapted.output_layer = Adapter(64, 128, config=adapted.config, init_method=torch.nn.init.zeros_, bias=False)
    deferred = head(config=types.SimpleNamespace(defer_embedding_wgrad_compute=True))
    sharded = subject(tp).model
    sharded.output_layer.weight.__fsdp_param__ = True
    patched = head(forward=ColumnParallelLinear.forward)
    capped = processor_directly(gpt, batch, scale_logits=lambda logits: 30 * torch.tanh(logits / 30))
    return {
        "another forward": processor(adapted, batch),
        "an output layer of another kind": processor_directly(gpt, batch, output_layer=torch.nn.Linear(4, 4)),
        "a replaced forward": processor(patched, batch),
        "gathered output": processor(head(gather_output=True), batch),
        "gathered output, context manager": wrapper(head(gather_output=True), batch),
        "deferred weight gradient": processor(deferred, batch),
        "logits capped by the model": capped,
        "weights split further": processor(head(gtp_remat_size=2), batch),
        "Megatron-FSDP": processor(sharded, batch),
    }


def of_arguments(gpt: Any, batch: Any) -> Result:
    """Arguments of the model, and options in the context of the processor."""
    gathered = {"runtime_gather_output": True}
    return {
        "runtime_gather_output": message(lambda: call(gpt, batch, arguments=gathered)),
        "generation": processor_directly(gpt, batch, inference_context=types.SimpleNamespace()),
        "no labels": message(lambda: gpt(*batch.inputs, output_processor=output_processor)),
        "labels of another shape": processor(gpt, batch, labels=batch.labels.t()),
        "flat labels": processor(gpt, batch, labels=batch.labels.flatten()),
        "where of another shape": processor(gpt, batch, where=torch.ones(3, dtype=torch.bool)),
        "where beyond the rows": processor(gpt, batch, where=torch.tensor([1, 96])),
        "candidates of another shape": processor(gpt, batch, candidates=torch.ones(32, 3, 2, dtype=torch.int64)),
        "temperature of another shape": processor(gpt, batch, temperature=torch.ones(5)),
        "an option of the model": processor(gpt, batch, reduce_grad_hidden=True, logit_scale=2.0, bias=None),
        "an unknown option": processor(gpt, batch, temprature=1.0),
    }


def of_predictions(tp: int, hybrid: Any, batch: Any) -> Result:
    """Models with multi-token prediction, and labels for the model itself."""
    mtp = subject(tp, mtp=1).model
    mtp.output_layer.weight.main_grad = torch.zeros_like(mtp.output_layer.weight)
    return {
        "wgrad and MTP": processor(mtp, batch, wgrad="main_grad"),
        "wgrad and MTP, context manager": wrapper(mtp, batch, wgrad="main_grad"),
        "labels to the model": message(lambda: labels_to_the_model(hybrid, batch)),
        "labels to the model, MTP": message(lambda: labels_to_the_model(mtp, batch)),
    }


def of_the_context_manager(tp: int, gpt: Any, hybrid: Any, batch: Any) -> Result:
    """Options and models that `fused_output_layer` does not take."""

    def nested() -> None:
        with fused_output_layer(hybrid, batch.labels):
            call(gpt, batch)  # another model: allowed
            with fused_output_layer(hybrid, batch.labels):
                pass

    stage = subject(tp, kind="hybrid", stage="first").model
    stage.output_layer = gpt.output_layer  # as in a stage with multi-token prediction
    return {
        "nested": message(nested),
        "no output layer": wrapper(torch.nn.Linear(4, 4), batch),
        "two output layers": wrapper(torch.nn.ModuleDict({"actor": gpt, "critic": hybrid}), batch),
        "a pipeline stage": wrapper(subject(tp, stage="first").model, batch),
        "a pipeline stage with an output layer": wrapper(stage, batch),
    }


def labels_to_the_model(model: Any, batch: Any) -> None:
    with fused_output_layer(model, batch.labels):
        model(*batch.inputs, labels=batch.labels)


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
