"""What logits are computed from, and what a model has done to them so far: enough to serve them, or to compute them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from lce_torch_bridge.tensors import _device

if TYPE_CHECKING:
    from lce_torch_bridge._types import LogprobOutput, Lora
    from lce_torch_bridge.deferred._deferral import Deferral

type Kind = Literal["logits", "log_softmax", "softmax", "p_log_p", "p_logits"]
type Factor = tuple[Literal["mul", "div", "tanh"], float]


OPERANDS = "hidden", "weight", "bias", "lora's A", "lora's B"
type Taken = dict[bool, list[tuple[torch.Tensor, torch.Tensor]]]
type State = tuple[tuple[int, bool] | None, ...]
_steps = [0]  # of all optimizers: fused ones write into parameters without changing their version
NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


@functools.cache
def count_steps() -> None:
    """Counts the steps of optimizers from now on."""

    def count(*_: Any) -> None:
        _steps[0] += 1

    register_optimizer_step_post_hook(count)


def _state(tensors: Iterable[torch.Tensor | None]) -> State:
    """How many times each was written into, and whether it has a gradient. Inference tensors do not count."""
    if torch.compiler.is_compiling():
        return ()  # its numbers would be data there
    return tuple([None if x is None or x.is_inference() else (x._version, x.requires_grad) for x in tensors])


def _refuse_changed(names: Iterable[str], tensors: Sequence[torch.Tensor | None], before: State) -> None:
    """Raises where a tensor has changed since the model used it, which stock's logits do not see."""
    now = _state(tensors)
    if now == before or not before or not now:
        return
    for name, x, old, new in zip(names, tensors, before, now, strict=False):
        if x is not None and old is not None and new is not None and old != new:
            change = f"written into in place (version {new[0]}, was {old[0]})"
            if old[0] == new[0]:
                change = f"given requires_grad={new[1]}"
            raise RuntimeError(
                f"{name} {tuple(x.shape)} was {change} after logits of it were deferred, which are those of before: "
                "write logits = logits.compute() before that"
            )


@dataclasses.dataclass(slots=True, eq=False)
class Source:
    """One call of a head: its operands, and the context in which it was called.

    Attributes:
        hidden: ``[..., H]``, what the head was given.
        weight: ``[V, H]``.
        bias: ``[V]`` or None.
        lora: an adapter ``(A, B, scale)`` on the weight, or None.
        autocast: the dtype of the autocast context, None outside of one.
        deferral: what counts, and says whether logits may be computed.
        device: the type of their device.
        operands: what has gradients: hidden, weight, bias, A and B.
        state: of the operands, when the head was called.
        step: how many steps optimizers had made then.
        checkpoint: what a non-reentrant checkpoint around the head's call packs tensors with, or None.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    lora: Lora | None
    autocast: torch.dtype | None
    deferral: Deferral
    device: str
    operands: tuple[torch.Tensor | None, ...] = dataclasses.field(init=False)
    state: State = dataclasses.field(init=False)
    step: int = dataclasses.field(init=False)
    checkpoint: Any = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        a, b, _ = self.lora or (None, None, None)
        self.operands = self.hidden, self.weight, self.bias, a, b
        self.state = _state(self.operands)
        self.step = _steps[0] if self.state else -1  # a compiled graph would be another one after each step
        self.checkpoint = _device.checkpoint_hook()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the logits that the head returns."""
        return self.hidden.dtype if self.autocast is None else self.autocast

    def compute(self, operands: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """The head's own operations: a linear layer, and PEFT's adapter on it."""
        hidden, weight, bias, a, b = operands
        assert hidden is not None
        assert weight is not None
        with self.ready():
            logits = torch.nn.functional.linear(hidden, weight, bias)
            if self.lora is not None:
                assert a is not None
                assert b is not None
                dtype, linear = logits.dtype, torch.nn.functional.linear
                logits = logits + linear(linear(hidden.to(a.dtype), a), b) * self.lora[2]
                logits = logits.to(dtype)
            return logits

    def is_outside(self) -> bool:
        """Whether this is a checkpoint that does not hold the head's call, and runs again without what is kept here."""
        hook = _device.checkpoint_hook()
        return hook is not None and hook is not self.checkpoint

    def kept(self) -> contextlib.AbstractContextManager[None]:
        """Inside is computed what is kept beside these logits, and is no part of a checkpoint that they come into."""
        return _device.without_hooks() if self.is_outside() else NOTHING

    def note(self, needed_for: str) -> None:
        """Counts and logs that these logits are computed, but not in a compiled graph, where nothing is counted."""
        if not torch.compiler.is_compiling():
            shape = torch.Size((*self.hidden.shape[:-1], self.weight.shape[0]))
            self.deferral.note(shape, self.dtype, needed_for)

    def ready(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the head's autocast context and its weight are as they were in its call."""
        _refuse_changed(OPERANDS, self.operands, self.state)
        if self.step >= 0 and self.step != _steps[0]:
            raise RuntimeError(
                "an optimizer has made a step since these logits were deferred, which are those of the weights before: "
                "write logits = logits.compute() before the step, or compute there what you need of them"
            )
        is_there = torch.compiler.is_compiling() or self.weight.untyped_storage().nbytes()
        autocast = autocast_to(self.device, self.autocast)
        return autocast if is_there else self._gathered(autocast)

    @contextlib.contextmanager
    def _gathered(self, autocast: contextlib.AbstractContextManager[None]) -> Iterator[None]:
        with _device.gathered(self.weight), autocast:
            yield


def autocast_to(device: str, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[None]:
    """Inside, autocast is as it was where ``dtype`` was its dtype; None: where there was none."""
    if dtype == _device.autocast_dtype(device):
        return NOTHING
    return torch.autocast(device, dtype=dtype, enabled=dtype is not None)


@dataclasses.dataclass(slots=True, eq=False)
class Step:
    """One operation of the model on its logits: ``function(logits, *args, **kwargs)``, under autocast as it was."""

    function: Callable[..., torch.Tensor]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    autocast: torch.dtype | None = None
    state: State = ()

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Those of its arguments, in indices too."""
        return _tensors((*self.args, *self.kwargs.values()))

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        return self.of(logits, self.args, self.kwargs)

    def of(self, logits: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """The operation with arguments that stand for its own."""
        if self.state:
            _refuse_changed(itertools.repeat("a tensor that the model used on its logits"), self.tensors, self.state)
        with autocast_to(logits.device.type, self.autocast):
            return self.function(logits, *args, **kwargs)


def _tensors(given: Iterable[Any]) -> list[torch.Tensor]:
    found = []
    for x in given:
        if isinstance(x, torch.Tensor):
            found.append(x)
        elif type(x) in (tuple, list):
            found += _tensors(x)
    return found


class Rows(NamedTuple):
    """Some rows of a recipe's, or one of the parts that a split or an iteration makes of all.

    Attributes:
        of: the recipe.
        select: takes these rows, or all parts, from a tensor ``[..., K]``.
        part: which part.
        taken: lse and entropy of all parts, by whether autograd records them: one operation takes them from those of
            all rows, and one node of the graph sums their gradients. None: these rows are no part.
    """

    of: Recipe
    select: Callable[[torch.Tensor], Any]
    part: int = 0
    taken: Taken | None = None


@dataclasses.dataclass(slots=True, eq=False)
class Recipe:
    """Logits, or their softmax, that are not computed.

    Attributes:
        source: the head's call.
        steps: what the model has done to the head's logits, in its own order.
        layout: a tensor without memory that has their shape, strides and dtype.
        grad: whether autograd records them.
        hidden: ``[..., H]``, the rows of ``source.hidden`` that they belong to.
        bias: ``[V]``, added to the products, or None: the head's and what the model adds.
        factors: scalars and tanh in order, of which temperature, cap and scale are made.
        vocab_size: how many columns the model has left, the first ones.
        classes_first: whether the vocabulary is the second dimension, as cross entropy wants it, and not the last.
        kind: the logits, or what was computed from each row of them.
        coefficient: multiplies what is no logit.
        logits: the recipe of the logits that a softmax is of.
        rows_of: the recipe whose rows these are, and what takes them from it.
        results: statistics of the logits that are computed already, by whether autograd records them.
        tensors: all that a gradient of the logits goes to: the operands, and those of the steps.
    """

    source: Source
    steps: tuple[Step, ...]
    layout: torch.Tensor
    grad: bool
    hidden: torch.Tensor
    bias: torch.Tensor | None
    vocab_size: int
    classes_first: bool = False
    factors: tuple[Factor, ...] = ()
    kind: Kind = "logits"
    coefficient: float = 1.0
    logits: Recipe | None = None
    rows_of: Rows | None = None
    results: dict[bool, LogprobOutput] = dataclasses.field(default_factory=dict)
    tensors: tuple[torch.Tensor | None, ...] = ()

    @classmethod
    def of_head(cls, source: Source) -> Recipe:
        """What a head returns."""
        hidden, vocab_size = source.hidden, source.weight.shape[0]
        layout = laid_out((*hidden.shape[:-1], vocab_size), source.dtype)
        grad, operands = torch.is_grad_enabled(), source.operands
        return cls(source, (), layout, grad, hidden, source.bias, vocab_size, tensors=operands)

    def then(self, step: Step, layout: torch.Tensor, **changes: Any) -> Recipe:
        """What the model has after one more step."""
        step.autocast = _device.autocast_dtype(self.source.device)
        tensors = self.tensors
        if (step.args or step.kwargs) and (given := step.tensors):
            step.state = _state(given)
            tensors = (*tensors, *[x for x in (*step.args, *step.kwargs.values()) if _has_gradient(x)])
        found = Recipe(
            self.source, (*self.steps, step), layout, self.grad and torch.is_grad_enabled(), self.hidden, self.bias,
            self.vocab_size, self.classes_first, self.factors, self.kind, self.coefficient, self.logits,
            tensors=tensors,
        )  # fmt: skip
        for name, x in changes.items():
            setattr(found, name, x)
        return found

    @property
    def dtype(self) -> torch.dtype:
        """Of the logits as the model has them."""
        return self.layout.dtype

    def compute(self, tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """The values, by the model's own operations in its own order, of `tensors` or of what stands for them."""
        operands, others = tensors[:5], iter(tensors[5:])
        value = self.source.compute(operands)

        def given(x: Any) -> Any:
            return next(others) if _has_gradient(x) else x

        for step in self.steps:
            args, kwargs = tuple(map(given, step.args)), {name: given(x) for name, x in step.kwargs.items()}
            value = step.of(value, args, kwargs)
        return value

    def options(self) -> dict[str, Any] | None:
        """The options of `linear_logprobs` that are not its defaults; None for a chain of factors that it lacks."""
        found = _options_of(self.factors) if self.factors else {}
        if found is None:
            return None
        if self.bias is not None:
            found["bias"] = self.bias
        if self.vocab_size != self.source.weight.shape[0]:
            found["vocab_size"] = self.vocab_size
        if self.source.lora is not None:
            found["lora"] = self.source.lora
        return found


def _options_of(factors: tuple[Factor, ...]) -> dict[str, Any] | None:
    """The options for t · c · tanh(a · z) or a · z; None for another chain of factors."""
    scale, cap, after, capped = 1.0, None, 1.0, False
    for name, x in factors:
        if name == "tanh":
            if capped:
                return None
            capped = True
            continue
        x = 1.0 / x if name == "div" else x
        if not capped:
            scale *= x
        elif cap is None:
            cap = x
        else:
            after *= x
    cap = 1.0 if capped and cap is None else cap
    if after <= 0 or (cap is not None and cap <= 0):
        return None
    found = {"logit_scale": scale if cap is None else scale * cap}
    if cap is not None:
        found |= {"logit_softcap": cap, "temperature": 1.0 / after}
    return found


def _has_gradient(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad


@_device.once
def laid_out(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A dense tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


@_device.once
def laid_out_alike(layout: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The layout of what torch computes elementwise; kept by the layout itself, a tensor's hash."""
    return torch.empty_like(layout, dtype=dtype)
