"""Which implementation serves a call: a list in order of preference, each with its reason to decline."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any, Protocol

from lce_jax import _devices, mosaic
from lce_jax._plans import ALONE, Plan, Surroundings
from lce_jax._types import (
    Case,
    Operands,
    Primals,
    RowCoefficients,
    ShardStatistics,
    UnsupportedError,
)
from lce_jax.mathematics._kl import Pair
from lce_jax.xla import _logprobs as xla


class Implementation(Protocol):
    """What a module must define to be one: what it supports, its plan, the statistics and the gradients.

    `lce_jax.mosaic` has steps of its own besides, which no other needs: statistics in parts, per-token arithmetic, and
    tiles that are left out.
    """

    NAME: str

    def supports(self, case: Case) -> str | None:
        """Why it cannot serve ``case``, in words for the user; None if it can."""

    def plan(self, case: Case, around: Surroundings = ALONE) -> Plan:
        """Its tiles and its bytes for ``case``, without running anything."""

    def statistics(self, operands: Operands, case: Case, keep_cache: bool = False) -> tuple[ShardStatistics, Any]:
        """Eq. 1 of the shard, and the cache for the backward (None, or arrays of at most ``cache_bytes``).

        With a ``gradient_threshold`` the cache may also hold what `lce_jax.mosaic.selected` needs.
        """

    def gradients(
        self,
        operands: Operands,
        case: Case,
        rows: RowCoefficients,
        cache: Any = None,
        *,
        may_round_dhidden: bool = False,
        may_overwrite_cache: bool = True,
        dweight: Any = None,
    ) -> Primals:
        """Eq. 5: dhidden [T, H] and dbias [V] in the statistics' dtype, dweight in the weight's.

        ``may_round_dhidden``: no sum over devices follows, so dhidden may come in the weight's dtype.
        ``may_overwrite_cache``: no other backward reads the cache.
        ``dweight``: a sum in the statistics' dtype, to which dweight is added without being rounded.
        """


IMPLEMENTATIONS: dict[str, Implementation] = {module.NAME: module for module in (mosaic, xla)}  # best first

_logger = logging.getLogger("lce_jax")


def choose(case: Case, implementation: tuple[str, ...] | None) -> tuple[Implementation, dict[str, str]]:
    """The first implementation that serves ``case``, and the reasons of those before it.

    Raises:
        UnsupportedError: none of those asked for can.
    """
    name, refused = _first(
        implementation, lambda name: IMPLEMENTATIONS[name].supports(case), "linear log-probabilities", case
    )
    return IMPLEMENTATIONS[name], refused


def choose_kl(cases: Pair[Case], implementation: tuple[str, ...] | None = None) -> tuple[str, dict[str, str]]:
    """Which implementation serves `lce_jax.linear_kl` of two heads, and the reasons of those before it.

    Raises:
        UnsupportedError: none of those asked for can.
    """
    return _first(
        implementation,
        lambda name: mosaic.kl_supports(cases) if name == mosaic.NAME else None,
        "divergences of two heads",
        cases.student,
    )


def _first(
    implementation: tuple[str, ...] | None,
    refusal: Callable[[str], str | None],
    what: str,
    case: Case,
) -> tuple[str, dict[str, str]]:
    """The first name that serves ``what``, and the reasons of those before it. The log tells, once."""
    refused: dict[str, str] = {}
    for name in IMPLEMENTATIONS if implementation is None else implementation:
        reason = refusal(name)
        if reason is None:
            if implementation is None:
                _log_choice(what, case.device.platform, name, tuple(refused.items()))
            return name, refused
        refused[name] = reason
    raise UnsupportedError("; ".join(f'implementation "{name}": {reason}' for name, reason in refused.items()))


def explain(case: Case, implementation: tuple[str, ...] | None, around: Surroundings) -> Plan:
    """The plan of the implementation that `choose` picks, with the reasons of those before it."""
    chosen, refused = choose(case, implementation)
    return dataclasses.replace(chosen.plan(case, around), refused=refused)


def over(case: Case, mesh: Any) -> Case:
    """``case`` on the devices of ``mesh``, if it names them."""
    if _devices.of_mesh(mesh) is None:
        return case
    return dataclasses.replace(case, device=_devices.current_device(mesh=mesh))


@functools.cache
def _log_choice(what: str, platform: str, name: str, refused: tuple[tuple[str, str], ...]) -> None:
    reasons = "".join(f"; not {other}: {reason}" for other, reason in refused)
    _logger.info("%s on %s: %s%s", what, platform, name, reasons)
