"""The launches of a kernel set: a table, the same for all generations, with a generation's tunings and its `Machine`.

`lce_jax.mosaic._kernel_set` says what each takes and returns; a function of that name here computes it. They import the
kernel language, which takes half a second, when they are first called.
"""

from __future__ import annotations

import abc
import importlib
from typing import TYPE_CHECKING, Any, Protocol

from lce_jax._types import Case
from lce_jax.mosaic._kernel_set import KernelSet
from lce_jax.mosaic.common import _tiles

if TYPE_CHECKING:
    from lce_jax.mosaic.common._machine import KLMachine, Machine

LEAST_HIDDEN = 128  # of a gathered row of the weight: a number for every thread


class Tunings(Protocol):
    """A generation's free choices."""

    def of(self, case: Case, kernel: str) -> Any:
        """Those of a kernel."""


def _launch(module: str, function: str) -> Any:
    """The launch of a kernel without tensor cores: ``function(*operands)`` of ``module``."""

    def launch(_: Any, *operands: Any, **more: Any) -> Any:
        return _found(module, function)(*operands, **more)

    return launch


def _multiply(module: str, function: str, tuning: str) -> Any:
    """The launch of a kernel with tensor cores: ``function(machine, tuning, *operands)`` of ``module``."""

    def launch(kernels: Kernels, *operands: Any, **more: Any) -> Any:
        case = next(x for x in operands if isinstance(x, Case))
        return _found(module, function)(kernels.machine, kernels.tunings.of(case, tuning), *operands, **more)

    return launch


def _of_two_heads(function: str, tuning: str) -> Any:
    """The launch of a kernel of two heads, ``function(machine, tuning, cases, *operands)`` of `common._kl`."""

    def launch(kernels: Kernels, cases: tuple[Case, Case], *operands: Any) -> Any:
        return _found("_kl", function)(kernels.kl_machine, kernels.tunings.of(cases[0], tuning), cases, *operands)

    return launch


def _found(module: str, function: str) -> Any:
    return getattr(importlib.import_module(f"lce_jax.mosaic.common.{module}"), function)


class Kernels(KernelSet):
    """The part of a `KernelSet` that every generation has in common."""

    tunings: Tunings

    @property
    @abc.abstractmethod
    def machine(self) -> Machine:
        """How the generation multiplies tiles."""

    @property
    def kl_machine(self) -> KLMachine:
        """Its epilogues of two heads."""
        found = self.machine.kl
        assert found is not None
        return found

    # The forward.
    statistics = _multiply("_statistics", "statistics", "forward")
    join = _launch("_join", "join")
    per_token = _launch("_per_token", "per_token")
    prepare = _launch("_tokens", "prepare")
    finish = _launch("_tokens", "finish")

    # The backward.
    coefficients = _launch("_tokens", "coefficients")
    dlogits = _multiply("_dlogits", "dlogits", "dlogits")
    cached_dlogits = _launch("_cached_dlogits", "dlogits")
    update_dhidden = _multiply("_products", "update_dhidden", "dhidden")
    write_dweight = _multiply("_products", "write_dweight", "dweight")

    # Rows of hidden and of the weight.
    total = _launch("_hidden_rows", "total")
    rows = _launch("_hidden_rows", "rows")
    copy = _launch("_hidden_rows", "copy")
    scale = _launch("_hidden_rows", "scale")
    zeros = _launch("_hidden_rows", "zeros")

    # Candidates.
    candidate_logits = _launch("_candidates", "logits")
    candidate_values = _launch("_candidates", "values")
    put_candidates = _launch("_put_candidates", "put")
    keep_candidates = _launch("_candidate_tokens", "keep")
    join_candidates = _launch("_candidate_tokens", "join")
    candidate_logprobs = _launch("_candidate_tokens", "logprobs")
    candidate_terms = _launch("_candidate_tokens", "terms")

    # A ``gradient_threshold``: which tiles are live, lists of them, and the backward along these.
    join_keeping = _launch("_join", "join_keeping")
    select = _launch("_select", "select")
    dropped_mass = _launch("_select", "dropped_mass")
    live_counts = _launch("_worklists", "counts")
    live_order = _launch("_worklists", "order")
    live_entries = _launch("_worklists", "entries")
    live_rows = _launch("_worklists", "rows")
    live_row_lists = _launch("_worklists", "row_lists")
    live_ranks = _launch("_worklists", "ranks")
    live_dlogits = _multiply("_dlogits", "live_dlogits", "dlogits")
    put_live_candidates = _launch("_put_candidates", "put_live")
    update_live_dhidden = _multiply("_live_products", "update_dhidden", "live_dhidden")
    write_live_dweight = _multiply("_live_products", "write_dweight", "live_dweight")

    # Two heads.
    kl_statistics = _of_two_heads("statistics", "kl_statistics")
    kl_mixture_sums = _of_two_heads("mixture_sums", "kl_mixture_sums")
    kl_dlogits = _of_two_heads("dlogits", "kl_dlogits")
    cached_kl_dlogits = _launch("_cached_kl_dlogits", "dlogits")

    def gathers(self, case: Case) -> bool:
        """Where a column of the weight is contiguous."""
        return case.options.vocab_dim == 0 and case.hidden_size >= LEAST_HIDDEN

    def live_shape(self, case: Case) -> tuple[int, int]:
        """Row blocks are padded to one for each thread."""
        return _tiles.live_shape(case)

    def live_group(self, case: Case) -> int:
        """The blocks of a cluster, which share each tile of the weight."""
        group: int = self.tunings.of(case, "dlogits").cluster
        return group
