"""Every public function, compiled for TPUs that need not be there: `make test-tpu`. Nothing is run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import lce_jax
from lce_jax import UnsupportedError, explain
from lce_jax.explain import __main__ as command
from lce_jax.explain import _pod
from lce_jax.explain._compile_targets import TPUS
from lce_jax.mesh import _custom_partitioning
from tests.compiled import needs_libtpu

pytestmark = [needs_libtpu, pytest.mark.usefixtures("optimized")]
B, T, H, V, K = 2, 4096, 256, 32768, 8  # a tile has an eighth of the columns
SHAPES = {
    "hidden": ((B, T, H), jnp.bfloat16, P("data")),
    "weight": ((V, H), jnp.bfloat16, P("tensor")),
    "labels": ((B, T), jnp.int32, P("data")),
    "where": ((B, T), jnp.bool_, P("data")),
    "temperature": ((B, T), jnp.float32, P("data")),
    "ids": ((B, T, K), jnp.int32, P("data")),
}
ENTROPY_BONUS = 0.01

CHUNK_BYTES = 32 << 20  # a loss keeps the exponentials of one chunk, by default of all tokens of so small a problem

type Call = Callable[..., Any]


def function(name: str, sharded: bool) -> Any:
    return getattr(lce_jax, f"sharded_{name}" if sharded else name)


def logprobs(hidden: Any, weight: Any, given: Any, sharded: bool, **options: Any) -> Any:
    options |= {"where": given["where"], "temperature": given["temperature"], "logit_softcap": 30.0}
    out = function("linear_logprobs", sharded)(hidden, weight, given["labels"], **options)
    return jnp.sum(out.logprobs + ENTROPY_BONUS * out.entropy)


def candidates(hidden: Any, weight: Any, given: Any, sharded: bool, **options: Any) -> Any:
    out = function("linear_logprobs", sharded)(hidden, weight, given["labels"], candidates=given["ids"], **options)
    return jnp.sum(out.candidate_logprobs)


def cross_entropy(hidden: Any, weight: Any, given: Any, sharded: bool, **options: Any) -> Any:
    options |= {"label_smoothing": 0.1, "chunk_bytes": CHUNK_BYTES}
    return function("linear_cross_entropy", sharded)(hidden, weight, given["labels"], **options)


def loss(hidden: Any, weight: Any, given: Any, sharded: bool, **options: Any) -> Any:
    def of_token(logprob: Any, entropy: Any, _: Any) -> Any:
        return -logprob - ENTROPY_BONUS * entropy

    options |= {"where": given["where"], "chunk_bytes": CHUNK_BYTES}
    return function("linear_loss", sharded)(of_token, hidden, weight, given["labels"], **options)[0]


def kl(hidden: Any, weight: Any, given: Any, sharded: bool, **options: Any) -> Any:
    teacher = jax.lax.stop_gradient((2 * hidden, weight))
    return jnp.sum(function("linear_kl", sharded)(hidden, weight, *teacher, where=given["where"], **options))


def logits(hidden: Any, weight: Any, given: Any, sharded: bool, **options: Any) -> Any:
    return jnp.sum(function("linear_logits", sharded)(hidden, weight, given["ids"], **options))


def topk(hidden: Any, weight: Any, given: Any, sharded: bool, **options: Any) -> Any:
    return function("linear_topk", sharded)(hidden, weight, K, where=given["where"], **options)


DIFFERENTIABLE: dict[str, Call] = {
    "linear_logprobs": logprobs, "candidates": candidates, "linear_cross_entropy": cross_entropy, "linear_loss": loss,
    "linear_kl": kl, "linear_logits": logits,
}  # fmt: skip
CALLS = DIFFERENTIABLE | {"linear_topk": topk}


class Place:
    """A way to say where the operands lie, on 2 x 2 devices or one: what to compile, and how much a device has."""

    def __init__(self, shards: int, step: Callable[[str, Mesh], Any], axis_type: AxisType | None) -> None:
        self.shards, self.step, self.axis_type = shards, step, axis_type

    def compiled(self, name: str, target: str) -> Any:
        mesh = TPUS[target].mesh(self.shards, self.shards, self.axis_type or AxisType.Auto)
        operands = structs(mesh, whole=self.axis_type is None)
        return jax.jit(with_gradients(name, self.step(name, mesh))).lower(*operands).compile()


def structs(mesh: Mesh, *, whole: bool = False) -> tuple[Any, Any, Any]:
    """Hidden states, weight, and all that has no gradient; ``whole``: on one device, which no mesh names."""

    def struct(shape: Any, dtype: Any, spec: P) -> jax.ShapeDtypeStruct:
        sharding = SingleDeviceSharding(mesh.devices.item()) if whole else NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    given = {name: struct(*of) for name, of in SHAPES.items()}
    return given.pop("hidden"), given.pop("weight"), given


def with_gradients(name: str, step: Any) -> Any:
    return jax.value_and_grad(step, argnums=(0, 1)) if name in DIFFERENTIABLE else step


def as_it_is(name: str, mesh: Mesh) -> Any:
    del mesh
    return functools.partial(CALLS[name], sharded=False)


def by_name(name: str, mesh: Mesh) -> Any:
    return functools.partial(CALLS[name], sharded=True, mesh=mesh, batch_axes="data", vocab_axis="tensor")


def in_shard_map(name: str, mesh: Mesh) -> Any:
    def own(*operands: Any) -> Any:
        found = CALLS[name](*operands, sharded=False, axis_name="tensor")
        return jax.lax.pmean(found, "data") if name in DIFFERENTIABLE else found

    specs = {name: spec for name, (_, _, spec) in SHAPES.items()}
    in_specs = specs.pop("hidden"), specs.pop("weight"), specs
    return jax.shard_map(own, mesh=mesh, in_specs=in_specs, out_specs=P() if name in DIFFERENTIABLE else P("data"))


WAYS = {
    "one device": Place(1, as_it_is, None),
    "Explicit axes": Place(2, as_it_is, AxisType.Explicit),
    "sharded_": Place(2, by_name, AxisType.Auto),
    "shard_map": Place(2, in_shard_map, AxisType.Auto),
}
COMBINED = [  # each function in each way, and each of both on each kind of TPU
    (name, way, list(TPUS)[(i + j) % len(TPUS)]) for i, name in enumerate(CALLS) for j, way in enumerate(WAYS)
]


@pytest.mark.parametrize(("name", "way", "target"), COMBINED)
def test_it_compiles(name: str, way: str, target: str) -> None:
    """No logits of all tokens, and no collective larger than a gradient and a few numbers per token of each shard."""
    text = WAYS[way].compiled(name, target).as_text()
    shards = WAYS[way].shards
    tokens, columns = B * T // shards, V // shards
    assert _pod.largest_array(text) < tokens * columns
    found = _pod.collectives(text, shards * shards)
    assert all(one.devices in (shards, shards * shards) for one in found)
    of_weight, of_tokens = 2 * columns * H, 4 * tokens * (H + 4 * K) * shards
    assert max([one.num_bytes for one in found], default=0) <= max(of_weight, of_tokens), found
    assert bool(found) == (shards > 1)


@pytest.mark.parametrize("name", CALLS)
def test_auto_axes_are_refused_with_the_line_to_write(name: str) -> None:
    """Were the rule there all the same, libtpu would say "Custom emitter for CustomSPMDPartitioning not found"."""
    mesh = TPUS["v5p"].mesh(2, 2)
    hidden, weight, given = structs(mesh)
    step = as_it_is(name, mesh)
    with pytest.raises(
        UnsupportedError, match=r"Give sharded_\S+ .*the axes of {'data': 2, 'tensor': 2} as vocab_axis"
    ):
        jax.jit(step).trace(hidden, weight, given)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (hidden, weight, given))
    shardings = jax.tree.map(lambda x: x.sharding, (hidden, weight, given))
    traced = jax.jit(step, in_shardings=shardings).trace(*shapes)  # only the lowering knows the devices
    with pytest.raises(UnsupportedError, match=r"Give sharded_\S+ .*the mesh's axes as vocab_axis= and batch_axes="):
        traced.lower()


def test_the_rule_is_still_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, libtpu has learnt to: let Auto axes be served."""
    monkeypatch.setattr(_custom_partitioning, "check_rules_are_read", lambda *_: None)
    mesh = TPUS["v5e"].mesh(2, 2)
    lowered = jax.jit(as_it_is("linear_topk", mesh)).lower(*structs(mesh))
    with pytest.raises(jax.errors.JaxRuntimeError, match="Custom emitter for CustomSPMDPartitioning not found"):
        lowered.compile()


def test_without_the_rule_xla_gathers_the_whole_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why Auto axes are refused in place of being left to XLA, which would partition our loops itself."""
    monkeypatch.setattr(_custom_partitioning, "check_rules_are_read", lambda *_: None)
    monkeypatch.setattr(_custom_partitioning, "_attach_rule", lambda run, *_: run)
    mesh = TPUS["v5p"].mesh(2, 2)
    step = with_gradients("linear_logprobs", as_it_is("linear_logprobs", mesh))
    text = jax.jit(step).lower(*structs(mesh)).compile().as_text()
    gathered = [one for one in _pod.collectives(text, 4) if one.arrays == f"bf16[{V},{H}]"]
    assert [one.kind for one in gathered] == ["all-gather"]
    assert gathered[0].times >= 2  # forward and backward


def test_explain_and_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    plan = explain(*(struct for struct in structs(TPUS["v6e"].mesh(1, 1), whole=True)[:2]), labels())
    assert (plan.implementation, plan.call.device.kind) == ("xla", "TPU v6 lite")
    given = ("--pod", "2x2", "--hidden", "256", "--vocab", "32003", "--tokens", "512", "--device", "v5e")
    assert command.main([*given, "--function", "linear_topk"]) == 0
    text = capsys.readouterr().out
    assert "4 of TPU v5 lite, 2x2 (data x tensor)" in text
    assert text.count("linear_topk under jit, Explicit axes: ") == text.count("sharded_linear_topk: ") == 3


def labels() -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((B, T), jnp.int32)
