"""Every mistake in a call raises before anything is computed, with a message that names the values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lce_jax import (
    explain,
    linear_cross_entropy,
    linear_logprobs,
    local,
    scalars,
    sharded_linear_cross_entropy,
    sharded_linear_logprobs,
)
from lce_jax._options import LogprobOptions
from tests.small_call import HIDDEN, LABELS, MESH, WEIGHT


def call(hidden: Any = HIDDEN, weight: Any = WEIGHT, labels: Any = LABELS, **options: Any) -> Any:
    return linear_logprobs(hidden, weight, labels, **options)


MISTAKES = {
    "hidden is a list": (dict(hidden=[[1.0] * 8]), TypeError, "hidden must be an array, got list"),
    "hidden of integers": (dict(hidden=jnp.ones((4, 8), jnp.int32)), TypeError, "hidden must be one of .* got int32"),
    "hidden a scalar": (dict(hidden=jnp.ones(())), ValueError, "hidden must have at least the hidden dimension"),
    "weight of rank 3": (dict(weight=jnp.ones((2, 32, 8))), ValueError, r"weight must have two .* \(2, 32, 8\)"),
    "weight of complex": (
        dict(weight=jnp.ones((32, 8), jnp.complex64)),
        TypeError,
        "weight must be one of .*complex64",
    ),
    "hidden sizes differ": (dict(weight=jnp.ones((32, 9))), ValueError, r"\(4, 8\) ends in H = 8, but .*has H = 9"),
    "weight transposed": (dict(weight=jnp.ones((8, 32))), ValueError, r'H = 32 \(it fits weight_layout="hv"\)'),
    "empty vocabulary": (dict(weight=jnp.ones((0, 8))), ValueError, r"weight \(0, 8\) must have at least one"),
    "labels of floats": (dict(labels=jnp.zeros((4,))), TypeError, "labels must be integers .* got float32"),
    "labels of bools": (dict(labels=jnp.zeros((4,), bool)), TypeError, "labels must be integers .* got bool"),
    "labels of another length": (dict(labels=jnp.zeros((5,), int)), ValueError, r"labels \(5,\) must have .*\(4,\)"),
    "labels one-hot": (dict(labels=jnp.zeros((4, 32), int)), ValueError, r"labels \(4, 32\) must have .*\(4,\)"),
    "where of integers": (dict(where=jnp.ones((4,), int)), TypeError, "where must be bool, got int"),
    "where of another shape": (dict(where=jnp.ones((4, 1), bool)), ValueError, r"where \(4, 1\) .* labels \(4,\)"),
    "where a bool": (dict(where=True), TypeError, "where must be a bool array, got bool"),
    "temperature negative": (dict(temperature=-0.5), ValueError, "temperature must be positive in float32, got -0.5"),
    "temperature zero": (dict(temperature=0), ValueError, "temperature must be positive in float32, got 0"),
    "temperature NaN": (dict(temperature=float("nan")), ValueError, "temperature must be finite in float32, got nan"),
    "temperature tiny": (dict(temperature=1e-46), ValueError, "temperature must be positive in float32, got 1e-46"),
    "temperature a string": (dict(temperature="hot"), TypeError, "temperature must be a Python number, got str 'hot'"),
    "temperature of another shape": (dict(temperature=jnp.ones((3,))), ValueError, r"\(3,\) must broadcast .*\(4,\)"),
    "temperature of integers": (dict(temperature=jnp.ones((4,), int)), TypeError, "temperature must be floating"),
    "softcap zero": (dict(logit_softcap=0.0), ValueError, "logit_softcap must be positive in float32, got 0.0"),
    "scale infinite": (dict(logit_scale=float("inf")), ValueError, "logit_scale must be finite in float32, got inf"),
    "softcap huge": (dict(logit_softcap=1e39), ValueError, "logit_softcap must be finite in float32, got 1e.39"),
    "softcap NumPy's": (dict(logit_softcap=np.float32(0)), ValueError, "logit_softcap must be positive .* got 0.0"),
    "scale of NumPy": (dict(logit_scale=np.array(np.inf)), ValueError, "logit_scale must be finite .* got inf"),
    "floor NumPy's": (dict(logit_floor=np.float32("nan")), ValueError, "logit_floor must be finite .* got nan"),
    "scale a vector": (dict(logit_scale=jnp.ones((4,))), ValueError, r"logit_scale must be .* got shape \(4,\)"),
    "scale of booleans": (dict(logit_scale=jnp.array(True)), TypeError, "logit_scale must be a real number, .* bool"),
    "softcap a vector": (dict(logit_softcap=jnp.ones((1,))), ValueError, r"logit_softcap must be .* got shape \(1,\)"),
    "entropy a string": (dict(entropy="grad"), TypeError, "entropy must be True or False, got 'grad'"),
    "stats a number": (dict(stats=1), TypeError, "stats must be True or False, got 1"),
    "vocab_size too large": (dict(vocab_size=33), ValueError, r"vocab_size must lie in \[1, 32\].*got 33"),
    "vocab_size zero": (dict(vocab_size=0), ValueError, r"vocab_size must lie in \[1, 32\].*got 0"),
    "vocab_size a float": (dict(vocab_size=30.0), TypeError, "vocab_size must be a Python integer, got 30.0"),
    "layout unknown": (dict(weight_layout="nk"), ValueError, "weight_layout must be .* got 'nk'"),
    "axis unbound": (dict(axis_name="tp"), ValueError, "axis_name 'tp' is not bound here"),
    "axis_name empty": (dict(axis_name=()), TypeError, r"axis_name must be None, .* got \(\)"),
    "axis_name a number": (dict(axis_name=0), TypeError, "axis_name must be None, .* got 0"),
    "part zero": (dict(vocab_part_size=0), ValueError, "vocab_part_size must be a positive multiple of 8, got 0"),
    "part no multiple": (dict(vocab_part_size=12), ValueError, "vocab_part_size must be a positive .* of 8, got 12"),
    "part a float": (dict(vocab_part_size=8.0), TypeError, "vocab_part_size must be a Python integer, got 8.0"),
    "part and cache": (
        dict(vocab_part_size=8, cache_bytes=5),
        ValueError,
        "vocab_part_size=8 with cache_bytes=5: .* Write cache_bytes=0, or vocab_part_size=None",
    ),
    "part and threshold": (
        dict(vocab_part_size=8, gradient_threshold=0.25),
        ValueError,
        "vocab_part_size=8 with gradient_threshold=0.25: .* Write gradient_threshold=0, or vocab_part_size=None",
    ),
    "cache negative": (dict(cache_bytes=-1), ValueError, "cache_bytes must be .* at least 0, got -1"),
    "precision unknown": (dict(precision="exact"), ValueError, "precision 'exact' is not"),
    "implementation unknown": (dict(implementation="cuda"), ValueError, "unknown implementation 'cuda'; known"),
    "implementation a list": (
        dict(implementation=["xla"]),
        TypeError,
        "implementation must be None, a name or a tuple",
    ),
    "implementation an empty tuple": (dict(implementation=()), TypeError, "implementation must be None"),
}


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", MISTAKES)
def test_linear_logprobs(name: str, jitted: bool) -> None:
    mistake, error, message = MISTAKES[name]
    arrays = {key: value for key, value in mistake.items() if isinstance(value, jax.Array)}
    rest = {key: value for key, value in mistake.items() if key not in arrays}
    function = jax.jit(lambda **arrays: call(**arrays, **rest)) if jitted else lambda **arrays: call(**arrays, **rest)
    with pytest.raises(error, match=message):
        function(**arrays)


@pytest.mark.parametrize("name", [name for name in MISTAKES if "axis" not in name])
def test_explain_meets_the_same_mistakes(name: str) -> None:
    mistake, error, message = MISTAKES[name]
    arguments = {"hidden": HIDDEN, "weight": WEIGHT, "labels": LABELS, **mistake}
    with pytest.raises(error, match=message):
        explain(**arguments)


OF_A_LOSS = {"where", "ignore_index", "reduction", "label_smoothing", "z_loss"}
OF_A_MESH = {"mesh", "vocab_axis", "batch_axes", "sequence_axis"}
OF_LOGPROBS = {"entropy", "stats", "candidates"}
SHARED = set(LogprobOptions.__annotations__)


@pytest.mark.parametrize(
    ("function", "known", "unknown"),
    [
        (linear_cross_entropy, OF_A_LOSS | SHARED - OF_LOGPROBS, OF_A_MESH | OF_LOGPROBS),
        (sharded_linear_logprobs, {"where"} | OF_A_MESH | SHARED - {"axis_name"}, {"label_smoothing", "axis_name"}),
        (
            sharded_linear_cross_entropy,
            OF_A_LOSS | OF_A_MESH | SHARED - {"axis_name"} - OF_LOGPROBS,
            {"axis_name"} | OF_LOGPROBS,
        ),
        (explain, OF_A_LOSS | OF_A_MESH | SHARED, set()),
        (local.statistics, {"where", "num_rows", "vocab_start"} | SHARED - {"axis_name"}, OF_A_LOSS - {"where"}),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_an_unknown_option_lists_those_of_the_function(function: Any, known: set[str], unknown: set[str]) -> None:
    with pytest.raises(TypeError, match=f"{function.__name__}: unknown option softcap .did you mean") as error:
        function(HIDDEN, WEIGHT, LABELS, softcap=3.0)
    assert "did you mean logit_softcap?" in str(error.value)
    listed = set(str(error.value).split("known: ")[1].split(", "))
    assert listed >= known
    assert not listed & unknown


@pytest.mark.parametrize(("name", "meant"), [("smoothing", "label_smoothing"), *scalars.OTHER_NAMES.items()])
def test_another_name(name: str, meant: str) -> None:
    with pytest.raises(TypeError, match=rf"unknown option {name} \(did you mean {meant}\?\)"):
        linear_cross_entropy(HIDDEN, WEIGHT, LABELS, **{name: 0.1})
    with pytest.raises(TypeError, match=name):
        linear_logprobs(HIDDEN, WEIGHT, LABELS, **{name: 3.0})


@pytest.mark.parametrize("kind", [jnp.float32, jnp.float16, jnp.bfloat16, np.asarray])
def test_the_known_value_of_an_array_is_checked_as_a_number(kind: Any) -> None:
    """In a traced array it is not known."""
    for function in (linear_logprobs, explain, sharded_linear_logprobs):
        mesh = {"mesh": MESH} if function is sharded_linear_logprobs else {}
        with pytest.raises(ValueError, match=r"logit_softcap must be positive in float32, got 0\.0"):
            function(HIDDEN, WEIGHT, LABELS, logit_softcap=kind(0.0), **mesh)
        with pytest.raises(ValueError, match="logit_scale must be finite in float32, got nan"):
            function(HIDDEN, WEIGHT, LABELS, logit_scale=kind(np.nan), **mesh)


@pytest.mark.parametrize("name", ["entropy", "stats"])
@pytest.mark.parametrize("function", [linear_cross_entropy, sharded_linear_cross_entropy])
def test_a_loss_returns_no_more_than_itself(function: Any, name: str) -> None:
    mesh = {"mesh": MESH} if function is sharded_linear_cross_entropy else {}
    with pytest.raises(ValueError, match=f"{name}=True, but a loss has no such output: linear_logprobs"):
        function(HIDDEN, WEIGHT, LABELS, **mesh, **{name: True})
    assert function(HIDDEN, WEIGHT, LABELS, **mesh, **{name: False}).shape == ()
    with pytest.raises(ValueError, match=f"{name}=True, but a loss"):
        explain(HIDDEN, WEIGHT, LABELS, reduction="sum", **mesh, **{name: True})


@pytest.mark.parametrize("dtype", ["int4", "uint4", "int8", "uint8", "int16", "uint32"])
@pytest.mark.parametrize("numpy", [False, True], ids=["jax", "numpy"])
def test_labels_of_any_integer_type(dtype: str, numpy: bool) -> None:
    labels = jnp.array([0, 1, 7, 3], dtype)
    labels = np.asarray(labels) if numpy else labels
    weight = jnp.arange(256.0).reshape(32, 8)
    want = linear_logprobs(HIDDEN, weight, jnp.array([0, 1, 7, 3])).logprobs
    assert np.array_equal(linear_logprobs(HIDDEN, weight, labels).logprobs, want)
    assert np.allclose(linear_cross_entropy(HIDDEN, weight, labels, ignore_index=7), -want[jnp.array([0, 1, 3])].mean())


@pytest.mark.parametrize("name", ["hidden", "weight", "labels", "where", "temperature"])
def test_torch_tensors_belong_to_the_bridge(name: str) -> None:
    torch = pytest.importorskip("torch")
    tensors = {
        "hidden": torch.ones(4, 8), "weight": torch.nn.Parameter(torch.ones(32, 8)),
        "labels": torch.zeros(4, dtype=torch.int64), "where": torch.ones(4, dtype=torch.bool),
        "temperature": torch.ones(4),
    }  # fmt: skip
    arguments = {"hidden": HIDDEN, "weight": WEIGHT, "labels": LABELS, name: tensors[name]}
    for function in (linear_logprobs, linear_cross_entropy, explain):
        with pytest.raises(TypeError, match=f"{name} must be .* of JAX, got torch's .*: lce_torch_bridge has"):
            function(**arguments)


LOSS_MISTAKES = {
    "reduction unknown": (dict(reduction="batchmean"), ValueError, "reduction must be .* got 'batchmean'"),
    "smoothing of one": (dict(label_smoothing=1.0), ValueError, r"label_smoothing must lie in \[0, 1\), got 1.0"),
    "z_loss negative": (dict(z_loss=-1e-4), ValueError, "z_loss must not be negative, got -0.0001"),
    "z_loss a vector": (dict(z_loss=jnp.ones((4,))), ValueError, r"z_loss must be .* of shape \(\), got shape \(4,\)"),
    "z_loss NumPy's": (dict(z_loss=np.float32(-1)), ValueError, "z_loss must not be negative, got -1.0"),
    "z_loss a known array": (dict(z_loss=jnp.float32(-1)), ValueError, "z_loss must not be negative, got -1.0"),
    "z_loss a bool": (dict(z_loss=jnp.array(True)), TypeError, "z_loss must be a real number, got an array of bool"),
    "normalizer of a sum": (dict(normalizer=8, reduction="sum"), ValueError, "normalizer=8 is .* is 'sum'"),
    "normalizer of no reduction": (dict(normalizer=8, reduction="none"), ValueError, "normalizer=8 .* is 'none'"),
    "normalizer zero": (dict(normalizer=0), ValueError, "normalizer must be positive in float32, got 0.0"),
    "normalizer NumPy's": (dict(normalizer=np.int64(0)), ValueError, "normalizer must be positive in .* got 0.0"),
    "normalizer a known array": (dict(normalizer=jnp.float32(-2)), ValueError, "normalizer must not be .* got -2.0"),
    "normalizer of NumPy": (dict(normalizer=np.array(-2)), ValueError, "normalizer must not be negative, got -2.0"),
    "normalizer a vector": (dict(normalizer=jnp.ones((4,))), ValueError, r"normalizer must be .* got shape \(4,\)"),
    "ignore_index a float": (dict(ignore_index=-100.0), TypeError, "ignore_index must be a Python integer, got -100.0"),
    "ignore_index too large": (dict(ignore_index=2**40), ValueError, "ignore_index must lie .* got 1099511627776"),
    "labels of floats": (dict(ignore_index=0, labels=jnp.zeros((4,))), TypeError, "labels must be integers"),
    "where of another shape": (
        dict(ignore_index=0, where=jnp.ones((3,), bool)), ValueError, r"where \(3,\) must have the shape of labels",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSS_MISTAKES)
def test_linear_cross_entropy(name: str) -> None:
    mistake, error, message = LOSS_MISTAKES[name]
    with pytest.raises(error, match=message):
        linear_cross_entropy(**{"hidden": HIDDEN, "weight": WEIGHT, "labels": LABELS, **mistake})


SHARDED_MISTAKES = {
    "no mesh": (dict(mesh=None), "no mesh: pass mesh="),
    "vocab axis unknown": (dict(vocab_axis="model"), "vocab_axis 'model' is no axis of the mesh .*'tensor': 4"),
    "batch axis unknown": (dict(batch_axes="fsdp"), "batch_axes 'fsdp' is no axis"),
    "axis used twice": (dict(batch_axes="tensor"), "overlap; only sequence_axis may hold vocab_axis"),
    "vocabulary does not divide": (dict(weight=jnp.ones((30, 8))), r"\(30, 8\) must divide by the 4 .*vocab_size=30"),
    "batch does not divide": (
        dict(batch_axes="data", hidden=jnp.ones((3, 8)), labels=jnp.zeros((3,), int)),
        r"dimension 0 of hidden \(3, 8\) must divide by the 2 shards",
    ),
    "axis_name outside": (dict(axis_name="tensor"), "axis_name='tensor' is for callers inside shard_map"),
    "no batch at all": (
        dict(batch_axes="data", hidden=jnp.ones((8,)), labels=jnp.zeros((), int)), r"hidden \(8,\) has no batch",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHARDED_MISTAKES)
def test_sharded(name: str) -> None:
    mistake, message = SHARDED_MISTAKES[name]
    arguments = {"hidden": HIDDEN, "weight": WEIGHT, "labels": LABELS, "mesh": MESH, **mistake}
    with pytest.raises(ValueError, match=message):
        sharded_linear_logprobs(**arguments)


def test_local() -> None:
    with pytest.raises(ValueError, match=r"functions of lce_jax\.local know no axis"):
        local.statistics(HIDDEN, WEIGHT, LABELS, axis_name="tensor")
    with pytest.raises(ValueError, match=r"labels \(2, 2\) must be flat"):
        local.statistics(HIDDEN.reshape(2, 2, 8), WEIGHT, LABELS.reshape(2, 2))


def test_numpy_operands_are_welcome() -> None:
    out = linear_logprobs(np.ones((4, 8), np.float32), np.zeros((32, 8), np.float32), np.zeros((4,), np.int64))
    assert np.allclose(out.logprobs, -np.log(32))
