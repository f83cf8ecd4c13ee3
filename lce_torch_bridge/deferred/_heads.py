"""`defer_logits`, which replaces a head's forward by one that returns `DeferredLogits`."""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

import torch

from lce_torch_bridge._types import PLAIN
from lce_torch_bridge.call import _checks
from lce_torch_bridge.deferred import _dispatch
from lce_torch_bridge.deferred._deferral import DEFERRAL, PREVIOUS_FORWARD, Deferral
from lce_torch_bridge.deferred._recipe import Source, count_steps
from lce_torch_bridge.deferred._tensor import DeferredLogits
from lce_torch_bridge.deferred._traced import TracedLogits
from lce_torch_bridge.tensors import _device

FLOATS = frozenset(_checks.FLOATS)

DeferredLogits.call = TracedLogits.call = staticmethod(_dispatch.call)


def defer_logits(module: torch.nn.Module, *, strict: bool = False, always: bool = False) -> Deferral:
    """Makes a head, or the head of a model, return logits that are computed only when something needs them.

    The model's own forward and loss run. While gradients are needed, the head returns a `DeferredLogits`: a tensor with
    the shape, dtype and device of the logits, but without memory. It records selections of rows, views, casts, factors
    and tanh. torch's cross entropy, log-probabilities, lse, entropy, argmax and topk of a `DeferredLogits` are computed
    without logits. Every other function computes the logits once, using the model's own operations in order, and
    continues as it would without `defer_logits`; a log message then names the function and the line of code. So nothing
    that a model does to its logits, and no term of its loss, is left out.

    Without gradients, and in ``generate``, the head computes its logits as before. A model that is called with labels
    defers its logits even without gradients, so that a loss in evaluation stores no logits.

    Use deferred logits before their inputs change. If hidden states or weights are changed in place after the head's
    call, or an optimizer makes a step, using the logits raises an error. Writes through ``weight.data`` are not
    noticed.

    Call this function before DDP, FSDP or ``torch.compile`` wraps the model. PEFT may come before or after. A model
    that was pickled and loaded computes its logits: call this function again after loading.

    Args:
        module: a linear head, such as ``model.lm_head``, or a model whose ``get_output_embeddings()`` returns one, as
            in Transformers.
        strict: whether to raise an error instead of computing logits.
        always: whether to defer logits even without gradients and labels, for example for log-probabilities of an old
            policy or a reference. ``generate`` then computes the logits that it reads.

    Returns:
        The handle, which counts results and logits and has ``undo()``. A second call with the same module returns the
        same handle.

    Raises:
        TypeError: ``module`` is neither a head nor a model that has one; the message says what to pass.
        NotImplementedError: the head is not a linear layer, or other code has replaced its forward.

    Memory:
        As long as a deferred tensor is referenced, it keeps hidden states and the head's parameters alive, as the graph
        does anyway.

    Numerics:
        Results come from `linear_cross_entropy` and `linear_logprobs`: they are computed in float32 from products in
        the head's dtype, then rounded to the dtype that torch returns. In bfloat16 they are more exact than results of
        stored logits, which are rounded first.

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
    """Implements `defer_logits`. Messages refer to ``public_name``, the public function that was called."""
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
    """Whether this package has replaced a module's forward. Cleans up a module that pickling has restored."""
    attributes = vars(module)
    if DEFERRAL in attributes and not hasattr(getattr(attributes.get("forward"), "__func__", None), DEFERRAL):
        for name in (DEFERRAL, PREVIOUS_FORWARD):
            attributes.pop(name, None)
        if getattr(attributes.get("forward"), "__func__", None) is type(module).forward:
            del attributes["forward"]
    return DEFERRAL in attributes


def _attach(deferral: Deferral, head: torch.nn.Module) -> None:
    """Defers the logits of a head, or of each copy of the head that PEFT trains."""
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
    """Returns a model's head, from Transformers' ``get_output_embeddings()``."""
    head = getattr(model, "get_output_embeddings", lambda: None)() if isinstance(model, torch.nn.Module) else None
    if head is None:
        actual = type(model).__name__ if isinstance(model, torch.nn.Module) else repr(model)
        raise TypeError(
            f"pass a head, {public_name}(model.lm_head), or a model that has get_output_embeddings, as Transformers' "
            f"…ForCausalLM has: got {actual}"
        )
    return head


def _refuse_wrapper(public_name: str, module: Any) -> None:
    """Refuses a wrapper of a model, such as DDP, and an object that has a model, such as a Trainer."""
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
    """Returns the forward that replaces a head's forward."""
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
    """Returns the forward that replaces a model's forward. Its signature is the same, because the Trainer reads it."""
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
    """Returns the source of deferred logits; None if the head should compute its logits now."""
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
    """Returns why the weight will have no memory when the loss is computed; None if it will have memory."""
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
