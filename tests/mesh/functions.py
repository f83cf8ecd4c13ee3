"""Every function that a mesh may spread, and every place where it may run: the two sides of this folder's matrix."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lce_jax
from tests import oracle
from tests.partition_cases import KINDS, B, H, S, V, mesh_of, names, put
from tests.sharding_cases import LAYOUTS
from tests.sharding_cases import mesh_of as mesh_of_layout

AUTO, EXPLICIT = KINDS
G, K = 48, 3  # the teacher's hidden size, and ids per token
GRADIENTS = ("hidden", "weight", "bias")
type Operands = dict[str, jax.Array]
type Results = tuple[jax.Array, ...]


def _draw() -> Operands:
    """For all functions: hidden states and weight of two heads, their biases, and what belongs to each token."""
    rng = np.random.default_rng(0)
    drawn = {
        "hidden": rng.standard_normal((B, S, H)),
        "weight": rng.standard_normal((V, H)) / 8,
        "bias": rng.standard_normal(V),
        "teacher_hidden": rng.standard_normal((B, S, G)),
        "teacher_weight": rng.standard_normal((V, G)) / 8,
        "temperature": rng.uniform(0.5, 2.0, (B, S)),
        "advantage": rng.standard_normal((B, S)),
    }
    where, labels, ids = rng.random((B, S)) < 0.6, rng.integers(-1, V, (B, S)), rng.integers(0, V, (B, S, K))
    floats = {name: jnp.asarray(x, jnp.float32) for name, x in drawn.items()}
    return floats | {"where": jnp.asarray(where), "labels": jnp.asarray(labels), "ids": jnp.asarray(ids)}


OPERANDS = _draw()  # here, where no mesh is in the context


class Function(NamedTuple):
    """Its name without and with a mesh, and what it returns for the operands: arrays by token, or their sum."""

    name: str
    results: Callable[[Callable[..., Any], Operands], Results]
    sums: bool = False
    gradients: tuple[str, ...] = GRADIENTS

    def __str__(self) -> str:
        return self.name

    def bind(self, sharded: bool = False, **axes: Any) -> Callable[[Operands], Results]:
        function = getattr(lce_jax, f"sharded_{self.name}" if sharded else self.name)
        return lambda x: self.results(functools.partial(function, precision="highest", **axes), x)


def _rows(x: Operands, *keys: str) -> dict[str, jax.Array]:
    return {key: x[key] for key in keys}


def _policy(logprob: Any, entropy: Any, lse: Any, advantage: Any) -> Any:
    return -advantage * jnp.exp(0.1 * logprob) - 0.01 * entropy + 1e-3 * lse**2


def _logprobs(f: Any, x: Operands) -> Results:
    more = _rows(x, "bias", "where", "temperature")
    return f(x["hidden"], x["weight"], x["labels"], vocab_size=4001, logit_softcap=4.0, **more)[:3]


def _cross_entropy(f: Any, x: Operands) -> Results:
    given = {"reduction": "none", "label_smoothing": 0.1, "z_loss": 1e-3, "ignore_index": -1, "vocab_size": 4001}
    return (f(x["hidden"], x["weight"], x["labels"], bias=x["bias"], **given),)


def _loss(f: Any, x: Operands) -> Results:
    head = x["hidden"], x["weight"], x["labels"], x["advantage"]
    return (f(_policy, *head, chunk_bytes=1, **_rows(x, "bias", "where"))[0],)


def _logits(f: Any, x: Operands) -> Results:
    return (f(x["hidden"], x["weight"], x["ids"], **_rows(x, "bias", "where", "temperature")),)


def _kl(f: Any, x: Operands) -> Results:
    heads = x["hidden"], x["weight"], x["teacher_hidden"], x["teacher_weight"]
    more = _rows(x, "bias", "where", "temperature")
    return (f(*heads, teacher_bias=-x["bias"], vocab_size=4001, direction="jsd", beta=0.3, **more),)


def _topk(f: Any, x: Operands) -> Results:
    out = f(x["hidden"], x["weight"], K, vocab_size=4001, **_rows(x, "bias", "where", "temperature"))
    return out.logprobs, out.lse, out.ids


FUNCTIONS = [
    Function("linear_logprobs", _logprobs),
    Function("linear_cross_entropy", _cross_entropy),
    Function("linear_loss", _loss, sums=True),
    Function("linear_logits", _logits),
    Function("linear_kl", _kl),
    Function("linear_topk", _topk, gradients=()),
]
BY_NAME = {function.name: function for function in FUNCTIONS}


class Found(NamedTuple):
    results: Results
    gradients: dict[str, jax.Array]
    flops: float  # of one device's program, which has all functions


type Runs = dict[str, Callable[[Operands], Results]]


def found(runs: Runs, x: Operands, **jit: Any) -> dict[str, Found]:
    """Of each function in one program, results and the gradients of their sum with fixed cotangents."""

    def total(own: Operands, others: Operands, run: Callable[[Operands], Results]) -> tuple[jax.Array, Results]:
        results = run(others | own)
        floats = [y for y in results if jnp.issubdtype(y.dtype, jnp.floating)]
        return sum(jnp.sum(y * jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)) for y in floats), results

    def step(x: Operands) -> dict[str, tuple[Results, Operands]]:
        all_of = {}
        for name, run in runs.items():
            own = {key: x[key] for key in BY_NAME[name].gradients}
            if own:
                gradients, results = jax.grad(total, has_aux=True)(own, x, run)
            else:
                gradients, results = {}, run(x)
            all_of[name] = results, gradients
        return all_of

    compiled = jax.jit(step, **jit).lower(x).compile()
    flops = compiled.cost_analysis()["flops"]
    return {name: Found(*of_function, flops) for name, of_function in compiled(x).items()}


def each(*args: Any, **axes: Any) -> Runs:
    return {function.name: function.bind(*args, **axes) for function in FUNCTIONS}


@functools.cache
def run_on_one_device() -> dict[str, Found]:
    return found(each(), OPERANDS)


def assert_same(got: Found, function: Function) -> None:
    want = run_on_one_device()[function.name]
    for x, y in zip(got.results, want.results, strict=True):
        assert oracle.value_error(x, y) < 5e-6
    for name, gradient in got.gradients.items():
        assert oracle.relative_norm(gradient, want.gradients[name]) < 1e-5, name


class Split(NamedTuple):
    """How the operands are split over the axes "data" and "tensor"."""

    hidden: P
    weight: P
    tokens: P = P("data")  # what belongs to each

    @property
    def specs(self) -> dict[str, P]:
        """Of each operand. The bias is split as the vocabulary."""
        by_name = dict.fromkeys(OPERANDS, self.tokens)
        heads = {"hidden": self.hidden, "teacher_hidden": self.hidden}
        return (
            by_name | heads | dict.fromkeys(("weight", "teacher_weight"), self.weight) | {"bias": P(*self.weight[:1])}
        )


WIDEST = Split(P("data"), P("tensor"))
SPLITS = {
    "batch": Split(P("data"), P()),
    "tokens alone": Split(P(), P()),
    "sequence on the vocabulary's axis": Split(P("data", "tensor"), P("tensor")),
    "one axis for both": Split(P("data"), P("data")),
    "hidden dimension": Split(P("data", None, "tensor"), P("tensor")),
    "weight over both axes": Split(P("data"), P("tensor", "data")),
}


@functools.cache
def run_over_named_axes(kind: AxisType = AUTO) -> dict[str, Found]:
    """By ``sharded_`` forms, from operands that no device has a part of."""
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        return found(each(sharded=True, mesh=mesh, batch_axes="data"), OPERANDS)


def run_over_layout(function: Function, layout: str, kind: AxisType) -> Found:
    """The same over the axes of `LAYOUTS`, of one function."""
    mesh = mesh_of_layout(layout, kind)
    with jax.set_mesh(mesh):
        run = function.bind(sharded=True, mesh=mesh, **LAYOUTS[layout][2])
        return found({function.name: run}, OPERANDS)[function.name]


def inside_shard_map(check_vma: bool = True) -> dict[str, Found]:
    """By each shard, with ``axis_name``; the gradient is taken outside."""

    def mapped(function: Function) -> Callable[[Operands], Results]:
        def body(x: Operands) -> Results:
            results = function.bind(axis_name="tensor")(x)
            return tuple(lax.psum(y, "data") for y in results) if function.sums else results

        rows = P() if function.sums else P("data")
        return jax.shard_map(body, mesh=mesh_of(AUTO), in_specs=(WIDEST.specs,), out_specs=rows, check_vma=check_vma)

    return found({function.name: mapped(function) for function in FUNCTIONS}, OPERANDS)


@contextmanager
def split_operands(split: Split, kind: AxisType) -> Iterator[Operands]:
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        yield {name: put(x, mesh, split.specs[name]) for name, x in OPERANDS.items()}


def where_operands_are(split: Split, kind: AxisType, functions: Sequence[Function] = FUNCTIONS) -> dict[str, Found]:
    """Under plain ``jit``, from operands that are split: their gradients are split as they are, by types."""
    with split_operands(split, kind) as x:
        got = found({function.name: function.bind() for function in functions}, x)
    for of_function in got.values() if kind == EXPLICIT else ():
        for name, gradient in of_function.gradients.items():
            assert names(gradient) == names(x[name]), name
    return got


def run_with_in_shardings() -> dict[str, Found]:
    """No type shows how the operands are split, and they need not be there when the program is compiled."""
    mesh = mesh_of(AUTO)
    shardings = {name: NamedSharding(mesh, spec) for name, spec in WIDEST.specs.items()}
    return found(each(), OPERANDS, in_shardings=(shardings,))


def run_examples(kind: AxisType) -> dict[str, Found]:
    """Under ``vmap`` over the batch, which the mesh splits, with weights that the examples share."""

    def mapped(function: Function) -> Callable[[Operands], Results]:
        def run(x: Operands) -> Results:
            shared = {name: None if name in ("weight", "teacher_weight", "bias") else 0 for name in x}
            results = jax.vmap(function.bind(), in_axes=(shared,))(x)
            return tuple(y.sum() for y in results) if function.sums else results

        return run

    with split_operands(WIDEST, kind) as x:
        return found({function.name: mapped(function) for function in FUNCTIONS}, x)


PLACES: dict[str, Callable[[], dict[str, Found]]] = {
    "named, Auto": run_over_named_axes,
    "named, Explicit": lambda: run_over_named_axes(EXPLICIT),
    "shard_map": inside_shard_map,
    "shard_map without types": lambda: inside_shard_map(check_vma=False),
    "Auto": lambda: where_operands_are(WIDEST, AUTO),
    "Explicit": lambda: where_operands_are(WIDEST, EXPLICIT),
    "in_shardings": run_with_in_shardings,
    "vmap, Auto": lambda: run_examples(AUTO),
    "vmap, Explicit": lambda: run_examples(EXPLICIT),
}
