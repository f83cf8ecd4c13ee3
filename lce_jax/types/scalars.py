"""Checks of single numbers, flags, names and shapes. `lce_jax` and `lce_torch_bridge` share them.

Both packages therefore raise the same messages. A check takes an argument's name and value. It returns a plain Python
number, or raises a ``TypeError`` or ``ValueError`` that has the value in its message. Arrays and tensors are checked in
`lce_jax.call._checks` and `lce_torch_bridge.call._checks`.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import math
import numbers
import os
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

__all__ = [
    "ALTERNATIVES",
    "CACHE_BYTES",
    "DIRECTIONS",
    "DIVERGENCES",
    "FLOAT32_MAX",
    "FLOAT32_TINY",
    "IGNORED",
    "INT32_MAX",
    "MOST_CANDIDATES",
    "MOST_MASS",
    "OTHER_NAMES",
    "RESTS",
    "all_in_vocabulary",
    "bound",
    "check_beta",
    "check_candidate_shape",
    "check_choice",
    "check_class_weights",
    "check_floor_options",
    "check_k",
    "check_labels_shape",
    "check_loss_arguments",
    "check_part_size",
    "check_per_token_shape",
    "check_vocab_parts",
    "count_candidates",
    "flag",
    "format_bytes",
    "fraction",
    "hint_at_logits",
    "integer",
    "is_integer",
    "is_number",
    "is_temperature",
    "list_loss_arguments",
    "mixed_tokens_error",
    "not_negative",
    "num_bytes",
    "number",
    "positive",
    "real",
    "require_labels",
    "require_value",
    "reword_for_teacher",
    "smoothing",
    "split_loss_arguments",
    "student_only_error",
    "suggest_broadcasts",
    "unknown_options_error",
    "warn_outside",
]

FLOAT32_MAX, FLOAT32_TINY = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)
CACHE_BYTES = 1 << 30  # the most bytes that ``cache_bytes=None`` caches, on devices where it caches anything
INT32_MAX = int(np.iinfo(np.int32).max)
MOST_CANDIDATES = 512  # ids per token
DIRECTIONS = ("forward", "reverse", "jsd", "tv")  # directions of `linear_kl`
DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")  # divergences of `distillation_loss`
RESTS = ("bin", "drop", "renormalize")  # how a distillation treats the probability outside the candidates
MOST_MASS = 1.01  # despite rounding, a sum of probabilities stays below it, also with bfloat16 log-probabilities
IGNORED = -100  # the label that losses ignore by default
ATOM = 8  # the fewest columns of the vocabulary that kernels move at once


def padded_rank(rank: int) -> int:
    """Returns the rank of an adapter padded to a multiple of 64, a swizzle atom of the kernels."""
    return -(-rank // 64) * 64


def number(name: str, value: Any) -> float:
    """Returns a number that is finite in float32."""
    if type(value) is not float:
        value = real(name, value)
    if not abs(value) <= FLOAT32_MAX:
        raise ValueError(f"{name} must be finite in float32, got {value}")
    return value


def bound(name: str, value: Any) -> float:
    """Returns a number that is infinite, or finite in float32."""
    value = real(name, value)
    return value if math.isinf(value) else number(name, value)


def real(name: str, value: Any) -> float:
    """Returns a number of Python or NumPy as a float. Any value is accepted."""
    if isinstance(value, np.generic) and not isinstance(value, np.bool_):
        value = value.item()  # ml_dtypes' scalars too
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a Python number, got {type(value).__name__} {value!r}")
    return float(value)


def positive(name: str, value: Any) -> float:
    """Returns a number that is finite and positive in float32, where subnormal numbers count as 0."""
    value = number(name, value)
    if value < FLOAT32_TINY:
        raise ValueError(f"{name} must be positive in float32, got {value}")
    return value


def is_temperature(x: Any) -> Any:
    """Whether ``x``, in float32 or float64, is positive and finite in float32, where subnormal numbers count as 0."""
    return (x >= FLOAT32_TINY) & (x <= FLOAT32_MAX)


def not_negative(name: str, value: Any) -> float:
    """Returns a finite number that is at least 0."""
    value = number(name, value)
    if value < 0:
        raise ValueError(f"{name} must not be negative, got {value}")
    return value


def fraction(name: str, value: Any) -> float:
    """Returns a number in [0, 1)."""
    value = number(name, value)
    if not 0 <= value < 1:
        raise ValueError(f"{name} must lie in [0, 1), got {value}")
    return value


def check_class_weights(shape: Sequence[int], weight: Sequence[int], columns: int, smoothing: float) -> None:
    """Refuses class weights that are not one number per vocabulary entry of the head, or of a smoothed loss."""
    if tuple(shape) != (columns,):
        entries = f"one number per vocabulary entry of weight {tuple(weight)}: ({columns},)"
        raise ValueError(f"class_weights {tuple(shape)} must have {entries}")
    if smoothing > 0:
        raise ValueError(
            f"class_weights with label_smoothing={smoothing!r}: smoothing would need the sum of all logits times their "
            "class weights, which no kernel computes. Leave one of the two out"
        )


def smoothing(value: Any) -> float:
    """Returns a ``label_smoothing`` in [0, 1], as in torch. With 1 the labels do not count."""
    value = number("label_smoothing", value)
    if not 0 <= value <= 1:
        raise ValueError(f"label_smoothing must lie in [0, 1], got {value}")
    return value


def is_integer(value: Any) -> bool:
    """Whether ``value`` is an integer of Python or NumPy, not a bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether ``value`` is a number or flag of Python or NumPy, which is a constant of a program."""
    return isinstance(value, numbers.Number | np.generic)


def integer(name: str, value: Any) -> int:
    """Returns a whole number that fits in an int32."""
    if not is_integer(value):
        raise TypeError(f"{name} must be a Python integer, got {value!r}")
    if abs(value) >= INT32_MAX:
        raise ValueError(f"{name} must lie within ±{INT32_MAX - 1}, got {value}")
    return int(value)


def check_beta(beta: Any, argument: str, chosen: str, ends: tuple[str, ...]) -> float | None:
    """Returns the teacher's weight in a mixture: the β of a generalised JSD, by default 0.5, and 0.5 of a "tv".

    None: ``chosen`` is a divergence without a mixture. ``ends`` are the names of the divergences that a β of 0 and of 1
    would be.
    """
    if chosen != "jsd":
        if beta is not None:
            raise ValueError(
                f'beta={beta!r} is a weight of {argument}="jsd", but {argument} is "{chosen}": leave beta out, or '
                f'write {argument}="jsd"'
            )
        return 0.5 if chosen == "tv" else None
    beta = number("beta", 0.5 if beta is None else beta)
    if not 0 < beta < 1:
        raise ValueError(f'beta must lie in (0, 1), got {beta}: {argument}="{ends[0]}" is 0, "{ends[1]}" is 1')
    return beta


def student_only_error(name: str, value: Any, neutral: float | None) -> ValueError:
    """Returns the error for a scale or cap of the student if the caller does not give the teacher's."""
    advice = f'write teacher_{name}="same", or the teacher\'s value; teacher_{name}={neutral} if it has none'
    return ValueError(f"{name}={value} is only the student's, because each model has its own: {advice}")


def num_bytes(name: str, value: Any) -> int:
    """Returns a whole number of bytes, of any size."""
    if not is_integer(value) or value < 0:
        raise ValueError(f"{name} must be a whole number of bytes, at least 0, got {value!r}")
    return int(value)


def format_bytes(count: float) -> str:
    """Formats ``count`` in the largest binary unit with a value of 1 or more: ``3 << 20`` is ``'3.0 MiB'``."""
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024 or unit == "GiB":
            break
    return f"{count:,.1f} {unit}"


MODEL_ARGUMENTS = "hidden|weight|bias|temperature|logit_scale|logit_softcap|weight_layout"  # both models have these
# Such a name in a line of code: an argument in parentheses, or a name before "=", "[" or an attribute.
NAME_IN_CODE = re.compile(rf"(?<=\()\b({MODEL_ARGUMENTS})(?=[,)])|\b({MODEL_ARGUMENTS})(?=[=\[]|\.\w)")


def reword_for_teacher(error: Exception) -> str:
    r"""Returns an error's message with the names of the teacher's arguments in place of the student's.

    Example:
        >>> from lce_jax.types.scalars import reword_for_teacher
        >>> reword_for_teacher(ValueError('hidden (4, 9) does not fit: write weight_layout="hv"'))
        'the teacher\'s hidden (4, 9) does not fit: write teacher_weight_layout="hv"'
    """
    return "the teacher's " + NAME_IN_CODE.sub(r"teacher_\g<0>", str(error))


def hint_at_logits(hidden: Sequence[int], weight: Sequence[int], vocab_size: int, other: str) -> str:
    """Returns the hint for hidden states whose last dimension has the size of the vocabulary; else an empty string.

    ``other`` is what to write for a weight [H, V]. The likelier mistake comes first: a vocabulary is usually larger
    than the hidden size.
    """
    if hidden[-1:] != (vocab_size,):
        return ""
    transposed = f"the vocabulary is the other dimension of weight {tuple(weight)}: write {other}"
    advice = "Pass the hidden states that the head multiplies"
    if vocab_size < max(weight):
        return f": if hidden is right, {transposed}. Or did you pass logits? {advice}"
    return f": hidden has V = {vocab_size} columns: did you pass logits? {advice}. If hidden is right, {transposed}"


def check_part_size(value: Any, cache_bytes: int | None, gradient_threshold: float) -> int | None:
    """Checks a ``vocab_part_size``, in columns, and returns it; None for a vocabulary without parts.

    It must be a multiple of 8, because TMA reads the weight in atoms of 8 columns.
    """
    if value is None:
        return None
    value = integer("vocab_part_size", value)
    if value < 1 or value % ATOM:
        raise ValueError(f"vocab_part_size must be a positive multiple of {ATOM}, got {value}")
    excluded = {"cache_bytes": cache_bytes, "gradient_threshold": gradient_threshold}
    for name, excluded_value in excluded.items():
        if excluded_value:
            raise ValueError(
                f"vocab_part_size={value} with {name}={excluded_value}: the backward does not support vocab_part_size, "
                f"so it cannot use tiles that the forward keeps. Write {name}=0, or vocab_part_size=None"
            )
    return value


# Names that other packages use for an option, or for an argument that these functions do not need.
OTHER_NAMES = {
    "softcap": "logit_softcap",
    "softcapping": "logit_softcap",
    "final_logit_softcapping": "logit_softcap",
    "scale": "logit_scale",
    "lse_square_scale": "z_loss",
    "mask": "where",
    "loss_mask": "where",
    "attention_mask": "where",
    "padding_mask": "where",
    "response_mask": "where",
    "completion_mask": "where",
    "shift": "labels shifted by rows.next_tokens",
    "temp": "temperature",
    "class_weight": "class_weights",
    "tau": "temperature",
}
ALTERNATIVES = {  # what to write in place of an option that a function does not have
    "weight_layout": "weight is [V, H]: pass weight.T if yours is [H, V]",
    "precision": 'call torch.set_float32_matmul_precision("highest") before, for products of float32',
}
SHARDS = {  # the options that name the shards of the vocabulary, each with advice. A function has one of them.
    "vocab_axis": "vocab_axis",
    "axis_name": "axis_name inside shard_map, or vocab_axis of the function over a mesh",
    "tp_group": "tp_group",
}
SHARD_NAMES = (*SHARDS, "axis", "tp_axis", "group", "process_group")


def unknown_options_error(
    function: str, unknown: Sequence[str], known: Sequence[str], loss_fn: Callable[..., Any] | None = None
) -> TypeError:
    """Returns the error for names that are neither options of a function nor arguments of its ``loss_fn``.

    The message has the option that the first name may mean, or what to write in its place.
    """
    loss_names = list_loss_arguments(loss_fn)
    similar = iter(difflib.get_close_matches(unknown[0], [*loss_names, *known], 1))
    shards = (advice for name, advice in SHARDS.items() if unknown[0] in SHARD_NAMES and name in known)
    meant = OTHER_NAMES.get(unknown[0]) or next(shards, None) or next(similar, None)
    hint = f" (did you mean {meant}?)" if meant else ""
    hint = f": {ALTERNATIVES[unknown[0]]}" if unknown[0] in ALTERNATIVES else hint
    arguments = "" if loss_fn is None else f"; arguments of loss_fn: {', '.join(loss_names) or 'none by name'}"
    return TypeError(f"{function}: unknown option {', '.join(unknown)}{hint}; known: {', '.join(known)}{arguments}")


def split_loss_arguments(
    loss_fn: Callable[..., Any],
    per_token: Sequence[Any],
    keywords: Mapping[str, Any],
    options: Collection[str],
    parameters: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits keyword arguments into those of a per-token loss and the others.

    ``parameters`` are the caller's own parameters, with their values. If the loss has an argument with the name of a
    parameter that is not None, that is an error.
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
    """Refuses a loss that does not take three results of a token, or whose further arguments are not those passed."""
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
    """Returns the names of required arguments that a loss does not get."""
    positional = (None, None, None, *per_token)
    with contextlib.suppress(TypeError):  # raised if the loss takes fewer arguments
        passed = signature.bind_partial(*positional, **named).arguments
        required = [x for x in signature.parameters.values() if x.default is x.empty]
        return [
            x.name for x in required if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY) and x.name not in passed
        ]
    return []


def _signature(loss_fn: Callable[..., Any]) -> inspect.Signature | None:
    """Returns the signature of a loss, or None if Python cannot tell it.

    With `functools.wraps` a wrapper shows the signature of the function inside. An adapter may take other arguments
    than that function, so the wrapper's own signature is returned if the function inside cannot take three results.
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
    except (TypeError, ValueError):  # it is no function, or has no signature
        return []
    first = [x for x in parameters if x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD)][:3]
    by_name = [x for x in parameters if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY)]
    return [x.name for x in by_name if x not in first]


def mixed_tokens_error(
    reason: str,
    function: str,
    shape: Sequence[int],
    where: str | None,
    ignore_index: int | None,
    options: Collection[str],
    mean: tuple[str, str],
) -> ValueError:
    """Returns the error for a ``loss_fn`` that mixes tokens. Its message has the code that computes such a loss.

    ``function`` is the name of the function that returns all results, and ``where`` is the code of a mask. ``mean`` is
    the code of a mean over a sequence, once of all tokens and once of the tokens in ``mask``.
    """
    ignored = None if ignore_index is None else f"labels != {ignore_index}"
    mask = f"{where} & ({ignored})" if where and ignored else where or ignored
    first, masks = (f"mask = {mask}; ", ["where=mask"]) if mask else ("", [])
    arguments = ", ".join(["hidden", "weight", "labels", *masks, *(f"{name}={name}" for name in options)])
    return ValueError(
        f"loss_fn mixes tokens: {reason}. The loss of a token may use that token's numbers alone, because linear_loss "
        f"computes chunks of tokens. Compute other losses from the results of all tokens {tuple(shape)}: "
        f"`{first}out = {function}({arguments})`. There the mean of x over each sequence is `{mean[mask is not None]}`"
    )


def suggest_broadcasts(name: str, shape: Sequence[int], tokens: Sequence[int]) -> list[str]:
    """Returns expressions of an array ``name`` of this shape that broadcast to the shape of the tokens.

    Example:
        >>> from lce_jax.types.scalars import suggest_broadcasts
        >>> suggest_broadcasts("temperature", (2,), (2, 3))
        ['temperature[..., None]']
    """
    missing = len(tokens) - len(shape)
    fits = missing >= 0 and all(n in (1, m) for n, m in zip(shape, tokens[missing:], strict=True))
    leads = missing > 0 and tuple(shape) == tuple(tokens[: len(shape)])
    return [name] * fits + [f"{name}[..., {', '.join(['None'] * missing)}]"] * leads


def check_per_token_shape(name: str, shape: Sequence[int], tokens: Sequence[int]) -> None:
    """Refuses a shape that does not begin with that of the tokens.

    A size of 1 may stand in place of any of the tokens' sizes, and () is one number for all tokens.
    """
    if shape and (len(shape) < len(tokens) or any(n not in (1, m) for n, m in zip(shape, tokens, strict=False))):
        raise ValueError(
            f"{name} {tuple(shape)} must begin with the shape of labels {tuple(tokens)}, or have 1 in place of a size"
        )


def require_labels(labels: Any, advice: str) -> None:
    """Refuses None as labels. ``advice`` says what to write for tokens without labels."""
    if labels is None:
        raise TypeError(
            f"labels is None: give a vocabulary id for each token, in the shape of hidden before H; {advice}"
        )


def all_in_vocabulary(labels: Any, vocab_size: int) -> bool:
    """Whether every label lies in the vocabulary or is `IGNORED`, labels of masked rows included."""
    if labels.max() >= vocab_size:
        return False
    least = labels.min()
    return bool(least >= 0 or (least == IGNORED and not ((labels < 0) & (labels != IGNORED)).any()))


def warn_outside(numbers: Any, vocab_size: int, *packages: str, is_cross_entropy: bool) -> None:
    """Warns if ``numbers``, labels that count, lie outside the vocabulary.

    For a cross entropy, one such label is enough; other functions warn only if all labels lie outside. Labels of
    `IGNORED` do not count, because a micro-batch may consist of padding. ``packages`` are the folders of other packages
    that call this function. The warning names the line that calls this package or one of them.
    """
    counted = numbers[numbers != IGNORED]
    outside = counted[(counted < 0) | (counted >= vocab_size)]
    if not len(outside) or (len(outside) < len(counted) and not is_cross_entropy):
        return
    first = int(outside[0])
    warnings.warn(
        f"{len(outside)} of the {len(counted)} labels that count lie outside the vocabulary, [0, {vocab_size}), from "
        f"{int(outside.min())} to {int(outside.max())}: each has logprob 0, whose gradient is not 0. Pass token ids. "
        f"If {first} is padding, write ignore_index={first}; where= leaves out other tokens without a label",
        RuntimeWarning,
        skip_file_prefixes=(os.path.dirname(os.path.dirname(__file__)), *packages),
    )


def check_labels_shape(labels: Sequence[int], leading: Sequence[int]) -> None:
    """Refuses labels whose shape is not that of the hidden states before H. The message suggests a fix if it can."""
    labels, leading = tuple(labels), tuple(leading)
    if labels == leading:
        return
    hint = ""
    if len(leading) == 2 and labels == leading[::-1]:
        hint = ": one of them is [s, b] and the other [b, s]. Write labels.T"
    elif len(labels) == 1 and math.prod(leading) == labels[0]:
        hint = f": write labels.reshape{leading}"
    elif len(labels) == len(leading) and labels[:-1] == leading[:-1] and labels[-1] == leading[-1] - 1:
        hint = ": labels = rows.next_tokens(tokens) has a label for each token, -100 for the last one"
    elif len(labels) == len(leading) + 1 and labels[:-1] == leading:
        hint = ": give ids in place of one-hot rows, labels.argmax(-1)"
    raise ValueError(f"labels {labels} must have hidden's leading shape {leading}{hint}")


def require_value(name: str, value: Any) -> None:
    """Refuses None as an argument of a loss that needs it."""
    if value is None:
        raise TypeError(f"{name} is None: give one number per token, or [b, 1] for one per sequence")


def check_loss_arguments(logprob: Any, **arguments: Any) -> None:
    """Refuses per-token arguments of a loss unless they have no dimensions, or as many as ``logprob``.

    An array [b] would broadcast along the sequence of [b, s].
    """
    tokens = tuple(getattr(logprob, "shape", ()))  # a number has no shape
    for name, value in arguments.items():
        require_value(name, value)
        shape = tuple(getattr(value, "shape", ()))
        if len(shape) not in (0, len(tokens)):
            raise ValueError(
                f"{name} {shape} must have the dimensions of logprob {tokens}, of size 1 where all are the same: "
                "[b, 1] for one number per sequence"
            )


def check_floor_options(num_candidates: int, mean_logit: bool) -> None:
    """Refuses options that have no meaning with a ``logit_floor``, which gives each row its own set of tokens."""
    if num_candidates:
        raise ValueError(
            f"logit_floor with candidates, {num_candidates} per token: a candidate below the floor has no "
            "log-probability. Write candidates=None, or call linear_logits for their logits"
        )
    if mean_logit:
        raise ValueError(
            "logit_floor with label_smoothing (or mean_logit), which is a mean over the whole vocabulary. Write "
            "label_smoothing=0, or logit_floor=None"
        )


def check_vocab_parts(part_size: int | None, columns: int, shard_columns: int) -> None:
    """Refuses shards whose columns do not divide into parts. A vocabulary of one shard may end inside a part."""
    if part_size is None or shard_columns == columns or shard_columns % part_size == 0:
        return
    shards = columns // shard_columns
    padded = -(-columns // (shards * part_size)) * shards * part_size
    raise ValueError(
        f"vocab_part_size={part_size}: each of the {shards} shards has {shard_columns} of the {columns} columns of "
        f"weight, which do not divide into parts. Give a divisor of {shard_columns}, or pad the vocabulary of weight "
        f"to {padded} columns and pass the true vocab_size"
    )


def flag(name: str, value: Any) -> bool:
    """Returns a flag as a Python bool."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Refuses a value that is not one of ``choices``."""
    if value not in choices:
        *first, last = (f'"{choice}"' for choice in choices)
        raise ValueError(f"{name} must be {', '.join(first)} or {last}, got {value!r}")


def check_k(k: Any, vocab_size: int | None = None) -> int:
    """Returns the k of ``linear_topk``. It is at most ``vocab_size``, if that is known."""
    k = integer("k", k)
    if not 1 <= k <= MOST_CANDIDATES:
        raise ValueError(f"k must lie in [1, {MOST_CANDIDATES}], got {k}")
    if vocab_size is not None and k > vocab_size:
        raise ValueError(f"k must be at most the vocabulary, {vocab_size}, got {k}")
    return k


def count_candidates(name: str, shape: Sequence[int]) -> int:
    """Returns the K of ids of this shape, ``[..., K]``."""
    if len(shape) < 1 or not 1 <= shape[-1] <= MOST_CANDIDATES:
        raise ValueError(f"{name} {tuple(shape)} must end in K, from 1 to {MOST_CANDIDATES} ids per token")
    return int(shape[-1])


def check_candidate_shape(name: str, shape: Sequence[int], leading: Sequence[int], operand: str) -> None:
    """Refuses ids whose shape is not ``[*leading, K]``, where ``leading`` is the shape of ``operand``."""
    if tuple(shape[:-1]) != tuple(leading):
        raise ValueError(
            f"{name} {tuple(shape)} must be [..., K] with the shape of {operand} {tuple(leading)} before K"
        )
