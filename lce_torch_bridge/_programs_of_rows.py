"""The programs of direct launches, to which one more array costs nothing, so that nothing is packed.

As in `_programs`, but hidden, what is per token and results may have only the rows that count, which ``count`` says.
Labels are ``[P, 2]``, the halves of each int64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from lce_torch_bridge import _programs
from lce_torch_bridge._programs import Spec, Tokens


@functools.cache
def forward(spec: Spec, keep_cache: bool, fields: tuple[str, ...], megatron: bool) -> Callable[..., Any]:
    """``(hidden, weight, bias, count, labels, temperature, candidates) -> fields, S, cache leaves``."""

    def run(hidden: Any, weight: Any, bias: Any, *per_token: Any) -> Any:
        tokens = _tokens(spec, *per_token)
        packed, cache = _programs.statistics_of(spec, keep_cache, hidden, weight, bias, tokens)
        found, saved = _programs.results_of(spec, fields, megatron, tokens, packed[None])
        return list(found.values()), saved, cache

    return run


@functools.cache
def statistics(spec: Spec, keep_cache: bool) -> Callable[..., Any]:
    """``(hidden, weight, bias, count, labels, temperature, candidates) -> packed, cache leaves``."""

    def run(hidden: Any, weight: Any, bias: Any, *per_token: Any) -> Any:
        tokens = _tokens(spec, *per_token)
        return _programs.with_columns(spec, keep_cache, hidden, weight, bias, tokens)

    return run


@functools.cache
def results(spec: Spec, fields: tuple[str, ...], megatron: bool) -> Callable[..., Any]:
    """``(count, labels, temperature, candidates, gathered [N F, P]) -> fields, S``."""

    def run(*operands: Any) -> Any:
        *per_token, gathered = operands
        tokens = _tokens(spec, *per_token)
        of_shards = gathered.reshape(-1, sum(spec.statistics.values()) + 1, gathered.shape[-1])
        found, saved = _programs.results_of(spec, fields, megatron, tokens, _programs.of_equal_parts(of_shards))
        return list(found.values()), saved

    return run


@functools.cache
def gradients(
    spec: Spec, cotangents: tuple[str, ...], wanted: tuple[bool, ...], cache: Any, overwrite_cache: bool, rounded: bool
) -> Callable[..., Any]:
    """``(hidden, weight, count, S, the cotangents, sum, *cache leaves) -> [dhidden, dweight]``."""

    def run(hidden: Any, weight: Any, count: Any, saved: Any, seeds: Any, total: Any, *leaves: Any) -> list[Any]:
        kept = None if cache is None else jax.tree.unflatten(cache, leaves)
        num_rows, named = count if spec.masked else None, dict(zip(cotangents, seeds, strict=True))
        options = {"dweight": total, "overwrite_cache": overwrite_cache, "round_dhidden": rounded, "cache": kept}
        return _programs.gradients_of(spec, wanted, (hidden, weight, None), num_rows, saved, named, options)[0]

    return run


def _tokens(spec: Spec, count: Any, labels: Any, temperature: Any, candidates: Any) -> Tokens:
    """What is per token, unpacked."""
    return Tokens(count if spec.masked else None, _programs.labels_of(spec, *labels.T), temperature, candidates)
