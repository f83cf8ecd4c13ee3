"""The case matrix that every implementation must pass, as data."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests import oracle


@dataclasses.dataclass(frozen=True)
class TestCase:
    """One call. ``where``, ``temperature`` and ``labels`` say how arrays are drawn; ``options`` go to the function."""

    __test__ = False

    name: str
    leading: tuple[int, ...] = (24,)
    H: int = 32
    V: int = 104
    dtype: str = "float32"
    hidden_dtype: str | None = None
    spread: float = 1.0  # standard deviation of the logits
    where: str | None = None  # "some" | "none" | "all" | "nan": masked rows hold NaN
    temperature: Any = 1.0  # a number, or "token" | "sequence"
    bias: str | None = None  # the bias's dtype
    labels: str = "valid"  # "valid" | "foreign": a third are out of vocabulary
    K: int = 0  # candidates per token
    floor: int = 0  # tokens that reach the floor; 0: there is none
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return self.name


def case(name: str, **kwargs: Any) -> TestCase:
    fields = {field.name for field in dataclasses.fields(TestCase)}
    case_fields = {key: value for key, value in kwargs.items() if key in fields}
    options = tuple((key, value) for key, value in kwargs.items() if key not in fields)
    return TestCase(name, options=options, **case_fields)


MATRIX = [
    case("plain"),
    case("one token", leading=(1,)),
    case("no leading dimension", leading=()),
    case("three leading dimensions", leading=(2, 3, 4)),
    case("no tokens", leading=(2, 0)),
    case("one column", V=1),
    case("ragged", leading=(23,), H=31, V=97),
    case("vocabulary of GPT-2's remainder", V=50257 % 4096),
    case("foreign labels", labels="foreign"),
    case("where", where="some"),
    case("where false everywhere", where="none"),
    case("where true everywhere", where="all"),
    case("where hides NaN", where="nan", labels="foreign"),
    case("temperature", temperature=0.7),
    case("temperature per token", temperature="token"),
    case("temperature per sequence", leading=(4, 6), temperature="sequence"),
    case("softcap", spread=5.0, logit_softcap=3.0),
    case("scale", logit_scale=0.25),
    case("negative scale", logit_scale=-1.5),
    case("padded vocabulary", V=128, vocab_size=101, labels="foreign"),
    case("padded to one column", V=64, vocab_size=1, labels="foreign"),
    case("hv", weight_layout="hv"),
    case("hv padded", weight_layout="hv", V=128, vocab_size=101),
    case("no entropy", entropy=False),
    case("stats", stats=True, vocab_size=97),
    case("stats and where", stats=True, where="some"),
    case("cache", cache_bytes=1 << 20),
    case("precision", precision="highest"),
    case(
        "everything", leading=(4, 6), V=128, vocab_size=113, temperature="token", where="nan", labels="foreign",
        logit_softcap=4.0, logit_scale=1.3, stats=True, weight_layout="hv", spread=3.0,
    ),
    case("peaked", spread=40.0),
    case("bfloat16", dtype="bfloat16", leading=(64,), H=128, V=512),
    case("bfloat16 peaked", dtype="bfloat16", leading=(64,), H=128, V=512, spread=12.0),
    case("bfloat16 hv softcap", dtype="bfloat16", leading=(64,), H=128, V=512, weight_layout="hv", logit_softcap=5.0),
    case("float16", dtype="float16", leading=(64,), H=128, V=512),
    case("float32 hidden, bfloat16 weight", dtype="bfloat16", hidden_dtype="float32", leading=(64,), H=128, V=512),
    case("bfloat16 hidden, float32 weight", hidden_dtype="bfloat16"),
]  # fmt: skip

# Calls with a bias, which not every implementation serves.
BIASED = [
    case("bias", bias="float32"),
    case("bias, padded vocabulary, foreign labels", bias="float32", vocab_size=97, labels="foreign", stats=True),
    case("bias and where", leading=(3, 50), V=600, bias="float32", where="nan", spread=100.0),
    case(
        "bias and everything", leading=(4, 6), V=128, vocab_size=113, temperature="token", where="nan",
        labels="foreign", logit_softcap=4.0, logit_scale=-1.3, stats=True, weight_layout="hv", spread=3.0,
        bias="float32",
    ),
    case("float16 bias, no entropy", bias="float16", entropy=False),
    case("bfloat16 with a float32 bias", dtype="bfloat16", leading=(64,), H=128, V=512, bias="float32"),
]  # fmt: skip

CANDIDATES = [
    case("candidates", K=3),
    case("one candidate", K=1, leading=(2, 5)),
    case("64 candidates, ragged", K=64, leading=(23,), H=31, V=1097, cache_bytes=1 << 20),
    case("512 candidates", K=512, leading=(9,)),
    case("candidates, no leading dimension", K=3, leading=()),
    case("candidates of no tokens", K=3, leading=(2, 0)),
    case("candidates and where", K=5, leading=(3, 50), V=600, where="nan", labels="foreign", entropy=False),
    case("candidates, where false everywhere", K=5, where="none"),
    case("candidates, negative scale, padded", K=5, logit_scale=-1.5, vocab_size=97, stats=True),
    case("candidates, scale 0", K=5, logit_scale=0.0),
    case("candidates, bias", K=5, bias="float32", vocab_size=97, weight_layout="hv"),
    case("candidates, peaked", K=7, spread=40.0),
    case(
        "candidates and everything", K=7, leading=(4, 6), V=1128, vocab_size=1113, temperature="token", where="nan",
        labels="foreign", logit_softcap=4.0, logit_scale=1.3, stats=True, weight_layout="hv", spread=3.0,
        bias="float32",
    ),
    case("candidates, bfloat16", K=8, dtype="bfloat16", leading=(64,), H=128, V=512),
    case("candidates, bfloat16 hidden, float32 weight", K=8, hidden_dtype="bfloat16"),
    case("candidates, a threshold", K=5, spread=5.0, gradient_threshold=2.0**-12, vocab_size=97, where="some"),
]  # fmt: skip


FLOORS = [
    case("floor", floor=5, stats=True, labels="foreign"),
    case("floor and everything", floor=30, leading=(4, 6), H=31, V=5128, vocab_size=5113, temperature="token",
         where="nan", labels="foreign", logit_softcap=4.0, logit_scale=-1.3, stats=True, weight_layout="hv", spread=3.0,
         bias="float32"),
    case("floor, a threshold", floor=7, spread=5.0, gradient_threshold=2.0**-12, temperature="token"),
    case("floor of one token, bfloat16", floor=1, dtype="bfloat16", leading=(64,), H=128, V=512, entropy=False,
         cache_bytes=1 << 20),
]  # fmt: skip


# Cases whose options are also in "everything" of the same list, or together with more in another case.
_SLOW = {
    "ragged", "vocabulary of GPT-2's remainder", "softcap", "scale", "padded vocabulary", "hv",
    "hv padded", "stats", "stats and where", "where false everywhere", "temperature", "bias", "one candidate",
    "64 candidates, ragged", "candidates, no leading dimension", "candidates and where", "candidates, bias",
    "candidates, where false everywhere", "candidates, scale 0", "candidates, negative scale, padded",
    "candidates, bfloat16", "candidates, bfloat16 hidden, float32 weight", "bfloat16 peaked", "floor",
}  # fmt: skip
SLOW = [case for case in (*MATRIX, *BIASED, *CANDIDATES, *FLOORS) if case.name in _SLOW]


def draw_floor(test: TestCase, operands: Any, options: dict[str, Any]) -> jax.Array:
    """Draws floors that ``test.floor`` logits of a token reach. Each is halfway between two logits."""
    hidden, weight, labels = operands
    z = np.sort(oracle.logits(hidden.astype(weight.dtype), weight, labels, **options), axis=-1)
    return jnp.asarray((z[..., -test.floor] + z[..., -test.floor - 1]) / 2, jnp.float32)


def draw_candidates(test: TestCase, labels: np.ndarray, seed: int) -> np.ndarray:
    """Draws ids. Some are -1, out of vocabulary, in the last column, equal to the label, or occur twice."""
    rng = np.random.default_rng(seed + 2)
    vocab_size = dict(test.options).get("vocab_size") or test.V
    ids = rng.integers(0, vocab_size, (*test.leading, test.K))
    special = rng.choice([-100, -1, test.V, vocab_size, vocab_size - 1], ids.shape)
    ids = np.where(rng.random(ids.shape) < 0.2, special, ids)
    ids[..., 0] = labels
    ids[..., -1] = ids[..., test.K // 2]
    ids.reshape(-1, test.K)[1:2] = -1
    return ids


def draw(test: TestCase, seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array, dict[str, Any], list[jax.Array]]:
    """Draws hidden, weight, labels and options of a call, and seeds: a cotangent for each differentiable output."""
    rng = np.random.default_rng(seed)
    options: dict[str, Any] = dict(test.options)
    dtype, hidden_dtype = jnp.dtype(test.dtype), jnp.dtype(test.hidden_dtype or test.dtype)
    hidden = rng.standard_normal((*test.leading, test.H))
    weight = rng.standard_normal((test.V, test.H)) * (test.spread / np.sqrt(test.H))
    labels = rng.integers(0, options.get("vocab_size") or test.V, test.leading)
    if test.labels == "foreign":
        foreign = rng.choice([-100, -1, test.V, test.V - 1, 10**6, 2**31 - 1], test.leading)
        labels = np.where(rng.random(test.leading) < 0.3, foreign, labels)
    if test.where is not None:
        share = {"some": 0.5, "nan": 0.5, "none": 0.0, "all": 1.0}[test.where]
        unmasked = rng.random(test.leading) < share
        options["where"] = jnp.asarray(unmasked)
        if test.where == "nan":
            hidden = np.where(unmasked[..., None], hidden, rng.choice([np.nan, np.inf, -np.inf]))
    if isinstance(test.temperature, str):
        shape = test.leading if test.temperature == "token" else (test.leading[0], *(1,) * (len(test.leading) - 1))
        options["temperature"] = jnp.asarray(rng.uniform(0.5, 2.0, shape), jnp.float32)
    elif test.temperature != 1.0:
        options["temperature"] = test.temperature
    if test.bias is not None:
        bias = np.random.default_rng(seed + 1).standard_normal(test.V) * test.spread
        bias[options.get("vocab_size", test.V) :] = np.nan
        options["bias"] = jnp.asarray(bias, test.bias)
    if options.get("weight_layout") == "hv":
        weight = weight.T
    seeds = [jnp.asarray(rng.standard_normal(test.leading), jnp.float32) for _ in range(3)]
    if test.K:
        options["candidates"] = jnp.asarray(draw_candidates(test, labels, seed), jnp.int32)
        candidate_seeds = np.random.default_rng(seed + 3).standard_normal((*test.leading, test.K))
        seeds.append(jnp.asarray(candidate_seeds, jnp.float32))
    arrays = (jnp.asarray(hidden, hidden_dtype), jnp.asarray(weight, dtype), jnp.asarray(labels, jnp.int32))
    if test.floor:
        options["logit_floor"] = draw_floor(test, arrays, options)
    return *arrays, options, seeds


def objective(out: Any, seeds: list[jax.Array]) -> jax.Array:
    """Returns Σ seed · output over the differentiable outputs that exist."""
    fields = out[:3] if len(seeds) == 3 else (*out[:3], out.candidate_logprobs)
    return sum(jnp.sum(seed * field) for seed, field in zip(seeds, fields, strict=True) if field is not None)
