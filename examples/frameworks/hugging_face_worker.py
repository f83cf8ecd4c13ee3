"""The Trainer of Hugging Face with logits and without, and a model with PEFT's adapters; prints JSON.

``python -m examples.frameworks.hugging_face_worker``, in an environment with transformers, accelerate and peft. With
``torchrun``, two ranks under DDP; the model under FSDP2.
"""

from __future__ import annotations

import os

os.environ.update(JAX_PLATFORMS="cpu", HF_HUB_OFFLINE="1", ACCELERATE_USE_CPU="true")

import copy
import inspect
import json
import types
from typing import Any

import peft
import torch
import transformers
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from examples import hugging_face_trainer
from lce_torch_bridge.transformers import patch
from tests.torch.test_cross_entropy import products

SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, pad_token_id=0)  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {  # what is served, then what is refused
    "Llama": {}, "Gemma2": dict(final_logit_softcapping=0.5), "GPTNeoX": {}, "Mixtral": dict(num_local_experts=2),
    "Cohere": {}, "Granite": dict(logits_scaling=8.0), "RecurrentGemma": dict(num_hidden_layers=3, logits_soft_cap=0.5),
}  # fmt: skip
ADAPTERS: dict[str, dict[str, Any]] = {  # of attention, beside the head as a whole, and around it
    "attention": dict(target_modules=["q_proj", "v_proj"]),
    "whole head": dict(target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "head": dict(target_modules=["lm_head"]),
    "head's weight": dict(target_modules=[], target_parameters=["lm_head.weight"]),
    "tokens of a tied head": dict(target_modules=["q_proj"], trainable_token_indices=[3]),
}


def model_of(name: str, **sizes: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES | sizes)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def batch() -> dict[str, torch.Tensor]:
    """Tokens, the same on all ranks, with labels that do not count."""
    tokens = torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    return dict(input_ids=tokens, labels=tokens.where(torch.arange(12) > 2, -100))


def of_model(name: str) -> str | list[float]:
    """The losses of two calls of a model of its own, with labels by place; or why it is refused."""
    model, given = model_of(name, **MODELS[name]), batch()
    asked = dict(output_hidden_states=True, output_attentions=True, use_cache=True)
    want = model(**given, **asked)
    places = list(inspect.signature(model.forward).parameters)
    by_place = [given.get(place) for place in places[: places.index("labels") + 1]]
    try:
        with patch(model):
            got = [model(**given, **asked), model(*by_place)]
            assert {*want} - {*got[0]} == {"logits"}
            assert all(map(torch.equal, got[0].hidden_states, want.hidden_states))
            return [want.loss.item(), *(output.loss.item() for output in got)]
    except NotImplementedError as refusal:
        return str(refusal)


def step(model: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss, and the gradient of all that has one."""
    model.zero_grad()
    loss = model(**batch()).loss
    loss.backward()
    grads = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    return loss.item(), {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in grads.items()}


def error(got: Any, want: Any) -> float:
    """The largest of a loss and its gradients, of their size."""
    assert got[1].keys() == want[1].keys()
    of_grads = [((got[1][name] - x).norm() / x.norm()).item() for name, x in want[1].items()]
    return max(abs(got[0] / want[0] - 1), *of_grads)


def with_adapter(name: str, patched: bool = False) -> Any:
    """A Llama with an adapter that trains."""
    model = model_of("Llama", tie_word_embeddings=name == "tokens of a tied head")
    if patched:
        patch(model)
    model = peft.get_peft_model(
        model, peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **ADAPTERS[name])
    )
    torch.manual_seed(1)
    for x in model.parameters():
        if x.requires_grad:
            x.data = torch.randn_like(x) / 8
    return model.eval()


def of_adapter(name: str, first: bool) -> str | list[Any]:
    """Of a model that is patched before it has an adapter, or after; of a deep copy; and the products for the head."""
    want = step(with_adapter(name))
    try:
        model = with_adapter(name, patched=first)
        patch(model.get_base_model())
        step(model)
        with products() as run:
            errors = [error(step(model), want)]
        other = copy.deepcopy(model)
        for x in model.parameters():
            x.data *= 2
        return [*errors, error(step(other), want), run]
    except NotImplementedError as refusal:
        return str(refusal)


def sharded(unit: bool, frozen: bool) -> float:
    """The error under FSDP2, with the head in a unit of its own."""
    want, got = (model_of("Llama") for _ in range(2))
    patch(got)
    for model in (want, got):
        model.lm_head.requires_grad_(not frozen)
        for module in [*model.model.layers, *[model.lm_head] * unit, model]:
            fully_shard(module, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
    assert isinstance(got.lm_head.weight, DTensor)
    return max(error(step(got), step(want)) for _ in range(2))


def main() -> None:
    got = hugging_face_trainer.main()
    want = hugging_face_trainer.main(patch=lambda _: types.SimpleNamespace(calls=8))
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    found = {"got": got, "want": want, "ranks": ranks, "models": {name: of_model(name) for name in MODELS}}
    found["adapters"] = {name: [of_adapter(name, first) for first in (True, False)] for name in ADAPTERS}
    if ranks == 2:
        found["sharded"] = [sharded(*told) for told in ((False, False), (True, False), (True, True))]
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
