"""The static part of a call of `lce_jax.linear_kl`: that of each of the two models."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lce_jax import _dispatch
from lce_jax._types import Case, Device
from lce_jax.call._spec import Spec
from lce_jax.mathematics._kl import Direction, Pair
from lce_jax.xla._kl import KLPlan

if TYPE_CHECKING:
    import jax.numpy as jnp

    from lce_jax.mesh._layout import Layout


@dataclasses.dataclass(frozen=True)
class KLSpec:
    """A call's static part."""

    models: Pair[Spec]
    direction: Direction
    requested: tuple[str, ...] | None = None  # as `Spec.requested`
    mesh: Any = None  # as `Spec.mesh`

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the result."""
        return self.plan(0).dtype

    @property
    def case(self) -> Case:
        """The student's."""
        return self.models.student.case

    @property
    def implementation(self) -> str:
        """The one that serves it, with kernels or without."""
        return _dispatch.choose_kl(self._cases, self.requested)[0]

    def implementation_on(self, device: Device) -> str:
        """The one that would serve the call on ``device``."""
        cases = Pair(*(dataclasses.replace(case, device=device) for case in self._cases))
        return _dispatch.choose_kl(cases, self.requested)[0]

    def with_tokens(self, num_tokens: int) -> KLSpec:
        """The same call with so many tokens."""
        return dataclasses.replace(self, models=Pair(*(model.with_tokens(num_tokens) for model in self.models)))

    def share(self, layout: Layout, num_tokens: int, columns: Sequence[int]) -> KLSpec:
        """The spec of one device's share."""
        of_models = zip(self.models, columns, strict=True)
        models = Pair(*(model.share(layout, num_tokens, [size]) for model, size in of_models))
        return dataclasses.replace(self, models=models, mesh=None)

    def plan(self, columns: int) -> KLPlan:
        """That of a shard with ``columns``."""
        return KLPlan(self._cases, self.direction, columns)

    @property
    def _cases(self) -> Pair[Case]:
        return Pair(*(spec.case for spec in self.models))
