"""Checks of single numbers, flags, names and shapes, shared by `lce_jax` and `lce_torch_bridge`.

So errors read alike. Each takes an argument's name and value, and returns a plain Python number or raises a
``TypeError`` or ``ValueError`` with the value. Arrays and tensors themselves are checked elsewhere.
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
    "CACHE_BYTES",
    "CLASS_WEIGHTS",
    "DIRECTIONS",
    "DIVERGENCES",
    "FLOAT32_MAX",
    "FLOAT32_TINY",
    "IGNORED",
    "INSTEAD",
    "INT32_MAX",
    "MOST_CANDIDATES",
    "MOST_MASS",
    "OTHER_NAMES",
    "RESTS",
    "alone_with_floor",
    "are_inside",
    "arguments_of_loss",
    "bound",
    "broadcasting",
    "candidate_shape",
    "dimensions_of_tokens",
    "flag",
    "format_bytes",
    "fraction",
    "given_labels",
    "given_value",
    "integer",
    "is_integer",
    "is_number",
    "is_temperature",
    "labels_shape",
    "mixed_tokens",
    "names_of_loss",
    "not_hidden",
    "not_negative",
    "num_bytes",
    "num_candidates",
    "num_largest",
    "number",
    "of_the_student_alone",
    "of_the_teacher",
    "one_of",
    "part_size",
    "per_token_shape",
    "positive",
    "real",
    "smoothing",
    "unknown_options",
    "warn_outside",
    "weight_of_jsd",
    "whole_parts",
]

FLOAT32_MAX, FLOAT32_TINY = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)
CACHE_BYTES = 1 << 30  # that ``cache_bytes=None`` keeps at most, where it keeps any
INT32_MAX = int(np.iinfo(np.int32).max)
MOST_CANDIDATES = 512  # ids per token
DIRECTIONS = ("forward", "reverse", "jsd")  # of the divergence of two heads
DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")  # of a distillation over candidates
RESTS = ("bin", "drop", "renormalize")  # what becomes of the probability outside them
MOST_MASS = 1.01  # rounding, also that of bfloat16 log-probabilities, keeps the sum of probabilities below it
IGNORED = -100  # the label that losses leave out by default
ATOM = 8  # columns of the vocabulary that kernels move at least


def padded_rank(rank: int) -> int:
    """The rank of an adapter with zeros up to whole 64, a swizzle atom of the kernels."""
    return -(-rank // 64) * 64


def number(name: str, value: Any) -> float:
    """A number that is finite in float32."""
    if type(value) is not float:
        value = real(name, value)
    if not abs(value) <= FLOAT32_MAX:
        raise ValueError(f"{name} must be finite in float32, got {value}")
    return value


def bound(name: str, value: Any) -> float:
    """A number that may be infinite: what lies beyond float32 is."""
    value = real(name, value)
    return value if math.isinf(value) else number(name, value)


def real(name: str, value: Any) -> float:
    """A number of Python or NumPy, of any value."""
    if isinstance(value, np.generic) and not isinstance(value, np.bool_):
        value = value.item()  # ml_dtypes' scalars too
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a Python number, got {type(value).__name__} {value!r}")
    return float(value)


def positive(name: str, value: Any) -> float:
    """A number that is finite and positive in float32, where subnormal numbers count as 0."""
    value = number(name, value)
    if value < FLOAT32_TINY:
        raise ValueError(f"{name} must be positive in float32, got {value}")
    return value


def is_temperature(x: Any) -> Any:
    """Whether ``x``, in float32 or float64, is positive and finite in float32, where subnormal numbers count as 0."""
    return (x >= FLOAT32_TINY) & (x <= FLOAT32_MAX)


def not_negative(name: str, value: Any) -> float:
    """A finite number, at least 0."""
    value = number(name, value)
    if value < 0:
        raise ValueError(f"{name} must not be negative, got {value}")
    return value


def fraction(name: str, value: Any) -> float:
    """A number in [0, 1)."""
    value = number(name, value)
    if not 0 <= value < 1:
        raise ValueError(f"{name} must lie in [0, 1), got {value}")
    return value


def smoothing(value: Any) -> float:
    """A ``label_smoothing`` in [0, 1], as in torch: with 1 the labels do not count."""
    value = number("label_smoothing", value)
    if not 0 <= value <= 1:
        raise ValueError(f"label_smoothing must lie in [0, 1], got {value}")
    return value


def is_integer(value: Any) -> bool:
    """Whether ``value`` is an integer of Python or NumPy, not a bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether ``value`` is a number or a flag of Python or NumPy, which has one value in a program."""
    return isinstance(value, numbers.Number | np.generic)


def integer(name: str, value: Any) -> int:
    """A whole number that an int32 holds."""
    if not is_integer(value):
        raise TypeError(f"{name} must be a Python integer, got {value!r}")
    if abs(value) >= INT32_MAX:
        raise ValueError(f"{name} must lie within ±{INT32_MAX - 1}, got {value}")
    return int(value)


def weight_of_jsd(beta: Any, argument: str, chosen: str, ends: tuple[str, ...]) -> float | None:
    """The β of a generalised JSD, by default 0.5; None if ``chosen`` is another divergence. 0 and 1 are ``ends``."""
    if chosen != "jsd":
        if beta is not None:
            raise ValueError(f'beta={beta!r} is a weight of {argument}="jsd", {argument} is "{chosen}"')
        return None
    beta = number("beta", 0.5 if beta is None else beta)
    if not 0 < beta < 1:
        raise ValueError(f'beta must lie in (0, 1), got {beta}: {argument}="{ends[0]}" is 0, "{ends[1]}" is 1')
    return beta


def of_the_student_alone(name: str, value: Any, neutral: float | None) -> ValueError:
    """A student's scale or cap says nothing of the teacher's: each belongs to its model."""
    write = f'write teacher_{name}="same", or the teacher\'s own, teacher_{name}={neutral} if it has none'
    return ValueError(f"{name}={value} is the student's alone: {write}")


def num_bytes(name: str, value: Any) -> int:
    """A whole number of bytes, of any size."""
    if not is_integer(value) or value < 0:
        raise ValueError(f"{name} must be a whole number of bytes, at least 0, got {value!r}")
    return int(value)


def format_bytes(count: float) -> str:
    """``count`` in the largest binary unit that keeps it at least 1: ``format_bytes(3 << 20)`` is ``'3.0 MiB'``."""
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024 or unit == "GiB":
            break
    return f"{count:,.1f} {unit}"


OF_MODELS = "hidden|weight|bias|temperature|logit_scale|logit_softcap|weight_layout"  # arguments of each of two models
IN_CODE = re.compile(rf"(?<=\()\b({OF_MODELS})(?=[,)])|\b({OF_MODELS})(?=[=\[]|\.\w)")


def of_the_teacher(error: Exception) -> str:
    r"""An error's words about the teacher's arguments; what they tell to write names the teacher's.

    Example:
        >>> from lce_jax.types.scalars import of_the_teacher
        >>> of_the_teacher(ValueError('hidden (4, 9) does not fit: write weight_layout="hv"'))
        'the teacher\'s hidden (4, 9) does not fit: write teacher_weight_layout="hv"'
    """
    return "the teacher's " + IN_CODE.sub(r"teacher_\g<0>", str(error))


def not_hidden(hidden: Sequence[int], weight: Sequence[int], vocab_size: int, other: str) -> str:
    """What may be wrong with hidden states that end in the vocabulary; ``other``: what to write for a weight [H, V].

    First what is likelier: a vocabulary is larger than a hidden state.
    """
    if hidden[-1:] != (vocab_size,):
        return ""
    turned = f"the vocabulary is the other dimension of weight {tuple(weight)}: write {other}"
    pass_hidden = "Pass the hidden states that the head multiplies"
    if vocab_size < max(weight):
        return f": if hidden is right, {turned}. Or did you pass logits? {pass_hidden}"
    return f": hidden has V = {vocab_size} columns: did you pass logits? {pass_hidden}. If hidden is right, {turned}"


def part_size(value: Any, cache_bytes: int | None, gradient_threshold: float) -> int | None:
    """A ``vocab_part_size``: columns, a multiple of 8 as TMA reads the weight. None: the vocabulary has no parts."""
    if value is None:
        return None
    value = integer("vocab_part_size", value)
    if value < 1 or value % ATOM:
        raise ValueError(f"vocab_part_size must be a positive multiple of {ATOM}, got {value}")
    others = {"cache_bytes": cache_bytes, "gradient_threshold": gradient_threshold}
    for name, other in others.items():
        if other:
            raise ValueError(
                f"vocab_part_size={value} with {name}={other}: what the forward keeps of its tiles is of no use to a "
                f"backward, whose tiles know no parts. Write {name}=0, or vocab_part_size=None"
            )
    return value


# What others call an option, or what they have and these functions need not.
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
    "tau": "temperature",
}
# One line for arrays of JAX and NumPy and for tensors. A label below 0 would read a class from the end.
CLASS_WEIGHTS = (
    "weigh tokens. With w = class_weights[labels.clip(min=0)] * (labels >= 0), the loss is "
    "linear_loss(lambda logprob, entropy, lse, w: -w * logprob, hidden, weight, labels, w=w)[0] / w.sum()"
)
INSTEAD = {  # what to write in place of an option that a function does not have
    "class_weight": CLASS_WEIGHTS,
    "class_weights": CLASS_WEIGHTS,
    "weight_layout": "weight is [V, H]: pass weight.T if yours is [H, V]",
    "precision": 'call torch.set_float32_matmul_precision("highest") before, for products of float32',
}
SHARDS = {  # what says where the vocabulary's shards are: a function has one of these
    "vocab_axis": "vocab_axis",
    "axis_name": "axis_name inside shard_map, or vocab_axis of the function over a mesh",
    "tp_group": "tp_group",
}
OF_SHARDS = (*SHARDS, "axis", "tp_axis", "group", "process_group")


def unknown_options(
    function: str, unknown: Sequence[str], known: Sequence[str], loss_fn: Callable[..., Any] | None = None
) -> TypeError:
    """The refusal of names that are no options of a function, nor arguments of the ``loss_fn`` that it is given.

    With the one that the first may mean, or what to write in its place.
    """
    of_loss = names_of_loss(loss_fn)
    similar = iter(difflib.get_close_matches(unknown[0], [*of_loss, *known], 1))
    shards = (words for name, words in SHARDS.items() if unknown[0] in OF_SHARDS and name in known)
    meant = OTHER_NAMES.get(unknown[0]) or next(shards, None) or next(similar, None)
    hint = f" (did you mean {meant}?)" if meant else ""
    hint = f": {INSTEAD[unknown[0]]}" if unknown[0] in INSTEAD else hint
    also = "" if loss_fn is None else f"; arguments of loss_fn: {', '.join(of_loss) or 'none by name'}"
    return TypeError(f"{function}: unknown option {', '.join(unknown)}{hint}; known: {', '.join(known)}{also}")


def arguments_of_loss(
    loss_fn: Callable[..., Any],
    per_token: Sequence[Any],
    given: Mapping[str, Any],
    options: Collection[str],
    parameters: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is ``given`` by name, apart: arguments of a per-token loss, which takes them all, and the rest.

    ``parameters``: those of the caller that take a name before it can be given to the loss; None is none.
    """
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function of (logprob, entropy, lse, *per_token), got {type(loss_fn)}")
    taken = [name for name, x in parameters.items() if x is not None]
    own = names_of_loss(loss_fn) if given or taken else []
    named = {name: x for name, x in given.items() if name in own}
    rest = {name: x for name, x in given.items() if name not in own}
    if both := [name for name in own if name in taken or (name in named and name in options)]:
        raise TypeError(f"{both[0]} is an option, and loss_fn has an argument of that name: rename the argument")
    if rest.keys() <= set(options):  # else the caller refuses the rest
        _check_arguments(loss_fn, per_token, named)
    return named, rest


def _check_arguments(loss_fn: Callable[..., Any], per_token: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Refuses a loss that does not take three results of a token, or whose own arguments are not those given."""
    if (signature := _signature(loss_fn)) is None:
        return
    try:
        signature.bind_partial(None, None, None)
    except TypeError:
        raise TypeError(
            f"loss_fn takes {signature}, and is given three results of a token: write "
            "lambda logprob, entropy, lse: ..., with further arguments after these"
        ) from None
    try:
        signature.bind(None, None, None, *per_token, **named)
    except TypeError as error:
        own = ", ".join(names_of_loss(loss_fn)) or "none by name"
        write = ", ".join(f"{name}=..." for name in _missing(signature, per_token, named))
        hint = f": give {write}" if write else ""
        raise TypeError(f"loss_fn: {error}; its own arguments are {own}{hint}") from None


def _missing(signature: inspect.Signature, per_token: Sequence[Any], named: Mapping[str, Any]) -> list[str]:
    """The arguments that a loss must have and does not get."""
    first = (None, None, None, *per_token)
    with contextlib.suppress(TypeError):  # it does not take so many
        given = signature.bind_partial(*first, **named).arguments
        needed = [x for x in signature.parameters.values() if x.default is x.empty]
        return [x.name for x in needed if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY) and x.name not in given]
    return []


def _signature(loss_fn: Callable[..., Any]) -> inspect.Signature | None:
    """What a loss says that it takes, or what it does take if that cannot be three results; None if it says neither."""
    said = None
    for follows in (True, False):  # `functools.wraps` says what is inside, of which an adapter makes another function
        try:
            said = inspect.signature(loss_fn, follow_wrapped=follows)
            said.bind_partial(None, None, None)
        except (TypeError, ValueError):
            continue
        return said
    return said


def names_of_loss(loss_fn: Any) -> list[str]:
    """The arguments that a per-token loss takes by name, after log-probability, entropy and lse."""
    try:
        parameters = list(inspect.signature(loss_fn).parameters.values())
    except (TypeError, ValueError):  # it is no function, or says nothing of its arguments
        return []
    first = [x for x in parameters if x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD)][:3]
    by_name = [x for x in parameters if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY)]
    return [x.name for x in by_name if x not in first]


def mixed_tokens(
    found: str,
    function: str,
    shape: Sequence[int],
    where: str | None,
    ignore_index: int | None,
    options: Collection[str],
    mean: tuple[str, str],
) -> ValueError:
    """The refusal of a ``loss_fn`` that mixes tokens, with the lines that serve such a loss.

    ``function`` gives all results, ``where`` is the expression of a mask, and ``mean`` are the expressions of a mean
    over a sequence, of all tokens and of those in ``mask``.
    """
    ignored = None if ignore_index is None else f"labels != {ignore_index}"
    mask = f"{where} & ({ignored})" if where and ignored else where or ignored
    first, given = (f"mask = {mask}; ", ["where=mask"]) if mask else ("", [])
    arguments = ", ".join(["hidden", "weight", "labels", *given, *(f"{name}={name}" for name in options)])
    return ValueError(
        f"loss_fn mixes tokens: {found}. The loss of a token may use that token's numbers alone, because linear_loss "
        f"computes chunks of tokens. Compute other losses from the results of all tokens {tuple(shape)}: "
        f"`{first}out = {function}({arguments})`. There the mean of x over each sequence is `{mean[mask is not None]}`"
    )


def broadcasting(name: str, shape: Sequence[int], tokens: Sequence[int]) -> list[str]:
    """What to write for an array of this shape so that it broadcasts to that of the tokens.

    Example:
        >>> from lce_jax.types.scalars import broadcasting
        >>> broadcasting("temperature", (2,), (2, 3))
        ['temperature[..., None]']
    """
    missing = len(tokens) - len(shape)
    fits = missing >= 0 and all(n in (1, m) for n, m in zip(shape, tokens[missing:], strict=True))
    leads = missing > 0 and tuple(shape) == tuple(tokens[: len(shape)])
    return [name] * fits + [f"{name}[..., {', '.join(['None'] * missing)}]"] * leads


def per_token_shape(name: str, shape: Sequence[int], tokens: Sequence[int]) -> None:
    """A shape that begins with that of the tokens, with 1 where it is the same for all; or that of one number."""
    if shape and (len(shape) < len(tokens) or any(n not in (1, m) for n, m in zip(shape, tokens, strict=False))):
        raise ValueError(
            f"{name} {tuple(shape)} must begin with the shape of labels {tuple(tokens)}, or have 1 in place of a size"
        )


def given_labels(labels: Any, without: str) -> None:
    """Refuses None as labels; ``without``: what to write for tokens that have none."""
    if labels is None:
        raise TypeError(
            f"labels is None: give a vocabulary id for each token, in the shape of hidden before H; {without}"
        )


def are_inside(labels: Any, vocab_size: int) -> bool:
    """Whether all labels lie in the vocabulary or are `IGNORED`, those that a mask leaves out too."""
    if labels.max() >= vocab_size:
        return False
    least = labels.min()
    return bool(least >= 0 or (least == IGNORED and not ((labels < 0) & (labels != IGNORED)).any()))


def warn_outside(numbers: Any, vocab_size: int, *packages: str, is_cross_entropy: bool) -> None:
    """Warns if labels that count, ``numbers``, lie outside the vocabulary: all of them, or some of a cross entropy's.

    `IGNORED` marks a token that has no label: a micro-batch may be padding alone. ``packages``: folders of other
    packages that call this. The warning names the line that calls them and this package.
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


def labels_shape(labels: Sequence[int], leading: Sequence[int]) -> None:
    """Refuses labels of another shape than hidden states have before H, with the line to write where it is plain."""
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


def given_value(name: str, value: Any) -> None:
    """Refuses None as an argument of a loss that needs it."""
    if value is None:
        raise TypeError(f"{name} is None: give one number per token, or [b, 1] for one per sequence")


def dimensions_of_tokens(name: str, shape: Sequence[int], tokens: Sequence[int]) -> None:
    """A number's shape, or one of as many dimensions: [b] would go along the sequence of [b, s]."""
    if len(shape) not in (0, len(tokens)):
        raise ValueError(
            f"{name} {tuple(shape)} must have the dimensions of logprob {tuple(tokens)}, of size 1 where all are the "
            "same: [b, 1] for one number per sequence"
        )


def alone_with_floor(num_candidates: int, mean_logit: bool) -> None:
    """A ``logit_floor`` excludes what has no meaning where each row has a set of tokens of its own."""
    if num_candidates:
        raise ValueError(
            f"logit_floor with candidates, {num_candidates} per token: those below the floor have no log-probability. "
            "Write candidates=None, or call linear_logits for their logits"
        )
    if mean_logit:
        raise ValueError(
            "logit_floor with label_smoothing (or mean_logit), a mean over the whole vocabulary. Write "
            "label_smoothing=0, or logit_floor=None"
        )


def whole_parts(part_size: int | None, columns: int, of_shard: int) -> None:
    """Shards of ``of_shard`` columns each must have whole parts; a vocabulary of one shard may end inside a part."""
    if part_size is None or of_shard == columns or of_shard % part_size == 0:
        return
    shards = columns // of_shard
    whole = -(-columns // (shards * part_size)) * shards * part_size
    raise ValueError(
        f"vocab_part_size={part_size}: each of the {shards} shards has {of_shard} of the {columns} columns of weight, "
        f"which are no whole parts. Give a divisor of {of_shard}, or pad the vocabulary of weight to {whole} columns "
        "and pass the true vocab_size"
    )


def flag(name: str, value: Any) -> bool:
    """True or False."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def one_of(name: str, value: Any, choices: Sequence[str]) -> None:
    """One of several names."""
    if value not in choices:
        *first, last = (f'"{choice}"' for choice in choices)
        raise ValueError(f"{name} must be {', '.join(first)} or {last}, got {value!r}")


def num_largest(k: Any, vocab_size: int | None = None) -> int:
    """The k of ``linear_topk``, which is at most the vocabulary, if it is known."""
    k = integer("k", k)
    if not 1 <= k <= MOST_CANDIDATES:
        raise ValueError(f"k must lie in [1, {MOST_CANDIDATES}], got {k}")
    if vocab_size is not None and k > vocab_size:
        raise ValueError(f"k must be at most the vocabulary, {vocab_size}, got {k}")
    return k


def num_candidates(name: str, shape: Sequence[int]) -> int:
    """The K of ids of this shape, ``[..., K]``."""
    if len(shape) < 1 or not 1 <= shape[-1] <= MOST_CANDIDATES:
        raise ValueError(f"{name} {tuple(shape)} must end in K, from 1 to {MOST_CANDIDATES} ids per token")
    return int(shape[-1])


def candidate_shape(name: str, shape: Sequence[int], leading: Sequence[int], of: str) -> None:
    """Ids of this shape must be ``[*leading, K]``, where ``leading`` is the shape of ``of``."""
    if tuple(shape[:-1]) != tuple(leading):
        raise ValueError(f"{name} {tuple(shape)} must be [..., K] with the shape of {of} {tuple(leading)} before K")
