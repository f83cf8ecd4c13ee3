"""What type checkers and signatures say of options, beside the table of options."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

import lce_jax
from lce_jax.call import _options
from lce_jax.call._options import KLOptions, LogprobOptions, MeshPlacement
from lce_jax.flax import _head, linen, nnx

TYPED = {
    "logprobs": _head.OptionsOfLogprobs,
    "topk": _head.OptionsOfTopK,
    "kl": _head.OptionsOfKL,
    "loss": _head.OptionsOfLoss,
}


def keywords(function: Callable[..., Any]) -> dict[str, Any]:
    """The parameters that a call gives by name, with their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {x.name: x.default for x in parameters if x.kind is x.KEYWORD_ONLY}


def test_typed_keywords_are_the_table() -> None:
    assert KLOptions.__annotations__.keys() == _options.OPTIONS.keys()
    assert set(LogprobOptions.__annotations__) == set(_options.list_options("linear_logprobs"))


@pytest.mark.parametrize("name", [name for name in lce_jax.__all__ if "linear_" in name])
def test_a_signature_has_the_defaults_of_the_table(name: str) -> None:
    options = keywords(getattr(lce_jax, name)).items() & {(x, y.default) for x, y in _options.OPTIONS.items()}
    assert {x for x, _ in options} == keywords(getattr(lce_jax, name)).keys() & _options.OPTIONS.keys()


@pytest.mark.parametrize("name", [name for name in lce_jax.__all__ if name.startswith("sharded_")])
def test_the_axes_of_a_mesh_stand_in_place_of_axis_name(name: str) -> None:
    own, base = (inspect.signature(getattr(lce_jax, x)).parameters for x in (name, name.removeprefix("sharded_")))
    assert list(keywords(getattr(lce_jax, name)))[: len(MeshPlacement._fields)] == [*MeshPlacement._fields]
    others = {x for x in own if x not in (*MeshPlacement._fields, "options")}
    assert others == {x for x in base if x not in (*_options.OPTIONS, "options", "unknown")}
    assert {x: own[x].default for x in others} == {x: base[x].default for x in others}


@pytest.mark.parametrize("method", TYPED)
def test_a_head_has_the_options_of_the_function_that_it_calls(method: str) -> None:
    """But for those that are its own, and for an adapter, whose weight is no head's."""
    settings = _head.HeadSettings(8)
    own = {"bias", "lora", *settings._function_options()}
    own |= {f"teacher_{name}" for name in own}
    known = set(_options.list_keywords(_head.METHODS[method])) - own
    assert set(TYPED[method].__annotations__) | set(keywords(getattr(_head.LMHead, method))) == known


def test_a_tied_head_has_the_options_of_a_head_but_those_of_a_weight_of_its_own() -> None:
    of_weight = {"hidden_size", "vocab_size", "embed", "pad_to_multiple", "weight_init"}
    given = {
        nnx.LMHead: (keywords(nnx.LMHead.__init__).keys() | of_weight) - {"rngs"},
        linen.LMHead: {field.name for field in dataclasses.fields(linen.LMHead)} - {"parent", "name"},
    }
    for names in given.values():
        assert names == {*_head.TiedOptions.__annotations__, *of_weight}


def test_a_head_has_the_defaults_of_the_table() -> None:
    settings = {field.name: field.default for field in dataclasses.fields(_head.HeadSettings)}
    shared = {"logit_scale", "logit_softcap", "precision"}
    assert {name: settings[name] for name in shared} == {name: _options.OPTIONS[name].default for name in shared}
    of_linen = {field.name: field.default for field in dataclasses.fields(linen.LMHead)}
    for arguments in (keywords(nnx.LMHead.__init__), of_linen):
        assert {name: arguments[name] for name in settings if name != "vocab_size"} == {
            name: x for name, x in settings.items() if name != "vocab_size"
        }


def test_a_missing_argument_names_the_function_over_a_mesh() -> None:
    with pytest.raises(TypeError, match=r"sharded_linear_logprobs\(\) .* 'weight' and 'labels'"):
        lce_jax.sharded_linear_logprobs(jnp.ones((2, 3)))
