"""Causal language models of Hugging Face Transformers whose loss needs no logits: `patch` one, before it is trained.

With labels, the model then computes its loss from the last hidden states and the head's weight. Without labels, as in
``generate``, it is as before. The Trainer does not change.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from typing import TYPE_CHECKING, Any

import torch

from lce_torch_bridge._framework import Installed
from lce_torch_bridge._types import Lora
from lce_torch_bridge.call import _checks
from lce_torch_bridge.ops._cross_entropy import linear_cross_entropy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["loss_function", "patch"]

# What a configuration may do to logits besides; `_check_logits` finds what has another name.
OF_LOGITS = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")


def patch(model: PreTrainedModel) -> Installed:
    """Given labels, a model returns its loss and no logits; without labels it is as before.

    Call it before the Trainer or DDP wraps the model; before PEFT or FSDP2 does, or after, for the model inside.
    Gradient accumulation, evaluation of the loss (``prediction_loss_only=True``) and a deep copy of the model work. The
    output also has the hidden states, attentions and cache that a call asks for.

    Args:
        model: a causal language model of Transformers 5 whose head is a linear layer, with or without a softcap.

    Returns:
        What counts the losses, and undoes it; a second call for the same model returns the same.

    Raises:
        TypeError: this is no instance of such a model.
        NotImplementedError: the head is more than its weight and bias, or one adapter of PEFT's LoRA without dropout,
            bias or DoRA; the configuration scales logits or adds a router's loss; the model has an encoder, reads
            labels before its head, or has another loss (its own, or ``model.loss_function``); or its logits, of the
            last token in the first call, are not those of its head and softcap.

    Example:
        >>> import lce_torch_bridge.transformers
        >>> lce_torch_bridge.transformers.patch(model)  # doctest: +SKIP
        >>> Trainer(model, arguments, train_dataset=rows).train()  # doctest: +SKIP
    """
    module = isinstance(model, torch.nn.Module)
    head = getattr(model, "get_output_embeddings", lambda: None)() if module else None
    if head is None:
        got = type(model).__name__ if module else repr(model)
        raise TypeError(f"pass an instance of a causal language model, whose class is a …ForCausalLM, got {got}")
    _refuse_shallow_copy(model)
    if (ours := _ours_of(model)) is not None:
        return ours.args[2]
    _checks.head(head)
    config = model.config.get_text_config()
    if getattr(model.config, "is_encoder_decoder", False) or model.base_model is model:
        raise NotImplementedError(f"{type(model).__name__} is not a decoder in base_model, and a head")
    for name in OF_LOGITS:
        if getattr(config, name, None) not in (None, 1):
            raise NotImplementedError(f"{name}={getattr(config, name)}: this loss leaves it out")
    _refuse_routers_loss(getattr(config, "output_router_logits", None))
    _check_loss(model)
    if "labels" in inspect.signature(model.base_model.forward).parameters:
        raise NotImplementedError(f"{type(model.base_model).__name__} reads labels, as for its mask: it gets none here")
    installed = Installed("transformers", "5", f"the loss of {type(model).__name__} comes")
    forward = functools.partial(_forward, model, model.forward, installed)  # whose copy has a copy of the model
    functools.update_wrapper(forward, type(model).forward)  # the Trainer reads the signature
    return installed.put((model, "forward", forward), handles=(model.register_forward_pre_hook(_refuse_shallow_copy),))


def loss_function(
    hidden_states: torch.Tensor,
    labels: torch.Tensor | None,
    vocab_size: int | None = None,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    *,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    lora: Lora | None = None,
) -> torch.Tensor:
    """Transformers' loss of a causal language model, of hidden states and the head's weight in place of logits.

    The other arguments are those of `linear_cross_entropy` and `linear_logprobs`.

    Args:
        hidden_states: ``[b, s, H]``, what the head is applied to.
        labels: ``[b, s]`` token ids, not shifted: the hidden state of a token predicts the next one.
        num_items_in_batch: what the sum of the losses is divided by, as the Trainer counts labels over micro-batches.
            None: the number of labels that count here.
        shift_labels: ``[b, s]``, labels that are shifted already, in place of ``labels``.

    Returns:
        The loss in nats, a float32 scalar.

    Raises:
        lce_jax.UnsupportedError, ValueError, TypeError, NotImplementedError, RuntimeError: in the cases that
            `linear_cross_entropy` lists.

    Example:
        >>> import torch
        >>> from lce_torch_bridge.transformers import loss_function
        >>> tokens, weight = torch.tensor([[1, 2, 3]]), torch.zeros(1000, 8)
        >>> round(loss_function(torch.ones(1, 3, 8), tokens, weight=weight).item(), 3)  # ln 1000
        6.908
    """
    if shift_labels is None:
        if labels is None:
            raise ValueError("no labels: pass labels, or shift_labels")
        hidden_states, shift_labels = hidden_states[:, :-1], labels[:, 1:]
    loss = linear_cross_entropy(
        hidden_states, weight, shift_labels, bias=bias, logit_scale=logit_scale, logit_softcap=logit_softcap,
        vocab_size=vocab_size, ignore_index=ignore_index, reduction="mean" if num_items_in_batch is None else "sum",
        lora=lora,
    )  # fmt: skip
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def _forward(model: Any, stock: Any, installed: Installed, /, *arguments: Any, **inputs: Any) -> Any:
    """In place of a model's ``forward``, to which accelerate's `unwrap_model` may bind it as if it were a function."""
    arguments = arguments[1:] if arguments and arguments[0] is model else arguments
    if arguments:  # one of them may be the labels
        inputs = dict(**inspect.signature(stock).bind_partial(*arguments).arguments, **inputs)
    if inputs.get("labels") is None and inputs.get("shift_labels") is None:
        if model.training and torch.is_grad_enabled():
            warnings.warn(
                f"{type(model).__name__} trains without labels: its logits are stored, and the loss is another's. "
                "Leave out what takes the labels, as the Trainer's label_smoothing_factor and compute_loss_func do",
                RuntimeWarning,
                stacklevel=2,
            )
        return stock(**inputs)
    from transformers.modeling_outputs import CausalLMOutputWithPast

    labels, shift_labels, num_items_in_batch, return_dict = (
        inputs.pop(name, None) for name in ("labels", "shift_labels", "num_items_in_batch", "return_dict")
    )
    head, lora = _checks.head(model.get_output_embeddings())  # at each call, because PEFT may replace it later
    config = model.config.get_text_config()
    _refuse_routers_loss(inputs.get("output_router_logits", getattr(config, "output_router_logits", None)))
    softcap = getattr(config, "final_logit_softcapping", None)
    _check_loss(model)
    inputs["use_cache"] = bool(inputs.get("use_cache"))
    body = model.base_model(**inputs) if installed.calls else _check_logits(model, stock, softcap, inputs)
    installed.count()
    loss = loss_function(
        body.last_hidden_state, labels, None, num_items_in_batch, -100, shift_labels,
        weight=head.weight, bias=head.bias, logit_softcap=softcap, lora=lora,
    )  # fmt: skip
    kept = {name: getattr(body, name, None) for name in ("past_key_values", "hidden_states", "attentions")}
    output = CausalLMOutputWithPast(loss=loss, **kept)
    return output.to_tuple() if return_dict is False else output


def _ours_of(model: Any) -> functools.partial | None:
    there = vars(model).get("forward")
    return there if isinstance(there, functools.partial) and there.func is _forward else None


def _refuse_shallow_copy(model: Any, *_: Any) -> None:
    """It has the forward of the model that was patched, which reads that one's configuration and weights."""
    ours = _ours_of(model)
    if ours is not None and ours.args[0] is not model:
        raise NotImplementedError(
            f"a shallow copy of a patched {type(model).__name__} calls that one's forward: make it with copy.deepcopy, "
            "or before patch. DataParallel makes such copies: start the program with torchrun"
        )


def _refuse_routers_loss(asked: bool | None) -> None:
    """Of mixtures of experts, which add it where this is True in a call, or else in their configuration."""
    if asked:
        raise NotImplementedError(
            "output_router_logits=True adds a router's loss, which this loss leaves out: set it to False"
        )


def _check_loss(model: Any) -> None:
    """The model gives its logits to Transformers' loss of a causal language model, as few still do not."""
    own = "loss_function" not in inspect.unwrap(type(model).forward).__code__.co_names
    name = "a loss of its own" if own else getattr(model.loss_function, "__name__", repr(model.loss_function))
    if name != "ForCausalLMLoss":
        raise NotImplementedError(
            f"{type(model).__name__} computes {name}, and this is ForCausalLMLoss of Transformers, of next tokens: "
            "leave the model as it is. Of an adapter (PEFT), patch the model in it: patch(model.get_base_model())"
        )


def _check_logits(model: Any, stock: Any, softcap: float | None, inputs: dict[str, Any]) -> Any:
    """The body's output in a model's own forward, whose logits of the last token are those of its head and softcap.

    A model may scale or mask its logits, or what its head is given, whatever its configuration calls that.
    """
    outputs: list[Any] = []
    hook = model.base_model.register_forward_hook(lambda *given: outputs.append(given[-1]))
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(stock).parameters else {}
    try:
        logits = stock(**inputs | last).logits[:, -1:].float()
    finally:
        hook.remove()
    if not outputs:
        name = type(model).__name__
        raise NotImplementedError(f"the forward of {name} calls a part of its base_model: leave the model as it is")
    with torch.no_grad():
        want = model.get_output_embeddings()(outputs[-1].last_hidden_state[:, -1:]).float()
        want = want if softcap is None else softcap * torch.tanh(want / softcap)
        # A softcap of bfloat16 logits is off by 2⁻⁸ of the largest, and what scales or masks them by more.
        if not (logits - want).abs().max() <= 2**-6 * want.abs().max():
            raise NotImplementedError(
                f"the logits of {type(model).__name__} are not those of its head"
                f"{'' if softcap is None else f' and a softcap of {softcap}'}: this loss would leave out what it does "
                "to them. Compute the loss of this model in its own forward, with loss_function"
            )
    return outputs[-1]
