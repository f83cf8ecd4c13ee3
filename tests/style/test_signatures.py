"""What signatures say to type checkers: no public argument is Any, and overloads take what they stand for."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable
from typing import Any

import pytest

import lce_jax
import lce_torch_bridge
import lce_torch_bridge.call._keywords
import lce_torch_bridge.megatron
import lce_torch_bridge.verl
from lce_jax import _types, local, losses
from lce_jax.call import _keywords
from lce_jax.flax import _head, linen, nnx

MODULES = (lce_jax, local, losses, lce_torch_bridge, lce_torch_bridge.megatron, lce_torch_bridge.verl)
METHODS = ("__init__", "tied", "__call__", "logprobs", "topk", "kl", "loss")
PUBLIC = [
    *(value for module in MODULES for name in module.__all__ if inspect.isfunction(value := getattr(module, name))),
    *(inspect.unwrap(getattr(kind, name)) for kind in (nnx.LMHead, linen.LMHead) for name in METHODS),
]
OPAQUE = {"Mapping[str, Any] | None"}  # options that stand in a dict, in Megatron's context


def name_of(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"


@pytest.mark.parametrize("function", PUBLIC, ids=name_of)
def test_no_argument_is_any(function: Callable[..., Any]) -> None:
    signature = inspect.signature(function)
    given = {x.name: x.annotation for x in signature.parameters.values() if x.name not in ("self", "cls")}
    given["return"] = signature.return_annotation
    assert {name: x for name, x in given.items() if re.search(r"\bAny\b|\b_empty\b", str(x)) and x not in OPAQUE} == {}


def keywords(function: Callable[..., Any]) -> set[str]:
    """The names of all arguments, those of ``**options`` too."""
    found = set()
    for x in inspect.signature(function).parameters.values():
        if x.kind is not x.VAR_KEYWORD:
            found.add(x.name)
            continue
        (name,) = re.findall(r"Unpack\[(?:_head\.)?(\w+)\]", x.annotation)
        home = _head if "flax" in function.__module__ else _keywords
        home = lce_torch_bridge.call._keywords if "torch" in function.__module__ else home
        found |= set((getattr(home, name, None) or getattr(_types, name)).__annotations__)
    return found


OVERLOADED = [function for function in map(inspect.unwrap, PUBLIC) if typing.get_overloads(function)]


def test_overloads_are_found() -> None:
    names = {function.__qualname__ for function in OVERLOADED}
    assert names == {
        "linear_logprobs", "sharded_linear_logprobs", "linear_loss", "sharded_linear_loss", "LMHead.logprobs"
    }  # fmt: skip


@pytest.mark.parametrize("function", OVERLOADED, ids=name_of)
def test_overloads_take_what_the_function_takes(function: Callable[..., Any]) -> None:
    assert {frozenset(keywords(each)) for each in typing.get_overloads(function)} == {frozenset(keywords(function))}
