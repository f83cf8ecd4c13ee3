"""The right results in NumPy float64, from stored logits. No code is the package's; finite differences check it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class Results(NamedTuple):
    logprobs: np.ndarray
    entropy: np.ndarray
    lse: np.ndarray
    max_logit: np.ndarray
    min_logit: np.ndarray
    correct: np.ndarray  # in float64: two logits that float32 rounds to one number differ here, see `margin`
    candidate_logprobs: np.ndarray | None = None
    sum_p_squared: np.ndarray | None = None
    support: np.ndarray | None = None


def _double(x: Any) -> np.ndarray:
    x = np.asarray(x)
    return (np.stack([x.real, x.imag]) if np.iscomplexobj(x) else x).astype(np.float64)


def _logits(hidden, weight, bias, temperature, logit_softcap, logit_scale, vocab_size):
    """Returns logits over the true vocabulary and d(logit) / d(hidden · weight)."""
    z = logit_scale * (hidden @ weight.T + (0 if bias is None else _double(bias)))
    slope = np.full_like(z, logit_scale)
    if logit_softcap is not None:
        slope *= 1 / np.cosh(z / logit_softcap) ** 2
        z = logit_softcap * np.tanh(z / logit_softcap)
    temperature = np.broadcast_to(_double(temperature), hidden.shape[:-1])[..., None]
    return (z / temperature)[..., :vocab_size], (slope / temperature)[..., :vocab_size]


def _softmax(z, is_in_set):
    """Returns lse and probabilities over the columns ``is_in_set``. Other columns have the probability 0."""
    m = z.max(-1, keepdims=True, where=is_in_set, initial=-np.inf)
    e = np.where(is_in_set, np.exp(np.minimum(z - m, 0)), 0)
    return m + np.log(e.sum(-1, keepdims=True)), e / e.sum(-1, keepdims=True)


def _select_set(z, labels, logit_floor):
    """Returns for each column whether it is in the set: its logit reaches the floor, or it is the label's."""
    if logit_floor is None:
        return np.ones(z.shape, bool)
    floor = np.broadcast_to(_double(logit_floor), labels.shape)[..., None]
    return (z >= floor) | (labels[..., None] == np.arange(z.shape[-1]))


def _vocabulary_by_hidden(weight, weight_layout):
    return _double(weight) if weight_layout == "vh" else _double(weight).T


def logits(
    hidden, weight, labels, *, where=None, temperature=1.0, logit_softcap=None, logit_scale=1.0, vocab_size=None,
    weight_layout="vh", bias=None, **_unused,
) -> np.ndarray:  # fmt: skip
    """Computes logits over the true vocabulary. Rows with ``where`` False have hidden states of 0."""
    weight = _vocabulary_by_hidden(weight, weight_layout)
    unmasked = np.ones(np.shape(labels), bool) if where is None else np.asarray(where)
    hidden = np.where(unmasked[..., None], _double(hidden), 0)
    temperature = np.where(unmasked, np.broadcast_to(_double(temperature), unmasked.shape), 1)
    vocab_size = vocab_size or weight.shape[0]
    return _logits(hidden, weight, bias, temperature, logit_softcap, logit_scale, vocab_size)[0]


def logprobs(hidden, weight, labels, *, where=None, candidates=None, logit_floor=None, **options) -> Results:
    """Computes all results. Rows with ``where`` False are 0."""
    labels = np.asarray(labels).astype(object) if np.asarray(labels).dtype == np.uint64 else np.asarray(labels)
    unmasked = np.ones(labels.shape, bool) if where is None else np.asarray(where)
    z = logits(hidden, weight, labels, where=where, **options)
    vocab_size = z.shape[-1]
    is_in_set = _select_set(z, labels, logit_floor)
    lse, p = _softmax(z, is_in_set)
    owned = (labels >= 0) & (labels < vocab_size)
    column = np.where(owned, labels, 0).astype(np.int64)
    logprob = np.where(owned, np.take_along_axis(z - lse, column[..., None], -1)[..., 0], 0)
    entropy = -(p * (z - lse)).sum(-1)
    at_label = np.take_along_axis(z, column[..., None], -1)[..., 0]
    highest = z.max(-1, where=is_in_set, initial=-np.inf)
    lowest = z.min(-1, where=is_in_set, initial=np.inf)
    fields = (logprob, entropy, lse[..., 0], highest, lowest, owned & (at_label == highest))
    candidate_logprobs = None
    if candidates is not None:
        ids = np.asarray(candidates)
        column = np.where((ids >= 0) & (ids < vocab_size), ids, 0)
        candidate_logprobs = np.take_along_axis(z - lse, column, -1) * (column == ids) * unmasked[..., None]
    squares = np.where(unmasked, (p * p).sum(-1), 0)
    support = None if logit_floor is None else is_in_set.sum(-1) * unmasked
    return Results(*(np.where(unmasked, field, 0) for field in fields), candidate_logprobs, squares, support)


def margin(hidden, weight, labels, logit_floor=None, **options) -> np.ndarray:
    """Returns the distance of the label's logit to the largest other. Within float32's rounding, `correct` is open."""
    z, labels = logits(hidden, weight, labels, **options), np.asarray(labels)
    outside = ~_select_set(z, labels, logit_floor) | (np.arange(z.shape[-1]) == labels[..., None])
    others = np.where(outside, -np.inf, z).max(-1, initial=-np.inf)
    column = np.clip(labels, 0, z.shape[-1] - 1).astype(np.int64)
    return np.abs(np.take_along_axis(z, column[..., None], -1)[..., 0] - others)


def gradients(
    hidden, weight, labels, seeds, *, where=None, temperature=1.0, logit_softcap=None, logit_scale=1.0,
    vocab_size=None, weight_layout="vh", bias=None, candidates=None, logit_floor=None, **_unused,
) -> tuple[np.ndarray, ...]:  # fmt: skip
    """Computes the gradients of Σ seeds[0]·logprobs + seeds[1]·entropy + seeds[2]·lse in hidden, weight and a bias.

    With candidates, the sum also has seeds[3]·candidate_logprobs. A label out of vocabulary has the gradient of -lse.
    """
    matrix = _vocabulary_by_hidden(weight, weight_layout)
    labels = np.asarray(labels)
    unmasked = np.ones(labels.shape, bool) if where is None else np.asarray(where)
    hidden = np.where(unmasked[..., None], _double(hidden), 0)
    g_logprob, g_entropy, g_lse = (np.where(unmasked, _double(seed), 0)[..., None] for seed in seeds[:3])
    true_vocab = vocab_size or matrix.shape[0]
    temperature = np.where(unmasked, np.broadcast_to(_double(temperature), labels.shape), 1)
    z, slope = _logits(hidden, matrix, bias, temperature, logit_softcap, logit_scale, true_vocab)
    lse, p = _softmax(z, _select_set(z, labels, logit_floor))
    entropy = -(p * (z - lse)).sum(-1, keepdims=True)
    onehot = labels[..., None] == np.arange(true_vocab)
    dz = g_logprob * (onehot - p) - g_entropy * p * (z - lse + entropy) + g_lse * p
    if candidates is not None:
        ids = np.asarray(candidates)
        seed = _double(seeds[3]) * unmasked[..., None] * ((ids >= 0) & (ids < true_vocab))
        dz -= p * seed.sum(-1, keepdims=True)
        for k in range(ids.shape[-1]):
            dz += seed[..., k, None] * (ids[..., k, None] == np.arange(true_vocab))
    draw = np.zeros((*labels.shape, matrix.shape[0]))
    draw[..., :true_vocab] = dz * slope
    dhidden = draw @ matrix
    rows = draw.reshape(-1, matrix.shape[0])
    dweight = rows.T @ hidden.reshape(-1, hidden.shape[-1])
    grads = dhidden, dweight if weight_layout == "vh" else dweight.T
    return grads if bias is None else (*grads, rows.sum(0))


def relative_norm(got: Any, want: Any) -> float:
    """Returns ‖got - want‖ / ‖want‖, or ‖got‖ if want is 0."""
    got, want = _double(got), _double(want)
    norm = np.linalg.norm(want)
    return float(np.linalg.norm(got - want) / (norm if norm > 0 else 1.0))


def value_error(got: Any, want: Any) -> float:
    """Returns the largest error, relative to max(1, |value|)."""
    got, want = _double(got), _double(want)
    return float(np.max(np.abs(got - want) / np.maximum(1, np.abs(want)), initial=0.0))
