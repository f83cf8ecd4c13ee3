"""A call's static part, of global arrays or of one device's share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lce_jax import _dispatch, scalars
from lce_jax._types import Case, Device

if TYPE_CHECKING:
    from lce_jax.mesh._layout import Layout


@dataclasses.dataclass(frozen=True)
class Spec:
    """What to compute, by which implementation, split over which axis."""

    case: Case
    implementation: str
    requested: tuple[str, ...] | None  # the names to choose from again, for a shard's shapes
    vocab_size: int  # the true size of the whole vocabulary
    padded: bool = False  # whether the shards together have more columns
    axis_name: Any = None
    gather_dim: int | None = None  # hidden's dimension that is split over ``axis_name`` too
    # The axes that split the tokens, in a program of `runner._over_devices`. No types say there what to sum, so the
    # program sums over these axes, and cotangents arrive whole. None: the types of ``shard_map`` say what to sum.
    token_axes: tuple[str, ...] | None = None
    # Where `runner._over_devices` finds global operands: a `Layout`, or the mesh of their types, empty if they name
    # none. None: on this device.
    mesh: Any = None

    def implementation_on(self, device: Device) -> str:
        """The one that would serve the call on ``device``."""
        return _dispatch.choose(dataclasses.replace(self.case, device=device), self.requested)[0].NAME

    def with_tokens(self, num_tokens: int) -> Spec:
        """The same call with so many tokens."""
        return dataclasses.replace(self, case=dataclasses.replace(self.case, num_tokens=num_tokens))

    def share(self, layout: Layout, num_tokens: int, columns: Sequence[int]) -> Spec:
        """The spec of one device's share, its implementation chosen for the share's shapes."""
        case = dataclasses.replace(_dispatch.over(self.case, layout.mesh), num_tokens=num_tokens, vocab_size=columns[0])
        scalars.whole_parts(case.options.vocab_part_size, self.case.vocab_size, case.vocab_size)
        chosen, _ = _dispatch.choose(case, self.requested)
        return dataclasses.replace(
            self,
            case=case,
            implementation=chosen.NAME,
            axis_name=layout.vocab_axes,
            gather_dim=layout.gather_dim,
            token_axes=layout.token_axes,
            mesh=None,
        )
