"""`defer_logits`, which makes a head return `DeferredLogits`."""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

import torch

from lce_torch_bridge._types import PLAIN
from lce_torch_bridge.call import _checks
from lce_torch_bridge.deferred import _functions
from lce_torch_bridge.deferred._deferral import DEFERRAL, PREVIOUS_FORWARD, Deferral
from lce_torch_bridge.deferred._recipe import Source, count_steps
from lce_torch_bridge.deferred._tensor import DeferredLogits
from lce_torch_bridge.deferred._traced import TracedLogits
from lce_torch_bridge.tensors import _device

FLOATS = frozenset(_checks.FLOATS)

DeferredLogits.call = TracedLogits.call = staticmethod(_functions.call)


def defer_logits(module: torch.nn.Module, *, strict: bool = False, always: bool = False) -> Deferral:
    """Makes a head, or the head of a model, return logits that are computed only when something needs them.

    The model's own forward and loss run. While gradients are needed, the head returns a `DeferredLogits`: a tensor with
    the shape, dtype and device of the logits, and without memory. It records rows, views, casts, factors and tanh.
    This package computes torch's cross entropy, log-probabilities, lse, entropy, argmax and topk of it without logits.
    Every other function computes the logits once, by the model's own operations in order, and goes on as without
    `defer_logits`. A line of the log then says which function it was, and where. So nothing that a model does to its
    logits, and no term of its loss, is left out.

    Without gradients the head computes its logits as before, and so does ``generate``. A model that is called with
    labels defers them without gradients too, so that a loss in evaluation stores no logits.

    Deferred logits belong to the head's call. If hidden states or weights are changed in place after the call, or an
    optimizer makes a step, using the logits raises an error. Writes through ``weight.data`` are not noticed.

    Call this function before DDP, FSDP or ``torch.compile`` wraps the model. PEFT may come before or after. A model
    that is pickled and loaded computes its logits: call this function again.

    Args:
        module: a linear head, ``model.lm_head``, or a model whose ``get_output_embeddings()`` is one, as those of
            Transformers are.
        strict: raises an error where logits would be computed.
        always: defers without gradients and labels too, such as for log-probabilities of an old policy or a reference.
            ``generate`` then computes the logits that it reads.

    Returns:
        The handle, which counts results and logits and has ``undo()``. A second call with the same module returns the
        same handle.

    Raises:
        TypeError: ``module`` is neither a head nor a model that has one; the message says what to pass.
        NotImplementedError: the head is not a linear layer, or other code has replaced its forward.

    Memory:
        A deferred tensor keeps hidden states and the head's parameters, which the graph keeps anyway, for as long as
        it is referenced.

    Numerics:
        Results are those of `linear_cross_entropy` and `linear_logprobs`: computed in float32 from products in the
        head's dtype, then rounded to the dtype that torch returns. In bfloat16 they are more exact than results of
        stored logits, because stored logits are rounded first.

    Example:
        >>> import torch
        >>> from lce_torch_bridge import defer_logits
        >>> head = torch.nn.Linear(8, 1000, bias=False)
        >>> handle = defer_logits(head)
        >>> logits = head(torch.ones(4, 8)) / 0.7
        >>> loss = torch.nn.functional.cross_entropy(logits, torch.arange(4))
        >>> loss.backward()
        >>> handle.served, handle.stored, head.weight.grad.shape
        (1, 0, torch.Size([1000, 8]))
    """
    return defer("defer_logits", module, strict, always)


def defer(public_name: str, module: torch.nn.Module, strict: bool, always: bool) -> Deferral:
    """Implements `defer_logits`. Messages name the public function that was called, ``public_name``."""
    if isinstance(module, torch.nn.Module) and _is_deferred(module):
        return getattr(module, DEFERRAL)
    count_steps()
    deferral = Deferral(strict, always)
    if isinstance(module, torch.nn.Linear):
        _attach(deferral, module)
        return deferral
    _refuse_wrapper(public_name, module)
    head = _get_head(public_name, module)
    _attach(deferral, head)
    deferral.replace_forward(module, _make_model_forward(type(module)))  # type: ignore[arg-type]
    deferral.has_model = True
    return deferral


def _is_deferred(module: torch.nn.Module) -> bool:
    """Whether a module has a forward of this package. A module that was pickled has its class's forward again."""
    attributes = vars(module)
    if DEFERRAL in attributes and not hasattr(getattr(attributes.get("forward"), "__func__", None), DEFERRAL):
        for name in (DEFERRAL, PREVIOUS_FORWARD):
            attributes.pop(name, None)
        if getattr(attributes.get("forward"), "__func__", None) is type(module).forward:
            del attributes["forward"]
    return DEFERRAL in attributes


def _attach(deferral: Deferral, head: torch.nn.Module) -> None:
    """Defers the logits of a head, or of PEFT's trained copies of it."""
    copies = getattr(head, "modules_to_save", None)
    for layer in [head] if copies is None else copies.values():
        if not _is_deferred(layer):
            _refuse_other_head(layer)
            deferral.replace_forward(layer, _make_head_forward(type(layer)))  # type: ignore[arg-type]


def _attach_replaced_head(deferral: Deferral, head: Any) -> None:
    """Defers the logits of a new head, after the model was resized or PEFT put an adapter around the head."""
    if head is None or DEFERRAL in vars(head):
        return
    try:
        _attach(deferral, head)
    except NotImplementedError as reason:
        deferral.log_reason(str(reason))


def _get_head(public_name: str, model: Any) -> Any:
    """Returns a model's head, as Transformers' ``get_output_embeddings()`` gives it."""
    head = getattr(model, "get_output_embeddings", lambda: None)() if isinstance(model, torch.nn.Module) else None
    if head is None:
        actual = type(model).__name__ if isinstance(model, torch.nn.Module) else repr(model)
        raise TypeError(
            f"pass a head, {public_name}(model.lm_head), or a model that has get_output_embeddings, as Transformers' "
            f"…ForCausalLM has: got {actual}"
        )
    return head


def _refuse_wrapper(public_name: str, module: Any) -> None:
    """Refuses a wrapper around the model, such as DDP, and objects that hold it, such as a Trainer."""
    wrappers = {"_orig_mod": "torch.compile", "module": "DDP or FSDP"}
    for name, wrapper in wrappers.items():
        children = vars(module).get("_modules", {}) if isinstance(module, torch.nn.Module) else {}
        if name in children or (name == "module" and "_fsdp_wrapped_module" in children):
            raise TypeError(
                f"{type(module).__name__} wraps the model, as {wrapper} does: write {public_name}(model) before that, "
                f"or {public_name}(model.{name})"
            )
    model = getattr(module, "model", None)
    if not isinstance(module, torch.nn.Module) and isinstance(model, torch.nn.Module):
        name = type(module).__name__
        raise TypeError(f"{name} is not a model: write {public_name}({name.lower()}.model)")


def _refuse_other_head(head: Any) -> None:
    is_linear = type(head).forward is torch.nn.Linear.forward or type(head).__module__.startswith("peft.tuners.")
    if not is_linear:
        raise NotImplementedError(
            f"the head is {type(head)}, whose forward is not a linear layer's: leave the model as it is, so "
            "that it computes its logits"
        )
    if "forward" in vars(head):
        raise NotImplementedError(
            f"the head's forward is already replaced by {vars(head)['forward']!r}: defer its logits before that"
        )


@functools.cache
def _make_head_forward(head_class: Any) -> Any:
    """Returns the forward that replaces a head's."""
    original = head_class.forward

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        source = _make_source(self, *args, **kwargs) if len(args) + len(kwargs) == 1 else None
        if source is None:
            return original(self, *args, **kwargs)
        return TracedLogits.from_source(source) if torch.compiler.is_compiling() else DeferredLogits.from_source(source)

    setattr(forward, DEFERRAL, True)
    return forward


@functools.cache
def _make_model_forward(model_class: Any) -> Any:
    """Returns the forward that replaces a model's, with the same signature, because the Trainer reads it."""
    original = model_class.forward

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        args = args[1:] if args and args[0] is self else args  # accelerate may bind a method as if it were a function
        deferral: Deferral = getattr(self, DEFERRAL)
        if not torch.compiler.is_compiling():
            _attach_replaced_head(deferral, self.get_output_embeddings())
        previous = getattr(self, PREVIOUS_FORWARD, None) or functools.partial(original, self)
        deferral.labelled_calls += (has_labels := _has_labels(original, self, args, kwargs))
        try:
            return previous(*args, **kwargs)
        finally:
            deferral.labelled_calls -= has_labels

    setattr(forward, DEFERRAL, True)
    return forward


def _has_labels(original: Any, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if kwargs.get("labels") is not None or kwargs.get("shift_labels") is not None:
        return True
    return bool(args) and inspect.signature(original).bind_partial(model, *args).arguments.get("labels") is not None


def _make_source(head: Any, input: Any) -> Source | None:
    """Returns the source of deferred logits, or None if the head is to compute its logits now."""
    deferral: Deferral = getattr(head, DEFERRAL)
    in_graph = torch.compiler.is_dynamo_compiling()
    allowed = deferral.labelled_calls or deferral.always or not deferral.has_model
    if (_device.is_traced() and not in_graph) or (in_graph and not allowed):
        return None
    layer, lora = head, None
    if type(head).forward is not torch.nn.Linear.forward:
        try:
            layer, lora = _checks.head(head)
        except NotImplementedError as reason:
            deferral.log_reason(str(reason))
            return None
    weight, bias = layer.weight, layer.bias
    if not in_graph and (freed := _explain_freed(head, weight)) is not None:
        deferral.log_reason(freed)
        return None
    if type(input) not in PLAIN or type(weight) not in PLAIN or not deferral.should_defer(input, weight, bias, lora):
        return None
    device = input.device
    kind, dtypes = device.type, (input.dtype, weight.dtype)
    if kind == "cuda" and not in_graph and torch.cuda.is_current_stream_capturing():
        deferral.log_reason("a CUDA graph is captured, in which the host cannot read labels")
        return None
    if device != weight.device or kind not in ("cpu", "cuda") or not FLOATS.issuperset(dtypes):
        return None
    if input.shape[-1:] != weight.shape[1:] or weight.shape[0] <= 1:
        return None
    dtype = _device.autocast_dtype(kind)
    if dtype is None and dtypes[0] != dtypes[1]:
        return None
    return Source(input, weight, bias, lora, dtype, deferral, kind)


def _explain_freed(head: Any, weight: Any) -> str | None:
    """Returns why the weight will have no memory when the loss is computed; None otherwise."""
    if hasattr(weight, "ds_id"):
        return "ZeRO-3 frees its weight after the head's forward"
    frame: Any = sys._getframe(3)  # the caller of the head
    while frame is not None and frame.f_code.co_filename == torch.nn.modules.module.__file__:
        frame = frame.f_back
    if frame is None or frame.f_code.co_name != "forward":
        return None
    caller = frame.f_locals.get("self")
    if not isinstance(caller, torch.nn.Module) or caller._modules.get("_fsdp_wrapped_module") is not head:
        return None
    return "FSDP frees its weight after the head's forward: let the model's FSDP module hold it, or use FSDP2"
