"""What frameworks get: put there and taken away whole, counted, and refused where it would leave something out.

The frameworks are stand-ins; ``examples/frameworks`` has their own tests.
"""

from __future__ import annotations

import copy
import functools
import importlib
import logging
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.modules import module as torch_modules

import lce_torch_bridge
from lce_torch_bridge import _framework, areal, nemo_rl, skyrl, torchtitan, trl, verl
from lce_torch_bridge.deferred._tensor import DeferredLogits
from lce_torch_bridge.transformers import loss_function, patch
from tests.torch import framework_doubles as doubles
from tests.torch.framework_doubles import TOKENS, CausalLM, LoraLinear, ModulesToSave, of_logits, right
from tests.torch.test_cross_entropy import products

VERSIONS = {"trl": "1.16.0", "verl": "0.9.1", "skyrl": "0.3.0", "nemo-rl": "0.6.0", "torchtitan": "0.3.0",
            "areal": "1.0.4", "transformers": "5.10.4"}  # fmt: skip
NEMO_RL = "from_parallel_hidden_states_to_logprobs"
SKYRL, VERL = "skyrl.backends.skyrl_train.distributed.megatron.model_utils", "verl.utils.kernel.linear_cross_entropy"
WRAPPER, UTILS = "skyrl.backends.skyrl_train.workers.model_wrapper", "skyrl.backends.skyrl_train.utils.torch_utils"
MODULES = {
    trl: ("trl.trainer.distillation_trainer", "trl.trainer.utils"),
    verl: (VERL, "verl.models.mcore.model_forward_fused"),
    skyrl: (SKYRL, WRAPPER, UTILS),
    nemo_rl: ("nemo_rl.distributed.model_utils",),
    torchtitan: ("torchtitan.components.loss", "torchtitan.config.override", "torchtitan.distributed.spmd_types"),
    areal: ("areal.engine", "areal.engine.fsdp_engine"),
}  # fmt: skip
PLACES = {  # what is replaced
    trl: {"trl.trainer.utils": ["_ChunkedLogProbFunction"],
          "trl.trainer.distillation_trainer": ["ChunkedDivergenceFunction"]},
    verl: {VERL: ["linear_cross_entropy"], "verl.models.mcore.model_forward_fused": ["linear_cross_entropy"],
           "ray": ["init"]},
    skyrl: {SKYRL: ["_fused_lm_head_logprob_apply", "from_parallel_logits_to_logprobs",
                    "from_parallel_logits_to_logprobs_packed_sequences"], f"{WRAPPER}.HFModelWrapper": ["__init__"],
            UTILS: ["FLASH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE"], "ray": ["init"]},
    nemo_rl: {"nemo_rl.distributed.model_utils": [NEMO_RL,
                                                  "from_parallel_logits_to_logprobs"], "ray": ["init"]},
    areal: {"areal.engine": ["FSDPPPOActor", "FSDPLMEngine", "FSDPDPOEngine"]},
    torchtitan: {"torchtitan.components.loss.ChunkedLossWrapper": ["set_lm_head", "__call__"]},
}  # fmt: skip
each_framework = pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])


class Wrapper:
    """Like SkyRL's `HFModelWrapper`."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model


def chunked_loss() -> type:
    """Like torchtitan's `ChunkedLossWrapper`."""

    class ChunkedLossWrapper:
        Config = type("Config", (types.SimpleNamespace,), {})

        def set_lm_head(self, lm_head: torch.nn.Module) -> None:
            raise AssertionError(lm_head)

        def __call__(self, pred: Any, labels: Any, global_valid_tokens: Any = None, **loss_inputs: Any) -> Any:
            raise AssertionError(pred, labels, global_valid_tokens, loss_inputs)

    return ChunkedLossWrapper


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For every framework and for Ray, as if they were installed."""
    doubles.modules_of(monkeypatch, *(path for paths in MODULES.values() for path in paths))
    doubles.modules_of(monkeypatch, "transformers.modeling_outputs", "ray", "skyrl.train.entrypoints.main_base")
    sys.modules["torchtitan.components.loss"].ChunkedLossWrapper = chunked_loss()
    sys.modules[WRAPPER].HFModelWrapper = type("HFModelWrapper", (Wrapper,), {"__init__": Wrapper.__init__})
    sys.modules["torchtitan.config.override"].override = lambda **_: lambda function: function
    sys.modules["ray"].is_initialized = lambda: False
    sys.modules["ray"].init = lambda **given: given
    monkeypatch.setattr("importlib.metadata.version", VERSIONS.__getitem__)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: True)
    before = dict(torch_modules._global_module_registration_hooks)
    yield
    for module in MODULES:
        module._installed.undo()
        module._installed.calls = 0
    assert torch_modules._global_module_registration_hooks == before
    for made in (torchtitan._register_override, skyrl._wrap_init, areal._make_engine, _framework._wrap_ray_init):
        made.cache_clear()


def owner_of(path: str) -> Any:
    owner, _, name = path.rpartition(".")
    return getattr(sys.modules[owner], name) if name.endswith("Wrapper") else sys.modules[path]


def held(module: types.ModuleType) -> list[Any]:
    return [getattr(owner_of(path), name) for path, names in PLACES[module].items() for name in names]


@each_framework
def test_installed_twice_and_taken_away(module: Any) -> None:
    before = held(module)
    owned = {path: dict(vars(owner_of(path))) for path in PLACES[module]}
    with module.install() as installed:
        ours = held(module)
        assert all(x is not y for x, y in zip(ours, before, strict=True))
        assert module.install() is installed
        assert all(x is y for x, y in zip(held(module), ours, strict=True))
    assert all(x is y for x, y in zip(held(module), before, strict=True))
    assert {path: dict(vars(owner_of(path))) for path in PLACES[module]} == owned
    installed.undo()  # nothing is left to undo
    assert module.install() is installed
    assert all(x is not y for x, y in zip(held(module), before, strict=True))


@each_framework
def test_another_version_is_said(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: "99.1")
    with pytest.warns(RuntimeWarning, match=r"[\w-]+ \d+\.\d+, .* 99.1: compare a step's loss"):
        module.install()


@each_framework
def test_a_framework_that_is_missing_is_named(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (*MODULES[module], "ray"):
        monkeypatch.setitem(sys.modules, path, None)
    with pytest.raises(ModuleNotFoundError, match=r"this is for [\w-]+ \d\.\d+, which is not installed"):
        module.install()


def test_a_version_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", unknown)
    with pytest.warns(RuntimeWarning, match="this is a copy without a version"):
        skyrl.install()


def test_a_function_with_other_parameters_is_refused() -> None:
    utils = sys.modules[SKYRL]
    utils._fused_lm_head_logprob_apply = lambda hidden, weight: hidden @ weight
    with pytest.raises(
        NotImplementedError, match=r"takes hidden, weight, and not backend, .*skyrl 0.3.0, and .* for 0.3"
    ):
        skyrl.install()
    assert held(skyrl)[1] is not skyrl._refuse_logits  # nothing is half installed


def test_a_function_of_another_name_is_refused() -> None:
    sys.modules[SKYRL]._fused_lm_head_logprob_apply = None
    with pytest.raises(NotImplementedError, match=r"_fused_lm_head_logprob_apply .* not there: .*skyrl 0\.3\.0"):
        skyrl.install()


def test_what_others_have_replaced_since_stays() -> None:
    installed = skyrl.install()
    utils = sys.modules[SKYRL]
    ours, utils._fused_lm_head_logprob_apply = utils._fused_lm_head_logprob_apply, print
    with pytest.raises(RuntimeError, match=r"_fused_lm_head_logprob_apply .*undo that"):
        installed.undo()
    utils._fused_lm_head_logprob_apply = ours


def test_calls_are_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(2, 3, 8, generator=generator), torch.randn(16, 8, generator=generator)
    labels = torch.randint(0, 16, (2, 3), generator=generator)
    with caplog.at_level(logging.INFO, "lce_torch_bridge"), skyrl.install() as of_skyrl, verl.install() as of_verl:
        for _ in range(2):
            sys.modules[SKYRL]._fused_lm_head_logprob_apply("torch", hidden, weight, labels, 0, 16, 4, None, False)
            sys.modules[VERL].linear_cross_entropy(hidden, weight, labels, 0.7)
    assert (of_skyrl.calls, of_verl.calls) == (2, 2)
    said = [record.getMessage() for record in caplog.records if "lce_torch_bridge" in record.getMessage()]
    assert [text.partition(":")[0] for text in said] == ["skyrl", "verl"]


@pytest.mark.parametrize("module", [verl, skyrl, nemo_rl], ids=["verl", "skyrl", "nemo_rl"])
def test_each_worker_of_ray_has_ours(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ray, hook = sys.modules["ray"], f"{module.__name__}.install_in_worker"
    with module.install():
        given = ray.init(num_cpus=1, runtime_env={"env_vars": {"A": "1"}})
        assert given == {"num_cpus": 1, "runtime_env": {"env_vars": {"A": "1"}, "worker_process_setup_hook": hook}}
        assert ray.init() == {"runtime_env": {"worker_process_setup_hook": hook}}
        with pytest.raises(ValueError, match=f"'mine' in runtime_env: call {hook} in it, not install"):
            ray.init(runtime_env={"worker_process_setup_hook": "mine"})
    first = ray.init
    monkeypatch.setattr(ray, "init", lambda **given: ("traced", first(**given)))
    with module.install(), module.install():  # what another has put there meanwhile is kept
        assert ray.init() == ("traced", {"runtime_env": {"worker_process_setup_hook": hook}})
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    before = held(module)
    with pytest.raises(RuntimeError, match=rf"call install\(\) before ray.init\(\), or give .*{hook}"):
        module.install()
    assert all(x is y for x, y in zip(held(module), before, strict=True))
    importlib.import_module(module.__name__).install_in_worker()  # as Ray calls the hook
    assert held(module)[0] is not before[0]


def test_workers_of_nemo_rl_without_megatron_have_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    before = held(nemo_rl)
    nemo_rl.install_in_worker()
    assert all(x is y for x, y in zip(held(nemo_rl), before, strict=True))


def test_verl_finds_its_module_by_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lce_torch_bridge, "verl", verl)
    monkeypatch.delitem(sys.modules, "lce_torch_bridge.verl")
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "mine,lce_torch_bridge.verl")
    fresh = importlib.import_module("lce_torch_bridge.verl")
    assert sys.modules[VERL].linear_cross_entropy.__module__ == "lce_torch_bridge.verl"
    assert isinstance(sys.modules["ray"].init(), dict)  # as it was
    fresh._installed.undo()


def test_command_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Each runs with ours in place, and leaves the framework as it was."""
    ran, before = [], held(skyrl) + held(nemo_rl)
    sys.modules["skyrl.train.entrypoints.main_base"].main = lambda: ran.append(held(skyrl)[0] is skyrl._logprobs)
    skyrl._main()
    script = tmp_path / "script.py"
    lines = "import sys", "from nemo_rl.distributed import model_utils", f"sys.argv.append(model_utils.{NEMO_RL})"
    script.write_text("\n".join(lines))
    monkeypatch.setattr(sys, "argv", ["nemo_rl", str(script), "--mine"])
    nemo_rl._main()
    assert ran == [True]
    assert sys.argv == [str(script), "--mine", nemo_rl._logprobs]
    assert all(x is y for x, y in zip(held(skyrl) + held(nemo_rl), before, strict=True))


@pytest.mark.parametrize(
    ("module", "switch"),
    [(skyrl, "trainer.fused_lm_head_logprob=true"), (nemo_rl, "policy.megatron_cfg.use_fused_linear_logprobs=true")],
    ids=["skyrl", "nemo_rl"],
)
def test_logits_are_an_error(module: Any, switch: str) -> None:
    module.install()
    with pytest.raises(RuntimeError, match=f"passes logits: set {switch}, or undo {module.__name__}"):
        held(module)[1](torch.ones(1, 2, 8))


def test_no_framework_is_imported_before_it_is_asked_for() -> None:
    names = [module.__name__.rpartition(".")[2] for module in MODULES]
    code = (
        f"import sys, lce_torch_bridge as b; [getattr(b, name) for name in {[*names, 'transformers']}];"
        f"print([x for x in {[*names, 'transformers', 'ray']} if x in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "[]", done.stderr


def test_hugging_faces_frozen_head_costs_no_gradient() -> None:
    model = CausalLM()
    model.lm_head.requires_grad_(False)
    patch(model)
    for _ in range(2):
        with products() as run:
            model(TOKENS, labels=TOKENS).loss.backward()
        assert run == ["kept", "dhidden"]
    right(model(TOKENS, labels=TOKENS).loss, model)


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


@pytest.mark.parametrize("wrap", [LoraLinear, replaced, lambda _: Half(16, 64)])
def test_a_head_of_another_kind(wrap: Any) -> None:
    """It is refused; put there later, it computes its logits, and the log says why."""
    model = CausalLM()
    model.lm_head = wrap(model.lm_head)
    with pytest.raises(NotImplementedError, match=r"forward is not a linear layer's|forward is already replaced"):
        patch(model)
    assert "forward" not in vars(model)
    model = CausalLM()
    handle = patch(model)
    right(model(TOKENS, labels=TOKENS).loss, model)
    assert handle.served == 1
    model.lm_head = wrap(torch.nn.Linear(16, 64, bias=False))
    right(model(TOKENS, labels=TOKENS).loss, model)
    assert handle.served == 1
    (reason,) = [place for place in handle.places if "of_logits" not in place and "compute()" not in place]
    assert "forward is not a linear layer's" in reason or "forward is already replaced" in reason


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("wrap", [hooked, ModulesToSave, lambda head: LoraLinear(head).merged()])
def test_heads_that_others_wrap_or_change(wrap: Any, first: bool) -> None:
    """A hook on the head, a trained copy of it, and an adapter that is merged are served."""
    model = CausalLM(bias=True)
    handle = patch(model) if first else None
    model.lm_head = wrap(model.lm_head)
    handle = handle or patch(model)
    for x in model.lm_head.parameters():
        x.data += 0.1 * torch.randn_like(x)  # a copy is no longer its original
    right(model(TOKENS, labels=TOKENS).loss, model)
    assert handle.served == 1


def test_hugging_face_takes_a_head_around_which_others_put_hooks() -> None:
    """Accelerate replaces the ``forward`` of a head, and binds a model's to the model, whatever it is."""
    model = CausalLM().eval()
    want = model(TOKENS).logits
    handle = patch(model)
    model.lm_head._old_forward = model.lm_head.forward
    model.lm_head.forward = functools.partial(model.lm_head._old_forward)
    model.forward = types.MethodType(model.forward, model)
    right(model(TOKENS, labels=TOKENS).loss, model)
    assert handle.served == 1
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, want)


class Scaled(CausalLM):
    """Changes its logits, and what its head is given, has no name for it, and adds a term to its loss."""

    def forward(self, tokens: torch.Tensor, labels: Any = None) -> types.SimpleNamespace:
        logits = 7 * torch.tanh(self.lm_head(1.1 * self.base_model(tokens).last_hidden_state) * 1.3 / 7)
        loss = None if labels is None else self.loss_function(logits, labels) + 1e-2 * logits.logsumexp(-1).mean()
        return types.SimpleNamespace(logits=logits, loss=loss)


def test_what_a_model_does_to_its_logits_is_done() -> None:
    """With and without deferred logits; and where its loss is one that nobody serves."""
    losses = []
    for own in (None, lambda logits, labels: (logits.softmax(-1) ** 2).mean() + 0 * labels.sum()):
        model, handle = Scaled(), None
        if own is not None:
            model.loss_function = own  # type: ignore[method-assign]
        for is_patched in (False, True):
            handle = patch(model) if is_patched else None
            loss = model(TOKENS, TOKENS).loss
            losses.append([loss, *torch.autograd.grad(loss, [*model.parameters()])])
        assert handle is not None
        assert (handle.served > 0, handle.stored > 0) == (own is None, own is not None)
    for want, got in (losses[:2], losses[2:]):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)


def test_what_is_no_model_is_refused() -> None:
    """And what only calls the model: the message says the line to write."""
    for model, got in (("a/b", "'a/b'"), (CausalLM, "<class .*CausalLM'>"), (torch.nn.Embedding(2, 2), "Embedding")):
        with pytest.raises(TypeError, match=rf"patch\(model.lm_head\).*: got {got}"):
            patch(model)
    model = CausalLM()
    trainer = type("Trainer", (), {"model": model})()
    with pytest.raises(TypeError, match=r"Trainer is not a model: write patch\(trainer.model\)$"):
        patch(trainer)
    with pytest.raises(TypeError, match=r"Trainer is not a model: write defer_logits\(trainer.model\)$"):
        lce_torch_bridge.defer_logits(trainer)
    parallel = torch.nn.Module()
    parallel.module = model
    wrappers = {"module": type("DistributedDataParallel", (torch.nn.Module,), {})(), "_orig_mod": torch.compile(model)}
    wrappers["module"].module = model
    for name, wrapper in wrappers.items():
        line = rf"{type(wrapper).__name__} wraps the model, .*: write patch\(model\) before that, or "
        with pytest.raises(TypeError, match=line + rf"patch\(model.{name}\)"):
            patch(wrapper)
        handle = patch(getattr(wrapper, name))  # as the message says
        right(model(TOKENS, labels=TOKENS).loss, model)
        assert handle.served == 1
        handle.undo()


def test_a_patched_model() -> None:
    model = CausalLM()
    before = dict(vars(model))
    with patch(model) as handle:
        assert patch(model) is handle
        assert lce_torch_bridge.defer_logits(model) is handle
        for _ in range(2):
            right(model(TOKENS, labels=TOKENS).loss, model)
        assert handle.served == 2
        other = copy.deepcopy(model)
        other.lm_head.weight.data *= 2
        right(other(TOKENS, labels=TOKENS).loss, other)  # of its own weight
        assert handle.served == 3
    assert vars(model) == before
    with patch(model, strict=True), pytest.raises(RuntimeError, match="strict=True"):
        model(TOKENS, labels=TOKENS).logits.exp()
    with patch(model, always=True) as handle, torch.no_grad():  # a Trainer that keeps the labels, in evaluation
        logits = model(TOKENS).logits
        got = torch.nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS.flatten())
        assert (handle.served, handle.stored) == (1, 0)
    with torch.no_grad():
        want = torch.nn.functional.cross_entropy(model(TOKENS).logits.flatten(0, 1), TOKENS.flatten())
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)


def test_the_loss_function() -> None:
    model = CausalLM(bias=True)
    given = model.base_model(TOKENS).last_hidden_state, TOKENS
    own = {"weight": model.lm_head.weight, "bias": model.lm_head.bias}
    torch.testing.assert_close(loss_function(*given, 64, **own).double(), of_logits(model), rtol=1e-6, atol=0)
    summed = loss_function(*given, num_items_in_batch=11, **own)
    torch.testing.assert_close(summed.double(), 3 * of_logits(model), rtol=1e-6, atol=0)
    with pytest.raises(ValueError, match="no labels: pass labels, or shift_labels"):
        loss_function(given[0], None, **own)


def test_torchtitan() -> None:
    torchtitan.install()
    theirs = sys.modules["torchtitan.components.loss"]
    loss = theirs.ChunkedLossWrapper()
    loss.loss_fn = theirs.CrossEntropyLoss()
    loss.set_lm_head(torch.nn.Linear(16, 64))
    for head in (LoraLinear(torch.nn.Linear(16, 64)), Half(16, 64)):
        with pytest.raises(NotImplementedError, match=r"lm_head is .*: leave it out of LoRA \(target_modules=\)"):
            loss.set_lm_head(head)
        assert "forward" not in vars(head)
    loss.loss_fn = theirs.MSELoss()
    with pytest.raises(NotImplementedError, match=r"loss is .*Config: this replaces CrossEntropyLoss alone"):
        loss.set_lm_head(torch.nn.Linear(16, 64))


def test_torchtitans_override() -> None:
    """Of a loss in chunks, and of all logits; it puts the loss in place of torchtitan's."""
    theirs = sys.modules["torchtitan.components.loss"]
    plain, before = theirs.CrossEntropyLoss.Config(), theirs.ChunkedLossWrapper.__call__
    chunked = theirs.ChunkedLossWrapper.Config(loss_fn=plain)
    assert torchtitan.without_logits(chunked) is chunked
    assert torchtitan.without_logits(plain).loss_fn is plain
    assert theirs.ChunkedLossWrapper.__call__ is not before


def test_torchtitan_finds_the_override(monkeypatch: pytest.MonkeyPatch) -> None:
    """By importing its module, and under its name."""
    found = []
    sys.modules["torchtitan.config.override"].override = lambda **_: found.append
    monkeypatch.setattr(lce_torch_bridge, "torchtitan", torchtitan)
    monkeypatch.delitem(sys.modules, "lce_torch_bridge.torchtitan")
    importlib.import_module("lce_torch_bridge.torchtitan")
    assert [f"{x.__module__}.{x.__name__}" for x in found] == ["lce_torch_bridge.torchtitan.without_logits"]


def test_skyrls_model_for_fsdp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its logits are deferred, and scored by torch's functions; without Megatron nothing else is replaced."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "flash_attn")
    before = held(skyrl)
    with skyrl.install_in_worker() as installed:
        assert [x is y for x, y in zip(held(skyrl), before, strict=True)] == [True, True, True, False, False, True]
        model = sys.modules[WRAPPER].HFModelWrapper(CausalLM()).model
        model(TOKENS).logits.div_(0.7).log_softmax(-1).gather(-1, TOKENS[..., None])
        (handle,) = installed.deferrals
        assert (handle.served, handle.stored) == (1, 0)
    assert "forward" not in vars(model)


def test_areal() -> None:
    """Its engines defer the logits of the models that they make, but of a critic's."""
    areal.install()
    actor = areal.Actor  # as AReaL's workers find it
    assert sys.modules["areal.engine"].FSDPPPOActor is actor
    assert (actor.__module__, actor.__qualname__) == ("lce_torch_bridge.areal", "Actor")
    with pytest.raises(AttributeError, match="has no attribute 'Critic'"):
        _ = areal.Critic

    class Stock:
        def __init__(self, is_critic: bool) -> None:
            self.config = types.SimpleNamespace(is_critic=is_critic)

        def _create_device_model(self) -> None:
            self.model = CausalLM()

        def _get_vocab_min_max_logits(self, logits: torch.Tensor, ulysses_pad_size: int = 0) -> Any:
            del ulysses_pad_size
            return logits.min(-1).values, logits.max(-1).values

        def _compute_values(self, values: torch.Tensor, ulysses_pad_size: int) -> torch.Tensor:
            del ulysses_pad_size
            return values

    engine: Any = type("Engine", (areal._DeferLogits, Stock), {})
    extremes = []
    for is_critic in (False, True):
        made = engine(is_critic)
        made._create_device_model()
        assert ("forward" in vars(made.model)) == (not is_critic)
        extremes.append(torch.stack(made._get_vocab_min_max_logits(made.model(TOKENS).logits)))
        if not is_critic:
            (handle,) = areal._installed.deferrals
            assert (handle.served, handle.stored) == (2, 0)
            with torch.no_grad():
                assert isinstance(made.model(TOKENS).logits, DeferredLogits)  # of an old policy
    torch.testing.assert_close(*extremes)


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


@pytest.mark.parametrize(
    ("module", "heads"),
    [
        (verl, ("lm_head", "output_layer")),
        (trl, ("lm_head", "embed_out")),
        (skyrl, ("output_layer",)),
        (nemo_rl, ("output_layer",)),
    ],
    ids=["verl", "trl", "skyrl", "nemo_rl"],
)
def test_frameworks_that_hand_over_a_weight(module: Any, heads: tuple[str, ...]) -> None:
    module.install()
    for head in heads:
        model = Megatron(head, torch.nn.Linear(16, 64, bias=False))
        model.first = LoraLinear(torch.nn.Linear(16, 16))  # of another layer
        model.first = ModulesToSave(torch.nn.Linear(16, 16))
        wrapped = getattr(model, head)
        with pytest.raises(NotImplementedError, match=f"LoraLinear'> around {head}, .* leave"):
            setattr(model, head, LoraLinear(wrapped))
        assert getattr(model, head) is wrapped
        if head != "lm_head":
            setattr(model, head, ValueHead(16, 1))
        setattr(model, head, torch.nn.Linear(16, 64, bias=False))
        if module in (verl, trl):
            setattr(model, head, torch.compile(getattr(model, head)))
            setattr(model, head, torch.nn.Linear(16, 64, bias=False))
            setattr(model, head, ModulesToSave(getattr(model, head)))
            assert getattr(model, head).weight.requires_grad


def test_verl_leaves_out_no_bias() -> None:
    with verl.install():
        with pytest.raises(NotImplementedError, match="lm_head has a bias, which verl drops here"):
            Megatron("lm_head", torch.nn.Linear(16, 64))
        Megatron("output_layer", ValueHead(16, 1))  # a critic's
    Megatron("lm_head", torch.nn.Linear(16, 64))
