"""Class weights of `linear_cross_entropy` against PyTorch's, on one device, over meshes and inside ``shard_map``."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lce_jax import linear_cross_entropy, sharded_linear_cross_entropy

B, S, H, V = 2, 12, 16, 64
RNG = np.random.default_rng(0)
HIDDEN, WEIGHT = (RNG.standard_normal(shape, np.float32) for shape in ((B, S, H), (V, H)))
LABELS = RNG.integers(0, V, (B, S)).astype(np.int32)
LABELS[0, 3] = LABELS[1, 5] = -100
WHERE = RNG.random((B, S)) < 0.7
CLASSES, SEEDS = RNG.random(V, np.float32), np.linspace(0, 1, B * S, dtype=np.float32).reshape(B, S)


def reference(reduction: str, where: Any = True) -> tuple[np.ndarray, list[np.ndarray]]:
    """PyTorch's loss of stored logits, and its gradients."""
    hidden, weight = (torch.tensor(x, requires_grad=True) for x in (HIDDEN, WEIGHT))
    logits, labels = (hidden @ weight.T).view(-1, V), torch.tensor(np.where(where, LABELS, -100).ravel()).long()
    loss = torch.nn.functional.cross_entropy(logits, labels, torch.tensor(CLASSES), reduction=reduction)
    loss = loss.view(B, S) if reduction == "none" else loss
    total = (loss * torch.tensor(SEEDS)).sum() if reduction == "none" else loss
    return loss.detach().numpy(), [x.numpy() for x in torch.autograd.grad(total, (hidden, weight))]


def evaluate(function: Any, reduction: str, hidden: Any, weight: Any) -> Any:
    """Returns the gradients of ``function(hidden, weight)``, and the loss that it is."""

    def objective(hidden: Any, weight: Any) -> Any:
        loss = function(hidden, weight)
        return jnp.sum(loss * SEEDS) if reduction == "none" else loss, loss

    return jax.grad(objective, (0, 1), has_aux=True)(hidden, weight)


def assert_is_torch(found: Any, reduction: str, where: Any = True) -> None:
    (gradients, loss), (want, wanted) = found, reference(reduction, where)
    np.testing.assert_allclose(loss, want, rtol=2e-5, atol=1e-6)
    for gradient, expected in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-5)


def check(function: Any, reduction: str, operands: Any = (HIDDEN, WEIGHT)) -> None:
    assert_is_torch(jax.jit(functools.partial(evaluate, function, reduction))(*operands), reduction)


@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
def test_matches_torch(jit: bool) -> None:
    """With logits' gradients from the forward, and from the backward; and with masked tokens."""
    calls: list[tuple[str, dict[str, Any]]] = [("none", {})]
    if jit:
        calls += [("mean", {"where": WHERE}), ("sum", {"cache_bytes": 0})]

    def run(hidden: Any, weight: Any) -> Any:
        more: Any = {"labels": LABELS, "class_weights": CLASSES, "precision": "highest"}
        return [
            evaluate(
                functools.partial(linear_cross_entropy, reduction=reduction, **options, **more),
                reduction,
                hidden,
                weight,
            )
            for reduction, options in calls
        ]

    for (reduction, options), found in zip(calls, (jax.jit(run) if jit else run)(HIDDEN, WEIGHT), strict=True):
        assert_is_torch(found, reduction, options.get("where", True))


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_over_a_mesh(reduction: str, types: AxisType) -> None:
    """Class weights are split as the vocabulary is."""
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(types, types))

    def put(x: Any, *spec: Any) -> Any:
        return jax.device_put(x, NamedSharding(mesh, P(*spec)))

    labels, classes = put(LABELS, "data"), put(CLASSES, "tensor")
    call = functools.partial(
        sharded_linear_cross_entropy, labels=labels, class_weights=classes, batch_axes="data", reduction=reduction,
        precision="highest",
    )  # fmt: skip
    with jax.set_mesh(mesh):
        check(call, reduction, (put(HIDDEN, "data"), put(WEIGHT, "tensor")))


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(check_vma: bool) -> None:
    """Each shard has its part, and ``normalizer`` is the sum of the factors of all devices."""
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    total = CLASSES[LABELS[LABELS >= 0]].sum()

    def body(hidden: Any, weight: Any, labels: Any, classes: Any) -> Any:
        options: Any = {"class_weights": classes, "axis_name": "tensor", "precision": "highest"}
        return jax.lax.psum(linear_cross_entropy(hidden, weight, labels, normalizer=total, **options), "data")

    specs = P("data"), P("tensor"), P("data"), P("tensor")
    run = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)
    check(lambda hidden, weight: run(hidden, weight, LABELS, CLASSES), "mean")


def test_labels_outside_have_no_weight() -> None:
    """Neither a label below 0, which would count from the end of the table, nor one of padding."""
    labels = np.array([3, -1, V, -(2**31)], np.int32)
    with pytest.warns(RuntimeWarning, match="outside"):
        loss = linear_cross_entropy(
            HIDDEN[0, :4], WEIGHT, labels, class_weights=CLASSES, ignore_index=None, precision="highest"
        )
    alone = linear_cross_entropy(HIDDEN[0, :1], WEIGHT, labels[:1], precision="highest")
    np.testing.assert_allclose(loss, alone, rtol=1e-6)


def test_nothing_counts() -> None:
    loss = jax.jit(lambda labels, classes: linear_cross_entropy(HIDDEN, WEIGHT, labels, class_weights=classes))
    assert loss(np.full((B, S), -100, np.int32), CLASSES) == 0
    assert loss(LABELS, np.zeros(V, np.float32)) == 0


def test_no_gradient() -> None:
    gradient = jax.grad(lambda x: linear_cross_entropy(HIDDEN, WEIGHT, LABELS, class_weights=x))(CLASSES)
    assert not np.any(gradient)


@pytest.mark.parametrize(
    ("value", "options", "message"),
    [
        (CLASSES[1:], {}, r"class_weights \(63,\) must have .* of weight \(64, 16\): \(64,\)"),
        ([1.0] * V, {}, "class_weights must be an array, got list"),
        (np.ones(V, np.int32), {}, "class_weights must be one of .* got int32"),
        (CLASSES, {"label_smoothing": 0.1}, "class_weights with label_smoothing=0.1"),
    ],
)  # fmt: skip
def test_refusals(value: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        linear_cross_entropy(HIDDEN, WEIGHT, LABELS, class_weights=value, **options)


def test_another_name() -> None:
    with pytest.raises(TypeError, match=r"unknown option class_weight .*did you mean class_weights"):
        linear_cross_entropy(HIDDEN, WEIGHT, LABELS, class_weight=CLASSES)  # type: ignore[call-arg]
