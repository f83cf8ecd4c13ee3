"""Calls for the bridge's tests, and their results from PyTorch in float64 with stored logits."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

from lce_torch_bridge import LogprobOutput, linear_logprobs
from lce_torch_bridge._types import TorchCall, make_call
from tests import cases


class Problem(NamedTuple):
    hidden: torch.Tensor
    weight: torch.Tensor
    labels: torch.Tensor

    def to(self, device: str) -> Problem:
        """The same on another device."""
        return Problem(*(x.to(device) for x in self))

    def leaves(self) -> Problem:
        """Fresh leaves that require gradients."""
        return Problem(self.hidden.clone().requires_grad_(), self.weight.clone().requires_grad_(), self.labels)


def draw(T: int = 37, H: int = 32, V: int = 104, dtype: torch.dtype = torch.float32, seed: int = 0) -> Problem:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(T, H, generator=generator)
    weight = torch.randn(V, H, generator=generator) / H**0.5
    labels = torch.randint(0, V, (T,), generator=generator)
    return Problem(hidden.to(dtype), weight.to(dtype), labels)


def bytes_of(rows: int, weight: torch.Tensor) -> int:
    """What the exponentials of so many tokens take: float32 on a CPU."""
    return rows * weight.shape[0] * (4 if weight.device.type == "cpu" else weight.element_size())


THREE_CHUNKS = bytes_of(2048, draw().weight)  # of 5,000 tokens


def told(V: int = 104, **options: Any) -> TorchCall:
    """What the operators get on one rank; by default the one from `linear_logprobs` with its defaults."""
    return make_call(**{"vocab_size": V} | options)


def from_case(test: cases.TestCase) -> tuple[Problem, dict[str, Any], list[torch.Tensor]]:
    """A case of the matrix as the bridge takes it."""
    hidden, weight, labels, options, seeds = cases.draw(test)
    options = {name: to_torch(value) if isinstance(value, jax.Array) else value for name, value in options.items()}
    return Problem(*map(to_torch, (hidden, weight, labels))), options, [to_torch(seed) for seed in seeds]


def to_torch(x: jax.Array) -> torch.Tensor:
    dtype = getattr(torch, x.dtype.name)
    return torch.from_numpy(np.asarray(x.astype("float32") if x.dtype == "bfloat16" else x).copy()).to(dtype)


def candidates_like(labels: torch.Tensor, K: int = 5, V: int = 104) -> torch.Tensor:
    """Ids of which some are none, out of vocabulary, equal to the label, or occur twice."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, V, (*labels.shape, K), generator=generator)
    special = torch.tensor([-1, -100, V, 2**32 + 3, V - 1])[torch.randint(0, 5, ids.shape, generator=generator)]
    ids = torch.where(torch.rand(ids.shape, generator=generator) < 0.3, special, ids).to(labels.device)
    ids[..., 0], ids[..., -1] = labels, ids[..., K // 2]
    return ids


def seeds_like(labels: torch.Tensor, seed: int = 1, K: int = 0) -> list[torch.Tensor]:
    """A cotangent each for logprobs, entropy and lse, and for K candidates."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [labels.shape] * 3 + [(*labels.shape, K)] * (K > 0)
    return [torch.randn(shape, generator=generator).to(labels.device) for shape in shapes]


def objective(out: LogprobOutput, seeds: list[torch.Tensor]) -> torch.Tensor:
    fields = out[:3] if len(seeds) == 3 else (*out[:3], out.candidate_logprobs)
    terms = [(seed.to(x.dtype) * x).sum() for seed, x in zip(seeds, fields, strict=True) if x is not None]
    return torch.stack(terms).sum()


def stored(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> LogprobOutput:
    """The same with the logits stored: products in ``dtype``, the rest in float64."""
    return of_products((hidden.to(dtype) @ weight.to(dtype).T).double(), labels, **options)


def capped(
    products: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    temperature: float | torch.Tensor | None = 1.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    vocab_size: int | None = None,
) -> torch.Tensor:
    """Logits of products ``hidden · weight``."""
    z = products[..., :vocab_size]
    z = (z if bias is None else z + bias[:vocab_size].to(z.dtype)) * logit_scale
    z = z if logit_softcap is None else logit_softcap * torch.tanh(z / logit_softcap)
    temperature = 1.0 if temperature is None else temperature
    return z / (temperature[..., None] if isinstance(temperature, torch.Tensor) else temperature)


def of_products(
    products: torch.Tensor,
    labels: torch.Tensor,
    *,
    candidates: torch.Tensor | None = None,
    logit_floor: torch.Tensor | None = None,
    **options: Any,
) -> LogprobOutput:
    """All results from the products ``hidden · weight``."""
    z, in_set = capped(products, **options), None
    if logit_floor is not None:
        label = labels[..., None] == torch.arange(z.shape[-1], device=z.device)
        in_set = (z >= logit_floor[..., None]) | label
        z = z.where(in_set, -1e30)
    logp = z.log_softmax(-1)
    inside = (labels >= 0) & (labels < z.shape[-1])
    at_label = logp.gather(-1, torch.where(inside, labels, 0).long().unsqueeze(-1)).squeeze(-1)
    lse = z.logsumexp(-1)
    of_candidates = None
    if candidates is not None:
        there = (candidates >= 0) & (candidates < z.shape[-1])
        of_candidates = logp.gather(-1, torch.where(there, candidates, 0).long()).where(there, 0.0)
    # Out of vocabulary: the value is 0 and the gradient that of -lse.
    logprobs = torch.where(inside, at_label, lse.detach() - lse)
    entropy = -(logp.exp() * logp).sum(-1)
    return LogprobOutput(
        logprobs, entropy, lse, z.amax(-1), z.amin(-1), z.mean(-1), of_candidates, logp.exp().square().sum(-1),
        None if in_set is None else in_set.sum(-1).double(),
    )  # fmt: skip


def stored_logits(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """Logits at ids, from all of them, in the dtype of the operands."""
    return at_ids(capped(hidden @ weight.T, **options), ids)


def at_ids(z: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """0 where the id is none or out of vocabulary."""
    there = (ids >= 0) & (ids < z.shape[-1])
    return z.gather(-1, torch.where(there, ids, 0).long()).where(there, 0.0)


def gradients(problem: Problem, seeds: list[torch.Tensor], call: Any = linear_logprobs, **options: Any) -> Any:
    """The results of ``call``, and the gradients of the objective in hidden and weight."""
    leaves = problem.leaves()
    out = call(*leaves, **options)
    return out, torch.autograd.grad(objective(out, seeds), leaves[:2])


def exact(problem: Problem, seeds: list[torch.Tensor], **options: Any) -> Any:
    """What `gradients` should return: in float64 from the operands as the products see them, nothing rounded."""
    hidden = problem.hidden.to(problem.weight.dtype).double()
    return gradients(Problem(hidden, problem.weight.double(), problem.labels), seeds, call=stored, **options)


def relative_norm(got: torch.Tensor, want: torch.Tensor) -> float:
    """‖got - want‖ / ‖want‖, and ‖got‖ where want is 0."""
    got, want = got.detach().double(), want.detach().double()
    norm = want.norm().item()
    return _bad_if_nan(((got - want).norm() / (norm if norm > 0 else 1.0)).item())


def value_error(got: torch.Tensor | None, want: torch.Tensor | None) -> float:
    """The largest error, relative to max(1, |value|); 0 for two results that are not there."""
    if got is None or want is None:
        return 0.0 if got is want else math.inf
    got, want = got.detach().double(), want.detach().double()
    error = (got - want).abs() / want.abs().clamp(min=1)
    return _bad_if_nan(error.max().item()) if error.numel() else 0.0


def _bad_if_nan(error: float) -> float:
    """``max(0.0, nan)`` is 0: NaN in a list of errors would look like a small one."""
    return math.inf if math.isnan(error) else error
