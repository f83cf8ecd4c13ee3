"""`linear_topk` against all logits, sorted in float64: ties, ragged vocabularies, rows that do not count."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from lce_jax import linear_logprobs, linear_topk, sharded_linear_topk
from lce_jax.xla import _topk
from tests import cases, oracle
from tests.pairs import combined
from tests.topk_cases import assert_exact, integers

CALLS = {
    "k 1": (1, cases.case("plain", leading=(23,), H=31, V=97)),
    "k 3": (3, cases.case("no leading dimension", leading=(), V=97)),
    "k 64": (64, cases.case("long rows", leading=(5, 3), V=5003)),
    "k 512": (512, cases.case("more than a group", leading=(7,), V=1201)),
    "all": (104, cases.case("the whole vocabulary", leading=(4,))),
    "where hides NaN": (5, cases.case("where", leading=(40, 6), where="nan", weight_layout="hv", bias="float32")),
    "nothing live": (5, cases.case("where", leading=(40,), where="none")),
    "negative scale": (5, cases.case("scale", logit_scale=-1.3, bias="float32", temperature=0.7)),
    "scale 0": (5, cases.case("scale", logit_scale=0.0, vocab_size=97)),
    "everything": (7, cases.case(
        "everything", leading=(40, 6), V=1128, vocab_size=1113, temperature="token", where="nan", logit_softcap=4.0,
        logit_scale=-1.3, weight_layout="hv", spread=3.0, bias="bfloat16",
    )),
    "bfloat16": (8, cases.case("bfloat16", dtype="bfloat16", leading=(64,), H=128, V=512)),
    "float32 hidden": (8, cases.case("mixed", dtype="bfloat16", hidden_dtype="float32", leading=(64,))),
    "float16": (8, cases.case("float16", dtype="float16", leading=(64,))),
    # XLA may round a product of one term otherwise in each place that uses it.
    "a hidden size of 1": (1, cases.case("one term", leading=(40,), H=1, V=150, bias="float32")),
    "everything of 1": (3, cases.case(
        "one term", leading=(40,), H=1, V=300, vocab_size=118, weight_layout="hv", logit_scale=0.5, bias="float32",
    )),
}  # fmt: skip


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Chunks of 16 tokens, of which the last reaches back; fewer tokens are one chunk."""
    monkeypatch.setattr(_topk, "GRAIN_ON_CPU", 16)
    monkeypatch.setattr(_topk, "CHUNK_BYTES_ON_CPU", 0)
    jax.clear_caches()  # the numbers are read while tracing
    yield
    jax.clear_caches()


@pytest.mark.fast("everything", "bfloat16", "nothing live", "k 64")
@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("name", CALLS)
def test_matches_float64(name: str) -> None:
    k, test = CALLS[name]
    hidden, weight, labels, options, _ = cases.draw(test)
    out = linear_topk(hidden, weight, k, **options)
    shape = labels.shape
    assert (out.ids.shape, out.logprobs.shape, out.lse.shape) == ((*shape, k), (*shape, k), shape)
    assert (out.ids.dtype, out.logprobs.dtype, out.lse.dtype) == (jnp.int32, jnp.float32, jnp.float32)
    rounded = hidden.astype(weight.dtype)
    z = oracle.logits(rounded, weight, labels, **options)
    want = oracle.logprobs(rounded, weight, labels, **options)
    live = np.asarray(options.get("where", np.ones(shape, bool)))
    ids, logprobs = np.asarray(out.ids), np.asarray(out.logprobs)
    assert np.all(ids[~live] == -1)
    assert np.all(logprobs[~live] == 0)
    assert np.all((ids[live] >= 0) & (ids[live] < z.shape[-1]))
    assert all(len(set(row)) == k for row in ids[live].reshape(-1, k))
    assert np.all(np.diff(logprobs, axis=-1) <= 0)
    bound = 2e-6 * max(1.0, test.spread)
    assert oracle.value_error(out.lse, want.lse) <= bound
    of_ids = np.take_along_axis(z, np.maximum(ids, 0), -1) - want.lse[..., None]
    assert oracle.value_error(logprobs, np.where(live[..., None], of_ids, 0)) <= bound
    smallest = np.sort(z, axis=-1)[..., -k] - want.lse  # no id that was left out is larger
    assert np.all(of_ids[live] >= smallest[live][..., None] - 2 * bound)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize(
    ("V", "k", "dtype"),
    [(97, 1, "bfloat16"), (97, 97, "float32"), (1201, 3, "float32"), (5003, 64, "bfloat16"), (1201, 512, "float32")],
)
def test_equal_logits_come_by_id(V: int, k: int, dtype: str) -> None:
    """Small integers, whose products are exact: almost every logit occurs many times, and 0 as -0 too."""
    hidden, weight = integers(37, V, dtype)
    out = jax.jit(linear_topk, static_argnums=2)(hidden, weight, k)
    assert_exact(out, hidden, weight, k)


@pytest.mark.slow
@combined(scale=[-3.0, 3.0, 0.0], softcap=[1.0, None])
def test_order_is_that_of_the_products(scale: float, softcap: float | None) -> None:
    """Also where the cap makes 1.0 of most logits, with a bias, and with a scale and a cap that are traced."""
    hidden, weight = integers(9, 700, "float32")
    bias = jnp.asarray(np.random.default_rng(3).integers(-1, 2, 700), jnp.float32)
    z = np.sign(scale) * (np.asarray(hidden) @ np.asarray(weight).T + np.asarray(bias))
    ids = np.argsort(-z, axis=-1, kind="stable")[:, :50]
    options = {"logit_scale": scale, "logit_softcap": softcap}
    traced = {name: None if x is None else jnp.float32(x) for name, x in options.items()}
    mesh = jax.make_mesh((4,), ("tensor",), devices=jax.devices("cpu")[:4], axis_types=(AxisType.Auto,))
    for given in (options, traced):
        assert np.array_equal(linear_topk(hidden, weight, 50, bias=bias, **given).ids, ids)
        assert np.array_equal(sharded_linear_topk(hidden, weight, 50, mesh=mesh, bias=bias, **given).ids, ids)


def test_padding_never_wins() -> None:
    hidden, weight = integers(20, 700, "float32")
    weight = np.array(weight)
    weight[600::2], weight[601::2] = 100.0, np.nan
    for k in (5, 512):
        assert_exact(linear_topk(hidden, weight, k, vocab_size=600), hidden, weight[:600], k)


@combined(scale=[-1.3, 0.0, 2.0], softcap=[None, 4.0])
def test_traced_scale_and_softcap(scale: float, softcap: float | None) -> None:
    hidden, weight, *_ = cases.draw(cases.case("plain", V=300))
    given = {"logit_scale": scale} | ({} if softcap is None else {"logit_softcap": softcap})
    want = linear_topk(hidden, weight, 9, **given)
    got = jax.jit(lambda o: linear_topk(hidden, weight, 9, **o))({n: jnp.float32(x) for n, x in given.items()})
    assert np.array_equal(got.ids, want.ids)
    assert oracle.value_error(got.logprobs, want.logprobs) < 1e-6


def test_a_traced_temperature_of_zero_stays_in_its_row() -> None:
    hidden, weight, *_ = cases.draw(cases.case("plain", leading=(6,)))
    out = jax.jit(lambda t: linear_topk(hidden, weight, 4, temperature=t))(np.float32(np.arange(6) != 3))
    want = linear_topk(hidden, weight, 4)
    wrong = np.arange(6) == 3
    assert np.all(np.asarray(out.ids)[3] == -1)
    assert np.isnan(np.asarray(out.logprobs)[3]).all()
    assert np.isnan(np.asarray(out.lse)[3])
    assert np.array_equal(np.asarray(out.ids)[~wrong], np.asarray(want.ids)[~wrong])
    assert oracle.value_error(np.asarray(out.logprobs)[~wrong], np.asarray(want.logprobs)[~wrong]) < 1e-6


@pytest.mark.slow
def test_peaked_rows_and_large_logits() -> None:
    """exp(logprobs) is a distribution: none is above 1, also where one token has all the probability."""
    hidden, weight, labels, _, _ = cases.draw(cases.case("peaked", leading=(64,), V=3000, spread=300.0))
    out = linear_topk(hidden, weight, 512)
    assert np.all(np.asarray(out.logprobs) <= 0)
    assert np.all(np.exp(np.asarray(out.logprobs, np.float64)).sum(-1) <= 1 + 1e-6)
    of_labels = linear_logprobs(hidden, weight, labels, implementation="xla")
    assert oracle.value_error(out.lse, of_labels.lse) < 1e-6


def test_float64() -> None:
    with jax.enable_x64(True):
        hidden, weight, labels, *_ = (x for x in cases.draw(cases.case("float64", dtype="float64", V=900)))
        out = linear_topk(hidden, weight, 9)
        z = oracle.logits(hidden, weight, labels)
        assert out.logprobs.dtype == jnp.float64
        assert np.array_equal(out.ids, np.argsort(-z, axis=-1, kind="stable")[:, :9])
        assert oracle.value_error(out.lse, oracle.logprobs(hidden, weight, labels).lse) < 1e-13


def test_no_tokens() -> None:
    out = linear_topk(jnp.ones((2, 0, 8)), jnp.ones((32, 8)), 3)
    assert [x.shape for x in out] == [(2, 0, 3), (2, 0, 3), (2, 0)]


@pytest.mark.slow
@pytest.mark.parametrize("where", [False, True])
def test_memory(where: bool) -> None:
    """No array of T x V: the logits of a chunk of tokens, and what is selected from them."""
    T, H, V = 4096, 256, 65536
    struct = jax.ShapeDtypeStruct
    args = struct((T, H), "bfloat16"), struct((V, H), "bfloat16"), struct((T,), bool) if where else None
    compiled = jax.jit(lambda h, w, where: linear_topk(h, w, 64, where=where)).lower(*args).compile()
    shapes = re.findall(r"\b(?:pred|[suf]\d+|bf16)\[([\d,]+)\]", compiled.as_text())
    largest = max(math.prod(map(int, dims.split(","))) for dims in shapes)
    chunk = _topk.CHUNK_BYTES_ON_CPU
    assert largest <= max(chunk // 4, V * H)
    assert compiled.memory_analysis().temp_size_in_bytes < 3 * chunk + V * H * 4  # the CPU widens the weight


@pytest.mark.parametrize(("V", "k"), [(151936, 64), (50257, 64), (128256, 1)])
def test_no_selection_is_from_a_whole_row(V: int, k: int) -> None:
    """It costs as much as the product: each is from less than a tenth of the columns."""
    struct = jax.ShapeDtypeStruct
    text = jax.jit(lambda h, w: linear_topk(h, w, k)).lower(struct((16, 8), "float32"), struct((V, 8), "float32"))
    sizes = re.findall(r"(?:top_k|sort)\b.*?tensor<16x(\d+)xf32>", text.as_text())
    assert sizes
    assert max(map(int, sizes)) < V / 10


def test_derivatives_that_are_used_are_refused() -> None:
    hidden, weight, labels, *_ = cases.draw(cases.case("plain"))
    for field in ("logprobs", "lse"):
        with pytest.raises(NotImplementedError, match=r"linear_topk is not differentiable.*candidates=topk\.ids"):
            jax.grad(lambda h, field=field: jnp.sum(getattr(linear_topk(h, weight, 3), field)))(hidden)

    def loss(hidden, weight):
        top = linear_topk(hidden, weight, 3)  # for metrics
        teacher = linear_topk(jax.lax.stop_gradient(hidden), jax.lax.stop_gradient(weight), 3)  # as the message advises
        out = linear_logprobs(hidden, weight, labels, candidates=teacher.ids)
        return -jnp.mean(jnp.sum(jnp.exp(teacher.logprobs) * out.candidate_logprobs, axis=-1)), top

    (value, top), gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(hidden, weight)
    ids = linear_topk(hidden, weight, 3)
    assert np.array_equal(top.ids, ids.ids)

    def stored(hidden, weight):
        logp = jnp.take_along_axis(jax.nn.log_softmax(hidden @ weight.T), ids.ids, -1)
        return -jnp.mean(jnp.sum(jnp.exp(ids.logprobs) * logp, axis=-1))

    want, wanted = jax.jit(jax.value_and_grad(stored, argnums=(0, 1)))(hidden, weight)
    assert oracle.value_error(value, want) < 1e-6
    assert all(oracle.relative_norm(a, b) < 1e-5 for a, b in zip(gradients, wanted, strict=True))


def test_derivatives_that_are_dropped_are_not_refused() -> None:
    """Metrics of a scan under ``jit``, a stopped result, and ids."""
    hidden, weight, *_ = cases.draw(cases.case("plain", leading=(4, 6)))

    def loss(hidden):
        def step(total, h):
            top = linear_topk(h, weight, 3)
            return total + jnp.sum(h**2) * jax.lax.stop_gradient(top.lse[0]) + jnp.sum(
                weight[top.ids]
            ), top.logprobs.mean()

        return jax.lax.scan(step, 0.0, hidden)

    gradient, _ = jax.jit(jax.grad(loss, has_aux=True))(hidden)
    lse = np.asarray(linear_topk(hidden, weight, 3).lse)[:, :1, None]
    assert oracle.relative_norm(gradient, 2 * np.asarray(hidden) * lse) < 1e-6
    with pytest.raises(NotImplementedError, match="linear_topk is not differentiable"):
        jax.jit(jax.grad(lambda h: jax.lax.map(lambda x: linear_topk(x, weight, 3).lse, h).sum()))(hidden)


def test_no_implicit_transfers() -> None:
    hidden, weight = jnp.ones((4, 8)), jnp.ones((32, 8))
    linear_topk(hidden, weight, 3)
    with jax.transfer_guard("disallow"):
        linear_topk(hidden, weight, 3)
