"""The checks that compare numbers: outputs and all parameters' gradients, by the op and by Megatron's own logits."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from torch.utils.checkpoint import checkpoint

from lce_torch_bridge.megatron import fused_losses, fused_output_layer, output_processor
from tests.torch import megatron_models
from tests.torch.executor import launched_directly
from tests.torch.megatron_models import VOCAB, Batch
from tests.torch.problem import relative_norm, value_error

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
        yield (*out[:2], getattr(out, "candidate_logprobs", out[-1])) if "candidates" in options else out[:2]


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


def worst(got: Gradients, want: Gradients) -> tuple[float, str]:
    """The largest relative error of a gradient, and whose it is."""
    assert got.keys() == want.keys(), f"gradients on one side only: {sorted(got.keys() ^ want.keys())}"
    return max((relative_norm(got[name], want[name]), name) for name in want)


def joined(grads: Gradients) -> torch.Tensor:
    """All gradients as one vector."""
    return torch.cat([grads[name].double().flatten() for name in sorted(grads)])


type Result = dict[str, float | bool | str]
type Options = dict[str, Any]

MICRO_BATCHES = 3
FIELDS = ("logprobs", "entropy", "candidates")  # the last if it is asked for


def parity(tp: int, model: Options, options: Options) -> Result:
    it = subject(tp, **model)
    batch, options = draw(**options)
    got, want = measure(fused, it, batch, **options), measure(stock, it, batch, **options)
    trainable = {name for name, p in it.model.named_parameters() if p.requires_grad}
    return compared(got, want) | {
        "ranks agree": ranks_agree(got[0], it.model.tp_group),
        "every parameter": got[1].keys() == trainable,
    }


def compared(got: tuple[Outputs, Gradients], want: tuple[Outputs, Gradients]) -> Result:
    pairs = zip(FIELDS, got[0], want[0], strict=False)
    values: Result = {name: value_error(a, b) for name, a, b in pairs if b is not None}
    error, parameter = worst(got[1], want[1])
    return values | {"gradient": error, "worst": parameter}


def ranks_agree(outputs: Outputs, group: dist.ProcessGroup) -> bool:
    """Whether all ranks of the group hold the same bits."""
    mine = torch.cat([out.flatten() for out in outputs if out is not None])
    return all(torch.equal(mine, other) for other in whole(mine[None], group))


def reduction_left_out(tp: int, model: Options, _options: Options) -> Result:
    return with_reduction(False, tp, model)


def reduction_doubled(tp: int, model: Options, _options: Options) -> Result:
    return with_reduction(True, tp, model)


def with_reduction(allreduce_dgrad: bool, tp: int, model: Options) -> Result:
    """Parity, with the layer's flag for the reduction of dhidden inverted."""
    it = subject(tp, **model)
    batch, _ = draw()
    want = measure(stock, it, batch)
    assert it.model.output_layer.allreduce_dgrad != allreduce_dgrad
    it.model.output_layer.allreduce_dgrad = allreduce_dgrad
    return compared(measure(fused, it, batch), want)


def half_precision(tp: int, model: Options, _options: Options) -> Result:
    """The errors of both ways against float64: of the whole model, and of the head alone on its hidden states."""
    it = subject(tp, **model)
    batch, _ = draw()
    true = measure(stock, oracle(it, tp, **model), batch)
    result: Result = {}
    for name, way in (("fused", fused), ("stock", stock)):
        with watched(it.model.output_layer) as seen:
            outputs, grads = measure(way, it, batch)
        pairs = zip(FIELDS, outputs, true[0], strict=False)
        result |= {f"{field} {name}": relative_norm(a, b) for field, a, b in pairs}
        result |= against(name, grads, true[1])
        exact = exact_head(it, batch, seen["hidden"])
        found = [*outputs, seen["dhidden"]] + [grads[key] for key in grads if key == "output_layer.weight"]
        pairs = zip((*FIELDS[:2], "dhidden", "dweight"), found, exact, strict=False)
        result |= {f"head's {field} {name}": relative_norm(a, b) for field, a, b in pairs}
    return result


@contextlib.contextmanager
def watched(layer: torch.nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """The hidden states that reach the layer, and their gradient."""
    seen = {}

    def note(_module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        seen["hidden"] = inputs[0].detach().clone()
        inputs[0].register_hook(lambda grad: seen.update(dhidden=grad.clone()))

    handle = layer.register_forward_pre_hook(note)
    yield seen
    handle.remove()


def exact_head(it: Subject, batch: Batch, hidden: torch.Tensor) -> list[torch.Tensor]:
    """In float64: logprobs, entropy, this rank's dhidden and, if the weight has no other use, its dweight."""
    config, group = it.model.config, it.model.tp_group
    tied = it.model.share_embeddings_and_output_weights
    weight = it.model.shared_embedding_or_output_weight() if tied else it.model.output_layer.weight
    hidden = whole(hidden, group) if config.sequence_parallel else hidden
    hidden, weight = (x.double().requires_grad_() for x in (hidden, whole(weight.detach(), group)))
    multiplier = config.mup_output_mult if config.use_mup else 1.0
    logp = (multiplier * hidden @ weight.t()).transpose(0, 1).log_softmax(-1)
    outputs = logp.gather(-1, batch.labels[..., None])[..., 0], -(logp.exp() * logp).sum(-1)
    objective(batch, outputs).backward()
    dhidden = hidden.grad.chunk(group.size())[group.rank()] if config.sequence_parallel else hidden.grad
    return [*outputs, dhidden, *([] if tied else [weight.grad.chunk(group.size())[group.rank()]])]


def whole(shard: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    shard = shard.contiguous()
    shards = [torch.empty_like(shard) for _ in range(group.size())]
    dist.all_gather(shards, shard, group=group)
    return torch.cat(shards)


def against(way: str, grads: Gradients, true: Gradients) -> Result:
    """The error of all gradients together, and of that of the weight in the head."""
    head = "output_layer.weight" if "output_layer.weight" in true else "embedding.word_embeddings.weight"
    return {
        f"gradient {way}": relative_norm(joined(grads), joined(true)),
        f"weight's gradient {way}": relative_norm(grads[head], true[head]),
    }


def main_grad(tp: int, model: Options, options: Options) -> Result:
    """``main_grad`` after three micro-batches, against Megatron's own layers with no accumulation fused."""
    overlap = {"overlap_grad_reduce": options.pop("overlap_grad_reduce", False)}
    direct = options.pop("direct", False) and not torch.cuda.is_available()
    it = in_training(subject(tp, fusion=options.pop("fusion", True), **model), **overlap)
    with launched_directly() if direct else contextlib.nullcontext():
        got = accumulated(fused, it, **options)
    want = accumulated(stock, in_training(subject(tp, **model), **overlap))
    error, parameter = worst(got, want)
    inner = it.model.module
    head = inner.shared_embedding_or_output_weight() if model.get("tied") else inner.output_layer.weight
    return {
        "gradient": error,
        "worst": parameter,
        "added to main_grad": getattr(head, "grad_added_to_main_grad", False),
        "no grad left": all(p.grad is None for p in it.model.parameters()),
    }


def in_training(it: Subject, **options: Any) -> Subject:
    it.model = megatron_models.data_parallel(it.model, **options)
    return it


def accumulated(way: Way, it: Subject, **options: Any) -> Gradients:
    """``main_grad`` of all parameters after three micro-batches, reduced as Megatron does it."""
    it.model.zero_grad_buffer()
    for step in range(MICRO_BATCHES):
        batch, _ = draw(seed=step + 10 * dist.get_rank(it.model.dp_group))
        last = step == MICRO_BATCHES - 1
        with contextlib.nullcontext() if last else it.model.no_sync(), way(it, batch, **options) as outputs:
            objective(batch, outputs).backward()
    finalize_model_grads([it.model])
    return {bare(name): p.main_grad.clone() for name, p in it.model.named_parameters() if p.requires_grad}


def bare(name: str) -> str:
    """A parameter's name without those of the wrappers."""
    return name.replace("module.", "")


def main_grad_half_precision(tp: int, model: Options, _options: Options) -> Result:
    it = subject(tp, fusion=True, **model)
    exact = in_training(oracle(it, tp, **model))
    true = accumulated(stock, exact)
    got = accumulated(fused, in_training(it))
    want = accumulated(stock, in_training(subject(tp, **model)))
    return against("fused", got, true) | against("stock", want, true)


def optimizer(tp: int, model: Options, _options: Options) -> Result:
    """How far three steps on float32 main parameters take the weights from where a float64 model takes them."""
    it = subject(tp, fusion=True, **model)
    exact = oracle(it, tp, **model)
    true = trained(stock, in_training(exact))
    got = trained(fused, in_training(it))
    want = trained(stock, in_training(subject(tp, **model)))
    return against("fused", got, true) | against("stock", want, true)


def trained(way: Way, it: Subject) -> Gradients:
    """The change of the main parameters."""
    weights = {bare(name): p for name, p in it.model.named_parameters()}
    start = {name: p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True) for name, p in weights.items()}
    main = {name: p.clone() for name, p in start.items()}
    descent = torch.optim.SGD(main.values(), lr=1e-3, momentum=0.9)
    for _ in range(3):
        grads = accumulated(way, it)
        for name, p in main.items():
            p.grad = grads[name].to(p.dtype)
        descent.step()
        with torch.no_grad():
            for name, p in weights.items():
                p.copy_(main[name].bfloat16())
    return {name: main[name] - start[name] for name in main}
