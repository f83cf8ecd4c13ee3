"""`DeferredLogits`: a tensor that is computed only when something needs its values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from torch.utils._pytree import tree_map

from lce_torch_bridge.deferred._recipe import Recipe, Source, Step

_plain = torch._C.DisableTorchFunctionSubclass  # inside, torch takes a subclass for the tensor that it is
_grad_fn: Any = torch.Tensor.__dict__.get("grad_fn") or torch._C.TensorBase.grad_fn
_grad_fn = _grad_fn.__get__


class DeferredLogits(torch.Tensor):
    """The logits of a head that are not computed, or their softmax: what a head of `defer_logits` returns.

    Shape, dtype and device are those of the logits.

    Written down, without computing anything: rows by slices, masks, indices, views, splits and iteration; casts;
    factors, as numbers or one for each row; tanh; a bias; the first columns; softmax and log_softmax.

    Served without logits, where V is the last dimension: ``cross_entropy`` with ids, ignore_index, reduction and
    smoothing; ``nll_loss``, ``gather``, ``take_along_dim`` or an index of a log_softmax; ``gather`` or an index of the
    logits; ``logsumexp``; entropy, as a sum of p · log p; ``mean`` and ``sum`` of logits that have no cap; ``argmax``
    and ``topk``. Log-probability, lse and entropy of one tensor share one pass.

    Every other function takes the values. They are computed once, by the model's own operations in its own order, and
    `Deferral` counts them. `compute` returns them.

    Attributes:
        recipe: what the values are computed from.

    Raises:
        RuntimeError: the gradient of the tensor itself is asked for, after a loss of it was computed without logits; or
            logits would be computed, and `defer_logits` was given ``strict=True``.
        NotImplementedError: a reshape in place; an operator that goes around torch's functions, and writes.

    Memory:
        O(1); it keeps hidden states and the head's parameters, which the graph keeps anyway.

    Example:
        >>> import torch
        >>> from lce_torch_bridge import DeferredLogits, defer_logits
        >>> head = torch.nn.Linear(8, 1000)
        >>> handle = defer_logits(head)
        >>> logits = head(torch.ones(4, 8)) / 0.7
        >>> isinstance(logits, DeferredLogits), tuple(logits.shape), tuple(logits[:2].argmax(-1).shape)
        (True, (4, 1000), (2,))
        >>> type(logits.compute()).__name__, handle.served, handle.stored
        ('Tensor', 1, 1)
    """

    recipe: Recipe
    _value: torch.Tensor | None  # once it is computed
    _parent: DeferredLogits | None  # whose values the last step takes; None of a head's own
    _written: list[bool]  # whether something was written in place, of all that share the same memory in stock
    _node: Any  # its own node of the graph
    _hooks: list[Any]  # of torch.distributed, which only ask when a backward begins
    call: ClassVar[Callable[..., Any]]  # a function of torch: `lce_torch_bridge.deferred._functions`

    @staticmethod
    def __new__(cls, recipe: Recipe) -> Self:
        layout = recipe.layout
        self = torch.Tensor._make_wrapper_subclass(
            cls, layout.shape, strides=layout.stride(), dtype=layout.dtype, device=recipe.source.hidden.device
        )
        self.recipe, self._value, self._parent, self._written, self._node = recipe, None, None, [False], None
        self._hooks = []
        return self

    @classmethod
    def of_head(cls, source: Source) -> DeferredLogits:
        """What a head returns."""
        return _make(Recipe.of_head(source))

    def then(self, step: Step, layout: torch.Tensor, is_view: bool = False, **changes: Any) -> DeferredLogits:
        """What the model has after one more step, which it has in the same memory where the layout says so."""
        del is_view
        child = _make(self.recipe.then(step, layout, **changes))
        child._parent, child._hooks = self, self._hooks
        if layout.untyped_storage()._cdata == self.recipe.layout.untyped_storage()._cdata:
            child._written = self._written
            if child._node is not None:
                child._node.written = self._written
        return child

    def is_deferred(self) -> bool:
        """Whether the recipe says what the values are: nothing was written, and no other node stands before it."""
        return self._value is None and not self._written[0] and self._is_own()

    def _is_own(self) -> bool:
        """Whether gradients of this tensor go to its own node alone, and not through a function of someone else's."""
        with _plain():
            return _grad_fn(self) is self._node

    def value(self, needed_for: str = "") -> torch.Tensor:
        """The values, computed once, as a plain tensor with a graph of its own."""
        if self._value is None:
            recipe = self.recipe
            with torch.inference_mode(recipe.source.hidden.is_inference()), torch.set_grad_enabled(recipe.grad):
                self._value, self._parent = self._computed(needed_for), None
        return self._value

    def _computed(self, needed_for: str) -> torch.Tensor:
        if not self._is_own():
            self.recipe.source.note(needed_for)
            with torch.no_grad():
                value = self.recipe.compute(self.recipe.tensors)
            with torch.enable_grad():
                return _Through.apply(self, value)
        parent = self._parent
        was_copied = parent is not None and parent._written[0] and parent._written is not self._written
        if parent is None or was_copied:  # before what has been written into the parent
            self.recipe.source.note(needed_for)
            return self.recipe.compute(self.recipe.tensors)
        return self.recipe.steps[-1](parent.value(needed_for))

    def compute(self) -> torch.Tensor:
        """The logits as a plain tensor of the same graph, computed once, for a function that must have one."""
        return self.value("compute()")

    def write(self, needed_for: str) -> torch.Tensor:
        """The values, into which something is about to be written."""
        value = self.value(needed_for)
        self._written[0] = True
        return value

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Torch's functions of this tensor."""
        del types
        return cls.call(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What goes around torch's functions: another tensor of the same recipe, or operators of the values."""
        del types
        kwargs = kwargs or {}
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            (self,) = args
            return _alike(self)
        if any(argument.alias_info is not None for argument in (*func._schema.arguments, *func._schema.returns)):
            raise NotImplementedError(
                f"{func} of deferred logits would write into them, or return a part of their memory, where no torch "
                "function sees it: pass logits.compute()"
            )
        name = str(func)
        return func(*tree_map(lambda x: x.value(name) if isinstance(x, cls) else x, args), **kwargs)


def _alike(of: DeferredLogits) -> DeferredLogits:
    """Another tensor of the same recipe and memory, as autograd makes them."""
    same = DeferredLogits(of.recipe)
    same._value, same._parent, same._written, same._hooks = of._value, of._parent, of._written, of._hooks
    same._node = of._node
    return same


def _make(recipe: Recipe) -> DeferredLogits:
    """With a node of the graph, where autograd records it."""
    tensors = recipe.tensors
    if not (recipe.grad and torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)):
        return DeferredLogits(recipe)
    logits: DeferredLogits = _Node.apply(recipe, *tensors)
    with _plain():
        logits._node = _grad_fn(logits)
    logits._node.written = logits._written
    return logits


class _Node(torch.autograd.Function):
    """The node of logits that are not computed.

    What torch's functions do not see, such as the autograd function of someone else, takes the values, and returns a
    gradient of the logits. It comes here, and goes on to hidden and the head's parameters.
    """

    @staticmethod
    def forward(ctx: Any, recipe: Recipe, *tensors: torch.Tensor | None) -> DeferredLogits:
        ctx.set_materialize_grads(False)
        ctx.recipe = recipe
        ctx.save_for_backward(*tensors)
        return DeferredLogits(recipe)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if gradient is None:
            return None, *(None for _ in ctx.saved_tensors)
        if ctx.written[0]:
            raise RuntimeError(
                "deferred logits were written into in place, and a function that is none of torch's took them: its "
                "gradient would miss what was written. Give it logits.compute()"
            )
        tensors = [None if x is None else x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
        wanted = [x for x in tensors if x is not None and x.requires_grad]
        with torch.enable_grad():
            value = ctx.recipe.compute(tensors)
        found = iter(torch.autograd.grad(value, wanted, gradient, allow_unused=True))
        return None, *(next(found) if x is not None and x.requires_grad else None for x in tensors)


class _Through(torch.autograd.Function):
    """The values of deferred logits, whose gradient goes where that of the deferred logits goes."""

    @staticmethod
    def forward(ctx: Any, logits: DeferredLogits, value: torch.Tensor) -> torch.Tensor:
        del ctx, logits
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        del ctx
        return gradient, None
