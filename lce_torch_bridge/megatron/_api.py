"""The public functions, which replace a model's output layer: `output_processor` and two context managers."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Unpack

import torch

from lce_torch_bridge._types import LogprobOutput
from lce_torch_bridge.megatron._output_layer import FusedForward, find_refusal, read_multiplier
from lce_torch_bridge.megatron._patching import replace_forward_in_thread
from lce_torch_bridge.megatron._pending_logits import PendingLogits, pending_logits, unscaled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from megatron.core.transformer import TransformerConfig

    from lce_torch_bridge.call._arguments import LossesOptions, ModelOptions

__all__ = ["fused_losses", "fused_output_layer", "output_processor"]

# Options of `fused_losses`. They decide how a loss is computed, not which loss.
LOSS_OPTIONS = ("cache_bytes", "gradient_threshold", "vocab_part_size", "implementation")


def output_processor(
    *,
    hidden_states: torch.Tensor,
    output_layer: torch.nn.Module,
    output_weight: torch.Tensor | None,
    labels: torch.Tensor | None,
    context: Mapping[str, Any] | None,
    scale_logits: Callable[[torch.Tensor], torch.Tensor],
    config: TransformerConfig,
    runtime_gather_output: bool | None = None,
    inference_context: object = None,
    **_: object,
) -> LogprobOutput:
    """Returns log-probability and entropy instead of logits.

    ``GPTModel`` calls this function instead of its output layer. Multi-token prediction runs earlier, and its loss
    stores logits unless the model runs inside `fused_losses`.

    Args:
        hidden_states: ``[s, b, h]``, or ``[s / TP, b, h]`` under sequence parallelism. The model passes this and all
            other arguments except ``context``.
        output_layer: the model's ColumnParallelLinear.
        output_weight: the embedding's weight if the head is tied to it, else None.
        labels: ``[b, s]``, the labels with which the model was called for multi-token prediction. They are used if
            ``context`` has none.
        context: a mapping with ``labels`` ``[b, s]``, global vocabulary ids that are already shifted, and any option of
            `lce_torch_bridge.linear_logprobs` except ``tp_group``, ``bias``, ``logit_scale`` and
            ``reduce_grad_hidden``, which the model sets. ``where`` is ``[b, s]`` bool, or row indices of the flattened
            ``[b, s]``; a tensor ``temperature`` or ``logit_floor`` broadcasts to ``[b, s]``; ``candidates`` are ``[b,
            s, K]``. ``wgrad`` defaults to the layer's own behaviour: "main_grad" with ``gradient_accumulation_fusion``.
        scale_logits: the model's multiplier of logits (MuP), which this function applies in float32.
        config: the model's configuration.
        runtime_gather_output: None or False, because every rank has all results anyway.
        inference_context: None, because generation needs logits.
        **_: other arguments that any version of megatron-core passes; they are ignored.

    Returns:
        A `LogprobOutput` of ``[b, s]`` tensors (``[b, s, K]`` for candidates), bitwise equal on all tensor-parallel
        ranks. Float16Module, which wraps every bf16 and fp16 model in training, turns the `LogprobOutput` into a plain
        tuple in the same order, so unpack the result.

    Raises:
        NotImplementedError: the model is not supported; the message says why and what to do.
        ValueError, TypeError: options do not fit; the message has their values.
        lce_jax.UnsupportedError, RuntimeError: in the cases that `linear_logprobs` lists.

    Memory:
        The call takes the memory of `linear_logprobs`. Under sequence parallelism the gathered hidden states are saved
        for the backward; Megatron's own layer gathers them twice instead.

    Example:
        >>> from lce_torch_bridge.megatron import output_processor
        >>> context = dict(labels=labels, temperature=0.7)  # doctest: +SKIP
        >>> out = model(  # doctest: +SKIP
        ...     tokens, positions, mask, output_processor=output_processor, output_processor_context=context
        ... )
    """
    if inference_context is not None:
        raise NotImplementedError("generation (inference_context is set) needs logits: leave output_processor out")
    options = dict(context or {})
    labels = options.pop("labels", labels)
    if labels is None:
        raise ValueError("no labels: pass output_processor_context=dict(labels=...) with token ids [b, s]")
    forward = FusedForward(
        output_layer, labels, read_multiplier(scale_logits), options, mtp=bool(getattr(config, "mtp_num_layers", 0))
    )
    with replace_forward_in_thread(output_layer, forward):
        out, _bias = output_layer(hidden_states, weight=output_weight, runtime_gather_output=runtime_gather_output)
    return _to_batch_first(out)


@contextlib.contextmanager
def fused_output_layer(model: torch.nn.Module, labels: torch.Tensor, **options: Unpack[ModelOptions]) -> Iterator[None]:
    """Makes ``model(tokens, positions, mask)`` return the results of `output_processor` instead of logits.

    It works with every Megatron model, including HybridModel, and every supported Megatron version. Call the model
    without ``labels``. The backward pass may run outside of the block, unless an activation checkpoint around the whole
    model calls the model again. Multi-token prediction keeps its own loss, computed without logits as in
    `fused_losses`.

    Args:
        model: a model with an ``output_layer``, which may be wrapped in DistributedDataParallel, Float16Module,
            ``torch.compile`` or other modules. Methods of the model and its output layer are replaced for all threads
            until the block ends. So only one thread at a time may be inside; several may use `output_processor`.
        labels: ``[b, s]`` global vocabulary ids, already shifted.
        **options: ``temperature``, ``logit_softcap``, ``vocab_size``, ``entropy``, ``stats``, ``mean_logit``,
            ``candidates``, ``where``, ``ignore_index``, ``out_of_vocab``, ``wgrad``, ``cache_bytes``,
            ``gradient_threshold``, ``vocab_part_size``, ``logit_floor`` and ``implementation``, as in the context of
            `output_processor`.

    Yields:
        None. The model returns a `LogprobOutput` of ``[b, s]`` tensors inside, as from `output_processor`.

    Raises:
        NotImplementedError: the model is not supported; the message says why and what to do.
        ValueError, TypeError: options do not fit; the message has their values.
        lce_jax.UnsupportedError, RuntimeError: in the cases that `linear_logprobs` lists.

    Memory:
        The model's call takes the memory of `output_processor`.

    Example:
        >>> from lce_torch_bridge.megatron import fused_output_layer
        >>> with fused_output_layer(model, labels, temperature=0.7):  # doctest: +SKIP
        ...     logprobs, entropy, *_ = model(tokens, positions, mask)
    """
    inner = _unwrap(model)
    all_options: dict[str, Any] = {**options}
    predictions = bool(getattr(inner.config, "mtp_num_layers", None))
    forward = FusedForward(
        inner.output_layer,
        labels,
        read_multiplier(getattr(inner, "_scale_logits", unscaled)),
        all_options,
        mtp=predictions,
    )
    loss_options = {name: all_options[name] for name in LOSS_OPTIONS if name in all_options}

    def finish(pending: PendingLogits) -> LogprobOutput:
        return _to_batch_first(forward(*pending.inputs)[0])

    with pending_logits(inner, finish, loss_options, processors=False), _refuse_model_loss(inner):
        yield


@contextlib.contextmanager
def fused_losses(model: torch.nn.Module, **options: Unpack[LossesOptions]) -> Iterator[None]:
    """Makes a model compute its losses without logits: the loss of ``labels=``, and multi-token prediction's losses.

    Megatron still rolls labels and masks, weights each depth's loss, logs the loss and the acceptance rate, and starts
    the backward pass. `output_processor` may be used inside the block; `fused_output_layer` does not need
    `fused_losses`. The block may contain one step or the whole training. If you need logits, call the model outside of
    the block.

    Args:
        model: a model with an ``output_layer``, which may be wrapped in DistributedDataParallel, Float16Module,
            ``torch.compile`` or other modules. Methods of the model and its output layer are replaced for all threads
            until the block ends. So only one thread at a time may be inside; several may use `output_processor`.
        **options: ``cache_bytes``, ``gradient_threshold``, ``vocab_part_size`` and ``implementation`` of each loss, as
            in `lce_torch_bridge.linear_logprobs`.

    Yields:
        None.

    Raises:
        NotImplementedError: the model is not supported, or is called without labels and without a processor; the
            message says why and what to do.
        RuntimeError: the methods are already replaced, for example inside `fused_output_layer`.
        ValueError, TypeError: options do not fit; the message has their values.
        lce_jax.UnsupportedError, RuntimeError: in the cases that `linear_logprobs` lists.

    Memory:
        Each loss takes the memory of `linear_logprobs`.

    Numerics:
        Each loss is Megatron's cross entropy, computed from unrounded float32 logits. A prediction counts as accepted
        if its logit equals the largest logit up to float32 rounding.

    Example:
        >>> from lce_torch_bridge.megatron import fused_losses
        >>> with fused_losses(model):  # doctest: +SKIP
        ...     losses = model(tokens, positions, mask, labels=labels, loss_mask=loss_mask)  # [b, s]
    """
    unknown = sorted(options.keys() - set(LOSS_OPTIONS))
    if unknown:
        raise TypeError(
            f"fused_losses takes {', '.join(LOSS_OPTIONS)}, got {', '.join(unknown)}: Megatron sets the other options"
        )
    inner = _unwrap(model)
    reason = find_refusal(inner.output_layer)
    if reason is not None:
        raise NotImplementedError(reason)
    with pending_logits(inner, _refuse_missing_labels, dict(options), processors=True):
        yield


def _refuse_missing_labels(_pending: PendingLogits) -> LogprobOutput:
    raise NotImplementedError(
        "the model was called without labels inside fused_losses, where there are no logits to return: pass labels or "
        "an output_processor, or call the model outside of the block"
    )


def _to_batch_first(out: LogprobOutput) -> LogprobOutput:
    """Transposes results from ``[s, b]`` to ``[b, s]``."""
    fields: list[Any] = [None if field is None else field.transpose(0, 1).contiguous() for field in out]
    return LogprobOutput(*fields)


@contextlib.contextmanager
def _refuse_model_loss(model: torch.nn.Module) -> Iterator[None]:
    """Makes the model raise if it is called with labels, because it then returns its own loss."""

    def check(_model: torch.nn.Module, _inputs: Any, out: Any) -> None:
        if not isinstance(out, LogprobOutput):
            raise ValueError(
                f"the model was called with labels {tuple(out.shape)} inside fused_output_layer, and returned its "
                "loss: pass the labels to fused_output_layer only; the loss is -logprob"
            )

    hook = model.register_forward_hook(check)
    try:
        yield
    finally:
        hook.remove()


def _unwrap(model: Any) -> Any:
    """Returns the model that calls the output layer, without the modules that wrap it."""
    name = type(model).__name__
    owners = dict(_find_owners(model, "")) if isinstance(model, torch.nn.Module) else {}
    if not owners:
        raise NotImplementedError(
            f"{name} has no output_layer: pass the language model, and on the last pipeline stage (post_process) only"
        )
    if len(owners) > 1:
        raise NotImplementedError(
            f"{name} has several modules with an output_layer, {', '.join(owners)}: pass the one to be served"
        )
    (model,) = owners.values()
    name = type(model).__name__
    if not getattr(model, "post_process", True):
        raise NotImplementedError(
            f"this {name} is a pipeline stage without post_process, which returns hidden states: enter "
            "this block on the last stage only, and contextlib.nullcontext() on the others"
        )
    return model


def _find_owners(module: torch.nn.Module, path: str) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yields the path and the module of each owner of an output layer.

    ``hasattr`` would also find wrappers, which pass attributes on. Modules inside an owner are not searched: they are
    most of the model, and have no other head.
    """
    if module._modules.get("output_layer") is not None:
        yield path, module
        return
    for name, child in module.named_children():
        yield from _find_owners(child, f"{path}.{name}" if path else name)
