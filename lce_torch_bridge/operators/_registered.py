"""Functions of tensors as operators of torch, which ``torch.compile`` and ``torch.func`` do not look into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from lce_torch_bridge.tensors._readable import readable

NAME = "lce_torch_bridge"
library = torch.library.Library(NAME, "FRAGMENT")  # registrations last as long as this object


def operator(name: str, schema: str) -> Callable[[Callable[..., Any]], Any]:
    """Makes a function of tensors an operator on every device, which has no rule for ``torch.func.vmap``.

    Like ``torch.library.custom_op`` without its checks of what the function returns, which cost the host 20 µs a call.
    """

    def register(function: Callable[..., Any]) -> Any:
        torch.library.define(f"{NAME}::{name}", schema, tags=(torch.Tag.pt2_compliant_tag,))
        found = getattr(getattr(torch.ops, NAME), name).default
        names = [argument.name for argument in found._schema.arguments]

        def run(*inputs: Any) -> Any:
            return function(*map(readable, names, inputs))

        undisturbed = torch.compiler.disable(run)  # the compiler of the caller's frames skips this one
        torch.library.impl(f"{NAME}::{name}", "default", undisturbed)
        torch.library.register_vmap(f"{NAME}::{name}", refuse_vmap)
        return found

    return register


def refuse_vmap(*_: Any) -> NoReturn:
    """Refuses ``torch.func.vmap``, and says what to do instead."""
    raise NotImplementedError(
        "lce_torch_bridge does not run under torch.func.vmap, nor under what uses it (jacrev, jacobian with "
        "vectorize=True, grad with is_grads_batched=True): hidden takes any leading shape, so give it the whole batch, "
        "and loop where each part has a weight or a gradient of its own"
    )
