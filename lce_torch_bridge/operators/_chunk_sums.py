"""The gradients of all chunks of `operators._loss_in_forward`, and the units in which float16 has them.

float16 has no numbers below 6e-8, and what keeps gradients away from there, the loss scale, is a part of the cotangent,
which is not known in the forward. So dlogits in float16 are computed in units of their own: all cotangents are
multiplied by the power of two that brings the largest dlogit of the call, so far as it is known, near float16's largest
number. What has been summed before a chunk with larger ones is brought to its units, and the backward divides.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from lce_torch_bridge._types import Call, Operands, Sums
from lce_torch_bridge.launched_directly._way import Way
from lce_torch_bridge.operators import _execute
from lce_torch_bridge.through_jax._sum import Sum

HIGHEST = 15  # dlogits lie below 2^15, and float16 ends at 2^16
MOST = 100  # exponent of a unit, so that its inverse is a normal float32 number


def unit_of(cotangents: dict[str, torch.Tensor], x: Operands, call: Call) -> torch.Tensor:
    """The power of two, ``[1]``, by which the cotangents are multiplied. Bounds of dlogits make it, not dlogits.

    Each dlogit is at most ``|logit_scale| / temperature`` times the sum of the cotangents' absolute values. That of the
    entropy counts ln V + 1 times, because it is multiplied by p (ln p + entropy), at most ln V + 1/e.
    """
    bound = torch.zeros(len(x.labels), dtype=torch.float32, device=x.labels.device)
    for name, cotangent in cotangents.items():
        bound += cotangent.abs() * (math.log(call.vocab_size) + 1 if name == "entropy" else 1)
    bound = bound * abs(call.logit_scale)
    if x.temperature is not None:
        bound = bound / x.temperature
    _, exponent = torch.frexp(bound.where(bound.isfinite(), 0).amax(0, keepdim=True))
    exponent = (HIGHEST - exponent).clamp(-MOST, MOST).where(bound.any(), MOST)
    return torch.ldexp(torch.ones_like(bound[:1]), exponent)


class ChunkSums:
    """The gradients of all chunks: of hidden row by row, of weight and bias added up."""

    def __init__(
        self, x: Operands, wanted: tuple[bool, ...], chunks: int, into: torch.Tensor | None, may_have_units: bool
    ) -> None:
        """``into`` is what dweight is added to at once. They have no units if the cotangent of the loss is known."""
        hidden, weight, bias, *_ = x
        half = weight.dtype == torch.float16
        self._wanted = wanted
        self._hidden = torch.zeros_like(hidden) if wanted[0] else None
        # One chunk's dweight may be rounded at once, but not to float16, because the cotangent is not known.
        self._total = Sum(weight, into) if wanted[1] and (chunks != 1 or half or into is not None) else None
        self._kept = into is None
        self._weight: torch.Tensor | None = None
        self._bias = torch.zeros_like(bias) if wanted[2] and bias is not None else None
        self.tokens = 0  # whose gradients are here
        self._has_units = half and may_have_units
        self.unit: torch.Tensor | None = None  # by which everything here is to be divided; None: 1

    @property
    def are_in_main_grad(self) -> bool:
        """Whether something has been added to what was given."""
        return self._total is not None and self._total.is_given

    def add(
        self,
        part: slice,
        chunk: Operands,
        saved: torch.Tensor,
        cache: list[Any],
        cotangents: dict[str, torch.Tensor],
        call: Call,
        way: Way,
    ) -> None:
        """The gradients of the tokens in ``part``."""
        if not cotangents or not any(self._wanted):
            return
        if self._has_units:
            unit = self._fitted(unit_of(cotangents, chunk, call))
            cotangents = {name: cotangent * unit for name, cotangent in cotangents.items()}
        sums = Sums(self._total, owns_cache=True)
        grads = _execute.gradients(*chunk[:3], saved, cache, cotangents, self._wanted, call, way, sums)
        if self._hidden is not None:
            self._hidden[part] = grads.pop(0)
        if self._wanted[1] and self._total is None:
            self._weight = grads.pop(0)
        if self._bias is not None:
            self._bias += grads.pop(0)
        self.tokens = part.stop

    def _fitted(self, unit: torch.Tensor) -> torch.Tensor:
        """The unit of everything from now on: this one, or the one before if that is smaller."""
        if self.unit is not None:
            unit = torch.minimum(unit, self.unit)
            change = unit / self.unit
            for grad in (self._hidden, self._total, self._bias):
                if grad is not None:
                    grad.mul_(change)
        self.unit = unit
        return unit

    def finish(self, weight: torch.Tensor) -> list[torch.Tensor | None]:
        """Those in hidden, weight and bias."""
        if self._wanted[1] and self._weight is None:
            self._weight = torch.zeros_like(weight) if self._total is None else self._total.taken()
        return [self._hidden, self._weight if self._kept else None, self._bias]
