"""Stand-ins for fused losses that the tests do not install: their published signatures, over stored logits in float64.

Liger 0.8.5, ``liger_kernel.transformers.LigerFusedLinearCrossEntropyLoss``;
Cut Cross Entropy 25.1.1, ``cut_cross_entropy.linear_cross_entropy``;
verl 0.9.1, ``verl.utils.kernel.linear_cross_entropy.linear_cross_entropy``.
``test_migration.py`` runs the real Liger and Cut Cross Entropy where they are installed.
"""

from __future__ import annotations

import types
from typing import Any

import torch


def capped(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


class LigerFusedLinearCrossEntropyLoss:
    def __init__(
        self, ce_weight: Any = None, ignore_index: int = -100, lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0, reduction: str = "mean", softcap: float | None = None,
    ) -> None:  # fmt: skip
        assert ce_weight is None
        self.options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": reduction}
        self.lse_square_scale, self.softcap = lse_square_scale, softcap

    def __call__(self, lin_weight: Any, _input: Any, target: Any, bias: Any = None) -> torch.Tensor:
        logits = _input.double() @ lin_weight.double().t() + (0 if bias is None else bias.double())
        logits = capped(logits, self.softcap)
        squares = logits.logsumexp(-1).square()[target != self.options["ignore_index"]]
        z_loss = squares.mean() if self.options["reduction"] == "mean" else squares.sum()
        return torch.nn.functional.cross_entropy(logits, target, **self.options) + self.lse_square_scale * z_loss


def cut_cross_entropy(
    e: Any, c: Any, targets: Any, ignore_index: int = -100, softcap: float | None = None, reduction: str = "mean",
    shift: bool = False, filter_eps: float | str | None = "high", impl: str = "cce",
) -> torch.Tensor:  # fmt: skip
    del filter_eps, impl
    if shift:
        e, targets = e[..., :-1, :], targets[..., 1:]
    logits = capped(e.double() @ c.double().t(), softcap).flatten(0, -2)
    options = {"ignore_index": ignore_index, "reduction": reduction}
    return torch.nn.functional.cross_entropy(logits, targets.flatten(), **options)


def verl(
    hidden: Any, weight: Any, labels: Any, temperature: float = 1.0, reduction: str = "none",
    dist_process_group: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    assert (reduction, dist_process_group) == ("none", None)
    logp = (hidden.double() @ weight.double().t() / temperature).log_softmax(-1)
    return logp.gather(-1, labels[..., None])[..., 0], -(logp.exp() * logp).sum(-1)


MODULES = {
    "liger_kernel.transformers": {"LigerFusedLinearCrossEntropyLoss": LigerFusedLinearCrossEntropyLoss},
    "cut_cross_entropy": {"linear_cross_entropy": cut_cross_entropy},
    "verl.utils.kernel.linear_cross_entropy": {"linear_cross_entropy": verl},
}


def modules() -> dict[str, types.ModuleType]:
    """Returns the entries of ``sys.modules`` for the stand-ins and their parent packages."""
    by_name: dict[str, types.ModuleType] = {}
    for name, names in MODULES.items():
        for end in [index for index, letter in enumerate(name) if letter == "."]:
            by_name[name[:end]] = types.ModuleType(name[:end])
        by_name[name] = types.ModuleType(name)
        vars(by_name[name]).update(names)
    return by_name
