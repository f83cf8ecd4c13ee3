"""The recipe of deferred logits: the head's call that they come from, and the model's operations on them so far.

A `Source` is the head's call, a `Step` is one operation of the model, and a `Recipe` has both. `_fused_functions`
computes results from a recipe without the logits. `Recipe.compute` computes the logits themselves.
"""

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
type PartStatistics = dict[bool, list[tuple[torch.Tensor, torch.Tensor]]]
type TensorStates = tuple[tuple[int, bool] | None, ...]
_optimizer_steps = [0]  # of all optimizers; a fused optimizer changes parameters, but not their versions
NO_CONTEXT: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


@functools.cache
def count_steps() -> None:
    """Registers a hook that counts the steps of all optimizers from now on."""

    def count(*_: Any) -> None:
        _optimizer_steps[0] += 1

    register_optimizer_step_post_hook(count)


def _read_states(tensors: Iterable[torch.Tensor | None]) -> TensorStates:
    """Returns each tensor's version and requires_grad; None for an inference tensor, which has no version."""
    if torch.compiler.is_compiling():
        return ()  # versions would become constants of the graph
    return tuple([None if x is None or x.is_inference() else (x._version, x.requires_grad) for x in tensors])


def _refuse_changed(names: Iterable[str], tensors: Sequence[torch.Tensor | None], before: TensorStates) -> None:
    """Raises if a tensor has changed since the model used it, because stored logits would not have changed."""
    now = _read_states(tensors)
    if now == before or not before or not now:
        return
    for name, x, old, new in zip(names, tensors, before, now, strict=False):
        if x is not None and old is not None and new is not None and old != new:
            change = f"written into in place (version {new[0]}, was {old[0]})"
            if old[0] == new[0]:
                change = f"given requires_grad={new[1]}"
            raise RuntimeError(
                f"{name} {tuple(x.shape)} was {change} after logits that depend on it were deferred, and their old "
                "values can no longer be computed: write logits = logits.compute() before that change"
            )


@dataclasses.dataclass(slots=True, eq=False)
class Source:
    """One call of a head: its operands, and the context in which it was called.

    Attributes:
        hidden: ``[..., H]``, the head's input.
        weight: ``[V, H]``.
        bias: ``[V]`` or None.
        lora: an adapter ``(A, B, scale)`` on the weight, or None.
        autocast: the dtype of the autocast context; None outside of a context.
        deferral: the handle that counts results and logits, and says whether logits may be computed.
        device: the type of the operands' device.
        operands: the tensors that may have gradients: hidden, weight, bias, A and B.
        states: the operands' versions and requires_grad at the time of the head's call.
        step: the number of steps of all optimizers at the time of the head's call.
        checkpoint: the pack hook of a non-reentrant checkpoint around the head's call, or None.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    lora: Lora | None
    autocast: torch.dtype | None
    deferral: Deferral
    device: str
    operands: tuple[torch.Tensor | None, ...] = dataclasses.field(init=False)
    states: TensorStates = dataclasses.field(init=False)
    step: int = dataclasses.field(init=False)
    checkpoint: Any = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        a, b, _ = self.lora or (None, None, None)
        self.operands = self.hidden, self.weight, self.bias, a, b
        self.states = _read_states(self.operands)
        self.step = _optimizer_steps[0] if self.states else -1  # a graph would recompile at each step
        self.checkpoint = _device.checkpoint_hook()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the logits that the head returns."""
        return self.hidden.dtype if self.autocast is None else self.autocast

    def compute(self, operands: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Computes the head's output using its own operations: a linear layer, and a LoRA adapter if there is one."""
        hidden, weight, bias, a, b = operands
        assert hidden is not None
        assert weight is not None
        with self.restore_context():
            logits = torch.nn.functional.linear(hidden, weight, bias)
            if self.lora is not None:
                assert a is not None
                assert b is not None
                dtype, linear = logits.dtype, torch.nn.functional.linear
                logits = logits + linear(linear(hidden.to(a.dtype), a), b) * self.lora[2]
                logits = logits.to(dtype)
            return logits

    def is_in_other_checkpoint(self) -> bool:
        """Whether this code runs in a checkpoint that does not contain the head's call.

        When such a checkpoint runs again, statistics that are saved with the logits are not recomputed.
        """
        hook = _device.checkpoint_hook()
        return hook is not None and hook is not self.checkpoint

    def suspend_checkpoint(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which no other checkpoint is active, for statistics that are saved with the logits."""
        return _device.disable_hooks() if self.is_in_other_checkpoint() else NO_CONTEXT

    def record_logits(self, needed_for: str) -> None:
        """Counts and logs a computation of these logits. Does nothing in a compiled graph."""
        if not torch.compiler.is_compiling():
            shape = torch.Size((*self.hidden.shape[:-1], self.weight.shape[0]))
            self.deferral.record_logits(shape, self.dtype, needed_for)

    def restore_context(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context with the autocast dtype of the head's call, and with the head's weight gathered.

        Raises:
            RuntimeError: an operand was changed, or an optimizer made a step.
        """
        _refuse_changed(OPERANDS, self.operands, self.states)
        if self.step >= 0 and self.step != _optimizer_steps[0]:
            raise RuntimeError(
                "an optimizer has made a step since these logits were deferred, and logits of the old weights can no "
                "longer be computed: write logits = logits.compute() before the step, or compute your results there"
            )
        has_memory = torch.compiler.is_compiling() or self.weight.untyped_storage().nbytes()
        autocast = set_autocast(self.device, self.autocast)
        return autocast if has_memory else self._gather_weight(autocast)

    @contextlib.contextmanager
    def _gather_weight(self, autocast: contextlib.AbstractContextManager[None]) -> Iterator[None]:
        with _device.unshard_weight(self.weight), autocast:
            yield


def set_autocast(device: str, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which autocast uses ``dtype``, or is off if ``dtype`` is None."""
    if dtype == _device.autocast_dtype(device):
        return NO_CONTEXT
    return torch.autocast(device, dtype=dtype, enabled=dtype is not None)


@dataclasses.dataclass(slots=True, eq=False)
class Step:
    """One operation of the model on its logits: ``function(logits, *args, **kwargs)`` under the dtype ``autocast``."""

    function: Callable[..., torch.Tensor]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    autocast: torch.dtype | None = None
    states: TensorStates = ()  # versions and requires_grad of the tensors among the arguments

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the arguments, including tensors inside indices."""
        return _collect_tensors((*self.args, *self.kwargs.values()))

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        return self.apply(logits, self.args, self.kwargs)

    def apply(self, logits: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Runs the operation with ``args`` and ``kwargs`` in place of the saved ones, which must be unchanged."""
        if self.states:
            _refuse_changed(itertools.repeat("a tensor that the model used on its logits"), self.tensors, self.states)
        with set_autocast(logits.device.type, self.autocast):
            return self.function(logits, *args, **kwargs)


def _collect_tensors(arguments: Iterable[Any]) -> list[torch.Tensor]:
    tensors = []
    for x in arguments:
        if isinstance(x, torch.Tensor):
            tensors.append(x)
        elif type(x) in (tuple, list):
            tensors += _collect_tensors(x)
    return tensors


class RowSelection(NamedTuple):
    """Some rows of a recipe, or one of the parts into which a split or an iteration divides all rows.

    Attributes:
        recipe: the recipe that has all rows.
        select: a function that takes these rows, or all parts, from a tensor ``[..., K]``.
        part: the index of this part.
        parts: lse and entropy of all parts, keyed by whether autograd records them. One operation splits the statistics
            of all rows, so one autograd node sums the parts' gradients. None: these rows are not one of several parts.
    """

    recipe: Recipe
    select: Callable[[torch.Tensor], Any]
    part: int = 0
    parts: PartStatistics | None = None


@dataclasses.dataclass(slots=True, eq=False)
class Recipe:
    """How to compute logits, or their softmax.

    Attributes:
        source: the head's call.
        steps: the model's operations on the head's logits, in order.
        layout: a tensor without memory that has the shape, strides and dtype of the result.
        grad: whether autograd records the result.
        hidden: ``[..., H]``, the rows of ``source.hidden`` from which the result is computed.
        bias: ``[V]`` or None: the head's bias plus biases that the model adds.
        factors: the multiplications, divisions and tanh among the steps, in order; they give temperature, cap and
            scale.
        vocab_size: how many columns are left; they are the first columns.
        classes_first: whether the vocabulary is the second dimension, as cross entropy expects, instead of the last.
        kind: what is computed: the logits, or a function of each row of the logits.
        coefficient: a factor of the result, for each ``kind`` except "logits".
        logits: the recipe of the logits, if ``kind`` is not "logits".
        selection: the recipe from which these rows were selected, and the function that selects them; or None.
        results: statistics of the logits that are already computed, keyed by whether autograd records them.
        tensors: all tensors that may get a gradient: the operands, and arguments of the steps.
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
    selection: RowSelection | None = None
    results: dict[bool, LogprobOutput] = dataclasses.field(default_factory=dict)
    tensors: tuple[torch.Tensor | None, ...] = ()

    @classmethod
    def from_source(cls, source: Source) -> Recipe:
        """Returns the recipe of a head's output."""
        hidden, vocab_size = source.hidden, source.weight.shape[0]
        layout = make_layout((*hidden.shape[:-1], vocab_size), source.dtype)
        grad, operands = torch.is_grad_enabled(), source.operands
        return cls(source, (), layout, grad, hidden, source.bias, vocab_size, tensors=operands)

    def add_step(self, step: Step, layout: torch.Tensor, **changes: Any) -> Recipe:
        """Returns the recipe after one more step. ``changes`` are the new values of fields that the step changes."""
        step.autocast = _device.autocast_dtype(self.source.device)
        tensors = self.tensors
        if (step.args or step.kwargs) and (arguments := step.tensors):
            step.states = _read_states(arguments)
            tensors = (*tensors, *[x for x in (*step.args, *step.kwargs.values()) if _requires_grad(x)])
        recipe = Recipe(
            self.source, (*self.steps, step), layout, self.grad and torch.is_grad_enabled(), self.hidden, self.bias,
            self.vocab_size, self.classes_first, self.factors, self.kind, self.coefficient, self.logits,
            tensors=tensors,
        )  # fmt: skip
        for name, x in changes.items():
            setattr(recipe, name, x)
        return recipe

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the result."""
        return self.layout.dtype

    def compute(self, tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Computes the values using the model's own operations, with ``tensors`` in place of `Recipe.tensors`."""
        operands, others = tensors[:5], iter(tensors[5:])
        value = self.source.compute(operands)

        def substitute(x: Any) -> Any:
            return next(others) if _requires_grad(x) else x

        for step in self.steps:
            args, kwargs = tuple(map(substitute, step.args)), {name: substitute(x) for name, x in step.kwargs.items()}
            value = step.apply(value, args, kwargs)
        return value

    def options(self) -> dict[str, Any] | None:
        """Returns options that make `linear_logprobs` use these logits; None if no options express the factors."""
        options = _make_options(self.factors) if self.factors else {}
        if options is None:
            return None
        if self.bias is not None:
            options["bias"] = self.bias
        if self.vocab_size != self.source.weight.shape[0]:
            options["vocab_size"] = self.vocab_size
        if self.source.lora is not None:
            options["lora"] = self.source.lora
        return options


def _make_options(factors: tuple[Factor, ...]) -> dict[str, Any] | None:
    """Returns the options for a · z or t · c · tanh(a · z); None for any other chain of factors."""
    scale, cap, outer, capped = 1.0, None, 1.0, False  # a, c, t
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
            outer *= x
    cap = 1.0 if capped and cap is None else cap
    if outer <= 0 or (cap is not None and cap <= 0):
        return None
    options = {"logit_scale": scale if cap is None else scale * cap}
    if cap is not None:
        options |= {"logit_softcap": cap, "temperature": 1.0 / outer}
    return options


def _requires_grad(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad


@_device.cache_results
def make_layout(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Returns a dense tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


@_device.cache_results
def make_layout_like(layout: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns the layout of an elementwise result. The cache's key is the layout object: tensors hash by identity."""
    return torch.empty_like(layout, dtype=dtype)
