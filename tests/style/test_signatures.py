"""Type checkers see a type for every public argument: none is Any."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

import lce_jax
import lce_torch_bridge
from lce_jax import losses
from lce_jax.flax import linen, nnx
from lce_torch_bridge import areal, megatron, nemo_rl, skyrl, torchtitan, transformers, trl, verl

FRAMEWORKS = (areal, megatron, nemo_rl, skyrl, torchtitan, transformers, trl, verl)
MODULES = (lce_jax, losses, lce_torch_bridge, *FRAMEWORKS)
METHODS = ("__init__", "tied", "__call__", "logprobs", "topk", "kl", "loss", "linear_loss")
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
    annotations = {x.name: x.annotation for x in signature.parameters.values() if x.name not in ("self", "cls")}
    annotations["return"] = signature.return_annotation
    opaque = {name for name, x in annotations.items() if re.search(r"\bAny\b|\b_empty\b", str(x)) and x not in OPAQUE}
    assert opaque == set()
