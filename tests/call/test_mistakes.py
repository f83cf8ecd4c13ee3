"""Every mistake in a call raises before anything is computed, with a message that names the values.

`OF_OPTIONS` has each option's wrong values. Each function that has the option refuses them.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lce_jax
import lce_torch_bridge
from lce_jax import UnsupportedError, explain, linear_cross_entropy, linear_logprobs, sharded_linear_logprobs
from lce_jax.call import _options
from lce_jax.call._options import LogprobOptions
from lce_jax.types import messages
from tests.small_call import HIDDEN, LABELS, MESH, WEIGHT

ONES, IDS = jnp.ones, jnp.zeros((4, 3), int)
GIVEN: dict[str, dict[str, Any]] = {
    "linear_logprobs": {"labels": LABELS},
    "linear_cross_entropy": {"labels": LABELS},
    "linear_loss": {"loss_fn": lambda logprob, *_: -logprob, "labels": LABELS},
    "linear_logits": {"ids": IDS},
    "linear_topk": {"k": 3},
    "linear_kl": {"teacher_hidden": ONES((4, 6)), "teacher_weight": ONES((32, 6))},
}
FUNCTIONS = {name: (getattr(lce_jax, name), given) for name, given in GIVEN.items()}
FUNCTIONS |= {
    f"sharded_{name}": (getattr(lce_jax, f"sharded_{name}"), given | {"mesh": MESH}) for name, given in GIVEN.items()
}
FUNCTIONS |= {"explain": (explain, {"labels": LABELS})}


def options_of(name: str) -> tuple[str, ...]:
    if name == "explain":
        return tuple(x for x in LogprobOptions.__annotations__ if x != "axis_name")
    return _options.list_options(name)


def refused(name: str, changed: dict[str, Any], error: type[Exception], message: str, jitted: bool = False) -> None:
    """By the function, which is given ``changed`` in place of what is right; arrays are traced, if it is jitted."""
    function, given = FUNCTIONS[name]
    arguments = {"hidden": HIDDEN, "weight": WEIGHT, **given, **changed}
    arrays = {key: value for key, value in arguments.items() if jitted and isinstance(value, jax.Array)}
    rest = {key: value for key, value in arguments.items() if key not in arrays}
    with pytest.raises(error, match=message):
        (jax.jit if jitted else lambda run: run)(lambda arrays: function(**arrays, **rest))(arrays)


LORA = ONES((2, 8)), ONES((32, 2)), 2.0
OF_ARRAYS: dict[str, list[tuple[Any, type[Exception], str]]] = {
    "hidden": [
        ([[1.0] * 8], TypeError, "hidden .*array, got list"),
        (ONES((4, 8), jnp.int32), TypeError, "hidden .* got int32"),
        (ONES(()), ValueError, "hidden dimension|hidden before H"),
    ],
    "weight": [
        (ONES((2, 32, 8)), ValueError, r"weight must have two .* \(2, 32, 8\)"),
        (ONES((32, 8), jnp.complex64), TypeError, "weight must be one of .*complex64"),
        (ONES((32, 9)), ValueError, r"\(4, 8\) ends in H = 8, but .*has H = 9"),
        (ONES((8, 32)), ValueError, r'H = 32: .* write weight_layout="hv"\. Or .* logits'),
        (ONES((0, 8)), ValueError, r"weight \(0, 8\) must have at least one"),
    ],
    "labels": [
        (jnp.zeros((4,)), TypeError, "labels must be integers, got float32"),
        (jnp.zeros((4,), bool), TypeError, "labels must be integers, got bool"),
        (jnp.zeros((5,), int), ValueError, r"labels \(5,\) .*\(4,\)"),
        (jnp.zeros((4, 32), int), ValueError, r"labels \(4, 32\) .*\(4,\)"),
    ],
    "ids": [
        (jnp.zeros((4, 0), int), ValueError, r"ids \(4, 0\) .* 1 to 512"),
        (jnp.zeros((4, 3)), TypeError, "ids must be integers, got float32"),
        (jnp.zeros((5, 3), int), ValueError, r"ids \(5, 3\) must be .* \(4,\)"),
    ],
    "where": [
        (ONES((4,), int), TypeError, "where must be bool, got int"),
        (ONES((4, 1), bool), ValueError, r"where \(4, 1\) .*\(4,\)"),
        (True, TypeError, "where must be a bool array, got bool"),
    ],
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arrays(name: str) -> None:
    given = {"hidden", "weight", "where", *FUNCTIONS[name][1]}
    for argument in given & OF_ARRAYS.keys():
        for value, error, message in OF_ARRAYS[argument]:
            refused(name, {argument: value}, error, message)


OF_OPTIONS: dict[str, list[tuple[Any, type[Exception], str]]] = {
    "temperature": [
        (-0.5, ValueError, "temperature .*positive.* got -0.5"),
        (0, ValueError, "temperature .*positive.* got 0"),
        (float("nan"), ValueError, "temperature .*finite.* got nan"),
        (1e-46, ValueError, "temperature .*positive.* got 1e-46"),
        ("hot", TypeError, "temperature .*number, got str 'hot'"),
        (ONES((3,)), ValueError, r"\(3,\) must broadcast .*\(4,\)"),
        (ONES((4,), int), TypeError, "temperature must be floating"),
    ],
    "logit_softcap": [
        (0.0, ValueError, "logit_softcap .*positive.* got 0.0"),
        (1e39, ValueError, "logit_softcap .*finite.* got 1e.39"),
        (np.float32(0), ValueError, "logit_softcap must be positive .* got 0.0"),
        (ONES((1,)), ValueError, r"logit_softcap must be .* got shape \(1,\)"),
    ],
    "logit_scale": [
        (float("inf"), ValueError, "logit_scale .*finite.* got inf"),
        (np.array(np.inf), ValueError, "logit_scale must be finite .* got inf"),
        (ONES((4,)), ValueError, r"logit_scale must be .* got shape \(4,\)"),
        (jnp.array(True), TypeError, "logit_scale must be a real number, .* bool"),
    ],
    "entropy": [("grad", TypeError, "entropy .*True or False, got 'grad'")],
    "stats": [(1, TypeError, "stats .*True or False, got 1")],
    "vocab_size": [
        (33, ValueError, r"vocab_size must lie in \[1, 32\].*got 33"),
        (0, ValueError, r"vocab_size must lie in \[1, (32|2147483647)\].*got 0"),
        (30.0, TypeError, "vocab_size .*integer, got 30.0"),
    ],
    "weight_layout": [("nk", ValueError, "weight_layout must be .* got 'nk'")],
    "axis_name": [
        ("tp", ValueError, "axis_name 'tp' is not bound here"),
        ((), TypeError, r"axis_name must be None, .* got \(\)"),
        (0, TypeError, "axis_name must be None, .* got 0"),
    ],
    "vocab_part_size": [
        (0, ValueError, "vocab_part_size .*multiple of 8, got 0"),
        (12, ValueError, "vocab_part_size .*multiple of 8, got 12"),
        (8.0, TypeError, "vocab_part_size .*integer, got 8.0"),
    ],
    "cache_bytes": [(-1, ValueError, "cache_bytes must be .* at least 0, got -1")],
    "precision": [("exact", ValueError, "precision 'exact' is not")],
    "implementation": [
        ("cuda", ValueError, "unknown implementation 'cuda'; known"),
        (["xla"], TypeError, "implementation .*a tuple"),
        ((), TypeError, "implementation must be None"),
    ],
    "bias": [
        (ONES((8,)), ValueError, r"bias \(8,\) .*weight \(32, 8\)"),
        (ONES((32,), int), TypeError, r"bias .* got int32"),
        (1.0, TypeError, "bias .*array, got float"),
    ],
    "candidates": [
        (jnp.zeros((4, 0), int), ValueError, r"candidates \(4, 0\) .* 1 to 512"),
        (jnp.zeros((4, 513), int), ValueError, r"candidates \(4, 513\) .* 1 to 512"),
        (jnp.zeros((4, 3)), TypeError, "candidates must be integers, got float32"),
        ([[1, 2]] * 4, TypeError, "candidates .*array, got list"),
        (jnp.zeros((4,), int), ValueError, r"candidates \(4,\) must be \[..., K\] .* labels \(4,\)"),
        (jnp.zeros((), int), ValueError, r"candidates \(\) .*K"),
        (jnp.zeros((5, 3), int), ValueError, r"candidates \(5, 3\) must be .* labels \(4,\)"),
    ],
    "gradient_threshold": [
        *((x, ValueError, r"gradient_threshold must .*got") for x in (-0.1, 1.0, float("nan"), float("inf"))),
        ("2**-12", TypeError, "gradient_threshold"),
    ],
    "logit_floor": [
        (float("nan"), ValueError, "logit_floor .*finite.* got nan"),
        (np.float32("nan"), ValueError, "logit_floor must be finite .* got nan"),
        (jnp.array([0, jnp.nan, 1, jnp.nan]), ValueError, r"logit_floor .* nan.* in 2 of 4 rows.* \(1,\)"),
        (ONES((3,)), ValueError, r"logit_floor \(3,\) must broadcast to labels \(4,\)"),
        (ONES((4,), int), TypeError, "logit_floor .*floating.* got int32"),
        ("low", TypeError, "logit_floor .*number, got str 'low'"),
    ],
    "lora": [
        (LORA[:2], TypeError, r"lora must be a tuple \(A \[r, H\], B \[V, r\], scale\), got \(Array"),
        ((LORA[0], [1.0], 2.0), TypeError, "lora's B .*array, got list"),
        ((ONES((2, 8), int), *LORA[1:]), TypeError, "lora's A .* got int32"),
        ((*LORA[:2], "2"), TypeError, "lora's scale .*number, got str '2'"),
        ((LORA[1], LORA[0], 2.0), ValueError, r"A \(32, 2\) and B \(2, 8\) must be \[r, H\] and \[V, r\]"),
        ((ONES((0, 8)), ONES((32, 0)), 2.0), ValueError, r"A \(0, 8\) and B \(32, 0\) must be \[r, H\]"),
        ((LORA[0], ONES((31, 2)), 2.0), ValueError, r"must be \[r, 8\] and \[32, r\], to fit hidden \(4, 8\)"),
    ],
    "beta": [
        (0.5, ValueError, 'beta=0.5 .*direction="jsd"'),
    ],
    "teacher_temperature": [(-1.0, ValueError, "teacher's temperature must be")],
    "teacher_logit_softcap": [("some", TypeError, "teacher's logit_softcap must be a")],
    "teacher_logit_scale": [(float("inf"), ValueError, "teacher's logit_scale must be finite")],
    "teacher_weight_layout": [("th", ValueError, "the teacher's weight_layout must be")],
    "teacher_bias": [(ONES(31), ValueError, r"the teacher's bias \(31,\) must have")],
}  # fmt: skip


def test_every_option_has_wrong_values() -> None:
    assert OF_OPTIONS.keys() == _options.OPTIONS.keys()


@pytest.mark.parametrize(("name", "option"), [(name, option) for name in FUNCTIONS for option in options_of(name)])
def test_options(name: str, option: str) -> None:
    for value, error, message in OF_OPTIONS[option]:
        refused(name, {option: value}, error, message)
        if name == "linear_logprobs" and "rows" not in message:  # values of a traced array are not known
            refused(name, {option: value}, error, message, jitted=True)


@pytest.mark.parametrize(("name", "option"), [(x, y) for x in FUNCTIONS for y in OF_OPTIONS if y not in options_of(x)])
def test_options_of_other_functions(name: str, option: str) -> None:
    if name != "explain":
        refused(name, {option: OF_OPTIONS[option][0][0]}, (TypeError, ValueError), option)  # type: ignore[arg-type]


type Mistakes = list[tuple[dict[str, Any], type[Exception], str]]
IGNORED: Mistakes = [
    (dict(ignore_index=-100.0), TypeError, "ignore_index .*integer, got -100.0"),
    (dict(ignore_index=2**40), ValueError, "ignore_index must lie .* got 1099511627776"),
]
OF_LOSSES: Mistakes = [
    (dict(reduction="batchmean"), ValueError, "reduction must be .* got 'batchmean'"),
    (dict(label_smoothing=1.1), ValueError, r"label_smoothing must lie in \[0, 1\], got 1.1"),
    (dict(label_smoothing=0.1, logit_floor=0.0), ValueError, "logit_floor with label_smoothing.* label_smoothing=0"),
    (dict(z_loss=-1e-4), ValueError, "z_loss .*negative, got -0.0001"),
    (dict(z_loss=ONES((4,))), ValueError, r"z_loss must be .* of shape \(\), got shape \(4,\)"),
    (dict(z_loss=np.float32(-1)), ValueError, "z_loss .*negative, got -1.0"),
    (dict(z_loss=jnp.float32(-1)), ValueError, "z_loss .*negative, got -1.0"),
    (dict(z_loss=jnp.array(True)), TypeError, "z_loss must be a real number, got an array of bool"),
    (dict(normalizer=8, reduction="sum"), ValueError, "normalizer=8 is .* is 'sum'"),
    (dict(normalizer=8, reduction="none"), ValueError, "normalizer=8 .* is 'none'"),
    (dict(normalizer=0), ValueError, "normalizer .*positive.* got 0.0"),
    (dict(normalizer=np.int64(0)), ValueError, "normalizer must be positive in .* got 0.0"),
    (dict(normalizer=jnp.float32(-2)), ValueError, "normalizer must not be .* got -2.0"),
    (dict(normalizer=np.array(-2)), ValueError, "normalizer .*negative, got -2.0"),
    (dict(normalizer=ONES((4,))), ValueError, r"normalizer must be .* got shape \(4,\)"),
    *IGNORED,
    (dict(entropy=True), ValueError, "entropy=True.*: linear_logprobs"),
    (dict(stats=True), ValueError, "stats=True.*: linear_logprobs"),
    (dict(candidates=IDS), ValueError, "candidates"),
]  # fmt: skip
OF_ROW_LOSSES: Mistakes = [
    *IGNORED,
    (dict(chunk_byte=3), TypeError, r"unknown option chunk_byte \(did you mean chunk_bytes\?\)"),
    (dict(cache_bytes=3), ValueError, "cache_bytes=3: linear_loss keeps nothing"),
    (dict(vocab_part_size=8), ValueError, r"vocab_part_size=8: linear_loss .* Call linear_logprobs"),
    (dict(candidates=IDS), ValueError, "candidates: loss_fn gets only the label's"),
    (dict(chunk_bytes=-1), ValueError, "chunk_bytes"),
    (dict(loss_fn=3), TypeError, "loss_fn must be a function"),
    (dict(loss_fn=lambda *_: 1), ValueError, "scalar for one token, got int32"),
    (dict(loss_fn=lambda a, _, c: (a, c)), ValueError, r"got float32\[\], float32\[\]"),
]
OF_KL: Mistakes = [
    (dict(direction="forwards"), ValueError, 'direction must be "forward", "reverse", "jsd" or "tv"'),
    (dict(beta=0, direction="jsd"), ValueError, r'lie in \(0, 1\), got 0.0: direction="forward" is 0'),
    (dict(teacher_hidden=ONES((5, 6))), ValueError, r"hidden \(5, 6\) .* student's \(4, 8\)"),
    (dict(teacher_hidden=[[1.0]]), TypeError, "the teacher's hidden .*array, got list"),
    (dict(teacher_weight=ONES((32, 7))), ValueError, r"teacher's hidden \(4, 6\) ends in"),
    (dict(teacher_weight=ONES((40, 6))), ValueError, r"32 .* teacher's 40: pass .* vocab_size"),
    (dict(teacher_weight=ONES((40, 6)), vocab_size=33), ValueError, r"lie in \[1, 32\]"),
    (dict(gradient_threshold=0.1), TypeError, "linear_kl has no option gradient_threshold"),
    (dict(teacher_weight=ONES((32, 6), int)), TypeError, "the teacher's weight must be one of"),
]
OF_TOPK: Mistakes = [
    (dict(k=0), ValueError, r"k must lie in \[1, 512\], got 0"),
    (dict(k=-1), ValueError, r"k must lie in \[1, 512\], got -1"),
    (dict(k=513), ValueError, r"k must lie in \[1, 512\], got 513"),
    (dict(k=33), ValueError, "vocabulary, 32, got 33"),
    (dict(k=31, vocab_size=30), ValueError, "vocabulary, 30, got 31"),
    (dict(k=3.0), TypeError, "k .*integer, got 3.0"),
    (dict(k=True), TypeError, "k .*integer, got True"),
    (dict(k=jnp.array(3)), TypeError, "k .*integer, got Array"),
]
OF_MESHES: Mistakes = [
    (dict(mesh=None), ValueError, "no mesh: pass mesh="),
    (dict(vocab_axis="model"), ValueError, "vocab_axis 'model' is not an axis of the mesh .*'tensor': 4"),
    (dict(batch_axes="fsdp"), ValueError, "batch_axes 'fsdp' is not an axis"),
    (dict(batch_axes="tensor"), ValueError, "overlap: only sequence_axis may contain vocab_axis"),
]
MISTAKES: dict[str, Mistakes] = {
    "linear_logprobs": [
        (dict(vocab_part_size=8, cache_bytes=5), ValueError,
         "vocab_part_size=8 with cache_bytes=5: .* Write cache_bytes=0, or vocab_part_size=None"),
        (dict(vocab_part_size=8, gradient_threshold=0.25), ValueError,
         "vocab_part_size=8 with gradient_threshold=0.25: .* Write gradient_threshold=0, or vocab_part_size=None"),
        (dict(logit_floor=0.0, candidates=IDS[:, :2]), ValueError,
         "logit_floor with candidates, 2 per token: .* Write candidates=None"),
    ],
    "linear_cross_entropy": OF_LOSSES,
    "linear_loss": OF_ROW_LOSSES,
    "linear_logits": [
        (dict(stats=True), TypeError, "linear_logits has no option stats"),
        (dict(implementation="mosaic_gpu"), UnsupportedError, "linear_logits runs no kernel"),
    ],
    "linear_topk": [
        *OF_TOPK,
        (dict(stats=True), TypeError, "linear_topk has no option stats"),
        (dict(logit_floor=0.0), TypeError, "linear_topk has no option logit_floor"),
        (dict(implementation="mosaic_gpu"), UnsupportedError, "linear_topk runs no kernel"),
    ],
    "linear_kl": OF_KL,
    "sharded_linear_logprobs": [
        (dict(weight=ONES((30, 8))), ValueError, r"\(30, 8\) must divide by the 4 .*vocab_size=30"),
        (dict(batch_axes="data", hidden=ONES((3, 8)), labels=jnp.zeros((3,), int)), ValueError,
         r"dimension 0 of hidden \(3, 8\) must divide by the 2 shards"),
        (dict(batch_axes="data", hidden=ONES((8,)), labels=jnp.zeros((), int)), ValueError,
         r"hidden \(8,\) has no batch"),
    ],
    "sharded_linear_topk": [(dict(weight=ONES((30, 8))), ValueError, "pass vocab_size=30")],
}  # fmt: skip
for sharded in (name for name in FUNCTIONS if name.startswith("sharded_")):
    axis = dict(axis_name="tensor"), ValueError, "axis_name='tensor' is for callers inside shard_map"
    MISTAKES[sharded] = [*MISTAKES.get(sharded, []), *OF_MESHES, axis]


@pytest.mark.parametrize("name", MISTAKES)
def test_what_a_function_alone_has(name: str) -> None:
    for changed, error, message in MISTAKES[name]:
        refused(name, changed, error, message)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_unknown_option(name: str) -> None:
    refused(name, {"temprature": 2.0}, TypeError, "option temprature .did you mean temperature|argument 'temprature'")


@pytest.mark.parametrize("name", [x for x in FUNCTIONS if "cross_entropy" in x or "logprobs" in x] + ["explain"])
def test_an_unknown_option_lists_those_of_the_function(name: str) -> None:
    function = FUNCTIONS[name][0]
    with pytest.raises(TypeError, match=f"{name}: unknown option softcap .did you mean logit_softcap") as error:
        function(HIDDEN, WEIGHT, LABELS, softcap=3.0)
    listed = set(str(error.value).split("known: ")[1].split(", "))
    assert listed >= set(options_of(name))
    assert ("vocab_axis" in listed) == (name.startswith("sharded_") or name == "explain")
    assert ("label_smoothing" in listed) == ("cross_entropy" in name or name == "explain")


INSIDE = messages.SHARDS["axis_name"]


@pytest.mark.parametrize("name", ["axis", "tp_axis", "group", "process_group", "vocab_axis", "tp_group"])
def test_another_name_of_the_vocabularys_shards(name: str) -> None:
    """Each function hints at the option that it has."""
    for function, meant in (
        (linear_cross_entropy, INSIDE), (sharded_linear_logprobs, "vocab_axis"),
        (lce_torch_bridge.linear_cross_entropy, "tp_group"),
    ):  # fmt: skip
        if name != meant:
            with pytest.raises(TypeError, match=re.escape(f"unknown option {name} (did you mean {meant}?)")):
                function(HIDDEN, WEIGHT, LABELS, **{name: None})


@pytest.mark.parametrize(("name", "meant"), [("smoothing", "label_smoothing"), *messages.OTHER_NAMES.items()])
def test_another_name(name: str, meant: str) -> None:
    with pytest.raises(TypeError, match=re.escape(f"unknown option {name} (did you mean {meant}?)")):
        linear_cross_entropy(HIDDEN, WEIGHT, LABELS, **{name: 0.1})
    with pytest.raises(TypeError, match=name):
        linear_logprobs(HIDDEN, WEIGHT, LABELS, **{name: 3.0})


@pytest.mark.parametrize("kind", [jnp.float32, jnp.float16, jnp.bfloat16, np.asarray])
def test_the_known_value_of_an_array_is_checked_as_a_number(kind: Any) -> None:
    """In a traced array it is not known."""
    for name in ("linear_logprobs", "explain", "sharded_linear_logprobs"):
        refused(name, {"logit_softcap": kind(0.0)}, ValueError, r"logit_softcap .*positive.* got 0\.0")
        refused(name, {"logit_scale": kind(np.nan)}, ValueError, "logit_scale .*finite.* got nan")


@pytest.mark.parametrize("dtype", ["int4", "uint4", "int8", "uint8", "int16", "uint32"])
def test_labels_of_any_integer_type(dtype: str) -> None:
    weight = jnp.arange(256.0).reshape(32, 8)
    want = linear_logprobs(HIDDEN, weight, jnp.array([0, 1, 7, 3])).logprobs
    for labels in (jnp.array([0, 1, 7, 3], dtype), np.asarray(jnp.array([0, 1, 7, 3], dtype))):
        assert np.array_equal(linear_logprobs(HIDDEN, weight, labels).logprobs, want)
        loss = linear_cross_entropy(HIDDEN, weight, labels, ignore_index=7)
        assert np.allclose(loss, -want[jnp.array([0, 1, 3])].mean())


@pytest.mark.parametrize("name", ["hidden", "weight", "labels", "where", "temperature"])
def test_torch_tensors_belong_to_the_bridge(name: str) -> None:
    torch = pytest.importorskip("torch")
    tensors = {
        "hidden": torch.ones(4, 8), "weight": torch.nn.Parameter(torch.ones(32, 8)),
        "labels": torch.zeros(4, dtype=torch.int64), "where": torch.ones(4, dtype=torch.bool),
        "temperature": torch.ones(4),
    }  # fmt: skip
    for function in ("linear_logprobs", "linear_cross_entropy", "explain"):
        message = f"{name} must be .* of JAX, got torch's .*: lce_torch_bridge has"
        refused(function, {name: tensors[name]}, TypeError, message)


def test_numpy_operands_are_welcome() -> None:
    out = linear_logprobs(np.ones((4, 8), np.float32), np.zeros((32, 8), np.float32), np.zeros((4,), np.int64))
    assert np.allclose(out.logprobs, -np.log(32))
