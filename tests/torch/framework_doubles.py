"""Stand-ins for functions of frameworks that the tests do not install: their published signatures, over stored logits.

The names of arguments, their order, shapes and results are those of
SkyRL 0.3.0, skyrl/backends/skyrl_train/distributed/megatron/model_utils.py, ``_fused_lm_head_logprob_apply``;
NeMo RL at 7ea279a (2026-08-22), nemo_rl/distributed/model_utils.py, ``from_parallel_hidden_states_to_logprobs``,
``from_parallel_logits_to_logprobs`` and ``from_parallel_logits_to_logprobs_packed_sequences``;
TRL 1.16.0, trl/kernels/chunked_logprob.py, ``ChunkedLogProbFunction.apply``.
What they compute is written anew, in float64, on the whole vocabulary. ``examples/frameworks/test_trl.py`` runs TRL's.
"""

from __future__ import annotations

import copy
import itertools
import sys
import types
from typing import Any

import pytest
import torch

from lce_torch_bridge.deferred._tensor import DeferredLogits

TOKENS = torch.randint(0, 64, (3, 12), generator=torch.Generator().manual_seed(0))


def scores(hidden: Any, weight: Any, labels: Any) -> tuple[Any, Any]:
    """Log-probabilities of the labels, and all of them."""
    logp = (hidden.double() @ weight.double().t()).log_softmax(-1)
    return logp.gather(-1, labels[..., None])[..., 0], logp


class SkyRL:
    arguments = ("backend", "hidden", "weight", "target", "vocab_start_index", "vocab_end_index", "chunk_size",
                 "tp_group", "inference_only")  # fmt: skip

    @staticmethod
    def whole(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """[b, s, h] and [b, s] to [b, s]."""
        return scores(hidden, weight, target)[0]


class NeMoRL:
    arguments = (
        "tensor_parallel_hidden_states", "output_weight_layer", "runtime_gather_output", "target",
        "vocab_start_index", "vocab_end_index", "tp_group", "inference_only", "cp_group", "chunk_size",
    )  # fmt: skip

    @staticmethod
    def whole(hidden: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """[s, b, h] and tokens [b, s] to [b, s - 1], of each next token."""
        return scores(hidden.transpose(0, 1)[:, :-1], weight, tokens[:, 1:])[0]

    packed_arguments = (
        "target", "cu_seqlens_padded", "unpacked_seqlen", "vocab_start_index", "vocab_end_index", "group",
        "inference_only", "cp_group",
    )  # fmt: skip

    @staticmethod
    def whole_packed(
        hidden: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor, offsets: list[int], length: int
    ) -> torch.Tensor:
        """[T, 1, h] and tokens [1, T] to [n, length - 1], sequence by sequence."""
        found = []
        for begin, end in itertools.pairwise(offsets):
            logprobs = scores(hidden[begin : end - 1, 0], weight, tokens[0, begin + 1 : end])[0]
            found.append(torch.nn.functional.pad(logprobs, (0, length - 1 - len(logprobs))))
        return torch.stack(found)


class TRL:
    arguments = ("hidden", "weight", "bias", "targets", "temperature", "chunk_size", "final_logit_softcapping",
                 "logit_scale", "outputs")  # fmt: skip

    @staticmethod
    def apply(
        hidden: torch.Tensor, weight: torch.Tensor, bias: Any, targets: torch.Tensor, temperature: float,
        chunk_size: int, final_logit_softcapping: float | None = None, logit_scale: float = 1.0, outputs: Any = (),
    ) -> tuple[Any, ...]:  # fmt: skip
        del chunk_size, outputs
        z = logit_scale * (hidden.double() @ weight.double().t() + (0 if bias is None else bias.double()))
        if final_logit_softcapping is not None:
            z = final_logit_softcapping * torch.tanh(z / final_logit_softcapping)
        z = z / temperature
        logp = z.log_softmax(-1)
        chosen = logp.gather(-1, targets[:, None])[:, 0]
        squares = (2 * z).logsumexp(-1) - 2 * z.logsumexp(-1)
        return chosen, -(logp.exp() * logp).sum(-1), squares, z.mean(-1), z.argmax(-1) == targets


def modules_of(monkeypatch: pytest.MonkeyPatch, *paths: str) -> None:
    """Stand-ins for modules of a framework, and for their parents, in ``sys.modules``."""
    for path in paths:
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            place = ".".join(parts[:end])
            if not isinstance(sys.modules.get(place), Framework):
                monkeypatch.setitem(sys.modules, place, Framework(place))
            if end > 1:
                setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], sys.modules[place])


class LoraLinear(torch.nn.Module):
    """Like PEFT's ``lora.Linear``: around a layer, whose weight and bias it passes off as its own."""

    def __init__(self, base_layer: torch.nn.Linear, rank: int = 2, scale: float = 2.0) -> None:
        super().__init__()
        self.base_layer, self.scale = base_layer.requires_grad_(False), scale
        self.lora_A = torch.nn.Linear(base_layer.in_features, rank, bias=False)
        self.lora_B = torch.nn.Linear(rank, base_layer.out_features, bias=False)

    @property
    def weight(self) -> torch.Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self.base_layer.bias

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.base_layer(hidden) + self.scale * self.lora_B(self.lora_A(hidden))

    def merged(self) -> torch.nn.Linear:
        """As ``merge_and_unload`` leaves the layer."""
        self.base_layer.weight.data += self.scale * self.lora_B.weight.detach() @ self.lora_A.weight.detach()
        return self.base_layer


class PeftLinear(torch.nn.Module):
    """``peft.tuners.lora.layer.Linear``: its attributes, and its forward."""

    def __init__(
        self, base_layer: torch.nn.Linear, rank: int = 2, dropout: float = 0.0, names: Any = ("default",)
    ) -> None:
        super().__init__()
        self.base_layer, self.active_adapters = base_layer.requires_grad_(False), [*names]
        self.merged = self.disable_adapters = False
        self.scaling, self.use_dora = dict.fromkeys(names, 2.0), dict.fromkeys(names, False)
        self.lora_variant: dict[str, Any] = {}
        sizes = base_layer.in_features, rank, base_layer.out_features
        self.lora_A, self.lora_B = (
            torch.nn.ModuleDict({name: torch.nn.Linear(*sizes[i : i + 2], bias=False) for name in names})
            for i in (0, 1)
        )
        self.lora_dropout = torch.nn.ModuleDict(
            {name: torch.nn.Dropout(dropout) if dropout else torch.nn.Identity() for name in names}
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result = self.base_layer(hidden)
        for name in [] if self.merged or self.disable_adapters else self.active_adapters:
            result = result + self.lora_B[name](self.lora_A[name](self.lora_dropout[name](hidden))) * self.scaling[name]
        return result


PeftLinear.__module__, PeftLinear.__name__ = "peft.tuners.lora.layer", "Linear"


class ModulesToSave(torch.nn.Module):
    """Like PEFT's ``ModulesToSaveWrapper``: a copy is trained in a layer's place, and its attributes are passed on."""

    def __init__(self, original_module: torch.nn.Linear) -> None:
        super().__init__()
        self.original_module = original_module.requires_grad_(False)
        self.modules_to_save = torch.nn.ModuleDict({"default": copy.deepcopy(original_module).requires_grad_()})

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.modules_to_save["default"], name)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.modules_to_save["default"](hidden)


class CausalLM(torch.nn.Module):
    """Like a causal language model of Transformers."""

    def __init__(self, bias: bool = False, config: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base_model, self.lm_head = Trunk(), torch.nn.Linear(16, 64, bias=bias)
        self.config = config or types.SimpleNamespace(get_text_config=types.SimpleNamespace)

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.lm_head

    def forward(self, tokens: torch.Tensor, labels: Any = None) -> types.SimpleNamespace:
        logits = self.lm_head(self.base_model(tokens).last_hidden_state)
        return types.SimpleNamespace(logits=logits, loss=None if labels is None else self.loss_function(logits, labels))

    def loss_function(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def of_logits(model: CausalLM) -> torch.Tensor:
    """The loss of the model's own logits, in float64."""
    logits = model.lm_head(model.base_model(TOKENS).last_hidden_state)
    logits = logits.compute() if isinstance(logits, DeferredLogits) else logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].double().flatten(0, 1), TOKENS[:, 1:].flatten())


def right(loss: torch.Tensor, model: CausalLM) -> None:
    """The loss is that of the logits, and so are the gradients of all that trains."""
    trained = [x for x in model.parameters() if x.requires_grad]
    want = of_logits(model)
    torch.testing.assert_close(loss.double(), want, rtol=1e-6, atol=0)
    for x, y in zip(torch.autograd.grad(loss, trained), torch.autograd.grad(want, trained), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-7)


class Trunk(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(64, 16)

    def forward(self, tokens: torch.Tensor) -> types.SimpleNamespace:
        return types.SimpleNamespace(last_hidden_state=self.embed(tokens))


class Framework(types.ModuleType):
    """A module of a framework that is not installed. It has every name, as a class whose attributes are classes too."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (types.SimpleNamespace,), {"Config": type("Config", (), {})})
        setattr(self, name, made)
        return made
