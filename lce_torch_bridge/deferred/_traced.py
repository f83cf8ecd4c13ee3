"""`TracedLogits`: deferred logits in a graph of ``torch.compile``, which can make no tensor of a class of its own."""

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
    """What `DeferredLogits` is, as a plain object that takes part in torch's functions.

    Attributes:
        recipe: what the values are computed from.
    """

    call: ClassVar[Callable[..., Any]]  # a function of torch: `lce_torch_bridge.deferred._functions`
    _hooks: ClassVar[tuple[Any, ...]] = ()

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self._value: torch.Tensor | None = None
        self._parent: TracedLogits | None = None
        self._relatives = [1]  # how many may have the same memory in stock
        self._is_there = [False]  # whether one of these is computed

    @classmethod
    def of_head(cls, source: Source) -> TracedLogits:
        """What a head returns."""
        return cls(Recipe.of_head(source))

    def then(self, step: Step, layout: torch.Tensor, is_view: bool = False, **changes: Any) -> TracedLogits:
        """What the model has after one more step, which it may have in the same memory."""
        child = TracedLogits(self.recipe.then(step, layout, **changes))
        child._parent = self
        if is_view:
            child._relatives, child._is_there = self._relatives, self._is_there
            self._relatives[0] += 1
        return child

    def is_deferred(self) -> bool:
        """Whether the recipe says what the values are."""
        return self._value is None and not self._is_there[0]

    def value(self, needed_for: str = "") -> torch.Tensor:
        """The values, computed once."""
        if self._value is None:
            recipe, parent = self.recipe, self._parent
            is_view = parent is not None and parent._is_there is self._is_there
            with torch.enable_grad() if recipe.grad else torch.no_grad():
                if parent is not None and is_view:
                    self._value = recipe.steps[-1](parent.value(needed_for))
                else:  # a copy is of what was there before something was written; the compiler computes equals once
                    recipe.source.note(needed_for)
                    self._value = recipe.compute(recipe.tensors)
            self._is_there[0] = True
        return self._value

    def compute(self) -> torch.Tensor:
        """The logits as a plain tensor, for a function that must have one."""
        return self.value("compute()")

    def write(self, needed_for: str) -> torch.Tensor:
        """The values, into which something is about to be written."""
        if self._relatives[0] > 1:
            raise NotImplementedError(
                f"{needed_for} writes into deferred logits in a compiled graph, where others are views of them: write "
                "logits = logits.compute() before the views"
            )
        return self.value(needed_for)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Torch's functions of this object."""
        del types
        for x in args:
            if isinstance(x, TracedLogits) and x.recipe.grad and not torch.is_grad_enabled():
                _refuse_other_functions(x)
        return cls.call(func, args, kwargs or {})

    @property
    def shape(self) -> torch.Size:
        """Of the logits."""
        return self.recipe.layout.shape if self._value is None else self._value.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of the logits."""
        return self.recipe.layout.dtype

    @property
    def device(self) -> torch.device:
        """Of the logits."""
        return self.recipe.source.hidden.device

    @property
    def ndim(self) -> int:
        """Of the logits."""
        return len(self.shape)

    @property
    def requires_grad(self) -> bool:
        """Whether a gradient of the logits goes anywhere."""
        return self.recipe.grad and any(x is not None and x.requires_grad for x in self.recipe.tensors)

    def dim(self) -> int:
        """How many dimensions the logits have."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        """The shape, or one number of it."""
        return self.shape if dim is None else self.shape[dim]

    def __len__(self) -> int:
        return self.shape[0]

    def __getattr__(self, name: str) -> Any:
        """A method or attribute of tensors."""
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


@_device.not_compiled("deferred logits without a gradient look whose function takes them")
def _refuse_other_functions(x: TracedLogits) -> None:
    """Refuses the autograd function of someone else, to which this object is no tensor that has a gradient."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        at = frame.f_code.co_filename, frame.f_code.co_firstlineno  # torch's compiler makes code of its own there
        if at in _forwards() and any(each is x for each in frame.f_locals.values()):
            raise RuntimeError(
                "an autograd function takes deferred logits of a compiled graph, and would lose their gradient: "
                "give it logits.compute()"
            )
        frame = frame.f_back


def _forwards() -> set[Any]:
    """Where the forwards of all autograd functions stand."""
    found, classes = set(), [torch.autograd.Function]
    while classes:
        each: Any = classes.pop()
        classes += each.__subclasses__()
        code = getattr(inspect.unwrap(each.forward), "__code__", None)
        if code is not None:
            found.add((code.co_filename, code.co_firstlineno))
    return found


def _operator(name: str) -> Any:
    def operator(self: TracedLogits, *args: Any) -> Any:
        return TracedLogits.__torch_function__(getattr(torch.Tensor, name), (), (self, *args))

    return operator


for _name in (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "mod", "pow", "neg", "abs",
    "matmul", "getitem", "setitem", "iter", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "invert", "iadd", "isub",
    "imul", "itruediv",
):  # fmt: skip
    setattr(TracedLogits, f"__{_name}__", _operator(f"__{_name}__"))
TracedLogits.__hash__ = object.__hash__  # type: ignore[method-assign]

DEFERRED = (DeferredLogits, TracedLogits)
type Deferred = DeferredLogits | TracedLogits
