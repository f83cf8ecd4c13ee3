"""Checks of shapes, labels and combinations of options. `lce_jax` and `lce_torch_bridge` share them.

Each package checks the types and dtypes of its own arrays in its module ``call._checks``.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Sequence
from typing import Any

from lce_jax.types.defaults import IGNORED
from lce_jax.types.scalars import MOST_CANDIDATES

__all__ = [
    "all_in_vocabulary",
    "check_candidate_shape",
    "check_class_weights",
    "check_floor_options",
    "check_labels_shape",
    "check_loss_arguments",
    "check_per_token_shape",
    "check_vocab_parts",
    "count_candidates",
    "require_labels",
    "require_value",
    "warn_outside",
]


def check_labels_shape(labels: Sequence[int], leading: Sequence[int]) -> None:
    """Refuses labels whose shape is not the hidden states' shape without H. The message suggests a fix if it can."""
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


def require_labels(labels: Any, advice: str) -> None:
    """Refuses None as labels. ``advice`` says what to write for tokens without labels."""
    if labels is None:
        raise TypeError(
            f"labels is None: give a vocabulary id for each token, in the shape of hidden before H; {advice}"
        )


def all_in_vocabulary(labels: Any, vocab_size: int) -> bool:
    """Whether every label, even of a masked row, lies in the vocabulary or is `IGNORED`."""
    if labels.max() >= vocab_size:
        return False
    least = labels.min()
    return bool(least >= 0 or (least == IGNORED and not ((labels < 0) & (labels != IGNORED)).any()))


def warn_outside(labels: Any, vocab_size: int, *packages: str, is_cross_entropy: bool) -> None:
    """Warns of labels outside the vocabulary. ``labels`` has no labels of masked rows.

    For a cross entropy, one such label is enough; other functions warn only if all labels lie outside. Labels of
    `IGNORED` do not count, because a micro-batch may consist of padding. ``packages`` are the folders of other packages
    that call this function. The warning points to the user's line that calls this package or one of ``packages``.
    """
    counted = labels[labels != IGNORED]
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


def check_per_token_shape(name: str, shape: Sequence[int], tokens: Sequence[int]) -> None:
    """Refuses an array whose shape does not begin with the shape of the tokens.

    Any of these sizes may be 1 instead, and the shape () is one value for all tokens.
    """
    if shape and (len(shape) < len(tokens) or any(n not in (1, m) for n, m in zip(shape, tokens, strict=False))):
        raise ValueError(
            f"{name} {tuple(shape)} must begin with the shape of labels {tuple(tokens)}, or have 1 in place of a size"
        )


def require_value(name: str, value: Any) -> None:
    """Refuses None for an argument that a loss needs."""
    if value is None:
        raise TypeError(f"{name} is None: give one number per token, or [b, 1] for one per sequence")


def check_loss_arguments(logprob: Any, **arguments: Any) -> None:
    """Refuses per-token arguments of a loss unless they have no dimensions, or as many as ``logprob``.

    Otherwise, an array [b] would broadcast along the sequence of [b, s].
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


def count_candidates(name: str, shape: Sequence[int]) -> int:
    """Returns K, the number of ids per token, from the shape ``[..., K]`` of the ids."""
    if len(shape) < 1 or not 1 <= shape[-1] <= MOST_CANDIDATES:
        raise ValueError(f"{name} {tuple(shape)} must end in K, from 1 to {MOST_CANDIDATES} ids per token")
    return int(shape[-1])


def check_candidate_shape(name: str, shape: Sequence[int], leading: Sequence[int], operand: str) -> None:
    """Refuses ids whose shape is not ``[*leading, K]``, where ``leading`` is the shape of ``operand``."""
    if tuple(shape[:-1]) != tuple(leading):
        raise ValueError(
            f"{name} {tuple(shape)} must be [..., K] with the shape of {operand} {tuple(leading)} before K"
        )


def check_class_weights(shape: Sequence[int], weight: Sequence[int], columns: int, smoothing: float) -> None:
    """Refuses class weights that are not one number per vocabulary entry, or that come with label smoothing."""
    if tuple(shape) != (columns,):
        entries = f"one number per vocabulary entry of weight {tuple(weight)}: ({columns},)"
        raise ValueError(f"class_weights {tuple(shape)} must have {entries}")
    if smoothing > 0:
        raise ValueError(
            f"class_weights with label_smoothing={smoothing!r}: smoothing would need the sum of all logits times their "
            "class weights, which no kernel computes. Leave one of the two out"
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
