"""One call on its way through the kernels: its operands, as given and prepared, and the generation that serves it."""

from __future__ import annotations

from typing import Any, NamedTuple

from lce_jax._types import Case, Operands
from lce_jax.mosaic import _operands
from lce_jax.mosaic._generation import Generation
from lce_jax.mosaic._geometry import Geometry, geometry
from lce_jax.mosaic._host import TRACED, Host
from lce_jax.mosaic._operands import Prepared
from lce_jax.mosaic._span import Span


class KernelCall(NamedTuple):
    """What every step of a pass needs to know."""

    operands: Operands
    prepared: Prepared
    case: Case
    shape: Geometry
    generation: Generation
    host: Host = TRACED

    def span(self, **fields: Any) -> Any:
        """A `Span` of the call's live rows and columns, as a kernel takes it."""
        return self.host.numbers(*Span(self.prepared.num_rows, self.prepared.num_columns, **fields))

    @property
    def arrays(self) -> Prepared:
        """What kernels are given. How many rows and columns there are, their spans say: no kernel depends on it."""
        return self.prepared._replace(num_rows=None, num_columns=None)

    @classmethod
    def prepare(cls, operands: Operands, case: Case, generation: Generation) -> KernelCall:
        """The call of ``operands``, padded and marked."""
        shape = geometry(case, generation.tiling)
        return cls(operands, _operands.prepare(operands, case, shape), case, shape, generation)
