"""The checks of refusals: what cannot be served raises, and the message says what to do."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear

from lce_torch_bridge.megatron import fused_output_layer, output_processor
from tests.torch.megatron_calls import call, draw, subject
from tests.torch.megatron_checks import Options, Result


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
        "no entropy, context manager": wrapper(hybrid, batch, entropy=False),
        "stats, context manager": wrapper(hybrid, batch, stats=True),
        "mean logit, context manager": wrapper(hybrid, batch, mean_logit=True),
        "nested": message(nested),
        "no output layer": wrapper(torch.nn.Linear(4, 4), batch),
        "two output layers": wrapper(torch.nn.ModuleDict({"actor": gpt, "critic": hybrid}), batch),
        "a pipeline stage": wrapper(subject(tp, stage="first").model, batch),
        "a pipeline stage with an output layer": wrapper(stage, batch),
    }


def labels_to_the_model(model: Any, batch: Any) -> None:
    with fused_output_layer(model, batch.labels):
        model(*batch.inputs, labels=batch.labels)
