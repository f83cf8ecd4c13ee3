"""Each recipe reads only a head's weight, and refuses a head with more: an adapter would be ignored and not train."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
from flax import nnx

from tests.torch import framework_doubles as doubles

FRAMEWORKS = {
    "tunix_head": ("tunix", "tunix.rl"),
    "maxtext_head": ("absl", "maxtext", "maxtext.trainers.pre_train", "maxtext.utils"),
    "marin_head": ("equinox", "haliax", "levanter", "levanter.layers.attention", "levanter.models",
                   "levanter.models.llama", "levanter.models.lm_model", "levanter.models.loss"),
}  # fmt: skip


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a file of ``examples/`` beside doubles of its framework."""

    def imported(name: str) -> Any:
        doubles.modules_of(monkeypatch, *FRAMEWORKS[name])
        monkeypatch.delitem(sys.modules, f"examples.{name}", raising=False)
        return importlib.import_module(f"examples.{name}")

    return imported


def add_lora(layer: Any, weight: str) -> Any:
    """Adds the factors of a LoRA to a layer, as qwix does."""
    setattr(layer, f"{weight}_lora_a", nnx.LoRAParam(0.0))
    setattr(layer, f"{weight}_lora_b", nnx.LoRAParam(0.0))
    return layer


@pytest.mark.parametrize("tied", [True, False])
def test_tunix(recipe: Callable[[str], Any], tied: bool) -> None:
    head, names = recipe("tunix_head").head, ("embedder", "input_embedding") if tied else ("lm_head", "w")
    config = types.SimpleNamespace(dtype="float32")
    layer = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
    setattr(layer, names[1], nnx.Param(layer.kernel[...]))
    model = types.SimpleNamespace(config=config, **{names[0]: layer})
    assert head(model)[0].shape == (4, 8)
    add_lora(layer, names[1])
    with pytest.raises(NotImplementedError, match=f"the head holds {names[1]}_lora_a and {names[1]}_lora_b, which"):
        head(model)


@pytest.mark.parametrize("tied", [True, False])
def test_maxtext(recipe: Callable[[str], Any], tied: bool) -> None:
    head = recipe("maxtext_head").head
    layer = nnx.Embed(8, 4, rngs=nnx.Rngs(0)) if tied else nnx.Linear(4, 8, use_bias=False, rngs=nnx.Rngs(0))
    layer.dtype = "float32"
    model = types.SimpleNamespace(token_embedder=layer, decoder=types.SimpleNamespace(logits_dense=layer))
    config = types.SimpleNamespace(
        parameter_memory_host_offload=False, logits_via_embedding=tied, normalize_embedding_logits=False,
        final_logits_soft_cap=0.0, matmul_precision=types.SimpleNamespace(value="default"),
    )  # fmt: skip
    assert head(model, config, "float32")["weight"].shape == ((8, 4) if tied else (4, 8))
    for name, more in (
        ("embedding_lora_a", nnx.LoRAParam(0.0)),
        ("bias", nnx.Param(0.0)),
        ("AqtDotGeneral_0", nnx.Module()),
    ):
        setattr(layer, name, more)
        with pytest.raises(NotImplementedError, match=f"the head holds {name}, which this loss does not read"):
            head(model, config, "float32")
        delattr(layer, name)


def test_marin(recipe: Callable[[str], Any]) -> None:
    module = recipe("marin_head")
    linear = type("Linear", (), {"bias": None, "reparam": types.SimpleNamespace(active_scale=1.0)})
    module.hax.nn = types.SimpleNamespace(Linear=linear)
    model_of = sys.modules["levanter.models"].lm_model.LmHeadModel = type(
        "LmHeadModel", (), {"compute_next_token_loss": lambda _, x: x}
    )
    module.install()
    model = model_of()
    assert model.compute_next_token_loss(3) == 3  # tied
    for head in (linear(), None):
        model.lm_head = head
        assert model.compute_next_token_loss(3) == 3
    with_bias, scaled = linear(), linear()
    with_bias.bias, scaled.reparam = 1.0, types.SimpleNamespace(active_scale=0.5)
    for head in (with_bias, scaled, types.SimpleNamespace(wrapped=linear())):
        model.lm_head = head
        with pytest.raises(NotImplementedError, match="no LoRA, bias or scale"):
            model.compute_next_token_loss(3)
