"""The check that a ``loss_fn`` does not mix tokens: each loss must depend only on the values of its own token.

Chunks may end at any token, so a mean over tokens would be a mean over a chunk. After the first call of a function, the
losses of a few tokens are computed in one call and again in two parts, and compared. If the function fails on a few
tokens, it is called twice with all tokens instead, the second time with changed values for every second token. A
function is new if its code, or a name, flag or function that it closes over, has not been seen. So a lambda that is
recreated in each step is compared only once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import types
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from typing import Any

import torch

from lce_torch_bridge.tensors import _device

MOST = 16  # how many tokens are compared: pairs of neighbours, spread over the call
FIRST = 3  # the number of tokens in the first part; odd, so that the parts divide a pair
MOVE = 3.0  # nats; the largest change of results
CLOSE = 2.0**-6  # relative: bfloat16 products in loss_fn may round differently for other numbers of tokens
MOST_KNOWN = 1024  # how many functions are remembered

NAMES = (str, bool, types.NoneType, enum.Enum, type)  # values on which a function may branch
NUMBERS = (float, int, torch.Tensor)
EMPTY_CELL = types.CellType()

_compared: set[Hashable] = set()


def refuse_mixed_tokens(
    key: Hashable, device: torch.device, losses: Callable[[], TokenLosses], refusal: Callable[[str], ValueError]
) -> None:
    """Refuses a function if the loss of a token depends on other tokens. Compares once for each ``key`` (`make_key`).

    A function that draws random numbers, or returns other losses when called again, is not compared. torch's random
    state is unchanged afterwards. During the capture of a CUDA graph, and while operators are traced, nothing is
    compared.

    Raises:
        ValueError: two losses differ. ``refusal`` makes the error from a description of the difference.
    """
    if key in _compared or _device.is_traced():
        return
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return
    token_losses = losses()
    if token_losses.tokens < 2:
        return
    hooks = contextlib.nullcontext() if _device.top_hooks(False) is None else _device.disable_hooks()
    with hooks, torch.compiler.set_stance("force_eager"), _keep_random_state(device) as draws_numbers:
        is_conclusive = _compare(token_losses, draws_numbers, refusal)
    if is_conclusive:
        if len(_compared) >= MOST_KNOWN:
            _compared.clear()
        _compared.add(key)


def _compare(
    token_losses: TokenLosses, draws_numbers: Callable[[], bool], refusal: Callable[[str], ValueError]
) -> bool | torch.Tensor:
    """Compares losses. Returns whether the comparison was conclusive: it is not if all losses are 0."""
    for compute in (token_losses.split_tokens, token_losses.move_other_tokens):
        try:
            together, apart, change = compute()
            differs = _differ(together, apart)
            # The host waits here.
            repeats = not draws_numbers() and (not differs.any() or _are_same(compute(), (together, apart)))
        except Exception:  # loss_fn may reshape tokens, or close over a tensor of all tokens
            continue
        if not repeats:
            return True
        if differs.any():
            i = int(differs.nonzero()[0])
            raise refusal(f"the loss of one token is {float(together[i]):.6g}, and {float(apart[i]):.6g} {change}")
        return together.any()
    return True


type Compared = tuple[torch.Tensor, torch.Tensor, str]  # losses, the same losses computed again, and how they were


@dataclasses.dataclass
class TokenLosses:
    """Recomputes the losses of some of a call's tokens, in parts or with changed values."""

    compute: Callable[..., torch.Tensor]  # takes a dict of results, and per-token arguments
    fields: Mapping[str, torch.Tensor]  # [T]
    per_token: Collection[torch.Tensor]  # [T, ...]
    differentiable: Collection[str]  # the names of results that the call differentiates

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return len(self.fields["lse"])

    def split_tokens(self) -> Compared:
        """Returns the losses of a few tokens, computed twice: in one call, and split into two calls.

        Before that, results are moved by different amounts, up in the first part and down in the second. Otherwise
        equal results, such as the ratios of an unchanged policy, would equal their own mean.
        """
        count, device = min(self.tokens, MOST), self.fields["lse"].device
        rows = places = torch.arange(count, device=device)
        if self.tokens > MOST:
            rows = places // 2 * (self.tokens // (MOST // 2)) + places % 2
        first = FIRST if count >= 2 * FIRST else 1
        moves = MOVE * (1 - 2 * places / (count - 1))
        together = self._compute_losses(rows, moves)
        apart = torch.cat(
            [self._compute_losses(rows[part], moves[part]) for part in (slice(first), slice(first, count))]
        )
        return together, apart, f"where {count} tokens are divided into {first} and {count - first}"

    def move_other_tokens(self) -> Compared:
        """Returns the losses of every second token, before and after all floats of the other tokens are changed."""
        rows = torch.arange(self.tokens, device=self.fields["lse"].device)
        together, apart = (
            self._compute_losses(rows, moves, -moves / 2)[::2] for moves in (rows % 2 * 0.0, rows % 2 * -MOVE)
        )
        return together, apart, "where the numbers of other tokens are changed"

    def _compute_losses(
        self, rows: torch.Tensor, moves: torch.Tensor, argument_moves: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns the losses of some rows, from copies, because loss_fn may overwrite its arguments."""
        fields = {name: x.detach()[rows] for name, x in self.fields.items()}
        for name, x in fields.items():
            if name == "logprobs":
                fields[name] = torch.minimum(x + moves, x.clamp(min=0))  # so that probabilities stay at most 1
            elif name in ("entropy", "lse"):
                fields[name] = x + MOVE + moves  # so that entropies stay at least 0
        arguments = [x.detach()[rows] for x in self.per_token]
        if argument_moves is not None:
            arguments = [
                x + argument_moves.view(-1, *[1] * (x.ndim - 1)).to(x.dtype) if x.is_floating_point() else x
                for x in arguments
            ]
        fields = {name: x.requires_grad_(name in self.differentiable) for name, x in fields.items()}
        for x, y in zip(arguments, self.per_token, strict=True):
            x.requires_grad_(y.requires_grad and bool(self.differentiable))
        return self.compute(fields, *arguments).detach().clone().reshape(len(rows))


@contextlib.contextmanager
def _keep_random_state(device: torch.device) -> Iterator[Callable[[], bool]]:
    """Restores torch's random state on exit. Yields a function that says whether random numbers were drawn."""
    states: list[Callable[[], torch.Tensor]] = [torch.get_rng_state]
    if device.type == "cuda":
        states.append(functools.partial(torch.cuda.get_rng_state, device))
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        before = [state() for state in states]
        yield lambda: not all(torch.equal(state(), x) for state, x in zip(states, before, strict=True))


def _differ(together: torch.Tensor, apart: torch.Tensor) -> torch.Tensor:
    """Returns a mask of the losses that differ by more than rounding."""
    size = together.abs().nan_to_num(0.0, 0.0)
    near = (together - apart).abs() <= CLOSE * (size + size.mean())
    return ~(near | (together == apart) | (together.isnan() & apart.isnan()))


def _are_same(ones: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    return all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(ones, others, strict=False))


def make_key(function: Any, numbers: Iterable[Any] = ()) -> Hashable:
    """Returns a key for a function, made of its code and of the names, flags and functions that it closes over.

    Tensors and numbers are left out, because they change from step to step.
    """
    return _make_key_part(function, set()), *(x for x in numbers if x is True or x is False)


def _make_key_part(x: Any, seen: set[int]) -> Hashable:
    if isinstance(x, NAMES):
        return x
    if isinstance(x, NUMBERS) or id(x) in seen:
        return None
    seen.add(id(x))
    if isinstance(x, types.FunctionType):
        parts = [cell.cell_contents for cell in x.__closure__ or () if cell != EMPTY_CELL]
        parts += [*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()]
        return x.__code__, *[_make_key_part(part, seen) for part in parts]
    if isinstance(x, functools.partial | types.MethodType):
        parts = (
            [x.func, *x.args, *x.keywords.values()] if isinstance(x, functools.partial) else [x.__func__, x.__self__]
        )
        return type(x), *[_make_key_part(part, seen) for part in parts]
    # Of an object, such as a module or a configuration, only the direct attributes count.
    attributes = x.values() if isinstance(x, dict) else getattr(x, "__dict__", {}).values()
    return type(x), *[y for y in attributes if isinstance(y, NAMES)]
