"""What logits are computed from, and what a model has done to them so far: enough to serve them, or to compute them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from lce_torch_bridge.tensors import _device

if TYPE_CHECKING:
    from lce_torch_bridge._types import LogprobOutput, Lora
    from lce_torch_bridge.deferred._deferral import Deferral

type Kind = Literal["logits", "log_softmax", "softmax", "p_log_p", "p_logits"]
type Factor = tuple[Literal["mul", "div", "tanh"], float]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Source:
    """One call of a head: its operands, and the context in which it was called.

    Attributes:
        hidden: ``[..., H]``, what the head was given.
        weight: ``[V, H]``.
        bias: ``[V]`` or None.
        lora: an adapter ``(A, B, scale)`` on the weight, or None.
        autocast: the dtype of the autocast context, None outside of one.
        deferral: what counts, and says whether logits may be computed.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    lora: Lora | None
    autocast: torch.dtype | None
    deferral: Deferral

    @property
    def operands(self) -> tuple[torch.Tensor | None, ...]:
        """What has gradients: hidden, weight, bias, A and B."""
        a, b, _ = self.lora or (None, None, None)
        return self.hidden, self.weight, self.bias, a, b

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

    def note(self, needed_for: str) -> None:
        """Counts and logs that these logits are computed, but not in a compiled graph, where nothing is counted."""
        if not torch.compiler.is_compiling():
            shape = torch.Size((*self.hidden.shape[:-1], self.weight.shape[0]))
            self.deferral.note(shape, self.dtype, needed_for)

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """Inside, the head's autocast context and its weight are as they were in its call."""
        device = self.hidden.device.type
        with _device.gathered(self.weight):
            if self.autocast is None and not torch.is_autocast_enabled(device):
                yield
            else:
                with torch.autocast(device, dtype=self.autocast, enabled=self.autocast is not None):
                    yield


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One operation of the model on its logits: ``function(logits, *args, **kwargs)``."""

    function: Callable[..., torch.Tensor]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        return self.function(logits, *self.args, **self.kwargs)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
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
        rows_of: the recipe whose rows these are, with the function that takes them from a tensor ``[..., 1]``.
        results: statistics of the logits that are computed already, by whether autograd records them.
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
    rows_of: tuple[Recipe, Callable[[torch.Tensor], torch.Tensor]] | None = None
    results: dict[bool, LogprobOutput] = dataclasses.field(default_factory=dict)

    @classmethod
    def of_head(cls, source: Source) -> Recipe:
        """What a head returns."""
        hidden, vocab_size = source.hidden, source.weight.shape[0]
        layout = torch.empty((*hidden.shape[:-1], vocab_size), dtype=source.dtype, device="meta")
        return cls(source, (), layout, torch.is_grad_enabled(), hidden, source.bias, vocab_size)

    def then(self, step: Step, layout: torch.Tensor, **changes: Any) -> Recipe:
        """What the model has after one more step."""
        grad = self.grad and torch.is_grad_enabled()
        fresh: dict[str, Any] = {"results": {}, "rows_of": None, "grad": grad} | changes
        return dataclasses.replace(self, steps=(*self.steps, step), layout=layout, **fresh)

    @property
    def dtype(self) -> torch.dtype:
        """Of the logits as the model has them."""
        return self.layout.dtype

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """All tensors that a gradient of the logits goes to: the operands, and those of the steps."""
        others = [x for step in self.steps for x in (*step.args, *step.kwargs.values())]
        return *self.source.operands, *(x for x in others if isinstance(x, torch.Tensor) and x.requires_grad)

    def compute(self, tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """The values, by the model's own operations in its own order, of `tensors` or of what stands for them."""
        operands, others = tensors[:5], iter(tensors[5:])
        value = self.source.compute(operands)

        def given(x: Any) -> Any:
            return next(others) if isinstance(x, torch.Tensor) and x.requires_grad else x

        for step in self.steps:
            args, kwargs = tuple(map(given, step.args)), {name: given(x) for name, x in step.kwargs.items()}
            value = step.function(value, *args, **kwargs)
        return value

    def options(self) -> dict[str, Any] | None:
        """The options of `linear_logprobs` for t · c · tanh(a · z) or a · z; None for another chain of factors."""
        scale, cap, after, capped = 1.0, None, 1.0, False
        for name, x in self.factors:
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
        found: dict[str, Any] = {"logit_scale": scale if cap is None else scale * cap, "logit_softcap": cap}
        found["temperature"] = 1.0 / after
        if self.vocab_size != self.source.weight.shape[0]:
            found["vocab_size"] = self.vocab_size
        if self.source.lora is not None:
            found["lora"] = self.source.lora
        return found | {"bias": self.bias}
