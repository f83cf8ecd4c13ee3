"""Docstrings of public functions are complete, and describe an argument in the same words everywhere."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import lce_jax
import lce_torch_bridge
from lce_jax.call._options import LogprobOptions
from lce_torch_bridge import areal, megatron, nemo_rl, skyrl, torchtitan, transformers, trl, verl
from lce_torch_bridge.megatron import _api, _output_layer

# Each (function, argument) whose text differs, with the reason.
OTHER_MEANING = {
    ("linear_logits", "where"): "it moves no rows, so it saves no work",
    ("explain", "k"): "one of its arguments, which may be left out",
    ("explain", "ids"): "one of its arguments, which may be left out",
    ("linear_topk", "where"): "ids are -1 there",
    ("explain", "direction"): "it says what differs in the plan",
    ("masked_logprobs", "ids"): "a set",
    ("masked_logprobs", "labels"): "-inf outside the set",
}
# The same for the bridge. All its texts differ from lce_jax's, because they speak of torch and of ranks.
OTHER_MEANING_IN_THE_BRIDGE = {
    ("linear_loss", "wgrad"): "added in float32",
    ("linear_logits", "wgrad"): "there are no kernels",
    **{("linear_topk", name): "there are no labels" for name in ("tp_group", "temperature", "where")},
    **{("linear_topk", name): "it has no gradient" for name in ("bias", "vocab_size")},
    ("linear_topk", "implementation"): "there are no kernels",
    ("linear_logits", "implementation"): "there are no kernels, and no logits are stored",
    ("linear_logits", "bias"): "there are no kernels",
    ("linear_logits", "tp_group"): "there are no labels",
    ("linear_logits", "temperature"): "there are no labels",
    ("linear_logits", "where"): "a bool tensor without values costs what all do, and -1 leaves tokens out, too",
    **{("linear_kl", name): "there are no labels" for name in ("tp_group", "temperature", "where")},
    ("linear_kl", "vocab_size"): "two weights may have different numbers of rows",
    ("linear_kl", "cache_bytes"): "two numbers of each column are kept",
    **{("linear_kl", name): "it is not launched directly" for name in ("wgrad", "implementation")},
    ("masked_logprobs", "ids"): "a set",
    ("verl.linear_cross_entropy", "labels"): "verl's callers pass further shapes",
    ("verl.linear_cross_entropy", "temperature"): "verl's callers pass a number or None",
    ("verl.linear_cross_entropy", "reduction"): "of log-probabilities, without those that do not count",
    ("patch", "model"): "of Transformers",
    ("loss_function", "hidden_states"): "Transformers' shape",
    ("loss_function", "labels"): "[b, s], which it shifts",
    ("output_processor", "labels"): "the model's own, which the context replaces",
    ("fused_output_layer", "labels"): "[b, s], as Megatron has them",
}
FUNCTIONS = [x for name in lce_jax.__all__ if inspect.isfunction(x := getattr(lce_jax, name))]
BRIDGE = [
    getattr(module, name)
    for module in (lce_torch_bridge, areal, megatron, nemo_rl, skyrl, torchtitan, transformers, trl, verl)
    for name in module.__all__
    if inspect.isfunction(getattr(module, name))
]
each_function = pytest.mark.parametrize(
    "function", FUNCTIONS + BRIDGE, ids=lambda function: f"{function.__module__}.{function.__name__}"
)


def sections(function: Callable[..., Any]) -> dict[str, str]:
    """Returns the docstring's sections by title, dedented. The text before the first section has the title ''."""
    parts = re.split(r"^([A-Z]\w+):\n(?=    )", inspect.getdoc(function) or "", flags=re.MULTILINE)
    titled = zip(parts[1::2], parts[2::2], strict=True)
    return {"": parts[0]} | {title: inspect.cleandoc(text) for title, text in titled}


def entries(text: str) -> dict[str, str]:
    """Returns the text of each entry ``name: text`` by its name, with its lines joined."""
    parts = re.split(r"^(\*{0,2}\w+(?:, \w+)*): ", text, flags=re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in zip(parts[1::2], parts[2::2], strict=True)}


def accepted_options(function: Callable[..., Any]) -> set[str]:
    """Returns the names that ``**options`` may hold. `function` lists them when it refuses an unknown one."""
    parameters = inspect.signature(function).parameters.values()
    positional = [max if x.name == "loss_fn" else None for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD]
    with pytest.raises(TypeError, match="unknown option no_such_option") as refusal:
        function(*positional, no_such_option=None)
    known = str(refusal.value).partition("known: ")[2].partition(";")[0].split(", ")
    return set(known) - {x.name for x in parameters}


def options_of_the_bridge(function: Callable[..., Any]) -> set[str]:
    """Returns the options of the bridge's `linear_logprobs` that `function` takes and does not name itself."""
    parameters = set(inspect.signature(function).parameters)
    options = {
        name: x.default
        for name, x in inspect.signature(lce_torch_bridge.linear_logprobs).parameters.items()
        if x.kind is x.KEYWORD_ONLY and name not in parameters
    }
    if function is lce_torch_bridge.megatron.fused_output_layer:  # without a model; test_megatron sees it refuse these
        return set(options) - set(_output_layer.LAYER_OPTIONS)
    if function is lce_torch_bridge.megatron.fused_losses:
        return set(_api.LOSS_OPTIONS)
    hidden, weight, labels = torch.ones(2, 4), torch.ones(8, 4), torch.zeros(2, dtype=torch.int64)
    first = [lambda logprobs, *_: logprobs] if "loss_fn" in parameters else []
    tensors = [hidden, weight] + [labels] * ("labels" in parameters)

    def takes(name: str) -> bool:
        try:
            function(*first, *tensors, **{name: options[name]})
        except TypeError as refusal:
            if "linear_logprobs has this option" not in str(refusal):
                raise
            return False
        return True

    return set(filter(takes, options))


@each_function
def test_sections(function: Callable[..., Any]) -> None:
    signature = inspect.signature(function)
    refers = described_by(function, set()) - described_by(function, set(FUNCTIONS + BRIDGE))
    expected = {"Example"} if refers else {"Raises", "Example"}
    expected |= {"Args"} if signature.parameters and not refers else set()
    if signature.return_annotation != "None":
        expected |= {"Yields" if inspect.isgeneratorfunction(inspect.unwrap(function)) else "Returns"}
    assert expected <= sections(function).keys()
    assert ">>> " in sections(function)["Example"]


def described_by(function: Callable[..., Any], seen: set[Any]) -> set[str]:
    """Returns the arguments that a docstring describes, or that the public functions describe which it names."""
    seen.add(function)
    described = {x.lstrip("*") for names in entries(sections(function).get("Args", "")) for x in names.split(", ")}
    package = function.__module__.partition(".")[0]
    for other in FUNCTIONS + BRIDGE:
        is_named = f"`{other.__name__}`" in (inspect.getdoc(function) or "")
        if is_named and other not in seen and other.__module__.partition(".")[0] == package:
            described |= described_by(other, seen)
    return described


@each_function
def test_every_argument_is_described(function: Callable[..., Any]) -> None:
    """In order; here, or in a function that the docstring names."""
    parameters = list(inspect.signature(function).parameters)
    assert set(parameters) - {"options"} <= described_by(function, set())
    texts = entries(sections(function).get("Args", ""))
    each = [name.lstrip("*") for name in texts if ", " not in name]
    assert each == [name for name in parameters if name in each]
    assert all(text.endswith(".") for text in texts.values())


def name_of(function: Callable[..., Any]) -> str:
    return ("verl." if function is lce_torch_bridge.verl.linear_cross_entropy else "") + function.__name__


def texts_of(functions: list[Callable[..., Any]], without: dict[tuple[str, str], str]) -> dict[Any, dict[str, Any]]:
    """Returns, by argument and text, the functions that have the text."""
    texts: dict[str, dict[str, list[str]]] = {}
    for function in functions:
        for name, text in entries(sections(function).get("Args", "")).items():
            if name.startswith("**") or (name_of(function), name) in without:
                continue
            texts.setdefault(name, {}).setdefault(text, []).append(function.__name__)
    return texts


def test_the_same_argument_has_the_same_text() -> None:
    assert {lce_jax.linear_logprobs, lce_jax.explain} <= set(FUNCTIONS)
    texts = texts_of(FUNCTIONS, OTHER_MEANING)
    assert {key: functions for key, functions in texts.items() if len(functions) > 1} == {}


def test_the_same_argument_of_the_bridge_has_the_same_text() -> None:
    assert {"linear_logprobs", "init", "release", "output_processor"} <= {function.__name__ for function in BRIDGE}
    texts = texts_of(BRIDGE, OTHER_MEANING_IN_THE_BRIDGE)
    assert {key: functions for key, functions in texts.items() if len(functions) > 1} == {}
    assert all(len(texts[name]) == 1 for name in ("hidden", "weight", "labels", "where", "ignore_index"))
    described = {(name_of(function), name) for function in BRIDGE for name in inspect.signature(function).parameters}
    assert described >= OTHER_MEANING_IN_THE_BRIDGE.keys()


@pytest.mark.parametrize(
    "function",
    [x for x in FUNCTIONS + BRIDGE if "options" in inspect.signature(x).parameters],
    ids=lambda function: f"{function.__module__}.{function.__name__}",
)
def test_options_are_named(function: Callable[..., Any]) -> None:
    text, _, origin = entries(sections(function).get("Args", "")).get("**options", "").partition(", as ")
    if not text:  # the function that it names lists them
        return
    known = options_of_the_bridge(function) if function in BRIDGE else accepted_options(function)
    if text.startswith("those of `linear_logprobs` but"):
        known, text = set(LogprobOptions.__annotations__) - known, text.partition(". ")[0]
    else:
        assert "`" in origin
    assert set(re.findall(r"``(\w+)``", text)) == known
