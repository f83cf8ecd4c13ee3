"""Where a call runs: the mesh and axes that its caller names or its operands' types, as plans and losses ask for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from jax.sharding import AxisType

from lce_jax import scalars
from lce_jax._plans import ALONE, Surroundings
from lce_jax.call import _checks, _options
from lce_jax.call._options import CallOptions
from lce_jax.mesh._custom_partitioning import check_rules_are_read
from lce_jax.mesh._layout import layout_of_arrays, layout_of_names

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, Mesh

    from lce_jax._types import Case
    from lce_jax.mesh._layout import Axes, Layout


class Place(NamedTuple):
    """Where a call runs: the mesh and axes that the caller names, if any."""

    mesh: Mesh | AbstractMesh | None = None
    vocab_axis: Axes = None
    batch_axes: Axes = None
    sequence_axis: Axes = None

    @classmethod
    def of(cls, mesh: Mesh | AbstractMesh | None, *axes: Axes) -> Place:
        """With a hash, also where a caller gives lists of axes."""
        return cls(mesh, *(names if names is None or isinstance(names, str) else tuple(names) for names in axes))

    @property
    def is_named(self) -> bool:
        """Whether the caller names any."""
        return self.mesh is not None or bool(self.vocab_axis or self.batch_axes or self.sequence_axis)

    def layout(self, hidden: Any, weight: Any, options: CallOptions) -> Layout:
        """How the names split checked operands."""
        _options.no_axis_name(options)
        return layout_of_names(hidden, weight, options.static.vocab_dim, **self._asdict())


class Placed(NamedTuple):
    """One device's part of a call."""

    layout: Layout | None
    around: Surroundings
    columns: int  # of all devices; the largest number there is, where it is not known
    by_xla: bool  # whether XLA partitions the call over Auto axes


def placed(hidden: Any, weight: Any, per_token: list[Any], case: Case, options: CallOptions, place: Place) -> Placed:
    """How the operands lie on the mesh."""
    layout, around, columns, vocab_dim = None, ALONE, case.vocab_size, case.options.vocab_dim
    if place.is_named:
        layout = place.layout(hidden, weight, options)
    elif options.axis_name is None:
        layout = layout_of_arrays(hidden, weight, per_token, vocab_dim)
    else:
        columns = scalars.INT32_MAX  # the columns of all shards: how many shards there are is not known here
    by_xla = layout is not None and not place.is_named and AxisType.Explicit not in layout.mesh.axis_types
    if layout is not None:
        if by_xla:
            check_rules_are_read(case.device.platform, layout.mesh, case.options)
        around = Surroundings(gathers_hidden=layout.gather_dim is not None, shards=layout.vocab_shards)
    elif options.axis_name is None:
        around = Surroundings(true_columns=_checks.vocabulary(options.vocab_size, columns))
    return Placed(layout, around, columns, by_xla)
