"""`TracedLogits`: deferred logits in a graph of ``torch.compile``, where a `DeferredLogits` cannot be created."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from lce_torch_bridge.deferred._recipe import Recipe, Source, Step
from lce_torch_bridge.deferred._tensor import DeferredLogits
from lce_torch_bridge.tensors import _device


class TracedLogits:
    """The counterpart of `DeferredLogits` in a compiled graph: a plain object that overrides torch's functions.

    Attributes:
        recipe: how the values are computed.
    """

    call: ClassVar[Callable[..., Any]]  # calls a function of torch: `lce_torch_bridge.deferred._dispatch.call`
    _hooks: ClassVar[tuple[Any, ...]] = ()

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self._value: torch.Tensor | None = None
        self._parent: TracedLogits | None = None
        self._num_sharing = [1]  # how many tensors would share the memory of stored logits; views share this list
        self._is_computed = [False]  # whether one of these tensors is computed; views also share this list

    @classmethod
    def from_source(cls, source: Source) -> TracedLogits:
        """Returns a head's output."""
        return cls(Recipe.from_source(source))

    def add_step(self, step: Step, layout: torch.Tensor, is_view: bool = False, **changes: Any) -> TracedLogits:
        """Returns the logits after one more step. If the step may make a view, they are treated as sharing memory."""
        child = TracedLogits(self.recipe.add_step(step, layout, **changes))
        child._parent = self
        if is_view:
            child._num_sharing, child._is_computed = self._num_sharing, self._is_computed
            self._num_sharing[0] += 1
        return child

    def is_deferred(self) -> bool:
        """Whether the recipe still defines the values."""
        return self._value is None and not self._is_computed[0]

    def value(self, needed_for: str = "") -> torch.Tensor:
        """Returns the values, computed once. ``needed_for`` names the function that needs them."""
        if self._value is None:
            recipe, parent = self.recipe, self._parent
            is_view = parent is not None and parent._is_computed is self._is_computed
            with torch.enable_grad() if recipe.grad else torch.no_grad():
                if parent is not None and is_view:
                    self._value = recipe.steps[-1](parent.value(needed_for))
                else:  # a copy must have the values from before a write; the compiler merges equal computations
                    recipe.source.record_logits(needed_for)
                    self._value = recipe.compute(recipe.tensors)
            self._is_computed[0] = True
        return self._value

    def compute(self) -> torch.Tensor:
        """Returns the logits as a plain tensor."""
        return self.value("compute()")

    def write(self, needed_for: str) -> torch.Tensor:
        """Returns the values for a function that is about to write to them."""
        if self._num_sharing[0] > 1:
            raise NotImplementedError(
                f"{needed_for} writes into deferred logits that have views, in a compiled graph: write "
                "logits = logits.compute() before the views are made"
            )
        return self.value(needed_for)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Handles a torch function that is called with deferred logits."""
        del types
        for x in args:
            if isinstance(x, TracedLogits) and x.recipe.grad and not torch.is_grad_enabled():
                _refuse_other_functions(x)
        return cls.call(func, args, kwargs or {})

    @property
    def shape(self) -> torch.Size:
        """The shape of the logits."""
        return self.recipe.layout.shape if self._value is None else self._value.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the logits."""
        return self.recipe.layout.dtype

    @property
    def device(self) -> torch.device:
        """The device of the logits."""
        return self.recipe.source.hidden.device

    @property
    def ndim(self) -> int:
        """The number of the logits' dimensions."""
        return len(self.shape)

    @property
    def requires_grad(self) -> bool:
        """Whether any tensor that the logits depend on gets a gradient."""
        return self.recipe.grad and any(x is not None and x.requires_grad for x in self.recipe.tensors)

    def dim(self) -> int:
        """Returns the number of dimensions."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        """Returns the shape, or the size of one dimension."""
        return self.shape if dim is None else self.shape[dim]

    def __len__(self) -> int:
        return self.shape[0]

    def __getattr__(self, name: str) -> Any:
        """Returns a method of torch.Tensor as a function of this object, or an attribute of the values."""
        if name.startswith("__") or not hasattr(torch.Tensor, name):
            raise AttributeError(f"deferred logits have no attribute {name!r}")
        function = getattr(torch.Tensor, name)
        if not callable(function):
            return getattr(self.value(name), name)

        def method(*args: Any, **kwargs: Any) -> Any:
            return TracedLogits.__torch_function__(function, (), (self, *args), kwargs)

        return method

    def __repr__(self) -> str:
        return f"TracedLogits({self.recipe.kind} of {tuple(self.shape)}, {self.dtype}, {self.device}, not computed)"


@_device.not_compiled("deferred logits without a gradient look for the function that uses them")
def _refuse_other_functions(x: TracedLogits) -> None:
    """Raises if an autograd function uses deferred logits, because their gradient would be lost."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        line = frame.f_code.co_filename, frame.f_code.co_firstlineno  # the same in compiled code
        if line in _list_forwards() and any(each is x for each in frame.f_locals.values()):
            raise RuntimeError(
                "an autograd function uses deferred logits of a compiled graph, and would lose their gradient: "
                "give it logits.compute()"
            )
        frame = frame.f_back


def _list_forwards() -> set[Any]:
    """Returns, for each autograd function, the file and first line of its forward."""
    lines, classes = set(), [torch.autograd.Function]
    while classes:
        each: Any = classes.pop()
        classes += each.__subclasses__()
        code = getattr(inspect.unwrap(each.forward), "__code__", None)
        if code is not None:
            lines.add((code.co_filename, code.co_firstlineno))
    return lines


def _make_operator(name: str) -> Any:
    def operator(self: TracedLogits, *args: Any) -> Any:
        return TracedLogits.__torch_function__(getattr(torch.Tensor, name), (), (self, *args))

    return operator


for _name in (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "mod", "pow", "neg", "abs",
    "matmul", "getitem", "setitem", "iter", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "invert", "iadd", "isub",
    "imul", "itruediv",
):  # fmt: skip
    setattr(TracedLogits, f"__{_name}__", _make_operator(f"__{_name}__"))
TracedLogits.__hash__ = object.__hash__  # type: ignore[method-assign]

DEFERRED = (DeferredLogits, TracedLogits)
type Deferred = DeferredLogits | TracedLogits
