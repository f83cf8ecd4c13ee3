"""Compares trainers and adapters with deferred logits and without, in the same steps; prints a line of JSON per case.

``python -m examples.frameworks.deferred_training_worker [trl] [peft] [trainer] [hooks]``, in an environment with
transformers, trl, peft and accelerate.
"""

from __future__ import annotations

import os

os.environ.update(JAX_PLATFORMS="cpu", HF_HUB_OFFLINE="1", ACCELERATE_USE_CPU="true")

import contextlib
import copy
import dataclasses
import io
import itertools
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import datasets
import peft
import torch
import transformers
import trl
from tokenizers import Tokenizer, models, pre_tokenizers
from trl.experimental import cpo, gkd, orpo

from examples.frameworks.deferred_models import make_inputs, make_model
from examples.frameworks.deferred_sweep import (
    copy_parameters,
    describe,
    measure_errors,
    run_step,
    shorten,
    update,
)
from lce_torch_bridge import defer_logits

STEPS = 4
NEAR = 1e-5  # float32: relative to the loss, and to how far the parameters have moved


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", *(f"w{i}" for i in range(62))]
    vocabulary = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    vocabulary.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="<pad>", eos_token="<eos>")


def make_policy(seed: int = 0, kind: str = "ForCausalLM") -> Any:
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, head_dim=8, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False, eos_token_id=1, pad_token_id=0, initializer_range=0.2,
        num_labels=1,
    )  # fmt: skip
    return getattr(transformers, f"Qwen3{kind}")(config)


def reward_odd(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(int(word[1:]) % 2 for word in text.split() if word[1:].isdigit())) for text in completions]


PROMPTS = [f"w{i} w{i + 1}" for i in range(16)]
CHOSEN = [f" w{i + 2} w{i} w{i + 3}" for i in range(16)]
REJECTED = [f" w{i + 5} w{i + 7} w{i}" for i in range(16)]
PAIRS = {"prompt": PROMPTS, "chosen": CHOSEN, "rejected": REJECTED}
TEXTS = {"text": [x + y for x, y in zip(PROMPTS, CHOSEN, strict=True)]}
JUDGED = {"prompt": PROMPTS, "completion": CHOSEN, "label": [i % 2 == 0 for i in range(16)]}
SAMPLED: dict[str, Any] = dict(num_generations=4, max_completion_length=6, temperature=0.9)
TALKS = [
    [{"role": "user", "content": x}, {"role": "assistant", "content": y}] for x, y in zip(PROMPTS, CHOSEN, strict=True)
]


@dataclasses.dataclass
class Case:
    """A trainer of TRL: its module, its data, its options, and its other arguments."""

    module: Any
    name: str
    data: dict[str, list[Any]]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    more: Callable[[], dict[str, Any]] = dict
    kind: str = "ForCausalLM"


TRAINERS = {
    "SFT": Case(trl, "SFT", TEXTS),
    "SFT, label smoothing": Case(trl, "SFT", TEXTS, dict(label_smoothing_factor=0.1)),
    "DPO": Case(trl, "DPO", PAIRS, dict(beta=0.1)),
    "KTO": Case(trl, "KTO", JUDGED, dict(beta=0.1)),
    "ORPO": Case(orpo, "ORPO", PAIRS, dict(beta=0.1, max_length=16)),
    "CPO": Case(cpo, "CPO", PAIRS, dict(beta=0.1, max_length=16)),
    "GKD": Case(gkd, "GKD", {"messages": TALKS}, dict(lmbda=0.0), lambda: {"teacher_model": make_policy(1)}),
    "GRPO": Case(trl, "GRPO", {"prompt": PROMPTS}, SAMPLED | dict(beta=0.1), lambda: {"reward_funcs": reward_odd}),
    "RLOO": Case(trl, "RLOO", {"prompt": PROMPTS}, SAMPLED | dict(beta=0.1), lambda: {"reward_funcs": reward_odd}),
    "Reward": Case(trl, "Reward", PAIRS, {}, dict, "ForSequenceClassification"),
}  # fmt: skip


def arguments(folder: str, **options: Any) -> dict[str, Any]:
    """Returns options for descent without moments. Adam's first steps are signs, which would magnify rounding."""
    return dict(
        output_dir=f"{folder}/out", per_device_train_batch_size=4, max_steps=STEPS, logging_steps=1, learning_rate=0.1,
        optim="sgd", lr_scheduler_type="constant", report_to=[], save_strategy="no", disable_tqdm=True, bf16=False,
        seed=0, use_cpu=True, gradient_checkpointing=False,
    ) | options  # fmt: skip


def finish(trainer: Any, handle: Any) -> dict[str, Any]:
    logged = trainer.state.log_history
    return {
        "losses": [float(entry["loss"]) for entry in logged if "loss" in entry],
        "evaluated": [float(entry["eval_loss"]) for entry in logged if "eval_loss" in entry],
        "parameters": {name: x.detach().clone() for name, x in trainer.model.named_parameters()},
        "served": getattr(handle, "served", 0),
        "stored": getattr(handle, "stored", 0),
        "reasons": [*map(shorten, getattr(handle, "places", ()))],
    }


def train_case(case: Case, folder: str, deferred: str) -> dict[str, Any]:
    """Takes four steps of a trainer of TRL. ``deferred`` is "", "model" or "head"."""
    model = make_policy(0, case.kind)
    model.save_pretrained(f"{folder}/{case.kind}")  # TRL loads the reference policy by name
    model = type(model).from_pretrained(f"{folder}/{case.kind}")
    start = copy.deepcopy(model.state_dict())
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% generation %} {% endgeneration %}{% endfor %}"
    )
    config = getattr(case.module, f"{case.name}Config")(**arguments(folder, **case.options))
    data = datasets.Dataset.from_dict(case.data)
    torch.manual_seed(0)
    target = {"": None, "model": model, "head": getattr(model, "lm_head", model)}[deferred]
    try:
        handle = defer_logits(target) if deferred else None
    except Exception as error:
        return {"refused": describe(error)}
    trainer = getattr(case.module, f"{case.name}Trainer")(
        model=model, args=config, processing_class=tokenizer, train_dataset=data, **case.more()
    )
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    return finish(trainer, handle) | {"start": start}


def compare_runs(got: dict[str, Any], want: dict[str, Any], start: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Returns the largest relative error of the losses, and of the parameters relative to how far they have moved."""
    losses = zip(got["losses"] + got["evaluated"], want["losses"] + want["evaluated"], strict=True)
    moved = {name: (x - start[name]).norm() for name, x in want["parameters"].items()}
    total = torch.stack(list(moved.values())).norm()
    return {
        "losses": max(abs(x - y) / max(abs(y), 1e-2) for x, y in losses),
        "parameters": max(
            ((got["parameters"][name] - x).norm() / (moved[name] + 1e-3 * total)).item()
            for name, x in want["parameters"].items()
        ),
        "moved": (total / torch.stack([x.norm() for x in start.values()]).norm()).item(),
        "steps": len(got["losses"]),
        "served": got["served"],
        "stored": got["stored"],
        "reasons": got["reasons"],
    }


def run_trl(folder: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, case in TRAINERS.items():
        try:
            want = train_case(case, folder, "")
        except Exception as error:
            yield name, {"stock": describe(error)}
            continue
        for deferred in ("model", "head"):
            try:
                got = train_case(case, folder, deferred)
            except Exception as error:
                yield f"{name}, {deferred}", {"raises": describe(error)}
                continue
            if "refused" in got:
                yield f"{name}, {deferred}", got
                continue
            yield f"{name}, {deferred}", compare_runs(got, want, want["start"])


def lora(*targets: str, **options: Any) -> peft.PeftConfig:
    return peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, target_modules=list(targets), **options)


def adapter(kind: str, *targets: str, **options: Any) -> peft.PeftConfig:
    modules = {"target_modules": list(targets)} if targets else {}
    return getattr(peft, f"{kind}Config")(task_type="CAUSAL_LM", **modules, **options)


ADAPTERS: dict[str, Callable[[], peft.PeftConfig]] = {
    "LoRA of attention": lambda: lora("q_proj", "v_proj"),
    "LoRA of attention, dropout": lambda: lora("q_proj", "v_proj", lora_dropout=0.3),
    "LoRA of the head": lambda: lora("lm_head"),
    "LoRA of the head and attention": lambda: lora("q_proj", "lm_head"),
    "LoRA of the head, dropout": lambda: lora("lm_head", lora_dropout=0.3),
    "rsLoRA of the head, bias": lambda: lora("lm_head", use_rslora=True, lora_bias=True),
    "DoRA of the head": lambda: lora("lm_head", use_dora=True),
    "DoRA of attention": lambda: lora("q_proj", use_dora=True),
    "the head's weight": lambda: lora("q_proj", target_parameters=["lm_head.weight"]),
    "the head as a module to save": lambda: lora("q_proj", modules_to_save=["lm_head"]),
    "trainable tokens": lambda: lora("q_proj", trainable_token_indices=[7, 8]),
    "IA3": lambda: adapter("IA3", "k_proj", "v_proj", "down_proj", feedforward_modules=["down_proj"]),
    "IA3 of the head": lambda: adapter("IA3", "lm_head", feedforward_modules=[]),
    "prompt tuning": lambda: adapter("PromptTuning", num_virtual_tokens=3),
    "prefix tuning": lambda: adapter("PrefixTuning", num_virtual_tokens=3),
    "VeRA of the head": lambda: adapter("Vera", "lm_head", r=4, init_weights=False),
    "LoHa of the head": lambda: adapter("LoHa", "lm_head", init_weights=False),
    "OFT of the head": lambda: adapter("OFT", "lm_head", r=0, oft_block_size=8, init_weights=False),
}


def make_adapted(name: str, when: str) -> tuple[Any, Any]:
    """Returns a Llama with an adapter, and the handle. Logits are deferred before the adapter, after it, or never."""
    model = make_model("LlamaForCausalLM", tied="tied" in name)
    handle = defer_logits(model) if when == "before" else None
    second = name == "two adapters of the head"
    torch.manual_seed(2)
    model = peft.get_peft_model(model, lora("lm_head") if second else ADAPTERS[name]())
    if second:
        model.add_adapter("other", lora("lm_head", r=4))
        model.base_model.set_adapter(["default", "other"])
    handle = defer_logits(model) if when == "after" else handle
    return model.train(), handle


def run_peft(_: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Compares three steps. The head's weight and the adapters grow after the first."""
    for name in [*ADAPTERS, "two adapters of the head"]:
        for when in ("before", "after"):
            try:
                stock, _ = make_adapted(name, "never")
                inputs = make_inputs(stock)
                run_step(stock, inputs, 0)
            except Exception as error:
                yield f"{name}, {when}", {"stock": describe(error)}
                continue
            try:
                deferred, handle = make_adapted(name, when)
                worst = {"loss": 0.0}
                for step in range(3):
                    copy_parameters(stock, deferred)
                    want, got = run_step(stock, inputs, step), run_step(deferred, inputs, step)
                    errors = measure_errors(got, want)
                    worst = max(worst, errors, key=lambda x: max(x.values()))
                    update(stock, step)
            except Exception as error:
                yield f"{name}, {when}", {"raises": describe(error)}
                continue
            worst_name = max(worst, key=worst.__getitem__)
            yield f"{name}, {when}", {
                "error": worst[worst_name], "of": worst_name, "served": handle.served, "stored": handle.stored,
                "reasons": [*map(shorten, handle.places)],
            }  # fmt: skip


def run_trainer(folder: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Compares Transformers' Trainer: accumulation with an evaluation, and a run that resumes from a checkpoint."""
    tokens = torch.randint(5, 60, (16, 12), generator=torch.Generator().manual_seed(4))
    rows = [{"input_ids": x, "labels": x.masked_fill(torch.arange(12) < i % 5, -100)} for i, x in enumerate(tokens)]
    options = dict(
        gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2
    )

    def train(defer: bool, resume: str | None, smoothing: float = 0.0) -> tuple[dict[str, Any], dict[str, Any]]:
        model = make_model("LlamaForCausalLM", tied=False)
        start = copy.deepcopy(model.state_dict())
        handle = defer_logits(model) if defer else None
        config = transformers.TrainingArguments(
            **arguments(f"{folder}/{defer}", **options, label_smoothing_factor=smoothing)
        )
        trainer = transformers.Trainer(model=model, args=config, train_dataset=rows, eval_dataset=rows[:4])
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.train(resume_from_checkpoint=resume and f"{folder}/{defer}/out/{resume}")
        return finish(trainer, handle), start

    for name, resume, smoothing in (
        ("accumulation and evaluation", None, 0.0), ("resume", "checkpoint-2", 0.0), ("label smoothing", None, 0.1)
    ):  # fmt: skip
        try:
            want, start = train(False, resume, smoothing)
            got, _ = train(True, resume, smoothing)
            yield name, compare_runs(got, want, start)
        except Exception as error:
            yield name, {"raises": describe(error)}


class CallInBackward(torch.autograd.Function):
    """Calls a function when the gradient of a module's output arrives, as DeepSpeed does."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], None], x: torch.Tensor) -> torch.Tensor:
        ctx.call = call
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:  # type: ignore[override]
        ctx.call()
        return None, gradient


def partition(head: Any, way: str, before_backward: bool, marked: bool) -> None:
    """Frees the weight except during the head's own forward and backward, as ZeRO-3 does.

    ``way``: "storage" resizes the weight's storage, as FSDP does; "data" replaces it by an empty one, like DeepSpeed.
    ``marked``: the weight has DeepSpeed's mark.
    """
    full_weight = head.weight.detach().clone()
    weight, shape = head.weight, head.weight.shape
    if marked:
        weight.ds_id = 0

    def gather() -> None:
        if way == "storage":
            weight.untyped_storage().resize_(full_weight.untyped_storage().nbytes())
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(weight):
                weight.copy_(full_weight)
        else:
            weight.data = full_weight.clone().view(shape)

    def free() -> None:
        if way == "storage":
            weight.untyped_storage().resize_(0)
        else:
            weight.data = torch.empty(0)

    def keep_gradient(x: torch.Tensor) -> None:
        head.gradient, x.grad = x.grad, None
        free()

    head.register_forward_pre_hook(lambda *_: gather())
    if before_backward:
        head.register_forward_hook(lambda _module, _inputs, output: CallInBackward.apply(gather, output))
    else:
        head.register_full_backward_pre_hook(lambda *_: gather())
    head.register_forward_hook(lambda *_: free())
    weight.register_post_accumulate_grad_hook(keep_gradient)
    free()


def run_hooks(_: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Compares under ZeRO-3, where the head computes its logits, and under other hooks, where a loss is refused."""
    for way, before_backward, marked in itertools.product(("storage", "data"), (True, False), (True, False)):
        name = f"{way}, {'function on the output' if before_backward else 'backward hook'}"
        try:
            yield f"{'ZeRO-3' if marked else 'hooks'}, {name}", run_partitioned(way, before_backward, marked)
        except Exception as error:
            yield name, {"stock": describe(error)}


def run_partitioned(way: str, before_backward: bool, marked: bool) -> dict[str, Any]:
    stock = make_model("LlamaForCausalLM", tied=False)
    deferred, inputs = copy.deepcopy(stock), make_inputs(stock)
    handle = defer_logits(deferred)
    for model in (stock, deferred):
        partition(model.lm_head, way, before_backward, marked)
    worst = 0.0
    for step in range(2):
        want = run_step(stock, inputs, step)
        want.gradients["lm_head.weight"] = stock.lm_head.gradient
        try:
            got = run_step(deferred, inputs, step)
        except Exception as error:
            refused = isinstance(error, RuntimeError) and "has no memory, because it was freed" in str(error)
            return {"refused" if refused else "raises": describe(error)}
        got.gradients["lm_head.weight"] = deferred.lm_head.gradient
        worst = max(worst, *measure_errors(got, want).values())
    return {"error": worst, "served": handle.served, "stored": handle.stored, "reasons": [*map(shorten, handle.places)]}


def replace_weight(model: Any) -> Any:
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 2)
    return model


def assign_state(model: Any) -> Any:
    model.load_state_dict({name: x.clone() * 1.5 for name, x in model.state_dict().items()}, assign=True)
    return model


def resize(model: Any) -> Any:
    torch.manual_seed(5)
    model.resize_token_embeddings(160, mean_resizing=False)
    return model


def freeze(model: Any) -> Any:
    model.lm_head.requires_grad_(False)
    return model


def scale_logits(model: Any) -> Any:
    """Binds another forward, after the logits are deferred."""
    forward = model.lm_head.forward
    model.lm_head.forward = lambda x: forward(x) * 3.0
    return model


def hook_head(model: Any) -> Any:
    model.lm_head.register_forward_hook(lambda _module, _inputs, output: output * 3.0)
    return model


def compile_model(model: Any) -> Any:
    return torch.compile(model, backend="eager")


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a deep copy": copy.deepcopy, "a new weight": replace_weight, "load_state_dict(assign=True)": assign_state,
    "resize_token_embeddings": resize, "a frozen head": freeze, "a forward bound later": scale_logits,
    "a hook on the head": hook_head, "bfloat16": lambda model: model.bfloat16(), "torch.compile": compile_model,
    "gradient checkpointing": lambda model: model.gradient_checkpointing_enable() or model,
}  # fmt: skip


def run_changes(_: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Compares models that change after their logits are deferred."""
    for name, change in CHANGES.items():
        stock = make_model("LlamaForCausalLM", tied=False)
        deferred, inputs = copy.deepcopy(stock), make_inputs(stock)
        try:
            handle = defer_logits(deferred)
            stock, deferred, worst = change(stock), change(deferred), 0.0
            for step in range(2):
                copy_parameters(stock, deferred)
                want, got = run_step(stock, inputs, step), run_step(deferred, inputs, step)
                worst = max(worst, *measure_errors(got, want).values())
                update(stock, step)
        except Exception as error:
            yield name, {"raises": describe(error)}
            continue
        yield name, {"error": worst, "bound": 2e-2 if name == "bfloat16" else 1e-3, "served": handle.served,
                     "stored": handle.stored, "reasons": [*map(shorten, handle.places)]}  # fmt: skip


PARTS = {"trl": run_trl, "peft": run_peft, "trainer": run_trainer, "hooks": run_hooks, "changes": run_changes}


def main() -> None:
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for part in sys.argv[1:] or PARTS:
        with tempfile.TemporaryDirectory() as folder:
            for name, result in PARTS[part](folder):
                print(json.dumps({"part": part, "name": name} | result), flush=True)


if __name__ == "__main__":
    main()
