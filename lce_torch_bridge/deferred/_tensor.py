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


class Memory:
    """What stock has in one piece of memory: logits and the views of them.

    Once one of them is computed, the others are views of it, because something may have been written there.
    """

    __slots__ = "is_exposed", "value", "version"

    def __init__(self) -> None:
        self.value: torch.Tensor | None = None  # the first that was computed
        self.version = 0  # of it then
        self.is_exposed = False  # whether somebody may write there who does not change the version

    def keep(self, value: torch.Tensor) -> None:
        """Notes that values are there."""
        if self.value is None:
            self.value = value.detach()  # it shares the version, and holds no graph
            self.version = -1 if value.is_inference() else value._version

    def is_written(self) -> bool:
        """Whether something was written in place since."""
        return self.value is not None and (self.version < 0 or self.value._version != self.version)


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
    _value: torch.Tensor | None = None  # once it is computed
    _parent: DeferredLogits | None = None  # whose values the last step takes; None of a head's own
    _memory: Memory
    _used: bool = False  # whether results or other deferred tensors were made of it without its values
    _node: Any = None  # the node of the graph where the gradient of its values ends
    _hooks: list[Any]  # of torch.distributed, which only ask when a backward begins
    call: ClassVar[Callable[..., Any]]  # a function of torch: `lce_torch_bridge.deferred._functions`

    @staticmethod
    def __new__(cls, recipe: Recipe, memory: Memory | None = None) -> Self:
        layout = recipe.layout
        self = torch.Tensor._make_wrapper_subclass(
            cls, layout.shape, strides=layout.stride(), dtype=layout.dtype, device=recipe.source.hidden.device
        )
        torch._C._set_throw_on_mutable_data_ptr(self)  # there is no memory
        self.recipe, self._memory, self._hooks = recipe, Memory() if memory is None else memory, []
        return self

    @classmethod
    def of_head(cls, source: Source) -> DeferredLogits:
        """What a head returns."""
        return _make(Recipe.of_head(source))

    def then(self, step: Step, layout: torch.Tensor, is_view: bool = False, **changes: Any) -> DeferredLogits:
        """What the model has after one more step, in the same memory where that is a view."""
        child = _make(self.recipe.then(step, layout, **changes), self._memory if is_view else None)
        child._parent, child._hooks, self._used = self, self._hooks, True
        return child

    def become(self, child: DeferredLogits) -> Self:
        """Changes this tensor to ``child``, which a step in place made from it."""
        self.recipe, self._parent, self._used = child.recipe, None, False
        if self._node is not None:
            self._node.recipe = child.recipe
        return self

    def is_alone(self) -> bool:
        """Whether no other tensor was made from it, or has the same memory in stock."""
        return not self._used and (self._parent is None or self._parent._memory is not self._memory)

    def is_deferred(self) -> bool:
        """Whether the recipe says what the values are: none are there, and no other node stands before it."""
        return self._value is None and self._memory.value is None and self._is_own()

    def _is_own(self) -> bool:
        """Whether gradients of this tensor go to its own node alone, and not through a function of someone else's."""
        with _plain():
            return _grad_fn(self) is self._node

    def value(self, needed_for: str = "") -> torch.Tensor:
        """The values, computed once, as a plain tensor with a graph of its own."""
        is_own = self._is_own()
        if self._value is None or not is_own:
            recipe = self.recipe
            is_recorded = recipe.grad and is_own
            inference = torch.inference_mode(recipe.source.hidden.is_inference())
            with inference, torch.set_grad_enabled(is_recorded), recipe.source.kept():
                value = self._computed(needed_for) if self._value is None else self._value.detach()
            if not is_own:  # its gradient goes through someone else's function
                with torch.enable_grad(), _plain():
                    value, self._node = _Through.apply(self, value), _grad_fn(self)
            elif self._parent is None and value.requires_grad:
                for hook in self._hooks:
                    value.register_hook(hook)
            self._value, self._parent = value, None
            self._memory.keep(value)
        return self._value

    def _computed(self, needed_for: str) -> torch.Tensor:
        parent = self._parent
        is_copy = parent is not None and parent._memory is not self._memory
        if parent is None or (is_copy and (parent._memory.is_exposed or parent._memory.is_written())):
            self.recipe.source.note(needed_for)  # a copy is of what was there before something was written
            return self.recipe.compute(self.recipe.tensors)
        return self.recipe.steps[-1](parent.value(needed_for))

    def compute(self) -> torch.Tensor:
        """The logits as a plain tensor of the same graph, computed once, for a function that must have one."""
        return self.value("compute()")

    def expose(self) -> None:
        """Notes that somebody gets the memory, and may write there unseen."""
        self._memory.is_exposed = True

    def write(self, needed_for: str) -> torch.Tensor:
        """The values, into which something is about to be written."""
        return self.value(needed_for)

    @classmethod
    @torch.compiler.disable(reason="deferred logits of another graph are no part of this one")  # type: ignore[untyped-decorator]
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Torch's functions of this tensor, which a compiled function calls between its graphs."""
        del types
        return cls.call(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
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
    same._value, same._parent, same._memory, same._used = of._value, of._parent, of._memory, of._used
    same._node, same._hooks = of._node, of._hooks
    return same


def _make(recipe: Recipe, memory: Memory | None = None) -> DeferredLogits:
    """With a node of the graph, where autograd records it."""
    if recipe.grad and torch.is_grad_enabled():
        for x in recipe.tensors:
            if x is not None and x.requires_grad:
                logits: DeferredLogits = _Node.apply(recipe, memory, *recipe.tensors)
                return logits
    return DeferredLogits(recipe, memory)


class _Node(torch.autograd.Function):
    """The node of logits that are not computed.

    What torch's functions do not see, such as the autograd function of someone else, takes the values, and returns a
    gradient of the logits. It comes here, and goes on to hidden and the head's parameters.
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
                "deferred logits were written into in place, and a function that is none of torch's took them: its "
                "gradient would miss what was written. Give it logits.compute()"
            )
        tensors = [None if x is None else x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
        wanted = [x for x in tensors if x is not None and x.requires_grad]
        with torch.enable_grad():
            value = ctx.recipe.compute(tensors)
        found = iter(torch.autograd.grad(value, wanted, gradient, allow_unused=True))
        return None, None, *(next(found) if x is not None and x.requires_grad else None for x in tensors)


class _Through(torch.autograd.Function):
    """The values of deferred logits, whose gradient goes where that of the deferred logits goes."""

    @staticmethod
    def forward(ctx: Any, logits: DeferredLogits, value: torch.Tensor) -> torch.Tensor:
        del ctx, logits
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        del ctx
        return gradient, None
