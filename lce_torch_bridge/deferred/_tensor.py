"""`DeferredLogits`: logits whose values are computed only when something needs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from torch.utils._pytree import tree_map

from lce_torch_bridge.deferred._recipe import Recipe, Source, Step

DisableOverride = torch._C.DisableTorchFunctionSubclass  # a context in which torch treats a subclass as a plain tensor
_grad_fn: Any = torch.Tensor.__dict__.get("grad_fn") or torch._C.TensorBase.grad_fn
_grad_fn = _grad_fn.__get__


class Memory:
    """The memory that logits and their views would share if they were stored.

    Once one of these tensors is computed, the others become views of its values, because code may have written to them.
    """

    __slots__ = "is_exposed", "value", "version"

    def __init__(self) -> None:
        self.value: torch.Tensor | None = None  # the values of the first tensor that was computed
        self.version = 0  # the version of ``value`` when it was saved
        self.is_exposed = False  # whether code may write to this memory without changing the version

    def save(self, value: torch.Tensor) -> None:
        """Saves the values of the first tensor that is computed."""
        if self.value is None:
            self.value = value.detach()  # shares the version, and does not keep the graph alive
            self.version = -1 if value.is_inference() else value._version

    def is_written(self) -> bool:
        """Whether the values were changed in place since `save`."""
        return self.value is not None and (self.version < 0 or self.value._version != self.version)


class DeferredLogits(torch.Tensor):
    """Logits of a head, or their softmax, that are not computed yet. Heads under `defer_logits` return them.

    The tensor has the shape, dtype and device of the logits.

    These operations are recorded, and compute nothing: selections of rows by slices, masks, indices, views, splits and
    iteration; casts; factors, one for all rows or one for each row; tanh; a bias; the first columns; softmax and
    log_softmax.

    These results are computed without logits, if V is the last dimension: ``cross_entropy`` with ids, ignore_index,
    reduction and smoothing; ``nll_loss``, ``gather``, ``take_along_dim`` or an index of a log_softmax; ``gather`` or an
    index of the logits; ``logsumexp``; entropy, as a sum of p · log p; ``mean`` and ``sum`` of logits that have no cap;
    ``argmax`` and ``topk``. Log-probability, lse and entropy of one tensor share one pass.

    Every other function gets the values of the logits. They are computed once, using the model's own operations in
    order, and counted by `Deferral`. `compute` returns them too.

    Attributes:
        recipe: how the values are computed.

    Raises:
        RuntimeError: the gradient of the tensor itself is requested after a loss was computed without logits; or logits
            would be computed although `defer_logits` has ``strict=True``.
        NotImplementedError: a reshape in place; an operator that writes to the logits and is not called through a
            function of torch.

    Memory:
        O(1). The tensor keeps hidden states and the head's parameters alive, as the graph does anyway.

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
    _value: torch.Tensor | None = None  # the values; None until they are computed
    _parent: DeferredLogits | None = None  # the tensor before the last step; None for a head's output
    _memory: Memory
    _used: bool = False  # whether results or other tensors were derived from this tensor without its values
    _node: Any = None  # the autograd node that receives the gradient of the values
    _hooks: list[Any]  # hooks of torch.distributed, which only need to know when a backward begins
    call: ClassVar[Callable[..., Any]]  # calls a function of torch: `lce_torch_bridge.deferred._dispatch.call`

    @staticmethod
    def __new__(cls, recipe: Recipe, memory: Memory | None = None) -> Self:
        layout = recipe.layout
        self = torch.Tensor._make_wrapper_subclass(
            cls, layout.shape, strides=layout.stride(), dtype=layout.dtype, device=recipe.source.hidden.device
        )
        torch._C._set_throw_on_mutable_data_ptr(self)  # because this tensor has no memory
        self.recipe, self._memory, self._hooks = recipe, Memory() if memory is None else memory, []
        return self

    @classmethod
    def from_source(cls, source: Source) -> DeferredLogits:
        """Returns a head's output."""
        return _make_logits(Recipe.from_source(source))

    def add_step(self, step: Step, layout: torch.Tensor, is_view: bool = False, **changes: Any) -> DeferredLogits:
        """Returns the logits after one more step. They share this tensor's memory if the step makes a view."""
        child = _make_logits(self.recipe.add_step(step, layout, **changes), self._memory if is_view else None)
        child._parent, child._hooks, self._used = self, self._hooks, True
        return child

    def become(self, child: DeferredLogits) -> Self:
        """Turns this tensor into ``child``, the result of an in-place step."""
        self.recipe, self._parent, self._used = child.recipe, None, False
        if self._node is not None:
            self._node.recipe = child.recipe
        return self

    def is_unshared(self) -> bool:
        """Whether no other tensor was derived from this one, and this one is not a view of another."""
        return not self._used and (self._parent is None or self._parent._memory is not self._memory)

    def is_deferred(self) -> bool:
        """Whether the recipe still defines the values: they are not computed, and `_has_direct_gradient` holds."""
        return self._value is None and self._memory.value is None and self._has_direct_gradient()

    def _has_direct_gradient(self) -> bool:
        """Whether gradients of this tensor go directly to its node, not through an autograd function of other code."""
        with DisableOverride():
            return _grad_fn(self) is self._node

    def value(self, needed_for: str = "") -> torch.Tensor:
        """Returns the values, computed once, as a plain tensor. ``needed_for`` names the function that needs them."""
        is_direct = self._has_direct_gradient()
        if self._value is None or not is_direct:
            recipe = self.recipe
            is_recorded = recipe.grad and is_direct
            inference = torch.inference_mode(recipe.source.hidden.is_inference())
            with inference, torch.set_grad_enabled(is_recorded), recipe.source.suspend_checkpoint():
                value = self._compute_value(needed_for) if self._value is None else self._value.detach()
            if not is_direct:  # the gradient passes through an autograd function of other code
                with torch.enable_grad(), DisableOverride():
                    value, self._node = _PassGradient.apply(self, value), _grad_fn(self)
            elif self._parent is None and value.requires_grad:
                for hook in self._hooks:
                    value.register_hook(hook)
            self._value, self._parent = value, None
            self._memory.save(value)
        return self._value

    def _compute_value(self, needed_for: str) -> torch.Tensor:
        parent = self._parent
        is_copy = parent is not None and parent._memory is not self._memory
        # A copy has the values from before any write to its parent. So the recipe computes a copy whose parent has been
        # written to, or may have been.
        if parent is None or (is_copy and (parent._memory.is_exposed or parent._memory.is_written())):
            self.recipe.source.record_logits(needed_for)
            return self.recipe.compute(self.recipe.tensors)
        return self.recipe.steps[-1](parent.value(needed_for))

    def compute(self) -> torch.Tensor:
        """Returns the logits as a plain tensor of the same graph. They are computed once."""
        return self.value("compute()")

    def expose(self) -> None:
        """Records that other code gets access to the memory, and may write to it unnoticed."""
        self._memory.is_exposed = True

    def write(self, needed_for: str) -> torch.Tensor:
        """Returns the values for a function that is about to write to them."""
        return self.value(needed_for)

    @classmethod
    @torch.compiler.disable(reason="deferred logits of another graph are not part of this one")  # type: ignore[untyped-decorator]
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Handles a torch function called on deferred logits. Under ``torch.compile`` this happens at a graph break."""
        del types
        return cls.call(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Runs an operator that did not pass ``__torch_function__``.

        ``detach`` and ``alias`` return deferred logits again; any other operator gets the values.
        """
        del types
        kwargs = kwargs or {}
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            (self,) = args
            return _copy_logits(self)
        if any(argument.alias_info is not None for argument in (*func._schema.arguments, *func._schema.returns)):
            raise NotImplementedError(
                f"{func} would write into deferred logits, or return a view of their memory, where no torch function "
                "sees it: pass logits.compute()"
            )
        name = str(func)
        return func(*tree_map(lambda x: x.value(name) if isinstance(x, cls) else x, args), **kwargs)


def _copy_logits(logits: DeferredLogits) -> DeferredLogits:
    """Returns another tensor with the same recipe and memory, because autograd needs a new object."""
    same = DeferredLogits(logits.recipe)
    same._value, same._parent, same._memory = logits._value, logits._parent, logits._memory
    same._used, same._node, same._hooks = logits._used, logits._node, logits._hooks
    return same


def _make_logits(recipe: Recipe, memory: Memory | None = None) -> DeferredLogits:
    """Returns deferred logits, with an autograd node if autograd records them."""
    if recipe.grad and torch.is_grad_enabled():
        for x in recipe.tensors:
            if x is not None and x.requires_grad:
                logits: DeferredLogits = _Node.apply(recipe, memory, *recipe.tensors)
                return logits
    return DeferredLogits(recipe, memory)


class _Node(torch.autograd.Function):
    """The autograd node of deferred logits.

    A library's autograd function, which torch functions do not intercept, gets the values and returns a gradient of the
    logits. This node receives that gradient, and passes it on to hidden and the head's parameters.
    """

    @staticmethod
    def forward(ctx: Any, recipe: Recipe, memory: Memory | None, *tensors: torch.Tensor | None) -> DeferredLogits:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        logits = DeferredLogits(recipe, memory)
        ctx.recipe, ctx.memory, logits._node = recipe, logits._memory, ctx
        return logits

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if gradient is None:
            return None, None, *(None for _ in ctx.saved_tensors)
        if ctx.memory.is_written():
            raise RuntimeError(
                "deferred logits were written into in place, and a function outside torch used them: its gradient "
                "would not include what was written. Give it logits.compute()"
            )
        tensors = [None if x is None else x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
        inputs = [x for x in tensors if x is not None and x.requires_grad]
        with torch.enable_grad():
            value = ctx.recipe.compute(tensors)
        gradients = iter(torch.autograd.grad(value, inputs, gradient, allow_unused=True))
        return None, None, *(next(gradients) if x is not None and x.requires_grad else None for x in tensors)


class _PassGradient(torch.autograd.Function):
    """The identity function of the values. Their gradient goes to the deferred logits."""

    @staticmethod
    def forward(ctx: Any, logits: DeferredLogits, value: torch.Tensor) -> torch.Tensor:
        del ctx, logits
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        del ctx
        return gradient, None
