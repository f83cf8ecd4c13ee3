"""What one rank runs, and the checks of behaviour: ``torchrun ... -m tests.torch.megatron_worker DIRECTORY TABLE``.

The checks measure; the tests judge. Rank 0 writes one line of JSON per case of the table: the largest of each number
over the ranks, whether each flag holds on all of them, and its own texts. A case that raises ends the run, because the
ranks may then be out of step with each other: each rank that it raises on writes what.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import datetime
import json
import logging
import math
import os
import pathlib
import re
import sys
import threading
import traceback
import warnings
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_batch_on_this_cp_rank

from lce_torch_bridge import LogprobOutput, linear_logprobs
from lce_torch_bridge.megatron import _output_layer, fused_output_layer, output_processor
from tests.torch import executor, megatron_cases, megatron_checks, megatron_losses, megatron_models
from tests.torch.megatron_checks import (
    Options,
    Result,
    Subject,
    call,
    compared,
    draw,
    fused,
    in_training,
    measure,
    stock,
    subject,
    worst,
)
from tests.torch.megatron_losses import labels_to_the_model, message
from tests.torch.problem import value_error

README = pathlib.Path(__file__).parents[2] / "README.md"


def parameter_gather(tp: int, model: Options, _options: Options) -> Result:
    """A distributed optimizer leaves each rank its share of the weights; hooks gather the rest, module by module."""
    options = {"use_distributed_optimizer": True, "overlap_param_gather": True, "overlap_grad_reduce": True}
    options["align_param_gather"] = True  # a module's hook starts its own gather, not the next module's
    it = in_training(subject(tp, **model), **options, bucket_size=1)
    batch, _ = draw()
    it.model.disable_forward_pre_hook(param_sync=False)
    with torch.no_grad(), fused(it, batch) as outputs:
        want = [out.clone() for out in outputs]
    it.model.enable_forward_pre_hook()

    def after_a_step() -> list[torch.Tensor]:
        for group in it.model.bucket_groups:
            group.param_gather_dispatched = False
            for bucket in group.buckets:
                shards = bucket.param_data.chunk(dist.get_world_size(it.model.dp_group))
                for rank, shard in enumerate(shards):
                    if rank != dist.get_rank(it.model.dp_group):
                        shard.fill_(torch.nan)
        with torch.no_grad(), fused(it, batch) as outputs:
            return list(outputs)

    with torch.no_grad():
        got = after_a_step()
        head = it.model.remove_forward_pre_hook_handles[it.model.module.output_layer]
        head.remove()
        unhooked = after_a_step()
    return {
        "same bits": all(torch.equal(a, b) for a, b in zip(got, want, strict=True)),
        "noticed without the hook": bool(unhooked[0].isnan().any()),
    }


def pipeline_stages(tp: int, model: Options, _options: Options) -> Result:
    """The first stage never calls the processor; the last has no embedding, and its own copy of a tied weight."""
    batch, _ = draw()
    hidden = call(subject(tp, stage="first", **model).model, batch)
    it = subject(tp, stage="last", **model)
    measured = []
    for way in (fused, stock):
        received = hidden.detach().requires_grad_()
        it.model.set_input_tensor([received])
        outputs, grads = measure(way, it, batch)
        measured.append((outputs, grads | {"received": received.grad}))
    return compared(*measured) | {"hidden": str(tuple(hidden.shape))}


def result(tp: int, model: Options, _options: Options) -> Result:
    it = subject(tp, **model)
    batch, _ = draw()
    out = call(it.model, batch, stats=True, mean_logit=True, temperature=0.7)
    z = it.model(*batch.inputs) / 0.7
    want = {"lse": z.logsumexp(-1), "max_logit": z.amax(-1), "min_logit": z.amin(-1), "mean_logit": z.mean(-1)}
    want["sum_p_squared"] = z.softmax(-1).square().sum(-1)
    without = call(it.model, batch, entropy=False)
    accumulating = call(subject(tp, fusion=True, **model).model, batch)  # not in DDP: there is no main_grad
    return {
        "without DDP": torch.equal(accumulating.logprobs, without.logprobs),
        "type": type(out).__qualname__,
        "shapes": str({tuple(field.shape) for field in out[:6]}),
        "dtypes": str({field.dtype for field in out[:6]}),
        "contiguous": all(field.is_contiguous() for field in out[:6]),
        "absent": str([name for name, field in without._asdict().items() if field is None]),
        "error": max(value_error(getattr(out, name), field) for name, field in want.items()),
    }


def float16_module(tp: int, model: Options, _options: Options) -> Result:
    """Float16Module casts outputs, and rebuilds tuples as plain ones."""
    it = subject(tp, **model)
    batch, _ = draw()
    with fused(it, batch) as want:
        it = in_training(it)
    with fused(it, batch) as got:
        outer = it.model(*batch.inputs) if it.wrapper else call(it.model, batch)
    return {"same bits": all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), "type": type(outer).__name__}


def hidden_as_it_is(tp: int, model: Options, _options: Options) -> Result:
    """The op receives the decoder's own hidden states: [s, b, h], neither copied nor transposed."""
    it = subject(tp, **model)
    batch, _ = draw()
    seen: dict[str, torch.Tensor] = {}
    it.model.decoder.register_forward_hook(lambda _module, _inputs, out: seen.update(decoder=out))

    def spy(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> LogprobOutput:
        seen.update(op=hidden)
        return linear_logprobs(hidden, *args, **kwargs)

    _output_layer.linear_logprobs = spy
    try:
        call(it.model, batch)
    finally:
        _output_layer.linear_logprobs = linear_logprobs
    return {
        "same memory": seen["op"].data_ptr() == seen["decoder"].data_ptr(),
        "shape": str(tuple(seen["op"].shape)),
        "contiguous": seen["op"].is_contiguous(),
    }


def further_arguments(tp: int, model: Options, _options: Options) -> Result:
    """Other arguments reach the model; the processor ignores those that it does not know; labels may be the model's."""
    it = subject(tp, **model)
    batch, _ = draw()
    want = call(it.model, batch)
    seen: Options = {}

    def newer(**kwargs: Any) -> LogprobOutput:
        seen.update(kwargs)
        return output_processor(**kwargs, an_argument_of_tomorrow=1)

    loss_mask = torch.ones_like(batch.labels)
    got = it.model(
        *batch.inputs, labels=batch.labels, loss_mask=loss_mask, extra_block_kwargs={}, output_processor=newer
    )
    return {
        "same bits": torch.equal(got.logprobs, want.logprobs) and torch.equal(got.entropy, want.entropy),
        "passed on": seen["loss_mask"] is loss_mask and seen["labels"] is batch.labels,
    }


def threads(tp: int, model: Options, _options: Options) -> Result:
    """Two threads call one model, and are in its output layer at the same time; a third one gets logits there."""
    it = subject(tp, **model)
    batches = [draw(seed)[0] for seed in (0, 1)]
    want = [call(it.model, batch) for batch in batches]
    hidden = torch.ones(4, 1, it.model.config.hidden_size)
    logits, _ = it.model.output_layer(hidden)
    inside, turn, decoder = threading.Barrier(3), threading.Lock(), it.model.decoder
    # Megatron's tracker of random states raises where two threads are in it. A hook's result would replace the inputs.
    decoder.register_forward_pre_hook(lambda *_: turn.acquire() is None or None)
    decoder.register_forward_hook(lambda *_: turn.release(), always_call=True)
    it.model.output_layer.register_forward_pre_hook(lambda *_: inside.wait() is None or None)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(it.model.output_layer, hidden), *(pool.submit(call, it.model, x) for x in batches)]
        for future in futures:  # the others would wait for one that raised
            future.add_done_callback(lambda done: done.exception() and inside.abort())
    errors = [error for future in futures if isinstance(error := future.exception(), Exception)]
    if errors:
        raise ExceptionGroup("of the threads", errors)
    (plain, _), *got = (future.result() for future in futures)
    same = [torch.equal(one.logprobs, other.logprobs) for one, other in zip(got, want, strict=True)]
    return {"same bits": all(same), "logits": torch.equal(plain, logits)}


def readme(tp: int, model: Options, _options: Options) -> Result:
    """What README's Megatron block says a user writes, in a micro-batch with and in one without response tokens.

    `tests.site.test_docs` runs the block as a whole. It also checks what README says of the names in it:
    ``old_logprobs`` are the same call without gradients, before the update, and ``get_batch_on_this_cp_rank`` cuts
    labels and masks as it cuts the tokens.
    """
    it = subject(tp, **model)
    batch, drawn = draw(where="some")
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (block,) = (code for code in blocks if "fused_output_layer" in code)
    written, advantages = block[block.index("labels = ") :], batch.seeds[0]
    tokens, positions, _ = batch.inputs
    batch = batch._replace(mask=None, labels=tokens.roll(-1, dims=1))

    def run(mask: torch.Tensor) -> tuple[Options, dict[str, torch.Tensor]]:
        with torch.no_grad():
            old, *_ = call(it.model, batch, temperature=0.7, where=mask)
        names: Options = dict(
            torch=torch, model=it.model, tokens=tokens, positions=positions,
            fused_output_layer=fused_output_layer, response_mask=mask, old_logprobs=old, advantages=advantages,
        )  # fmt: skip
        it.model.zero_grad()
        exec(written, names)
        return names, {name: p.grad.clone() for name, p in it.model.named_parameters()}

    mask = drawn["where"]
    names, grads = run(mask)
    it.model.zero_grad()
    with stock(it, batch, temperature=0.7) as (logprobs, entropy):
        ratio = torch.exp(logprobs - logprobs.detach())
        want = -(ratio * advantages + 0.001 * entropy)[mask].mean()
        want.backward()
    error, parameter = worst(grads, {name: p.grad.clone() for name, p in it.model.named_parameters()})
    without, zero = run(torch.zeros_like(mask))

    per_token = {"tokens": batch.inputs[0], "labels": batch.labels, "response_mask": mask, "advantages": advantages}
    where = torch.arange(mask.shape[1], device=mask.device).expand(mask.shape).contiguous()
    part = get_batch_on_this_cp_rank(
        {**per_token, "where": where, "cu_seqlens": None}, is_hybrid_cp=False, cp_group=dist.group.WORLD
    )
    cut = [torch.equal(part[name], whole.gather(1, part["where"])) for name, whole in per_token.items()]
    return {
        "loss": value_error(names["loss"], want),
        "gradient": error,
        "worst": parameter,
        "first ratio is 1": torch.equal(names["logprobs"], names["old_logprobs"]),
        "without tokens: loss": float(without["loss"].abs().nan_to_num(nan=math.inf)),
        "without tokens: gradient": max(float(grad.norm().nan_to_num(nan=math.inf)) for grad in zero.values()),
        "cut alike": all(cut) and part["labels"].shape[1] == mask.shape[1] // dist.get_world_size(),
    }


def restored(tp: int, model: Options, _options: Options) -> Result:
    """Model and output layer are restored, also after an exception."""
    it = subject(tp, **model)
    batch, _ = draw()
    before = it.model(*batch.inputs)
    kept = set(vars(it.model)), set(vars(it.model.output_layer))
    with fused_output_layer(it.model, batch.labels):
        inside = it.model(*batch.inputs)
    try:
        with fused_output_layer(it.model, batch.labels):
            raise KeyError
    except KeyError:
        after = it.model(*batch.inputs)
    return {
        "shape": str(tuple(inside.logprobs.shape)),
        "dtype": str(inside.logprobs.dtype),
        "as before": kept == (set(vars(it.model)), set(vars(it.model.output_layer))),
        "same bits": torch.equal(before, after),
    }


class Delegating(torch.nn.Module):
    """Passes attributes on to the inner module, as torch.compile's module does."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name == "inner" else getattr(self.inner, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def wrapped(tp: int, model: Options, options: Options) -> Result:
    """In torch.compile, in DistributedDataParallel around that, and in a wrapper of the user's own."""
    it = subject(tp, **model)
    compiled = torch.compile(it.model, backend="eager")
    wrappers = torch.nn.parallel.DistributedDataParallel(compiled), Delegating(it.model)
    # Compiling takes seconds, so it is done once, if at all; the compiled model gets other labels each time.
    stance = "default" if options.get("compiles") else "force_eager"
    measured = [in_wrapper(it, compiled, seed, stance) for seed in (0, 1)]
    measured += [in_wrapper(it, outer, 2, "force_eager") for outer in wrappers]
    return {
        "logprobs": max(fused for fused, _, _ in measured),
        "logits after": max(after for _, after, _ in measured),
        "labels refused": all("called with labels" in said for _, _, said in measured),
    }


def in_wrapper(it: Subject, outer: Any, seed: int, stance: str) -> tuple[float, float, str]:
    """The errors of the outputs inside and of the logits afterwards, and the message for labels given to the model."""
    batch, _ = draw(seed=seed)
    with torch.no_grad(), torch.compiler.set_stance(stance):
        with stock(it, batch) as want, fused_output_layer(outer, batch.labels):
            error = max(map(value_error, outer(*batch.inputs)[:2], want))
        after = value_error(outer(*batch.inputs), it.model(*batch.inputs))
    with torch.compiler.set_stance("force_eager"):
        return error, after, message(lambda: labels_to_the_model(outer, batch))


def run(case: megatron_cases.Case) -> Result:
    name = case.check.replace(" ", "_")
    check = globals().get(name) or getattr(megatron_checks, name, None) or getattr(megatron_losses, name)
    mine = check(case.tp, dict(case.model), dict(case.options))
    results: list[Result] = [{}] * dist.get_world_size()
    dist.all_gather_object(results, mine)
    return {key: merged([result[key] for result in results]) for key in mine}


def merged(values: list[Any]) -> Any:
    if isinstance(values[0], bool):
        return all(values)
    return max(values) if isinstance(values[0], float) else values[0]


class Refused(logging.Handler):
    """Raises an error where the packages log a warning."""

    def emit(self, record: logging.LogRecord) -> None:
        raise AssertionError(f"logged: {record.getMessage()}")


def main() -> None:
    directory, table = pathlib.Path(sys.argv[1]), sys.argv[2]
    warnings.filterwarnings("error", module=r"lce_(jax|torch_bridge)")
    rank = int(os.environ["LOCAL_RANK"])
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(rank % torch.cuda.device_count())  # 0 if each rank sees only its own
    else:
        for name in ("lce_jax", "lce_torch_bridge"):
            logging.getLogger(name).addHandler(Refused(logging.WARNING))
    dist.init_process_group("nccl" if gpu else "gloo", timeout=datetime.timedelta(seconds=60))
    megatron_models.prepare()
    # Megatron makes a dozen groups for each size, and each group of gloo's has a thread that polls until the end.
    for case in sorted(getattr(megatron_cases, table), key=lambda case: (case.tp, dict(case.model).get("cp", 1))):
        try:
            with contextlib.nullcontext() if gpu else executor.in_float64():
                result = run(case)
        except Exception:
            result = {"raised": f"on rank {rank}: {traceback.format_exc()}"}
        if rank == 0 or "raised" in result:
            with open(directory / "results", "a") as file:
                file.write(json.dumps({"case": case.name, "result": result}) + "\n")
        if "raised" in result:
            os._exit(1)  # not through exit handlers, which may wait for the other ranks
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
