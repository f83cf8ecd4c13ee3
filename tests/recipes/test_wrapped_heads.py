"""Each recipe reads a head's weight, and refuses a head that is more: an adapter would neither count nor train."""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from flax import nnx
from torch.nn.modules import module as torch_modules

from examples import nemo_rl_head, skyrl_head, trl_head
from lce_torch_bridge import linear_cross_entropy
from tests.recipes import framework_doubles as doubles
from tests.recipes.framework_doubles import CausalLM, LoraLinear, ModulesToSave

MORE = "is more than its weight and bias: leave it out of target_modules"
TOKENS = torch.randint(0, 64, (3, 12), generator=torch.Generator().manual_seed(0))
FRAMEWORKS = {
    "hugging_face_trainer": ("transformers", "transformers.modeling_outputs"),
    "torchtitan_head": ("torchtitan", "torchtitan.components.loss", "torchtitan.config.override",
                        "torchtitan.distributed.spmd_types"),
    "areal_head": ("areal", "areal.engine", "areal.engine.fsdp_engine"),
    "verl_head": ("verl", "verl.utils.kernel.linear_cross_entropy"),
    "tunix_head": ("tunix", "tunix.rl"),
    "maxtext_head": ("absl", "maxtext", "maxtext.trainers.pre_train", "maxtext.utils"),
    "marin_head": ("equinox", "haliax", "levanter", "levanter.layers.attention", "levanter.models",
                   "levanter.models.llama", "levanter.models.lm_model", "levanter.models.loss"),
}  # fmt: skip


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a file of ``examples/`` beside doubles of its framework."""

    def imported(name: str) -> Any:
        for full in FRAMEWORKS[name]:
            parts = full.split(".")
            for end in range(1, len(parts) + 1):
                place = ".".join(parts[:end])
                if end == len(parts) or place not in sys.modules:
                    monkeypatch.setitem(sys.modules, place, doubles.Framework(place))
                if end > 1:
                    setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], sys.modules[place])
        if name == "torchtitan_head":
            sys.modules["torchtitan.config.override"].override = lambda **_: lambda function: function
        monkeypatch.delitem(sys.modules, f"examples.{name}", raising=False)
        return importlib.import_module(f"examples.{name}")

    return imported


@pytest.fixture
def hooks() -> Iterator[None]:
    """Takes away what a recipe asks torch to call for every module."""
    before = dict(torch_modules._global_module_registration_hooks)
    yield
    torch_modules._global_module_registration_hooks.clear()
    torch_modules._global_module_registration_hooks.update(before)


def of_logits(model: CausalLM) -> torch.Tensor:
    """The loss of the model's own logits, in float64."""
    logits = model.lm_head(model.base_model(TOKENS).last_hidden_state)[:, :-1].double()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten())


def right(loss: torch.Tensor, model: CausalLM) -> None:
    """The loss is that of the logits, and so are the gradients of all that trains."""
    trained = [x for x in model.parameters() if x.requires_grad]
    want = of_logits(model)
    torch.testing.assert_close(loss.double(), want, rtol=1e-6, atol=0)
    for x, y in zip(torch.autograd.grad(loss, trained), torch.autograd.grad(want, trained), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-7)


def hooked(head: torch.nn.Linear) -> torch.nn.Linear:
    head.register_forward_hook(lambda *given: given[-1] / 2)
    return head


def replaced(head: torch.nn.Linear) -> torch.nn.Linear:
    head.forward = lambda hidden: torch.nn.functional.linear(hidden / 2, head.weight)  # type: ignore[method-assign]
    return head


class Half(torch.nn.Linear):
    """A layer of its own kind, as quantized ones are."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) / 2


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("wrap", [LoraLinear, hooked, replaced, lambda _: Half(16, 64)])
def test_hugging_face_refuses(recipe: Callable[[str], Any], wrap: Any, first: bool) -> None:
    """Whether the head is wrapped before the model is changed, or after."""
    without_logits, model = recipe("hugging_face_trainer").without_logits, CausalLM()
    if first:
        model.lm_head = wrap(model.lm_head)
        with pytest.raises(NotImplementedError, match=MORE):
            without_logits(model)
        return
    without_logits(model)
    right(model(TOKENS, labels=TOKENS).loss, model)
    model.lm_head = wrap(model.lm_head)
    model(TOKENS)  # logits, for `generate`
    with pytest.raises(NotImplementedError, match=MORE):
        model(TOKENS, labels=TOKENS)


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_what_hugging_faces_refusal_says_is_right(recipe: Callable[[str], Any], first: bool) -> None:
    """A head in modules_to_save trains, and so does one with a bias; an adapter counts once it is merged."""
    without_logits = recipe("hugging_face_trainer").without_logits
    for model, wrap in ((CausalLM(), ModulesToSave), (CausalLM(bias=True), lambda head: LoraLinear(head).merged())):
        if not first:
            without_logits(model)
        model.lm_head = wrap(model.lm_head)
        if first:
            without_logits(model)
        trained = [x for x in model.lm_head.parameters() if x.requires_grad]
        for x in trained:
            x.data += 0.1 * torch.randn_like(x)  # a copy is no longer its original
        right(model(TOKENS, labels=TOKENS).loss, model)


def test_hugging_face_takes_a_head_around_which_others_put_hooks(recipe: Callable[[str], Any]) -> None:
    """FSDP2 registers hooks, and accelerate replaces ``forward``: neither changes what the head computes."""
    model = recipe("hugging_face_trainer").without_logits(CausalLM())

    def post_forward(*_: Any) -> None:
        pass

    post_forward.__module__ = "torch.distributed.fsdp._fully_shard._fsdp_state"
    model.lm_head.register_forward_hook(post_forward)
    model.lm_head._old_forward = model.lm_head.forward
    model.lm_head.forward = functools.partial(model.lm_head._old_forward)
    right(model(TOKENS, labels=TOKENS).loss, model)


def test_torchtitan(recipe: Callable[[str], Any]) -> None:
    loss = recipe("torchtitan_head").HeadLoss()
    loss.set_lm_head(torch.nn.Linear(16, 64))
    for head in (LoraLinear(torch.nn.Linear(16, 64)), Half(16, 64)):
        with pytest.raises(NotImplementedError, match=r"lm_head is .*: leave it out of LoRA \(target_modules=\)"):
            loss.set_lm_head(head)
        assert "forward" not in vars(head)


def test_areal(recipe: Callable[[str], Any]) -> None:
    engine = object.__new__(type("Engine", (recipe("areal_head").WithoutLogits,), {}))
    engine.parallel_helper, engine.enable_tree_training = types.SimpleNamespace(tp_size=1), False
    engine.config, engine.model = types.SimpleNamespace(is_critic=False), CausalLM()
    engine.model_config = engine.model.config
    engine._check_head()
    engine.model.lm_head.forward = None  # as the recipe leaves it at each call
    engine._check_head()
    for head in (LoraLinear(torch.nn.Linear(16, 64)), Half(16, 64)):
        engine.model.lm_head = head
        with pytest.raises(NotImplementedError, match=r"lm_head is .*Leave lm_head out of target_modules"):
            engine._check_head()


class Megatron(torch.nn.Module):
    """Like a language model of megatron-core, or of Transformers."""

    def __init__(self, name: str, layer: torch.nn.Module) -> None:
        super().__init__()
        self.name = name
        setattr(self, name, layer)

    def get_output_embeddings(self) -> torch.nn.Module:
        return getattr(self, self.name)


class ValueHead(torch.nn.Linear):
    """Like the head that verl gives to a critic: it takes the place of the output layer, and is not around it."""

    def forward(self, input: torch.Tensor) -> Any:
        return super().forward(input), None


@pytest.mark.usefixtures("hooks")
@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("verl_head", ("lm_head", "output_layer")),
        ("trl_head", ("lm_head", "embed_out")),
        ("skyrl_head", ("output_layer",)),
        ("nemo_rl_head", ("output_layer",)),
    ],
)
def test_frameworks_that_hand_over_a_weight(
    name: str, heads: tuple[str, ...], recipe: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(name, recipe, monkeypatch)
    for head in heads:
        model = Megatron(head, torch.nn.Linear(16, 64, bias=False))
        model.first = LoraLinear(torch.nn.Linear(16, 16))  # of another layer
        model.first = ModulesToSave(torch.nn.Linear(16, 16))
        wrapped = getattr(model, head)
        with pytest.raises(NotImplementedError, match=f"LoraLinear'> around {head}, whose weight alone is read: leave"):
            setattr(model, head, LoraLinear(wrapped))
        assert getattr(model, head) is wrapped
        if head != "lm_head":
            setattr(model, head, ValueHead(16, 1))
        setattr(model, head, torch.nn.Linear(16, 64, bias=False))
        if name in ("verl_head", "trl_head"):
            setattr(model, head, torch.compile(getattr(model, head)))
            setattr(model, head, torch.nn.Linear(16, 64, bias=False))
            setattr(model, head, ModulesToSave(getattr(model, head)))
            assert getattr(model, head).weight.requires_grad


def install(name: str, recipe: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a recipe, beside doubles of what it imports."""
    paths = {
        "trl_head": ("trl", "trl.trainer", "trl.trainer.distillation_trainer", "trl.trainer.utils"),
        "skyrl_head": ("skyrl", "skyrl.backends", "skyrl.backends.skyrl_train",
                       "skyrl.backends.skyrl_train.distributed", "skyrl.backends.skyrl_train.distributed.megatron",
                       "skyrl.backends.skyrl_train.distributed.megatron.model_utils"),
        "nemo_rl_head": ("nemo_rl", "nemo_rl.distributed", "nemo_rl.distributed.model_utils"),
    }  # fmt: skip
    if name == "verl_head":
        recipe(name)  # it installs itself
        return
    for path in paths[name]:
        monkeypatch.setitem(sys.modules, path, doubles.Framework(path))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: True)
    {"trl_head": trl_head, "skyrl_head": skyrl_head, "nemo_rl_head": nemo_rl_head}[name].install()


@pytest.mark.usefixtures("hooks")
def test_verl_leaves_out_no_bias(recipe: Callable[[str], Any]) -> None:
    recipe("verl_head")
    with pytest.raises(NotImplementedError, match="lm_head has a bias, which verl drops here"):
        Megatron("lm_head", torch.nn.Linear(16, 64))
    Megatron("output_layer", ValueHead(16, 1))  # a critic's


def with_lora(layer: Any, weight: str) -> Any:
    """As qwix leaves a layer: the factors beside the weight."""
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
    with_lora(layer, names[1])
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
        with pytest.raises(
            NotImplementedError, match="is more than its weight, which alone is read: no LoRA, bias or scale"
        ):
            model.compute_next_token_loss(3)


def test_lora_on_the_head_in_pytorch() -> None:
    """What docs/recipes/lora.md writes for torch: the gradients of an adapter around the head."""
    model = CausalLM()
    model.lm_head = layer = LoraLinear(model.lm_head)
    hidden = model.base_model(TOKENS).last_hidden_state[:, :-1]
    a, b, weight, scale = layer.lora_A.weight, layer.lora_B.weight, layer.weight, layer.scale
    hidden, weight = torch.cat([hidden, scale * hidden @ a.t()], -1), torch.cat([weight.detach(), b], -1)
    right(linear_cross_entropy(hidden, weight, TOKENS[:, 1:]), model)
