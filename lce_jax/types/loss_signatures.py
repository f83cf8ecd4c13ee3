"""The arguments that a caller's ``loss_fn`` takes after the three results of a token.

`lce_jax.linear_loss` and `lce_torch_bridge.linear_loss` share this module.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

__all__ = [
    "list_loss_arguments",
    "split_loss_arguments",
]


def split_loss_arguments(
    loss_fn: Callable[..., Any],
    per_token: Sequence[Any],
    keywords: Mapping[str, Any],
    options: Collection[str],
    parameters: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits keyword arguments into those that a per-token loss takes and all others.

    ``parameters`` are the calling function's own parameters, with their values. A loss must not have an argument with
    the name of a parameter that is not None.
    """
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function of (logprob, entropy, lse, *per_token), got {type(loss_fn)}")
    taken = [name for name, x in parameters.items() if x is not None]
    loss_names = list_loss_arguments(loss_fn) if keywords or taken else []
    named = {name: x for name, x in keywords.items() if name in loss_names}
    others = {name: x for name, x in keywords.items() if name not in loss_names}
    if both := [name for name in loss_names if name in taken or (name in named and name in options)]:
        raise TypeError(f"{both[0]} is an option, and loss_fn has an argument of that name: rename the argument")
    if others.keys() <= set(options):  # otherwise the caller refuses the others
        _check_arguments(loss_fn, per_token, named)
    return named, others


def _check_arguments(loss_fn: Callable[..., Any], per_token: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Refuses a loss that cannot take the three results of a token and the further arguments that are passed."""
    if (signature := _signature(loss_fn)) is None:
        return
    try:
        signature.bind_partial(None, None, None)
    except TypeError:
        raise TypeError(
            f"loss_fn takes {signature}, but it is called with three results of a token: write "
            "lambda logprob, entropy, lse: ..., with further arguments after these"
        ) from None
    try:
        signature.bind(None, None, None, *per_token, **named)
    except TypeError as error:
        names = ", ".join(list_loss_arguments(loss_fn)) or "none by name"
        missing = ", ".join(f"{name}=..." for name in _missing_arguments(signature, per_token, named))
        hint = f": give {missing}" if missing else ""
        raise TypeError(f"loss_fn: {error}; its further arguments are {names}{hint}") from None


def _missing_arguments(signature: inspect.Signature, per_token: Sequence[Any], named: Mapping[str, Any]) -> list[str]:
    """Returns the names of a loss's required arguments that are not passed."""
    positional = (None, None, None, *per_token)
    with contextlib.suppress(TypeError):  # raised if the loss takes fewer arguments
        passed = signature.bind_partial(*positional, **named).arguments
        required = [x for x in signature.parameters.values() if x.default is x.empty]
        return [
            x.name for x in required if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY) and x.name not in passed
        ]
    return []


def _signature(loss_fn: Callable[..., Any]) -> inspect.Signature | None:
    """Returns the signature of a loss, or None if Python cannot determine it.

    A wrapper made by `functools.wraps` shows the signature of the wrapped function, but may take other arguments. So
    the wrapper's own signature is returned if the wrapped function cannot take three results.
    """
    signature = None
    for follows in (True, False):
        try:
            signature = inspect.signature(loss_fn, follow_wrapped=follows)
            signature.bind_partial(None, None, None)
        except (TypeError, ValueError):
            continue
        return signature
    return signature


def list_loss_arguments(loss_fn: Any) -> list[str]:
    """Returns the arguments that a per-token loss takes by name, after log-probability, entropy and lse."""
    try:
        parameters = list(inspect.signature(loss_fn).parameters.values())
    except (TypeError, ValueError):  # not a function, or a function without a signature
        return []
    first = [x for x in parameters if x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD)][:3]
    by_name = [x for x in parameters if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY)]
    return [x.name for x in by_name if x not in first]
