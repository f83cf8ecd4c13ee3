"""Errors and hints that show the code to write instead. `lce_jax` and `lce_torch_bridge` share them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

from lce_jax.types.loss_signatures import list_loss_arguments

__all__ = [
    "ALTERNATIVES",
    "MODEL_ARGUMENTS",
    "NAME_IN_CODE",
    "OTHER_NAMES",
    "SHARDS",
    "SHARD_NAMES",
    "hint_at_logits",
    "mixed_tokens_error",
    "reword_for_teacher",
    "student_only_error",
    "suggest_broadcasts",
    "unknown_options_error",
]

# Names of options in other packages, each with what to write here.
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
SHARDS = {  # the options that name the shards of the vocabulary, each with advice. Each function has one of these.
    "vocab_axis": "vocab_axis",
    "axis_name": "axis_name inside shard_map, or vocab_axis of the function over a mesh",
    "tp_group": "tp_group",
}
SHARD_NAMES = (*SHARDS, "axis", "tp_axis", "group", "process_group")


def unknown_options_error(
    function: str, unknown: Sequence[str], known: Sequence[str], loss_fn: Callable[..., Any] | None = None
) -> TypeError:
    """Returns the error for names that are neither options of a function nor arguments of its ``loss_fn``.

    The message suggests which option the first name may mean, or what to write in its place.
    """
    loss_names = list_loss_arguments(loss_fn)
    similar = iter(difflib.get_close_matches(unknown[0], [*loss_names, *known], 1))
    shards = (advice for name, advice in SHARDS.items() if unknown[0] in SHARD_NAMES and name in known)
    meant = OTHER_NAMES.get(unknown[0]) or next(shards, None) or next(similar, None)
    hint = f" (did you mean {meant}?)" if meant else ""
    hint = f": {ALTERNATIVES[unknown[0]]}" if unknown[0] in ALTERNATIVES else hint
    arguments = "" if loss_fn is None else f"; arguments of loss_fn: {', '.join(loss_names) or 'none by name'}"
    return TypeError(f"{function}: unknown option {', '.join(unknown)}{hint}; known: {', '.join(known)}{arguments}")


def mixed_tokens_error(
    reason: str,
    function: str,
    shape: Sequence[int],
    where: str | None,
    ignore_index: int | None,
    options: Collection[str],
) -> ValueError:
    """Returns the error for a ``loss_fn`` that mixes tokens. Its message has the code that computes such a loss.

    ``function`` is the name of the function that returns all results. ``where`` is the code of the caller's mask.
    """
    ignored = None if ignore_index is None else f"labels != {ignore_index}"
    mask = f"{where} & ({ignored})" if where and ignored else where or ignored
    first, masks = (f"mask = {mask}; ", ["where=mask"]) if mask else ("", [])
    arguments = ", ".join(["hidden", "weight", "labels", *masks, *(f"{name}={name}" for name in options)])
    return ValueError(
        f"loss_fn mixes tokens: {reason}. The loss of a token may use that token's numbers alone, because linear_loss "
        f"computes chunks of tokens. Compute other losses from the results of all tokens {tuple(shape)}: "
        f"`{first}out = {function}({arguments})`. There each token's mean of x over its sequence is "
        f"`rows.segment_mean({', '.join(['x', *masks])})`, with segment_ids= in packed rows: docs/grpo.md has GSPO"
    )


def suggest_broadcasts(name: str, shape: Sequence[int], tokens: Sequence[int]) -> list[str]:
    """Returns expressions that broadcast an array ``name`` of this shape to the shape of the tokens.

    Example:
        >>> from lce_jax.types.messages import suggest_broadcasts
        >>> suggest_broadcasts("temperature", (2,), (2, 3))
        ['temperature[..., None]']
    """
    missing = len(tokens) - len(shape)
    fits = missing >= 0 and all(n in (1, m) for n, m in zip(shape, tokens[missing:], strict=True))
    leads = missing > 0 and tuple(shape) == tuple(tokens[: len(shape)])
    return [name] * fits + [f"{name}[..., {', '.join(['None'] * missing)}]"] * leads


def hint_at_logits(hidden: Sequence[int], weight: Sequence[int], vocab_size: int, other: str) -> str:
    """Returns a hint if the last dimension of hidden has the size of the vocabulary; else an empty string.

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


def student_only_error(name: str, value: Any, neutral: float | None) -> ValueError:
    """Returns the error for a student's scale or cap that the caller passes without the teacher's."""
    advice = f'write teacher_{name}="same", or the teacher\'s value; teacher_{name}={neutral} if it has none'
    return ValueError(f"{name}={value} is only the student's, because each model has its own: {advice}")


MODEL_ARGUMENTS = "hidden|weight|bias|temperature|logit_scale|logit_softcap|weight_layout"  # both models have these

# One of these names in a line of code: an argument in parentheses, or a name before "=", "[" or an attribute.
NAME_IN_CODE = re.compile(rf"(?<=\()\b({MODEL_ARGUMENTS})(?=[,)])|\b({MODEL_ARGUMENTS})(?=[=\[]|\.\w)")


def reword_for_teacher(error: Exception) -> str:
    r"""Returns an error's message with the names of the teacher's arguments in place of the student's.

    Example:
        >>> from lce_jax.types.messages import reword_for_teacher
        >>> reword_for_teacher(ValueError('hidden (4, 9) does not fit: write weight_layout="hv"'))
        'the teacher\'s hidden (4, 9) does not fit: write teacher_weight_layout="hv"'
    """
    return "the teacher's " + NAME_IN_CODE.sub(r"teacher_\g<0>", str(error))
