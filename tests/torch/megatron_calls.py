"""A Megatron model's log-probability and entropy, by its logits and by the op, and how far the two are apart."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from torch.utils.checkpoint import checkpoint

from lce_torch_bridge.megatron import fused_losses, fused_output_layer, output_processor
from tests.torch import megatron_models
from tests.torch.megatron_models import VOCAB, Batch

type Outputs = tuple[torch.Tensor | None, ...]  # logprobs, entropy, and candidates if they are asked for
type Gradients = dict[str, torch.Tensor]
type Way = Callable[..., contextlib.AbstractContextManager[Outputs]]


@dataclasses.dataclass
class Subject:
    """A model, and how it is called."""

    model: Any  # perhaps inside DDP
    wrapper: bool  # fused_output_layer instead of output_processor
    checkpoint: str | None  # of the whole model: "reentrant", "nonreentrant"
    losses: bool = False  # output_processor inside of fused_losses


def subject(
    tp: int, *, entry: str = "processor", frozen: str = "", checkpoint: str | None = None, **options: Any
) -> Subject:
    model = megatron_models.build(tp=tp, **options)
    for name in frozen.split():
        getattr(model, name).requires_grad_(False)
    return Subject(model, entry == "wrapper" or options.get("kind") == "hybrid", checkpoint, entry == "losses")


def oracle(it: Subject, tp: int, **options: Any) -> Subject:
    """The same model with the same weights in float64."""
    exact = subject(tp, **{**options, "dtype": "float64"})
    with torch.no_grad():
        for ours, theirs in zip(it.model.parameters(), exact.model.parameters(), strict=True):
            theirs.copy_(ours)
    return exact


def call(model: Any, batch: Any, *, arguments: dict[str, Any] | None = None, **context: Any) -> Any:
    """The model with the processor, as a user writes it."""
    return model(
        *batch.inputs, output_processor=output_processor, output_processor_context={"labels": batch.labels} | context,
        **arguments or {},
    )  # fmt: skip


def draw(seed: int = 0, *, foreign: bool = False, **options: Any) -> tuple[Batch, dict[str, Any]]:
    """A batch, and the options with their arrays drawn."""
    batch = megatron_models.batch(seed, foreign=foreign, vocab_size=options.get("vocab_size", VOCAB))
    generator = torch.Generator().manual_seed(seed + 1)
    shape, device = batch.labels.shape, batch.labels.device
    if "where" in options:
        mask = (torch.rand(shape, generator=generator) < 0.4).to(device)
        options["where"] = mask if options["where"] == "some" else mask.flatten().nonzero()[:, 0]
    if "candidates" in options:  # some of them none, out of vocabulary, or the label
        several = (*shape, options["candidates"])
        ids = torch.randint(-3, VOCAB + 3, several, generator=generator).to(device)
        ids[..., 0] = batch.labels
        options["candidates"] = ids
        seed = torch.randn(several, generator=generator, dtype=batch.seeds[0].dtype).to(device)
        batch = batch._replace(seeds=(*batch.seeds, seed))
    if isinstance(options.get("temperature"), str):
        drawn = shape if options["temperature"] == "token" else (shape[0], 1)
        options["temperature"] = (0.5 + torch.rand(drawn, generator=generator)).to(device)
    return batch, options


@contextlib.contextmanager
def stock(it: Subject, batch: Batch, **options: Any) -> Iterator[Outputs]:
    """Whole logits on every rank, then plain PyTorch in float32 (or float64)."""
    logits = gather_from_tensor_model_parallel_region(it.model(*batch.inputs))
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    cap, temperature = options.get("logit_softcap"), options.get("temperature", 1.0)
    if cap is not None:
        z = cap * torch.tanh(z / cap)
    z = z / (temperature[..., None] if isinstance(temperature, torch.Tensor) else temperature)
    z = z[..., : options.get("vocab_size")]
    logp = z.log_softmax(-1)
    owned = (batch.labels >= 0) & (batch.labels < logp.shape[-1])
    logprobs = logp.gather(-1, batch.labels.where(owned, 0)[..., None])[..., 0]
    lse = z.logsumexp(-1)
    foreign = lse.detach() - lse  # the value is 0, the gradient that of -lse
    logprobs = torch.where(owned, logprobs, foreign)
    entropy = -(logp.exp() * logp).sum(-1)
    of_ids, ids = None, options.get("candidates")
    if ids is not None:
        there = (ids >= 0) & (ids < logp.shape[-1])
        of_ids = logp.gather(-1, ids.where(there, 0)).where(there, 0)
    if "where" in options:
        kept = torch.zeros_like(owned)
        kept.view(-1)[options["where"].view(-1)] = True
        logprobs, entropy = logprobs.where(kept, 0), entropy.where(kept, 0)
        of_ids = None if of_ids is None else of_ids.where(kept[..., None], 0)
    entropy = {"metric": entropy.detach(), False: None}.get(options.get("entropy", True), entropy)
    yield (logprobs, entropy) if of_ids is None else (logprobs, entropy, of_ids)


@contextlib.contextmanager
def fused(it: Subject, batch: Batch, **options: Any) -> Iterator[Outputs]:
    """The same through the op, as a user writes it. The block is the caller's, to run the backward pass in."""
    call, inside = it.model, contextlib.nullcontext()
    if it.wrapper:
        inside = fused_output_layer(it.model, batch.labels, **options)
    else:
        inside = fused_losses(it.model) if it.losses else inside

        def call(*inputs: torch.Tensor) -> Any:
            context = {"labels": batch.labels, **options}
            return it.model(*inputs, output_processor=output_processor, output_processor_context=context)

    if it.checkpoint is not None:
        call = checkpointed(call, reentrant=it.checkpoint == "reentrant")
    with inside:
        out = call(*batch.inputs)
        found = (
            (*out[..., :2].unbind(-1), out[..., 2:])
            if it.wrapper
            else (*out[:2], getattr(out, "candidate_logprobs", out[-1]))
        )
        yield found if "candidates" in options else found[:2]


def checkpointed(call: Callable[..., Any], *, reentrant: bool) -> Callable[..., Any]:
    """All of the call under an activation checkpoint. A reentrant one needs an input with a gradient, and tensors."""

    def run(_anchor: torch.Tensor, *inputs: torch.Tensor) -> Any:
        out = call(*inputs)
        return out if isinstance(out, torch.Tensor) else tuple(field for field in out if field is not None)

    anchor = torch.zeros(1, requires_grad=True, device=torch.cuda.current_device())
    return lambda *inputs: checkpoint(run, anchor, *inputs, use_reentrant=reentrant)


def objective(batch: Batch, outputs: Outputs) -> torch.Tensor:
    pairs = zip(batch.seeds, outputs, strict=True)
    return sum((seed * out).sum() for seed, out in pairs if out is not None and out.requires_grad)


def measure(way: Way, it: Subject, batch: Batch, **options: Any) -> tuple[Outputs, Gradients]:
    """The outputs, and the gradient of every parameter that has one."""
    it.model.zero_grad()
    with way(it, batch, **options) as outputs:
        objective(batch, outputs).backward()
    grads = {name: p.grad.clone() for name, p in it.model.named_parameters() if p.grad is not None}
    return tuple(None if out is None else out.detach() for out in outputs), grads


def value_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest error, relative to max(1, |value|)."""
    return finite(((got - want).abs() / want.abs().clamp(min=1)).max())


def relative_norm(got: torch.Tensor, want: torch.Tensor) -> float:
    """‖got - want‖ / ‖want‖, and ‖got‖ where want is 0."""
    got, want = got.double(), want.double()
    norm = float(want.norm())
    return finite((got - want).norm()) / (norm if norm > 0 else 1.0)


def finite(error: torch.Tensor) -> float:
    """NaN becomes infinity, because a maximum would pass over it."""
    return float(error) if error.isfinite() else math.inf


def worst(got: Gradients, want: Gradients) -> tuple[float, str]:
    """The largest relative error of a gradient, and whose it is."""
    assert got.keys() == want.keys(), f"gradients on one side only: {sorted(got.keys() ^ want.keys())}"
    return max((relative_norm(got[name], want[name]), name) for name in want)


def joined(grads: Gradients) -> torch.Tensor:
    """All gradients as one vector."""
    return torch.cat([grads[name].double().flatten() for name in sorted(grads)])
