"""`defer_logits`: a head, or a model's, that returns `DeferredLogits`."""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

import torch

from lce_torch_bridge._types import PLAIN
from lce_torch_bridge.call import _checks
from lce_torch_bridge.deferred import _functions
from lce_torch_bridge.deferred._deferral import BEFORE, DEFERRAL, Deferral
from lce_torch_bridge.deferred._recipe import Source, count_steps
from lce_torch_bridge.deferred._tensor import DeferredLogits
from lce_torch_bridge.deferred._traced import TracedLogits
from lce_torch_bridge.tensors import _device

FLOATS = frozenset(_checks.FLOATS)

DeferredLogits.call = TracedLogits.call = staticmethod(_functions.call)


def defer_logits(module: torch.nn.Module, *, strict: bool = False, always: bool = False) -> Deferral:
    """A head, or a model's, returns logits that are computed only when something needs them.

    The model's own forward runs, and so does its loss. While gradients are wanted, the head returns a `DeferredLogits`:
    a tensor with the shape, dtype and device of the logits, and no memory. Rows, views, casts, factors and tanh of it
    are written down. torch's cross entropy, log-probabilities, lse, entropy and the largest of it are this package's
    functions. Whatever else needs the values computes the logits once, by the model's own operations in its own order,
    and goes on as it would without this function: a line of the log says for what, and where. So a model is served, or
    is as it was: nothing that it does to its logits, and no term of its loss, is left out.

    Without gradients the head computes its logits as before, and so does ``generate``. A model that is given labels
    defers them without gradients too, so that an evaluation's loss stores none.

    The logits are those of the head's call. If hidden states or weights are written into after it, or an optimizer
    makes a step, what is asked of them then raises. Nothing sees what is written through ``weight.data``.

    Call it before DDP, FSDP or ``torch.compile`` wraps the model. PEFT may come before or after. A model that was
    pickled computes its logits after it is loaded: call it again.

    Args:
        module: a linear head, ``model.lm_head``, or a model whose ``get_output_embeddings()`` is one, as those of
            Transformers are.
        strict: raises where logits would be computed, in place of computing them.
        always: defers without gradients and labels too, as for log-probabilities of an old policy or of a reference.
            ``generate`` then computes the logits that it reads.

    Returns:
        What counts results and logits, and undoes it. A second call for the same module returns the same.

    Raises:
        TypeError: this is neither a head nor a model with one; the message says what to pass.
        NotImplementedError: the head is no linear layer, or somebody has put another forward in its place.

    Memory:
        A deferred tensor keeps hidden states and the head's parameters, which the graph keeps anyway, for as long as
        it is referenced.

    Numerics:
        Results are those of `linear_cross_entropy` and `linear_logprobs`: in float32 from products in the head's dtype,
        then rounded to the dtype that torch returns. In bfloat16 they are more exact than those of stored logits, which
        are rounded first.

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


def defer(called: str, module: torch.nn.Module, strict: bool, always: bool) -> Deferral:
    """`defer_logits`; ``called``: the public function, which messages name."""
    if isinstance(module, torch.nn.Module) and _is_deferred(module):
        return getattr(module, DEFERRAL)
    count_steps()
    deferral = Deferral(strict, always)
    if isinstance(module, torch.nn.Linear):
        _attach(deferral, module)
        return deferral
    _refuse_wrapper(called, module)
    head = _head_of(called, module)
    _attach(deferral, head)
    deferral.put(module, _forward_of_model(type(module)))  # type: ignore[arg-type]
    deferral.of_model = True
    return deferral


def _is_deferred(module: torch.nn.Module) -> bool:
    """Whether a module has a forward of this package. One that was pickled has the stock forward again."""
    attributes = vars(module)
    if DEFERRAL in attributes and not hasattr(getattr(attributes.get("forward"), "__func__", None), DEFERRAL):
        for name in (DEFERRAL, BEFORE):
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
            deferral.put(layer, _forward_of_head(type(layer)))  # type: ignore[arg-type]


def _attach_new(deferral: Deferral, head: Any) -> None:
    """Defers the logits of another head than before: a resized one, or an adapter that PEFT has put around it."""
    if head is None or DEFERRAL in vars(head):
        return
    try:
        _attach(deferral, head)
    except NotImplementedError as reason:
        deferral.say(str(reason))


def _head_of(called: str, model: Any) -> Any:
    """A model's head, as Transformers says it."""
    head = getattr(model, "get_output_embeddings", lambda: None)() if isinstance(model, torch.nn.Module) else None
    if head is None:
        got = type(model).__name__ if isinstance(model, torch.nn.Module) else repr(model)
        raise TypeError(
            f"pass a head, {called}(model.lm_head), or a model that has get_output_embeddings, as Transformers' "
            f"…ForCausalLM has: got {got}"
        )
    return head


def _refuse_wrapper(called: str, module: Any) -> None:
    """Refuses what only calls the model, with the model in it."""
    inside = {"_orig_mod": "torch.compile", "module": "DDP or FSDP"}
    for name, what in inside.items():
        there = vars(module).get("_modules", {}) if isinstance(module, torch.nn.Module) else {}
        if name in there or (name == "module" and "_fsdp_wrapped_module" in there):
            raise TypeError(
                f"{type(module).__name__} calls the model, as {what} makes it: write {called}(model) before that, or "
                f"{called}(model.{name})"
            )
    model = getattr(module, "model", None)
    if not isinstance(module, torch.nn.Module) and isinstance(model, torch.nn.Module):
        name = type(module).__name__
        raise TypeError(f"{name} is no model: write {called}({name.lower()}.model)")


def _refuse_other_head(head: Any) -> None:
    is_linear = type(head).forward is torch.nn.Linear.forward or type(head).__module__.startswith("peft.tuners.")
    if not is_linear:
        raise NotImplementedError(
            f"the head is {type(head)}, whose forward is no linear layer's: leave the model as it is, which computes "
            "its logits"
        )
    if "forward" in vars(head):
        raise NotImplementedError(
            f"the head's forward is {vars(head)['forward']!r}, which somebody put there: defer its logits before that"
        )


@functools.cache
def _forward_of_head(head_class: Any) -> Any:
    """In place of a head's ``forward``."""
    stock = head_class.forward

    @functools.wraps(stock)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        source = _source(self, *args, **kwargs) if len(args) + len(kwargs) == 1 else None
        if source is None:
            return stock(self, *args, **kwargs)
        return TracedLogits.of_head(source) if torch.compiler.is_compiling() else DeferredLogits.of_head(source)

    setattr(forward, DEFERRAL, True)
    return forward


@functools.cache
def _forward_of_model(model_class: Any) -> Any:
    """In place of a model's ``forward``, whose signature the Trainer reads."""
    stock = model_class.forward

    @functools.wraps(stock)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        args = args[1:] if args and args[0] is self else args  # accelerate may bind a method as if it were a function
        deferral: Deferral = getattr(self, DEFERRAL)
        if not torch.compiler.is_compiling():
            _attach_new(deferral, self.get_output_embeddings())
        before = getattr(self, BEFORE, None) or functools.partial(stock, self)
        deferral.with_labels += (has_labels := _has_labels(stock, self, args, kwargs))
        try:
            return before(*args, **kwargs)
        finally:
            deferral.with_labels -= has_labels

    setattr(forward, DEFERRAL, True)
    return forward


def _has_labels(stock: Any, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if kwargs.get("labels") is not None or kwargs.get("shift_labels") is not None:
        return True
    return bool(args) and inspect.signature(stock).bind_partial(model, *args).arguments.get("labels") is not None


def _source(head: Any, input: Any) -> Source | None:
    """What the logits would be computed from; None where the head computes them."""
    deferral: Deferral = getattr(head, DEFERRAL)
    in_graph = torch.compiler.is_dynamo_compiling()
    asked = deferral.with_labels or deferral.always or not deferral.of_model
    if (_device.is_traced() and not in_graph) or (in_graph and not asked):
        return None
    layer, lora = head, None
    if type(head).forward is not torch.nn.Linear.forward:
        try:
            layer, lora = _checks.head(head)
        except NotImplementedError as reason:
            deferral.say(str(reason))
            return None
    weight, bias = layer.weight, layer.bias
    if not in_graph and (freed := _why_freed(head, weight)) is not None:
        deferral.say(freed)
        return None
    if type(input) not in PLAIN or type(weight) not in PLAIN or not deferral.wants(input, weight, bias, lora):
        return None
    device = input.device
    kind, dtypes = device.type, (input.dtype, weight.dtype)
    if kind == "cuda" and not in_graph and torch.cuda.is_current_stream_capturing():
        deferral.say("a CUDA graph is captured, in which the host cannot count labels")
        return None
    if device != weight.device or kind not in ("cpu", "cuda") or not FLOATS.issuperset(dtypes):
        return None
    if input.shape[-1:] != weight.shape[1:] or weight.shape[0] <= 1:
        return None
    dtype = _device.autocast_dtype(kind)
    if dtype is None and dtypes[0] != dtypes[1]:
        return None
    return Source(input, weight, bias, lora, dtype, deferral, kind)


def _why_freed(head: Any, weight: Any) -> str | None:
    """Why the weight will be gone when the loss is computed; None where it will be there, or is gathered then."""
    if hasattr(weight, "ds_id"):
        return "ZeRO-3 frees its weight after the head's forward"
    frame: Any = sys._getframe(3)  # of who calls the head
    while frame is not None and frame.f_code.co_filename == torch.nn.modules.module.__file__:
        frame = frame.f_back
    if frame is None or frame.f_code.co_name != "forward":
        return None
    caller = frame.f_locals.get("self")
    if not isinstance(caller, torch.nn.Module) or caller._modules.get("_fsdp_wrapped_module") is not head:
        return None
    return "FSDP frees its weight after the head's forward: let the model's FSDP module hold it, or use FSDP2"
