"""What the ranks of `megatron_worker` run, as data, and how they are started: without torch and megatron-core."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import pytest

from tests.torch.processes import forked, torchrun


@dataclasses.dataclass(frozen=True)
class Case:
    """One check of the worker, by name, on one model. ``tp`` 1 on two ranks is data parallelism over both."""

    name: str
    check: str
    tp: int
    model: tuple[tuple[str, Any], ...] = ()
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return self.name


def _case(check: str, tp: int, name: str, model: dict[str, Any], options: dict[str, Any]) -> Case:
    return Case(f"{check}, tp {tp}: {name}", check, tp, tuple(model.items()), tuple(options.items()))


MODELS = {
    "plain": {},
    "tied": dict(tied=True),
    "RMSNorm, SwiGLU, tied": dict(tied=True, modern=True),
    "MuP": dict(mup=True),
    "MuP, tied": dict(mup=True, tied=True),
    "MTP": dict(mtp=1),
    "MTP, tied, MuP": dict(mtp=1, tied=True, mup=True, entry="losses"),
    "Hybrid": dict(kind="hybrid"),
    "Hybrid, tied, MuP": dict(kind="hybrid", tied=True, mup=True, modern=True),
    "GPT in the context manager": dict(entry="wrapper"),
    "GPT in the context manager, MuP": dict(entry="wrapper", mup=True),
    "GPT in the context manager, MTP, tied, MuP": dict(entry="wrapper", mtp=2, tied=True, mup=True),
    "Hybrid, MTP": dict(kind="hybrid", mtp=1),
    "activations recomputed": dict(recompute="full"),
    "attention recomputed": dict(recompute="selective"),
    "frozen head": dict(frozen="output_layer"),
    "frozen embedding": dict(frozen="embedding"),
    "frozen, tied": dict(frozen="embedding", tied=True),
    "frozen below the head": dict(frozen="decoder embedding"),
    "bias": dict(bias=True),
    "bias, tied, MuP": dict(bias=True, tied=True, mup=True),
    "bias, Hybrid, MTP": dict(bias=True, kind="hybrid", mtp=1),
    "bias that nobody adds": dict(bias="skipped"),
    "checkpointed whole": dict(checkpoint="nonreentrant"),
    "checkpointed whole, reentrant": dict(checkpoint="reentrant"),
    "checkpointed whole, Hybrid": dict(checkpoint="nonreentrant", kind="hybrid"),
}
SEQUENCE_PARALLEL = ("plain", "tied", "MuP", "MTP, tied, MuP", "Hybrid", "Hybrid, tied, MuP", "frozen head", "bias")

OPTIONS = {
    "temperature": dict(temperature=1.3),
    "temperature per token": dict(temperature="token"),
    "temperature per sequence": dict(temperature="sequence"),
    "softcap": dict(logit_softcap=2.0),
    "labels out of vocabulary": dict(foreign=True),
    "padded vocabulary": dict(vocab_size=101, foreign=True),
    "some rows": dict(where="some", foreign=True),
    "rows by index": dict(where="index", foreign=True),
    "entropy as a metric": dict(entropy="metric"),
    "no entropy": dict(entropy=False),
    "cache": dict(cache_bytes=1 << 20),
    "candidates": dict(candidates=5),
    "everything": dict(
        temperature="token", vocab_size=101, foreign=True, where="some", cache_bytes=1 << 20, candidates=5
    ),
}

PARITY = [
    *(_case("parity", tp, name, model, {}) for tp in (1, 2) for name, model in MODELS.items()),
    *(_case("parity", 2, f"{name}, SP", MODELS[name] | dict(sp=True), {}) for name in SEQUENCE_PARALLEL),
    *(_case("parity", tp, name, {}, options) for tp in (1, 2) for name, options in OPTIONS.items()),
    _case("parity", 1, "no entropy, Hybrid", dict(kind="hybrid"), OPTIONS["no entropy"]),
    _case("parity", 2, "everything, SP", dict(sp=True, mup=True), OPTIONS["everything"]),
    _case("parity", 2, "everything, Hybrid, SP", dict(sp=True, kind="hybrid"), OPTIONS["everything"]),
]

HALF = dict(dtype="bfloat16")
HALF_PRECISION = [
    *(_case("half precision", tp, name, HALF | model, {}) for tp in (1, 2)
      for name, model in (("plain", {}), ("tied", dict(tied=True)), ("Hybrid, MuP", dict(kind="hybrid", mup=True)))),
    _case("half precision", 2, "SP, tied", HALF | dict(sp=True, tied=True), {}),
    _case("half precision", 2, "float16, SP", dict(dtype="float16", sp=True), {}),
]  # fmt: skip

# dhidden is not reduced, or reduced twice: the comparison must notice.
CONTROLS = [
    _case("reduction left out", 2, "plain", {}, {}),
    _case("reduction left out", 2, "Hybrid", dict(kind="hybrid"), {}),
    _case("reduction doubled", 2, "SP", dict(sp=True), {}),
]

# Three micro-batches into main_grad. Both data parallel (tp 1) and tensor parallel (tp 2).
TRAINING = [
    *(_case("main_grad", tp, name, model, options) for tp in (1, 2) for name, model, options in (
        ("plain", {}, {}),
        ("tied", dict(tied=True), {}),
        ("bias", dict(bias=True), {}),
        ("MTP", dict(mtp=1), {}),
        ("MTP, tied", dict(mtp=1, tied=True, entry="losses"), {}),
        ("Hybrid", dict(kind="hybrid"), {}),
        ("Hybrid, MTP", dict(kind="hybrid", mtp=1), {}),
        ("frozen head", dict(frozen="output_layer"), {}),
        ("not fused", {}, dict(fusion=False)),
        ("asked for", {}, dict(fusion=False, wgrad="main_grad")),
        ("gradients reduced meanwhile", dict(tied=True), dict(overlap_grad_reduce=True)),
        ("launched directly", {}, dict(direct=True, overlap_grad_reduce=True)),
        ("launched directly, MTP, tied", dict(mtp=1, tied=True, entry="losses"), dict(direct=True)),
    )),
    _case("main_grad", 2, "launched directly, SP, tied", dict(tied=True, sp=True), dict(direct=True)),
    _case("main_grad", 2, "SP, tied", dict(tied=True, sp=True), {}),
    *(_case("main_grad half precision", tp, name, HALF | model, {}) for tp in (1, 2)
      for name, model in (("plain", {}), ("tied", dict(tied=True)))),
    *(_case("optimizer", tp, "float32 main parameters", HALF, {}) for tp in (1, 2)),
]  # fmt: skip

BEHAVIOUR = [
    _case("megatron loss", 1, "GPT", {}, {}),
    _case("megatron loss", 2, "GPT", dict(tied=True, mup=True), {}),
    _case("parameter gather", 1, "GPT", {}, {}),
    _case("parameter gather", 1, "Hybrid", dict(kind="hybrid"), {}),
    *(_case("pipeline stages", tp, name, dict(tied=name == "tied", sp=tp == 2), {}) for tp in (1, 2)
      for name in ("untied", "tied")),
    _case("result", 1, "GPT", {}, {}),
    _case("float16 module", 1, "GPT", HALF, {}),
    _case("float16 module", 1, "Hybrid", HALF | dict(kind="hybrid"), {}),
    _case("hidden as it is", 1, "GPT", {}, {}),
    _case("further arguments", 1, "GPT", {}, {}),
    _case("threads", 1, "GPT", {}, {}),
    _case("restored", 1, "Hybrid", dict(kind="hybrid", mup=True), {}),
    _case("wrapped", 1, "GPT, MuP", dict(mup=True, layers=1), {}),
    _case("refusals", 1, "all", {}, {}),
]  # fmt: skip

# By name, what each message must say: the exception, the reason, what to do.
REFUSALS = {
    "another forward": r"NotImplementedError: .*class is Adapter.*turn off",
    "an output layer of another kind": r"NotImplementedError: .*class is Linear.*fp8_output_proj",
    "a replaced forward": r"RuntimeError: ColumnParallelLinear.forward has been replaced already",
    "gathered output": r"NotImplementedError: .*parallel_output=False.*runtime_gather_output=False",
    "gathered output, context manager": r"NotImplementedError: .*runtime_gather_output=False",
    "runtime_gather_output": r"NotImplementedError: gathered logits were asked for.*runtime_gather_output=False",
    "generation": r"NotImplementedError: generation .*leave output_processor out",
    "deferred weight gradient": r"NotImplementedError: defer_embedding_wgrad_compute .*turn it off",
    "logits capped by the model": r"NotImplementedError: .*_scale_logits .*1024 becomes 30; .*logit_softcap",
    "weights split further": r"NotImplementedError: .*gtp_remat ranks",
    "Megatron-FSDP": r"NotImplementedError: Megatron-FSDP .*use DistributedDataParallel",
    "no labels": r"ValueError: no labels: pass output_processor_context=dict\(labels=...\)",
    "labels of another shape": r"ValueError: labels \(32, 3\) must be \[b, s\] .*\(32, 3, 64\)",
    "flat labels": r"ValueError: labels \(96,\) must be \[b, s\]",
    "where of another shape": r"ValueError: where \(3,\) must have the tokens' shape \(3, 32\)",
    "where beyond the rows": r"ValueError: where holds row 96, and there are 96 rows",
    "temperature of another shape": r"ValueError: temperature \(5,\) must broadcast to the tokens' shape \(3, 32\)",
    "an option of the model": r"ValueError: bias, logit_scale, reduce_grad_hidden: set by the model",
    "an unknown option": r"TypeError: .*unknown option temprature \(did you mean temperature\?\)",
    "candidates of another shape": r"ValueError: candidates \(32, 3, 2\) must be .*labels \(3, 32\) before K",
    "wgrad and MTP": r"ValueError: wgrad='main_grad': multi-token prediction .*leave wgrad out",
    "wgrad and MTP, context manager": r"ValueError: wgrad='main_grad': multi-token prediction .*leave wgrad out",
    "labels to the model, MTP": r"ValueError: the model was called with labels \(3, 32\) inside fused_output_layer",
    "labels to the model": r"ValueError: the model was called with labels \(3, 32\) inside fused_output_layer",
    "nested": r"RuntimeError: .*replaced already, .*an enclosing fused_output_layer",
    "no output layer": r"NotImplementedError: Linear has no output_layer: .*last pipeline stage",
    "two output layers": r"NotImplementedError: ModuleDict has several .*output_layer, actor, critic: pass the one",
    "a pipeline stage": r"NotImplementedError: GPTModel has no output_layer: .*last pipeline stage",
    "a pipeline stage with an output layer": r"NotImplementedError: this HybridModel is a pipeline stage .*nullcontext",
}

# The losses that a model computes itself, by fused_losses.
LOSSES = [
    _case("losses", 1, "Hybrid, bias", dict(kind="hybrid", mtp=1, bias=True), dict(calculate_per_token_loss=True)),
    _case("losses", 2, "two depths, SP, tied, MuP, bias", dict(mtp=2, sp=True, tied=True, mup=True, bias=True), {}),
    _case("predictions dropped", 1, "GPT in the context manager", dict(entry="wrapper", mtp=1, layers=1), {}),
    _case("losses refused", 1, "all", {}, {}),
]
_MORE_LOSSES = [
    *(_case("losses", tp, "untied, bias", dict(mtp=1, bias=True), {}) for tp in (1, 2)),
    _case("losses", 2, "heads detached", dict(mtp=1), dict(mtp_detach_heads=True)),
    _case("losses", 2, "heads detached, tied", dict(mtp=1, tied=True), dict(mtp_detach_heads=True)),
    _case("losses", 2, "Hybrid, SP", dict(kind="hybrid", mtp=2, sp=True, tied=True), {}),
    _case("losses", 1, "context parallel, Hybrid", dict(kind="hybrid", cp=2, mtp=2, tied=True, bias=True), {}),
    _case("losses", 2, "activations recomputed", dict(mtp=1, recompute="full"), {}),
    *(
        _case("main_grad half precision", tp, "MTP, tied", HALF | dict(mtp=1, tied=True, entry="losses"), {})
        for tp in (1, 2)
    ),
]
REFUSED_LOSSES = {
    "no labels": r"NotImplementedError: the model was called without labels inside fused_losses.*output_processor",
    "labels of another shape": r"ValueError: labels \(32, 3\) must be \[b, s\] .*\(32, 3, 64\)",
    "an option of another kind": r"TypeError: fused_losses takes cache_bytes, .*, got temperature",
    "a negative cache": r"ValueError: cache_bytes .*-1",
    "gathered output": r"NotImplementedError: .*runtime_gather_output=False",
    "another use": r"AttributeError: \.float of logits that are not stored.*outside of fused_losses",
    "another function": r"AttributeError: softmax of logits that are not stored",
    "a largest logit before the loss": r"AttributeError: argmax, before a loss, of logits that are not stored",
    "nested": r"RuntimeError: .*replaced already.*fused_losses",
    "another forward": r"NotImplementedError: .*class is Adapter.*turn off",
}

README = [_case("readme", tp, "GPT", {}, {}) for tp in (1, 2)]

# Slow is what other models have together with more: without tensor parallelism also options that "everything" has, with
# it the models that sequence parallelism has too.
_ALONE = {
    "tied", "RMSNorm, SwiGLU, tied", "MuP", "MuP, tied", "MTP", "MTP, tied, MuP", "Hybrid",
    "GPT in the context manager", "GPT in the context manager, MuP", "Hybrid, MTP", "attention recomputed",
    "frozen head", "frozen embedding", "bias", "bias, tied, MuP", "checkpointed whole", "temperature",
    "temperature per token", "labels out of vocabulary", "padded vocabulary", "some rows", "cache", "candidates",
}  # fmt: skip
_ALONE_TP = {
    "tied", "MuP", "MuP, tied", "MTP", "MTP, tied, MuP", "Hybrid", "Hybrid, tied, MuP", "GPT in the context manager",
    "GPT in the context manager, MuP", "frozen head", "bias", "temperature per token", "padded vocabulary",
    "some rows",
}  # fmt: skip
_ALONE_TRAINING = {"tied", "bias", "MTP", "Hybrid"}
_COMPILED = _case("wrapped", 1, "compiled", dict(mup=True, layers=1), dict(compiles=True))  # 13 s on each rank
MORE = [_COMPILED, *_MORE_LOSSES] + [
    case
    for cases, tp, alone in ((PARITY, 1, _ALONE), (PARITY, 2, _ALONE_TP), (TRAINING, 1, _ALONE_TRAINING))
    for case in cases
    if case.tp == tp and case.check in ("parity", "main_grad") and case.name.split(": ")[1] in alone
]
_EVERY = [*PARITY, *HALF_PRECISION, *CONTROLS, *TRAINING, *BEHAVIOUR, *LOSSES, *README]
ALL = [case for case in _EVERY if case not in MORE]

# For two GPUs, NCCL.
_NAMES_ON_GPUS = (
    "plain", "tied", "RMSNorm, SwiGLU, tied", "Hybrid, tied, MuP", "GPT in the context manager, MuP", "everything",
    "plain, SP", "tied, SP", "MTP, tied, MuP, SP", "Hybrid, SP", "everything, SP", "SP, tied", "MTP",
    "gradients reduced meanwhile", "float32 main parameters", "two depths, SP, tied, MuP, bias",
)  # fmt: skip
ON_GPUS = [
    case
    for case in [*PARITY, *HALF_PRECISION, *CONTROLS, *TRAINING, *LOSSES]
    if case.tp == 2 and (case.name.split(": ")[1] in _NAMES_ON_GPUS or case in CONTROLS)
]
# With each rank seeing all GPUs, as under torchrun.
SEEING_ALL_GPUS = [case for case in PARITY if case.name in ("parity, tp 2: plain", "parity, tp 2: tied, SP")]


WORKER = "tests.torch.megatron_worker"


def run_ranks(
    directory: pathlib.Path, table: str, *, ranks: int, seconds: float, gpus: str | None = None
) -> dict[str, Any]:
    """The results of the cases of ``megatron_cases.<table>``, by name, and any failure under "failure".

    Args:
        directory: a new one.
        table: which cases.
        ranks: how many processes.
        seconds: after which they are ended.
        gpus: "own" shows each rank one GPU, "all" shows it all of them; None: CPU.
    """
    directory.mkdir(parents=True)
    command = ["-m", WORKER, str(directory), table]
    told = {"JAX_PLATFORMS": "cpu" if gpus is None else "cuda,cpu", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    if gpus is None:
        failure = forked(ranks, command, directory / "logs", seconds, **told)
    else:
        failure = torchrun(ranks, command, directory / "logs", seconds, own_gpus=gpus == "own", **told)
    results = directory / "results"
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    outcome = {line["case"]: line["result"] for line in reversed(lines)}  # the first of the ranks that raised
    if failure is not None:
        outcome["failure"] = failure
    return outcome


def of(outcome: dict[str, Any], case: Case) -> dict[str, Any]:
    """The result of a case. One that raised ended the ranks, and alone says why."""
    if case.name not in outcome:
        pytest.skip("the ranks ended before this case: test_the_ranks_end_well and the case that ended them say why")
    assert "raised" not in outcome[case.name], outcome[case.name]["raised"]
    return outcome[case.name]
