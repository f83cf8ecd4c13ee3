"""A model whose output layer is replaced: GPTModel's own way in newer versions, a context manager for the others."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Unpack

import torch

from lce_torch_bridge._types import LogprobOutput
from lce_torch_bridge.megatron._output_layer import Head, multiplier
from lce_torch_bridge.megatron._replaced import replaced, replaced_here

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from megatron.core.transformer import TransformerConfig

    from lce_torch_bridge.call._keywords import ModelOptions

__all__ = ["fused_output_layer", "output_processor"]


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
) -> LogprobOutput[torch.Tensor | None]:
    """Log-probability and entropy in place of logits: ``GPTModel`` calls it instead of its output layer.

    It runs after multi-token prediction, whose own loss is left as it is.

    Args:
        hidden_states: ``[s, b, h]``, or ``[s / TP, b, h]`` under sequence parallelism. The model passes
            them, and everything else but ``context``.
        output_layer: the model's ColumnParallelLinear.
        output_weight: the embedding's weight where it is tied, else None.
        labels: ``[b, s]``, those the model was called with (for multi-token prediction), used if ``context`` has none.
        context: ``labels`` ``[b, s]``, global vocabulary ids, already shifted, and any option of
            `lce_torch_bridge.linear_logprobs` but ``tp_group``, ``bias``, ``logit_scale`` and ``reduce_grad_hidden``,
            which the model sets. ``where`` is ``[b, s]`` bool, or the rows of the flattened ``[b, s]``; a tensor
            ``temperature`` or ``logit_floor`` broadcasts to ``[b, s]``; ``candidates`` are ``[b, s, K]``. ``wgrad`` is
            by default what the layer does: "main_grad" with ``gradient_accumulation_fusion``.
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
        Megatron's own layer gathers them a second time instead.

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
    head = Head(output_layer, labels, multiplier(scale_logits), options, mtp=bool(getattr(config, "mtp_num_layers", 0)))
    with replaced_here(output_layer, head):
        out, _bias = output_layer(hidden_states, weight=output_weight, runtime_gather_output=runtime_gather_output)
    batch_first: list[Any] = [None if field is None else field.transpose(0, 1).contiguous() for field in out]
    return LogprobOutput(*batch_first)


@contextlib.contextmanager
def fused_output_layer(model: torch.nn.Module, labels: torch.Tensor, **options: Unpack[ModelOptions]) -> Iterator[None]:
    """Inside, ``model(tokens, positions, mask)`` returns ``[b, s, 2]``, log-probability and entropy, not logits.

    With ``candidates`` ``[b, s, K]`` it returns ``[b, s, 2 + K]``: their log-probabilities come after these two. For
    models without an output processor. Call the model without ``labels``. The backward pass may run outside, unless
    the whole model is under an activation checkpoint, which calls it again. Multi-token prediction keeps its own loss,
    and stores that loss's logits.

    Args:
        model: a model with an ``output_layer``, also inside DistributedDataParallel, Float16Module, ``torch.compile``
            or other modules. Methods of it and of its output layer are replaced until the block is left, for all
            threads: one at a time may be inside, while `output_processor` serves several.
        labels: ``[b, s]`` global vocabulary ids, already shifted.
        **options: ``temperature``, ``logit_softcap``, ``vocab_size``, ``entropy``, ``candidates``, ``where``,
            ``ignore_index``, ``out_of_vocab``, ``wgrad``, ``cache_bytes``, ``gradient_threshold``, ``vocab_part_size``,
            ``logit_floor`` and ``implementation``, as in the context of `output_processor`. Not ``entropy=False``,
            because the model returns two results; "metric" spares the entropy's gradient.

    Yields:
        None.

    Raises:
        NotImplementedError: the model cannot be served; the message says why and what to do.
        ValueError, TypeError: options that do not fit, with the offending values.
        lce_jax.UnsupportedError, RuntimeError: in the cases that `linear_logprobs` lists.

    Memory:
        That of `output_processor`.

    Example:
        >>> from lce_torch_bridge.megatron import fused_output_layer
        >>> with fused_output_layer(model, labels, temperature=0.7):  # doctest: +SKIP
        ...     logprobs, entropy = model(tokens, positions, mask).unbind(-1)
    """
    inner = _unwrapped(model)
    given: dict[str, Any] = {**options}
    further = {name: given.get(name, False) for name in ("stats", "mean_logit")}
    if given.get("entropy") is False or any(further.values()):
        told = ", ".join(f"{name}={value!r}" for name, value in further.items())
        raise ValueError(
            f"entropy={given.get('entropy', True)!r}, {told}: the model returns exactly logprob and entropy "
            '(and candidates) here; entropy="metric" has no gradient and costs little'
        )
    scale_logits = getattr(inner, "_scale_logits", _unscaled)  # since megatron-core 0.17
    predictions = inner.config.mtp_num_layers if getattr(inner.config, "mtp_num_layers", None) else 0
    head = Head(inner.output_layer, labels, multiplier(scale_logits), given, mtp=predictions > 0)
    returned = (*labels.shape, 2 + (given["candidates"].shape[-1] if given.get("candidates") is not None else 0))
    turn = _Turn(predictions, type(inner).__name__, returned, scale_logits, inner.compute_language_model_loss)
    stock = inner.output_layer.forward

    def forward(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not turn.of_the_model():
            return stock(*args, **kwargs)
        out, bias = head(*args, **kwargs)
        fields: Any = out[:2]
        stacked = torch.stack(fields, dim=-1)
        of_candidates = out.candidate_logprobs
        return stacked if of_candidates is None else torch.cat([stacked, of_candidates], -1), bias

    # The model's own steps on logits: the op has applied the multiplier, and a loss cannot be computed.
    with (
        replaced(inner.output_layer, forward=forward),
        replaced(inner, _scale_logits=turn.scale, compute_language_model_loss=turn.loss),
        turn.watching(inner),
    ):
        yield


class _Turn:
    """Counts the calls of the output layer in a forward: multi-token prediction makes the first ones, for logits."""

    def __init__(
        self,
        predictions: int,
        name: str,
        returned: tuple[int, ...],
        scale: Callable[..., Any],
        loss: Callable[..., Any],
    ) -> None:
        self.predictions, self.name, self.returned = predictions, name, returned
        self._scale, self._loss = scale, loss
        self.calls = 0  # of the output layer, in this forward

    def of_the_model(self) -> bool:
        """Counts a call of the output layer; True for the model's own."""
        self.calls += 1
        return self.calls > self.predictions

    def scale(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self.calls > self.predictions else self._scale(logits)

    def loss(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        if self.calls <= self.predictions:
            return self._loss(labels, logits)
        raise ValueError(
            f"the model was called with labels {tuple(labels.shape)} inside fused_output_layer, where there are no "
            "logits to take its loss of: give the labels to fused_output_layer alone; the loss is -logprob"
        )

    @contextlib.contextmanager
    def watching(self, model: torch.nn.Module) -> Iterator[None]:
        """Counts anew in each forward, if the model has predictions to make."""

        def begin(_model: torch.nn.Module, _inputs: Any) -> None:
            self.calls = 0

        def end(_model: torch.nn.Module, _inputs: Any, out: torch.Tensor) -> None:
            if self.calls != self.predictions + 1 or out.shape != self.returned:
                raise NotImplementedError(
                    f"{self.name} has mtp_num_layers={self.predictions}, and called its output layer {self.calls} "
                    f"times, to return {tuple(out.shape)}: call it with input_ids, which give the further predictions "
                    "their labels (megatron-core 0.19 or newer), or build it without them"
                )

        hooks = [model.register_forward_pre_hook(begin), model.register_forward_hook(end)] if self.predictions else []
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _unscaled(logits: torch.Tensor) -> torch.Tensor:
    return logits


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
            "fused_output_layer on the last stage only, and contextlib.nullcontext() on the others"
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
