"""What ``help()`` says of the public functions: complete, and the same words for the same argument everywhere."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

import lce_jax
from lce_jax import local

# Names whose text differs, and why. Within each of the two modules the text is still the same.
DIFFERS_BETWEEN_MODULES = {
    "hidden": "local takes flat [T, H]",
    "weight": "local takes one shard of it",
    "labels": "local takes flat [T], the same on every shard",
    "where": "local takes flat [T], and leaves the statistics of the other rows undefined",
    "vocab_size": "finish has no columns to count and must be told",
    "entropy": "fields says which statistics the option adds",
    "stats": "fields says which statistics the option adds",
}
# (function, argument): an argument of another kind under the same name.
OTHER_MEANING = {
    ("pack", "stats"): "the statistics themselves",
    ("finish", "stats"): "the statistics themselves",
}
WITHOUT_RAISES = {local.merge, local.fields, local.pack}  # they check nothing

MODULES = (lce_jax, local)
FUNCTIONS = [
    getattr(module, name) for module in MODULES for name in module.__all__ if inspect.isfunction(getattr(module, name))
]


def sections(function: Callable[..., Any]) -> dict[str, str]:
    """The docstring's sections by title, each dedented; what comes before the first is under ''."""
    parts = re.split(r"^([A-Z]\w+):\n(?=    )", inspect.getdoc(function) or "", flags=re.MULTILINE)
    titled = zip(parts[1::2], parts[2::2], strict=True)
    return {"": parts[0]} | {title: inspect.cleandoc(text) for title, text in titled}


def entries(text: str) -> dict[str, str]:
    """``name: text`` of each entry, its lines joined."""
    parts = re.split(r"^(\*{0,2}\w+): ", text, flags=re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in zip(parts[1::2], parts[2::2], strict=True)}


def accepted_options(function: Callable[..., Any]) -> set[str]:
    """The names that ``**options`` may hold, which `function` lists when it is given an unknown one."""
    parameters = inspect.signature(function).parameters.values()
    positional = [None for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD]
    with pytest.raises(TypeError, match="unknown option no_such_option") as refusal:
        function(*positional, no_such_option=None)
    known = str(refusal.value).partition("known: ")[2].split(", ")
    return set(known) - {x.name for x in parameters}


def test_functions_are_found() -> None:
    assert {lce_jax.linear_logprobs, lce_jax.explain, local.statistics, local.unpack} <= set(FUNCTIONS)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_sections(function: Callable[..., Any]) -> None:
    expected = {"Args", "Returns", "Raises", "Example"} - ({"Raises"} if function in WITHOUT_RAISES else set())
    assert expected <= sections(function).keys()
    assert ">>> " in sections(function)["Example"]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_every_argument_is_described_in_order(function: Callable[..., Any]) -> None:
    described = entries(sections(function)["Args"])
    parameters = inspect.signature(function).parameters.values()
    assert list(described) == ["**options" if x.kind is x.VAR_KEYWORD else x.name for x in parameters]
    for name, text in described.items():
        assert text.endswith("."), f"{name}: {text}"
        assert not re.fullmatch(r"as (\w+ )*`[\w.]+`\W*", text, re.IGNORECASE), f"{name} only points elsewhere: {text}"


def test_the_same_argument_has_the_same_text() -> None:
    texts: dict[tuple[str, str], dict[str, list[str]]] = {}
    for function in FUNCTIONS:
        for name, text in entries(sections(function)["Args"]).items():
            if name == "**options" or (function.__name__, name) in OTHER_MEANING:
                continue
            module = function.__module__ if name in DIFFERS_BETWEEN_MODULES else ""
            key = (name, "local" if module == local.__name__ else "")
            texts.setdefault(key, {}).setdefault(text, []).append(function.__name__)
    assert {key: found for key, found in texts.items() if len(found) > 1} == {}
    assert all((name, "") in texts and (name, "local") in texts for name in DIFFERS_BETWEEN_MODULES)


@pytest.mark.parametrize(
    "function",
    [x for x in FUNCTIONS if "options" in inspect.signature(x).parameters],
    ids=lambda function: function.__name__,
)
def test_options_are_named(function: Callable[..., Any]) -> None:
    text, _, origin = entries(sections(function)["Args"])["**options"].partition(", as ")
    assert set(re.findall(r"``(\w+)``", text)) == accepted_options(function)
    assert "`" in origin
