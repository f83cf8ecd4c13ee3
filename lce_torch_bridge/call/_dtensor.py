"""Converts DTensor arguments to this rank's plain tensors, or refuses their placements.

A weight or bias is gathered over all dimensions of its mesh except the dimension of ``tp_group``, over which it stays
split. Its gradient is the mean over the ranks that gathered it. This is correct in three cases:

* Under FSDP2, HSDP and ``replicate``, ranks have different tokens, and the gradient is the mean by default.
* Ranks that have the same tokens have equal gradients, and the mean equals each of them.
* A wrapper may take the mean once more. This does not change it, because all ranks have the same mean.

A mean would be wrong if gradients are to be summed over different tokens. FSDP2's ``set_gradient_divide_factor``
requests such a sum, and is refused.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

from lce_torch_bridge.tensors import _device
from lce_torch_bridge.tensors._device import check_readable, not_compiled

WHY_NOT_COMPILED = "lce_torch_bridge compares the mesh of a DTensor with tp_group as it runs"


def is_dtensor(x: Any) -> bool:
    """Whether ``x`` is a DTensor. Does not import DTensor's module, which takes half a second."""
    if type(x) is torch.Tensor:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def tokens(**arguments: Any) -> tuple[Any, ...]:
    """Returns replicated per-token arguments as plain tensors, checked by `check_readable`, with replicated gradients.

    Raises:
        ValueError: a DTensor is not replicated.
    """
    return tuple(check_readable(name, _replicated(name, x) if is_dtensor(x) else x) for name, x in arguments.items())


def spans(x: Any, group: dist.ProcessGroup | None) -> bool:
    """Whether ``x`` is a DTensor whose mesh has ``group`` as a dimension."""
    return is_dtensor(x) and _dimension_of(group, x.device_mesh, "hidden") is not None


@not_compiled(WHY_NOT_COMPILED)
def rows(name: str, x: Any, group: dist.ProcessGroup | None, wgrad: str = "return") -> torch.Tensor:
    """Returns this rank's part of the vocabulary, ``[V, H]`` or ``[V]``, of a DTensor. Gathering it is a collective.

    Raises:
        ValueError: the placements are not supported, or ``wgrad`` is not "return".
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    if wgrad != "return":
        raise ValueError(f'wgrad={wgrad!r}: {name} is a DTensor, whose gradient autograd returns: use wgrad="return"')
    mesh = x.device_mesh
    split = _dimension_of(group, mesh, name)
    supported = [Shard(0) if dim == split else Replicate() for dim in range(mesh.ndim)]
    _refuse_placements(name, x, split, supported)
    if mesh.ndim > (split is not None):
        _refuse_other_reductions(name, x)
    grads = [Shard(0) if dim == split else Partial("avg") for dim in range(mesh.ndim)]
    return x.redistribute(placements=supported).to_local(grad_placements=grads)


def _refuse_placements(name: str, x: Any, split: int | None, supported: list[Any]) -> None:
    mesh = x.device_mesh
    for dim, placement in enumerate(x.placements):
        if placement.is_partial() or (dim == split and getattr(placement, "dim", None) != 0):
            dimension = dim if mesh.mesh_dim_names is None else repr(mesh.mesh_dim_names[dim])
            expected = "Shard(dim=0), as tp_group splits the vocabulary" if dim == split else "sharded or replicated"
            raise ValueError(
                f"{name} {tuple(x.shape)} is a DTensor with {placement!r} over mesh dimension {dimension}, but must be "
                f"{expected}: pass {name}.redistribute(placements={supported})"
            )
    if split is not None and x.shape[0] % mesh.size(split):
        raise ValueError(
            f"{name} has {x.shape[0]} rows, which do not divide into {mesh.size(split)} equal parts over "
            "tp_group: pad the vocabulary and give vocab_size"
        )


def _refuse_other_reductions(name: str, x: Any) -> None:
    """Refuses an FSDP2 parameter if FSDP2 sums its gradients instead of averaging them."""
    parameter = _parameter_of(x)
    for _, group in _device.fsdp2_groups():
        factor = group.gradient_divide_factor
        if factor is not None and any(param.sharded_param is parameter for param in group.fsdp_params):
            raise ValueError(
                f"{name} is sharded by FSDP2 with set_gradient_divide_factor({factor:g}), but gathered here its "
                "gradient would be the mean: make the call inside the forward of the FSDP module that holds it"
            )


def _parameter_of(x: torch.Tensor) -> torch.Tensor:
    """Returns the leaf from which ``x`` was computed, for example by a cast; ``x`` if it is a leaf itself."""
    node: Any = x.grad_fn
    while node is not None and not hasattr(node, "variable"):
        node = next((other for other, _ in node.next_functions if other is not None), None)
    return x if node is None else node.variable


def _replicated(name: str, x: Any) -> torch.Tensor:
    from torch.distributed.tensor import Replicate

    if not all(placement.is_replicate() for placement in x.placements):
        raise ValueError(
            f"{name} {tuple(x.shape)} is a DTensor with placements {list(x.placements)}, but must be replicated: "
            f"pass {name}.redistribute(placements={[Replicate()] * x.device_mesh.ndim})"
        )
    return x.to_local()


@not_compiled(WHY_NOT_COMPILED)
def _dimension_of(group: dist.ProcessGroup | None, mesh: Any, name: str) -> int | None:
    """Returns the dimension of ``mesh`` that has the ranks of ``group``; None if they share only this rank.

    Raises:
        ValueError: mesh and group share several ranks, but the group is not a dimension of the mesh.
    """
    if group is None or group.size() == 1:
        return None
    coordinate, ranks = mesh.get_coordinate(), dist.get_process_group_ranks(group)
    if coordinate is None:
        raise ValueError(f"rank {dist.get_rank()} is not in the mesh of {name}, {mesh.mesh.tolist()}")
    for dim in range(mesh.ndim):
        line = mesh.mesh[tuple(slice(None) if i == dim else index for i, index in enumerate(coordinate))]
        if line.tolist() == ranks:
            return dim
    if set(ranks) & set(mesh.mesh.flatten().tolist()) != {dist.get_rank()}:
        raise ValueError(
            f"tp_group has ranks {ranks}, which are no dimension of {name}'s mesh {mesh.mesh.tolist()}: pass the group "
            f"of the dimension that splits the vocabulary, {name}.device_mesh.get_group(dim)"
        )
    return None
