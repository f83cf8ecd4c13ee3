"""A model whose output layer is replaced: GPTModel's own way in newer versions, a context manager for the others."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Unpack

import torch

from lce_torch_bridge._types import LogprobOutput
from lce_torch_bridge.megatron._output_layer import FusedForward, multiplier, refusal
from lce_torch_bridge.megatron._pending import PendingLogits, pending_logits, replaced_here, unscaled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from megatron.core.transformer import TransformerConfig

    from lce_torch_bridge.call._arguments import LossesOptions, ModelOptions

__all__ = ["fused_losses", "fused_output_layer", "output_processor"]

OF_LOSSES = ("cache_bytes", "gradient_threshold", "vocab_part_size", "implementation")  # how, not what


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
    """Log-probability and entropy in place of logits: ``GPTModel`` calls this function instead of its output layer.

    Multi-token prediction runs before, and its own loss stores logits unless the call is inside `fused_losses`.

    Args:
        hidden_states: ``[s, b, h]``, or ``[s / TP, b, h]`` under sequence parallelism. The model passes
            them, and everything else but ``context``.
        output_layer: the model's ColumnParallelLinear.
        output_weight: the embedding's weight where it is tied, else None.
        labels: ``[b, s]``, the model's own (for multi-token prediction), used if ``context`` has none.
        context: ``labels`` ``[b, s]``, global vocabulary ids, already shifted, and any option of
            `lce_torch_bridge.linear_logprobs` but ``tp_group``, ``bias``, ``logit_scale`` and ``reduce_grad_hidden``,
            which the model sets. ``where`` is ``[b, s]`` bool, or the rows of the flattened ``[b, s]``; a tensor
            ``temperature`` or ``logit_floor`` broadcasts to ``[b, s]``; ``candidates`` are ``[b, s, K]``. The default
            of ``wgrad`` is what the layer does: "main_grad" with ``gradient_accumulation_fusion``.
        scale_logits: the model's multiplier of logits (MuP), which is applied in float32 here.
        config: the model's configuration.
        runtime_gather_output: None or False. Results are whole on every rank anyway.
        inference_context: None. Generation needs logits.
        **_: other arguments of megatron-core, of this or a later version, which are ignored.

    Returns:
        A `LogprobOutput` of ``[b, s]`` tensors (``[b, s, K]`` for candidates), bitwise equal on all tensor-parallel
        ranks. Float16Module, which wraps every bf16 and fp16 model in training, turns it into a plain tuple in the same
        order: unpack it.

    Raises:
        NotImplementedError: the model cannot be served; the message says why and what to do.
        ValueError, TypeError: options that do not fit, with the offending values.
        lce_jax.UnsupportedError, RuntimeError: in the cases that `linear_logprobs` lists.

    Memory:
        That of `linear_logprobs`. Under sequence parallelism the gathered hidden states are kept for the backward pass;
        Megatron's own layer gathers them twice.

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
        output_layer, labels, multiplier(scale_logits), options, mtp=bool(getattr(config, "mtp_num_layers", 0))
    )
    with replaced_here(output_layer, forward):
        out, _bias = output_layer(hidden_states, weight=output_weight, runtime_gather_output=runtime_gather_output)
    return _batch_first(out)


@contextlib.contextmanager
def fused_output_layer(model: torch.nn.Module, labels: torch.Tensor, **options: Unpack[ModelOptions]) -> Iterator[None]:
    """Inside, ``model(tokens, positions, mask)`` returns what `output_processor` returns, not logits.

    This is for every model and version, HybridModel first. Call the model without ``labels``. The backward pass may run
    outside, unless an activation checkpoint holds the whole model, which it then calls again. Multi-token prediction
    keeps its own loss, without logits, as in `fused_losses`.

    Args:
        model: a model with an ``output_layer``, also inside DistributedDataParallel, Float16Module, ``torch.compile``
            or other modules. Its methods, and those of its output layer, are replaced for all threads until the block
            ends. So one thread at a time may be inside; `output_processor` serves several.
        labels: ``[b, s]`` global vocabulary ids, already shifted.
        **options: ``temperature``, ``logit_softcap``, ``vocab_size``, ``entropy``, ``stats``, ``mean_logit``,
            ``candidates``, ``where``, ``ignore_index``, ``out_of_vocab``, ``wgrad``, ``cache_bytes``,
            ``gradient_threshold``, ``vocab_part_size``, ``logit_floor`` and ``implementation``, as in the context of
            `output_processor`.

    Yields:
        None. The model returns a `LogprobOutput` of ``[b, s]`` tensors inside, as from `output_processor`.

    Raises:
        NotImplementedError: the model cannot be served; the message says why and what to do.
        ValueError, TypeError: options that do not fit, with the offending values.
        lce_jax.UnsupportedError, RuntimeError: in the cases that `linear_logprobs` lists.

    Memory:
        That of `output_processor`.

    Example:
        >>> from lce_torch_bridge.megatron import fused_output_layer
        >>> with fused_output_layer(model, labels, temperature=0.7):  # doctest: +SKIP
        ...     logprobs, entropy, *_ = model(tokens, positions, mask)
    """
    inner = _unwrapped(model)
    given: dict[str, Any] = {**options}
    predictions = bool(getattr(inner.config, "mtp_num_layers", None))
    forward = FusedForward(
        inner.output_layer, labels, multiplier(getattr(inner, "_scale_logits", unscaled)), given, mtp=predictions
    )
    of_losses = {name: given[name] for name in OF_LOSSES if name in given}

    def returned(pending: PendingLogits) -> LogprobOutput:
        return _batch_first(forward(*pending.inputs)[0])

    with pending_logits(inner, returned, of_losses, processors=False), _without_own_loss(inner):
        yield


@contextlib.contextmanager
def fused_losses(model: torch.nn.Module, **options: Unpack[LossesOptions]) -> Iterator[None]:
    """Inside, a model's own losses store no logits: the loss of ``labels=``, and those of multi-token prediction.

    Megatron still rolls labels and masks, weights each depth's loss, logs it with its acceptance rate, and starts its
    backward pass. An `output_processor` may be used inside; `fused_output_layer` needs no `fused_losses`. The block may
    be one step, or the whole training. Call the model for logits outside.

    Args:
        model: a model with an ``output_layer``, also inside DistributedDataParallel, Float16Module, ``torch.compile``
            or other modules. Its methods, and those of its output layer, are replaced for all threads until the block
            ends. So one thread at a time may be inside; `output_processor` serves several.
        **options: ``cache_bytes``, ``gradient_threshold``, ``vocab_part_size`` and ``implementation`` of each loss, as
            in `lce_torch_bridge.linear_logprobs`.

    Yields:
        None.

    Raises:
        NotImplementedError: the model cannot be served, or is called without labels and without a processor; the
            message says why and what to do.
        RuntimeError: methods have been replaced already, as inside of `fused_output_layer`.
        ValueError, TypeError: options that do not fit, with the offending values.
        lce_jax.UnsupportedError, RuntimeError: in the cases that `linear_logprobs` lists.

    Memory:
        That of `linear_logprobs`, once for each loss.

    Numerics:
        Each loss is Megatron's cross entropy, of float32 logits that are never rounded. A prediction counts as accepted
        if its logit equals the largest within float32's rounding.

    Example:
        >>> from lce_torch_bridge.megatron import fused_losses
        >>> with fused_losses(model):  # doctest: +SKIP
        ...     losses = model(tokens, positions, mask, labels=labels, loss_mask=loss_mask)  # [b, s]
    """
    unknown = sorted(options.keys() - set(OF_LOSSES))
    if unknown:
        raise TypeError(
            f"fused_losses takes {', '.join(OF_LOSSES)}, got {', '.join(unknown)}: the losses are Megatron's"
        )
    inner = _unwrapped(model)
    reason = refusal(inner.output_layer)
    if reason is not None:
        raise NotImplementedError(reason)
    with pending_logits(inner, _without_labels, dict(options), processors=True):
        yield


def _without_labels(_pending: PendingLogits) -> LogprobOutput:
    raise NotImplementedError(
        "the model was called without labels inside fused_losses, where there are no logits to return: pass labels, "
        "or an output_processor, or call it outside"
    )


def _batch_first(out: LogprobOutput) -> LogprobOutput:
    """Results of ``[s, b]`` as the model returns them."""
    fields: list[Any] = [None if field is None else field.transpose(0, 1).contiguous() for field in out]
    return LogprobOutput(*fields)


@contextlib.contextmanager
def _without_own_loss(model: torch.nn.Module) -> Iterator[None]:
    """Inside, the model raises where it would return its own loss, of labels."""

    def check(_model: torch.nn.Module, _inputs: Any, out: Any) -> None:
        if not isinstance(out, LogprobOutput):
            raise ValueError(
                f"the model was called with labels {tuple(out.shape)} inside fused_output_layer, and returned its loss "
                "of them: give the labels to fused_output_layer alone; the loss is -logprob"
            )

    hook = model.register_forward_hook(check)
    try:
        yield
    finally:
        hook.remove()


def _unwrapped(model: Any) -> Any:
    """The model that calls the output layer, inside of any wrappers."""
    name = type(model).__name__
    owners = dict(_owners(model, "")) if isinstance(model, torch.nn.Module) else {}
    if not owners:
        raise NotImplementedError(
            f"{name} has no output_layer: pass the language model, and on the last pipeline stage (post_process) only"
        )
    if len(owners) > 1:
        raise NotImplementedError(
            f"{name} has several modules with an output_layer, {', '.join(owners)}: pass the one that is meant"
        )
    (model,) = owners.values()
    name = type(model).__name__
    if not getattr(model, "post_process", True):
        raise NotImplementedError(
            f"this {name} is a pipeline stage without post_process, which returns hidden states: enter "
            "this block on the last stage only, and contextlib.nullcontext() on the others"
        )
    return model


def _owners(module: torch.nn.Module, path: str) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules that hold an output layer themselves. ``hasattr`` does not tell, because wrappers pass attributes on.

    Modules inside an owner are not searched: most of the model is there, and no other head.
    """
    if module._modules.get("output_layer") is not None:
        yield path, module
        return
    for name, child in module.named_children():
        yield from _owners(child, f"{path}.{name}" if path else name)
