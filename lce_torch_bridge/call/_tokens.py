"""Per token: which tokens are computed, their temperature, and results in the shape of labels."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from lce_jax import scalars
from lce_torch_bridge.call import _checks


def per_token(temperature: float | torch.Tensor, labels: torch.Tensor) -> torch.Tensor | None:
    """One temperature per token, because a number would be compiled in; None for 1.

    Under ``torch.compile`` a varying number is symbolic. ``torch.full`` of it, or a comparison with 1, would make it
    a constant of the graph.
    """
    if isinstance(temperature, torch.Tensor):
        return temperature.to(torch.float32).expand(labels.shape).reshape(-1)
    known = statically_known_true if torch.compiler.is_compiling() else bool
    if known(temperature == 1.0):
        return None
    return torch.ones(labels.numel(), dtype=torch.float32, device=labels.device) * temperature


def floor_per_token(floor: float | torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """One floor per token, for the same reason."""
    if isinstance(floor, torch.Tensor):
        return floor.to(torch.float32).expand(labels.shape).reshape(-1)
    return torch.ones(labels.numel(), dtype=torch.float32, device=labels.device) * floor


def without(ignore_index: int, where: torch.Tensor | None, labels: torch.Tensor) -> torch.Tensor:
    """``where`` without the tokens that have this label."""
    # torch compares in the type of labels: in uint8, which does not hold -100, it would leave out 156.
    counts = labels.long() != scalars.integer("ignore_index", ignore_index)
    if where is None:
        return counts
    if where.dtype != torch.bool:
        none = torch.zeros(labels.numel(), dtype=torch.bool, device=labels.device)
        where = none.index_fill(0, where.long(), True).view(labels.shape)
    return where & counts


def count(where: torch.Tensor | None, labels: torch.Tensor) -> int | torch.Tensor:
    """How many tokens are kept, at least 1; for a mask, a tensor on its device."""
    if where is None or where.dtype != torch.bool:
        return max((labels if where is None else where).numel(), 1)
    return where.sum().clamp(min=1)


def rows_of(where: torch.Tensor) -> torch.Tensor:
    """The index of the rows that are computed. A mask that cannot be counted stays a mask: all rows are computed."""
    if where.dtype != torch.bool:
        return where
    where = where.reshape(-1)
    return where.nonzero().squeeze(1) if torch.compiler.is_compiling() or _checks.has_values(where) else where


def only_rows(x: Any, rows: torch.Tensor | None, other: float) -> Any:
    """The rows of ``x`` that are computed: those of an index, or all with ``other`` in those that a mask leaves out."""
    if x is None or rows is None:
        return x
    if rows.dtype == torch.bool:
        return x.where(rows.view(-1, *(1,) * (x.ndim - 1)), other)
    return x.index_select(0, rows)


def placed(x: torch.Tensor, rows: torch.Tensor | None, labels: torch.Tensor) -> torch.Tensor:
    """Results in the shape of labels (with K more for candidates), 0 on tokens that are left out."""
    if rows is not None and rows.dtype == torch.bool:
        x = x.where(rows.view(-1, *(1,) * (x.ndim - 1)), 0)
    elif rows is not None:
        x = x.new_zeros((labels.numel(), *x.shape[1:])).index_copy(0, rows.long(), x)
    return x if labels.ndim == 1 else x.view(labels.shape + x.shape[1:])
