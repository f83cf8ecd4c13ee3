"""Whether a ``loss_fn`` mixes tokens, where each loss is to be made of its own token's numbers alone.

Chunks of tokens end anywhere, so a mean over tokens would be one over a chunk. After the first call of a function, the
losses of a few tokens are computed together and in two parts, and compared. A call is the first one with a function's
code, and with the names, flags and functions that the code closes over. So a lambda that each step makes anew is one
function.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import types
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from typing import Any

import torch

from lce_torch_bridge.tensors import _device

MOST = 16  # tokens that are compared: pairs of neighbours, from all over the call
FIRST = 3  # of them in the first part, so that it divides a pair
CLOSE = 1e-3  # relative: more than a token's own sums over K numbers differ by, in other numbers of tokens
MOST_KNOWN = 1024  # functions

_compared: set[Hashable] = set()


def refuse_mixed_tokens(
    key: Hashable, device: torch.device, losses: Callable[[], TokenLosses], refusal: Callable[[str], ValueError]
) -> None:
    """Refuses a function of this `key_of`, once, if the loss of a token depends on other tokens.

    A function that draws random numbers or does not repeat itself is not compared. torch's random numbers stay as they
    are. A capture of a CUDA graph, and whatever records operators, leave the comparison to another call.

    Raises:
        ValueError: ``refusal`` of what was found; also where the function does not take any number of tokens.
    """
    if key in _compared or _device.is_traced():
        return
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return
    tried = losses()
    if tried.count < 2:
        return
    hooks = contextlib.nullcontext() if _device.top_hooks(False) is None else _device.without_hooks()
    with hooks, _keep_random_state(tried.device) as draws_numbers:
        together, apart = tried.compute(refusal)
        known = not draws_numbers()
        differs = _differ(together, apart)
        if known and differs.any() and _are_same(tried.compute(refusal), (together, apart)):  # the host waits for it
            i = int(differs.nonzero()[0])
            raise refusal(
                f"one of {tried.count} tokens has the loss {float(together[i]):.6g}, and {float(apart[i]):.6g} where "
                f"loss_fn is given {tried.parts[i >= tried.parts[0]]} of them"
            )
    if not known or together.any():  # losses of 0, as those of advantages of 0, say nothing
        if len(_compared) >= MOST_KNOWN:
            _compared.clear()
        _compared.add(key)


class TokenLosses:
    """The losses of a few tokens of a call."""

    def __init__(
        self,
        losses_of: Callable[..., torch.Tensor],  # of results by name, and of per-token arguments
        fields: Mapping[str, torch.Tensor],  # [T]
        per_token: Collection[torch.Tensor],  # [T, ...]
        differentiable: Collection[str],  # results that the call differentiates
    ) -> None:
        tokens, self.device = len(fields["lse"]), fields["lse"].device
        rows = torch.arange(min(tokens, MOST), device=self.device)
        steps = rows / MOST
        if tokens > MOST:
            rows = rows // 2 * (tokens // (MOST // 2)) + rows % 2
        self.count, self._losses_of, self._differentiable = len(rows), losses_of, differentiable
        self.parts = (FIRST, self.count - FIRST) if self.count >= 2 * FIRST else (1, self.count - 1)
        self._fields = {name: x.detach()[rows] for name, x in fields.items()}
        # Equal numbers would have their own mean: those of a policy that has not moved, or of a weight of 0.
        for name, sign in (("logprobs", -1), ("entropy", 1), ("lse", 1)):
            if name in self._fields:
                self._fields[name] += sign * steps
        self._per_token = [(x.detach()[rows], x.requires_grad and bool(differentiable)) for x in per_token]

    def compute(self, refusal: Callable[[str], ValueError]) -> tuple[torch.Tensor, torch.Tensor]:
        """``[count]``, of all tokens together and in two parts."""
        first, rest = self.parts
        try:
            return self._of(0, self.count), torch.cat([self._of(0, first), self._of(first, rest)])
        except Exception as error:
            raise refusal(
                f"it does not take any number of tokens, such as {self.count}, {first} and {rest} ({error}). If it "
                "closes over a tensor of all tokens, give that by name as a per-token argument"
            ) from error

    def _of(self, first: int, size: int) -> torch.Tensor:
        part = slice(first, first + size)  # of copies, because the function may overwrite what it gets
        fields = {
            name: x[part].clone().requires_grad_(name in self._differentiable) for name, x in self._fields.items()
        }
        losses = self._losses_of(fields, *[x[part].clone().requires_grad_(wanted) for x, wanted in self._per_token])
        if losses.numel() != size:
            raise ValueError(f"it returns {tuple(losses.shape)} for {size} tokens")
        return losses.detach().reshape(size)


@contextlib.contextmanager
def _keep_random_state(device: torch.device) -> Iterator[Callable[[], bool]]:
    """Afterwards torch's generators are as before; inside, a function that says whether they have drawn anything."""
    states = [torch.get_rng_state, *([functools.partial(torch.cuda.get_rng_state, device)] * (device.type == "cuda"))]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        before = [state() for state in states]
        yield lambda: not all(torch.equal(state(), x) for state, x in zip(states, before, strict=True))


def _differ(together: torch.Tensor, apart: torch.Tensor) -> torch.Tensor:
    """Which losses differ by more than rounding."""
    close = max(CLOSE, 4 * torch.finfo(together.dtype).eps)
    size = together.abs().nan_to_num(0.0, 0.0)
    near = (together - apart).abs() <= close * (size + size.mean())
    return ~(near | (together == apart) | (together.isnan() & apart.isnan()))


def _are_same(ones: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> bool:
    return all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(ones, others, strict=True))


def key_of(function: Any, numbers: Iterable[Any] = ()) -> Hashable:
    """What tells functions apart: code, and the names, flags and functions that it closes over.

    Not tensors and other numbers, which change from step to step.
    """
    return _part_of_key(function, set()), *(x for x in numbers if isinstance(x, bool))


def _part_of_key(x: Any, seen: set[int]) -> Hashable:
    if x is None or isinstance(x, str | bool | enum.Enum | type):
        return x
    if id(x) in seen or isinstance(x, torch.Tensor):
        return None
    seen.add(id(x))
    if isinstance(x, functools.partial):
        code, parts = functools.partial, [x.func, *x.args, *x.keywords.values()]
    elif isinstance(x, types.MethodType):
        code, parts = types.MethodType, [x.__func__, x.__self__]
    elif isinstance(x, types.FunctionType):
        code, parts = x.__code__, [*_cells_of(x), *(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()]
    else:  # an object, such as a module or a configuration: what stands in it, and no further
        inside = x.values() if isinstance(x, dict) else getattr(x, "__dict__", {}).values()
        code, parts = type(x), [y for y in inside if isinstance(y, str | bool | enum.Enum)]
    return code, *(_part_of_key(part, seen) for part in parts)


def _cells_of(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # it is not filled yet
            yield cell.cell_contents
