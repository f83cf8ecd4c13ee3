"""One call on its way through the kernels: its operands, as given and prepared, and the kernel set that serves it."""

from __future__ import annotations

from typing import NamedTuple

from lce_jax._types import Case, Operands
from lce_jax.mosaic import _operands
from lce_jax.mosaic._geometry import Geometry, geometry
from lce_jax.mosaic._kernel_set import KernelSet
from lce_jax.mosaic._operands import Prepared


class Call(NamedTuple):
    """What every step of a pass needs to know."""

    operands: Operands
    prepared: Prepared
    case: Case
    shape: Geometry
    kernels: KernelSet

    @classmethod
    def prepare(cls, operands: Operands, case: Case, kernels: KernelSet) -> Call:
        """The call of ``operands``, padded and marked for ``kernels``."""
        shape = geometry(case, kernels.tiling)
        return cls(operands, _operands.prepare(operands, case, shape), case, shape, kernels)
