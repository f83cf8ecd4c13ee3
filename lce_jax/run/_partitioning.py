"""How a mesh splits a program: the sharding of each array, one device's share, and the rule for XLA's partitioner.

A `Program` is the computation of one device, for its share of a call. If axis names or Explicit types give the layout,
`run_over_devices` runs the program under a ``shard_map``. Over Auto axes, XLA partitions by the rule `partition`, which
`lce_jax.mesh._custom_partitioning` attaches.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from lce_jax.call import _dispatch
from lce_jax.mesh._custom_partitioning import Partition, warn_once
from lce_jax.mesh._layout import Layout, auto_axes, find_typed_mesh, layout_of_specs
from lce_jax.types import _jax, shared_checks
from lce_jax.types._types import Call, Primals


class ArraySharding(enum.Enum):
    """How a mesh shards an array. Dimensions that a member does not mention are not split."""

    HIDDEN = "split by token, also over the vocabulary axis if that axis splits the sequence"
    RESULTS = "per token and sharded like hidden; an operand of this kind is gathered over the vocabulary axis"
    TOKENS = "per token, split by token and replicated over the vocabulary axis"
    ROWS = "the first dimension is the vocabulary and is split over the vocabulary axis"
    COLUMNS = "the second dimension is the vocabulary and is split over the vocabulary axis"
    REPLICATED = "the same on every device"
    DEVICE = "each device has its own array, which no other device reads"

    @property
    def vocab_dim(self) -> int | None:
        """The dimension of the array that is the vocabulary; None if no dimension is."""
        return {ArraySharding.ROWS: 0, ArraySharding.COLUMNS: 1}.get(self)

    def spec(self, layout: Layout) -> P:
        """Returns the partition spec of an array with this sharding over ``layout``."""
        if self in (ArraySharding.HIDDEN, ArraySharding.RESULTS):
            return layout.out_spec
        if self is ArraySharding.TOKENS:
            return layout.row_spec
        if self is ArraySharding.DEVICE:
            return layout.every_device
        return P() if self is ArraySharding.REPLICATED else P(*[None] * (self.vocab_dim or 0), layout.vocab_axes)


def head_sharding(vocab_dim: int) -> Primals[ArraySharding]:
    """Returns the shardings of a head's operands and of their gradients."""
    return Primals(
        ArraySharding.HIDDEN,
        ArraySharding.COLUMNS if vocab_dim else ArraySharding.ROWS,
        ArraySharding.ROWS,
        ArraySharding.ROWS,
    )


@dataclasses.dataclass(frozen=True)
class Program:
    """The computation of one device, for its share of a call, including the collectives.

    Attributes:
        run: ``run(call, *operands)``. The call describes the device's share: its ``axis_name``, ``gather_dim`` and
            ``token_axes`` say over which axes the collectives run.
        operands: an `ArraySharding` in place of each array or tree of arrays. At least one operand is
            `ArraySharding.HIDDEN`, and at least one is a weight.
        results: an `ArraySharding` in place of each result or tree of results.
        joins: whether a batch of calls can run as one call with more tokens. This requires that all results are per
            token.
        unused: a phrase for each option that has no effect where XLA partitions the program.
    """

    run: Callable[..., Any]
    operands: tuple[Any, ...]
    results: Any
    joins: bool = False
    unused: tuple[str, ...] = ()


def _pair_with_shardings(kinds: Any, tree: Any) -> Iterator[tuple[ArraySharding, Any]]:
    """Yields each array of ``tree`` with its sharding."""
    return zip(jax.tree.leaves(jax.tree.broadcast(kinds, tree)), jax.tree.leaves(tree), strict=True)


def find_hidden(program: Program, operands: Any) -> Any:
    """Returns the hidden states; their leading dimensions are the call's token dimensions."""
    return next(x for kind, x in _pair_with_shardings(program.operands, operands) if kind is ArraySharding.HIDDEN)


def _describe_share(call: Call, layout: Layout, program: Program, operands: Any) -> Call:
    """Returns the call of one device's share, with the implementation that is chosen for the share's shapes."""
    hidden = find_hidden(program, operands)
    gathered = 1 if layout.gather_dim is None else layout.vocab_shards
    pairs = _pair_with_shardings(program.operands, operands)
    columns = [x.shape[kind.vocab_dim] for kind, x in pairs if kind.vocab_dim is not None and x.ndim == 2]
    teacher = call.teacher and dataclasses.replace(call.teacher, columns=columns[1])
    share = dataclasses.replace(call, columns=columns[0], teacher=teacher).replace(
        num_tokens=math.prod(hidden.shape[:-1]) * gathered,
        axis_name=layout.vocab_axes,
        gather_dim=layout.gather_dim,
        token_axes=layout.token_axes,
        mesh=None,
    )
    share = _dispatch.use_mesh_device(share, layout.mesh)
    shared_checks.check_vocab_parts(call.vocab_part_size, call.columns, share.columns)
    return dataclasses.replace(share, implementation=_dispatch.choose(share)[0].NAME)


def _make_layout(mesh: Any, program: Program, operands: Any, specs: Any) -> Layout:
    """Returns the layout of operands that are sharded by ``specs``."""
    split = list(zip(_pair_with_shardings(program.operands, operands), specs, strict=True))
    (hidden, hidden_spec), *others = [(x, spec) for (kind, x), spec in split if kind is ArraySharding.HIDDEN]
    weights = [(kind.vocab_dim, x, spec) for (kind, x), spec in split if kind.vocab_dim is not None and x.ndim == 2]
    token_specs = [spec for (kind, _), spec in split if kind in (ArraySharding.TOKENS, ArraySharding.RESULTS)]
    token_specs += [spec for _, spec in others]
    vocab_dim, weight, weight_spec = weights[0]
    layout = layout_of_specs(mesh, hidden, weight, hidden_spec, weight_spec, token_specs, vocab_dim)
    if len({x.shape[dim] for dim, x, _ in weights}) > 1:  # vocabularies of different sizes are replicated
        return dataclasses.replace(layout, vocab_axes=None, gather_dim=None)
    return layout


# Layouts given by axis names or by Explicit types


def find_layout(call: Call, program: Program, operands: Any) -> Layout | None:
    """Returns the layout that the operands' types give, or None if all axes of their mesh are Auto."""
    mesh = find_typed_mesh(operands)
    if all(kind == AxisType.Auto for kind in mesh.axis_types):
        return None
    if auto := auto_axes(mesh):
        warn_once(
            f"{call.function} treats its operands as replicated over {', '.join(map(repr, auto))}, Auto axes of a mesh "
            f"that also has Explicit axes: make them Explicit, or call {call.sharded_function}"
        )
    return _make_layout(mesh, program, operands, [jax.typeof(x).sharding.spec for x in jax.tree.leaves(operands)])


def run_over_devices(layout: Layout, call: Call, program: Program, *operands: Any) -> Any:
    """Runs the program on every device of a layout.

    The program contains all collectives, so ``shard_map`` need not check types. Inside a ``shard_map`` over other axes,
    the types of the results vary over every axis over which an operand's type varies.
    """
    here = jax.sharding.get_abstract_mesh()
    layout = dataclasses.replace(layout, mesh=here) if here.manual_axes else layout
    pairs = _pair_with_shardings(program.operands, operands)
    placed = [x if kind is ArraySharding.DEVICE else layout.reshard(x, kind.spec(layout)) for kind, x in pairs]
    in_specs, out_specs = _make_specs(layout, program)
    device = functools.partial(_run_on_device, layout, call, program)
    mapped = jax.shard_map(device, mesh=layout.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    results = mapped(*jax.tree.unflatten(jax.tree.structure(operands), placed))
    return _jax.vary_over(results, _jax.varying_axes(operands))


def _run_on_device(layout: Layout, call: Call, program: Program, *operands: Any) -> Any:
    """Runs the program on the share of one device.

    Operands that are `ArraySharding.RESULTS` are first gathered over the vocabulary axis. From results that are
    `ArraySharding.RESULTS`, each device keeps its own rows.
    """
    share = _describe_share(call, layout, program, operands)
    kinds, flat = zip(*_pair_with_shardings(program.operands, operands), strict=True)
    gathered = iter(
        layout.gather_rows([x for kind, x in zip(kinds, flat, strict=True) if kind is ArraySharding.RESULTS])
    )
    full = [next(gathered) if kind is ArraySharding.RESULTS else x for kind, x in zip(kinds, flat, strict=True)]
    results = program.run(share, *jax.tree.unflatten(jax.tree.structure(operands), full))
    local = [
        layout.take_local_rows(x) if kind is ArraySharding.RESULTS else x
        for kind, x in _pair_with_shardings(program.results, results)
    ]
    return jax.tree.unflatten(jax.tree.structure(results), local)


def _make_specs(layout: Layout, program: Program) -> tuple[Any, Any]:
    """Returns the program's operands and results with a partition spec in place of each `ArraySharding`."""
    operands = jax.tree.map(lambda kind: kind.spec(layout), program.operands)
    return operands, jax.tree.map(lambda kind: kind.spec(layout), program.results)


# Over Auto axes, where XLA partitions


def name_dimensions(program: Program, operands: Any, results: Any) -> tuple[str, tuple[str, ...]]:
    """Names each dimension of each array for XLA's rule. Returns the names, and which of them XLA must not split.

    Dimensions with the same name must have the same size. So a name contains the size, except for token dimensions.
    """
    all_tokens = [f"b{dim}" for dim in range(find_hidden(program, operands).ndim - 1)]
    sides, unsplit = [], []
    for kinds, tree in ((program.operands, operands), (program.results, results)):
        arrays = []
        for kind, x in _pair_with_shardings(kinds, tree):
            tokens = all_tokens if kind in (ArraySharding.HIDDEN, ArraySharding.RESULTS, ArraySharding.TOKENS) else []
            names = [*tokens, *(f"n{size}" for size in x.shape[len(tokens) :])]
            if kind.vocab_dim is not None:
                names[kind.vocab_dim] = f"v{x.shape[kind.vocab_dim]}"
            unsplit += [name for name in names if name.startswith("n")]
            arrays.append(" ".join(names))
        sides.append(", ".join(arrays))
    return " -> ".join(sides), tuple(dict.fromkeys(unsplit))


def partition(call: Call, program: Program, mesh: Any, operands: Any, specs: Any) -> Partition:
    """The rule for XLA's partitioner. Returns one device's program for operands that XLA has split by ``specs``."""
    layout = _make_layout(mesh, program, operands, jax.tree.leaves(specs, is_leaf=_is_spec))
    in_specs, out_specs = _make_specs(layout, program)
    device = functools.partial(_run_on_device, layout, call, program)
    return Partition(device, jax.tree.broadcast(in_specs, operands, is_leaf=_is_spec), out_specs)


def _is_spec(x: Any) -> bool:
    return isinstance(x, P)
