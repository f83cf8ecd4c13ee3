"""Bad input: the right exception, with the offending values, before anything is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lce_jax import UnsupportedError
from lce_torch_bridge import explain, linear_cross_entropy, linear_entropy, linear_logprobs
from lce_torch_bridge.call import _checks
from tests.torch import problem as p

GOOD = p.draw(T=6, H=8, V=10)
MASK = r"a mask of zeros and ones must be bool: pass where\.bool\(\)"


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (dict(hidden=[1.0]), TypeError, r"hidden must be a torch.Tensor, got list"),
        (dict(hidden=torch.ones(6, 8, dtype=torch.float64)), TypeError, r"got torch.float64, which JAX would round"),
        (dict(weight=torch.ones(10, 8, dtype=torch.int8)), TypeError, r"weight must be .* got torch.int8"),
        (dict(labels=torch.ones(6)), TypeError, r"labels must be integers \(vocabulary ids\), got torch.float32"),
        (dict(labels=torch.ones(6, dtype=torch.bool)), TypeError, r"labels must be integers .*, got torch.bool"),
        (dict(weight=torch.ones(10)), ValueError, r"weight must be \[V, H\].* got shape \(10,\)"),
        (dict(weight=torch.ones(0, 8)), ValueError, r"neither of them 0, got shape \(0, 8\)"),
        (dict(weight=torch.ones(10, 7)), ValueError, r"hidden \(6, 8\) must end in the H of weight .* \(10, 7\)"),
        (dict(labels=torch.ones(5, dtype=int)), ValueError, r"labels \(5,\) must have hidden's leading shape \(6,\)"),
        (dict(labels=GOOD.labels.to("meta")), ValueError, r"labels is on meta, hidden on cpu"),
        (dict(tp_group="tp"), TypeError, r"tp_group must be a torch.distributed.ProcessGroup .* got 'tp'"),
        (dict(temperature=0.0), ValueError, r"temperature must be positive in float32, got 0.0"),
        (dict(temperature=float("nan")), ValueError, r"temperature must be finite in float32, got nan"),
        (dict(temperature=1e-46), ValueError, r"temperature must be positive in float32, got 1e-46"),
        (dict(temperature=torch.full((6,), 1e-46).double()), ValueError, r"in float32, got 0.0 in its values"),
        (dict(temperature=torch.tensor([1, 1, torch.inf, 1, 1, 1])), ValueError, r"finite in float32, got inf in its"),
        (dict(temperature=torch.tensor([1, torch.nan, 1, 1, 1, 1])), ValueError, r"finite in float32, got nan in its"),
        (dict(temperature="1"), TypeError, r"temperature must be a Python number, got str '1'"),
        (dict(temperature=torch.ones(5)), ValueError, r"temperature \(5,\) must broadcast to the tokens' shape \(6,\)"),
        (dict(temperature=torch.ones(2, 6)), ValueError, r"\(2, 6\) must broadcast to the tokens' shape \(6,\)"),
        (dict(temperature=torch.ones(6, dtype=int)), TypeError, r"temperature must be floating point"),
        (dict(temperature=torch.ones(6, requires_grad=True)), ValueError, r"pass temperature.detach\(\)"),
        (dict(temperature=torch.ones(6, device="meta")), ValueError, r"temperature is on meta, hidden on cpu"),
        (dict(logit_scale=float("inf")), ValueError, r"logit_scale must be finite in float32, got inf"),
        (dict(logit_scale=True), TypeError, r"logit_scale must be a Python number, got bool True"),
        (dict(logit_softcap=1e39), ValueError, r"logit_softcap must be finite in float32, got 1e\+39"),
        (dict(logit_softcap=0), ValueError, r"logit_softcap must be positive in float32, got 0.0"),
        (dict(vocab_size=11), ValueError, r"vocab_size must lie in \[1, 10\].* got 11"),
        (dict(vocab_size=0), ValueError, r"vocab_size must lie in \[1, 10\].* got 0"),
        (dict(vocab_size=9.0), TypeError, r"vocab_size must be a Python integer, got 9.0"),
        (dict(entropy="grad"), TypeError, r'entropy must be True, False or "metric", got .grad.'),
        (dict(out_of_vocab="nan"), ValueError, r"""out_of_vocab must be "zero" or "megatron", got 'nan'"""),
        (dict(wgrad="add"), ValueError, r"""wgrad must be "return" or "main_grad", got 'add'"""),
        (dict(stats=1), TypeError, r"stats must be True or False, got 1"),
        (dict(reduce_grad_hidden=None), TypeError, r"reduce_grad_hidden must be True or False, got None"),
        (dict(mean_logit="yes"), TypeError, r"mean_logit must be True or False, got 'yes'"),
        (dict(bias=[0.0] * 10), TypeError, r"bias must be a torch.Tensor, got list"),
        (dict(bias=torch.ones(10).double()), TypeError, r"bias must be bfloat16, .* torch.float64, which JAX would"),
        (dict(bias=torch.ones(6)), ValueError, r"bias \(6,\) must have one number for each .*\(10, 8\): \(10,\)"),
        (dict(bias=torch.ones(1, 10)), ValueError, r"bias \(1, 10\) must have one number .*: \(10,\)"),
        (dict(bias=torch.ones(10, device="meta")), ValueError, r"bias is on meta, weight on cpu"),
        (dict(vocab_part_size=12), ValueError, r"vocab_part_size must be a positive multiple of 8, got 12"),
        (dict(vocab_part_size=8, cache_bytes=5), ValueError, r"vocab_part_size=8 with cache_bytes=5: .* Write"),
        (dict(cache_bytes=-1), ValueError, r"cache_bytes must be a whole number of bytes, .* got -1"),
        (dict(cache_bytes=1e9), ValueError, r"cache_bytes must be a whole number of bytes, at least 0, got 1000000000"),
        (dict(where=[True] * 6), TypeError, r"where must be a torch.Tensor, got list"),
        (dict(where=torch.ones(5, dtype=bool)), ValueError, r"where \(5,\) must have the tokens' shape \(6,\)"),
        (dict(where=torch.ones(6)), TypeError, rf"where must be bool, or .* index of rows, got torch.float32; {MASK}"),
        (dict(where=torch.ones(6).byte()), TypeError, rf"where must be bool, or .*, got torch.uint8; {MASK}"),
        (dict(where=torch.tensor([0, 1] * 3)), ValueError, rf"must hold each row at most once, got 4 repeats; {MASK}"),
        (dict(where=torch.ones(2, 2, dtype=int)), ValueError, r"must have one dimension, got shape \(2, 2\)$"),
        (dict(where=torch.tensor([0, 6])), ValueError, r"where holds row 6, and there are 6 rows"),
        (dict(where=torch.tensor([-1])), ValueError, r"where holds row -1, and there are 6 rows"),
        (dict(where=torch.tensor([2, 2, 2])), ValueError, r"must hold each row at most once, got 2 repeats$"),
        (dict(candidates=[[1]] * 6), TypeError, r"candidates must be a torch.Tensor, got list"),
        (dict(candidates=torch.ones(6, 2)), TypeError, r"candidates must be integers \(vocabulary ids\), got torch"),
        (dict(candidates=GOOD.labels[:, None][:, :0]), ValueError, r"candidates \(6, 0\) must end in K, from 1 to 512"),
        (dict(candidates=torch.ones(6, 513, dtype=int)), ValueError, r"\(6, 513\) must end in K, from 1 to 512 ids"),
        (dict(candidates=torch.tensor(3)), ValueError, r"candidates \(\) must end in K"),
        (dict(candidates=torch.ones(5, 2, dtype=int)), ValueError, r"\(5, 2\) must be .* the shape of labels \(6,\)"),
        (dict(candidates=torch.ones(6, 2, dtype=int).to("meta")), ValueError, r"candidates is on meta, hidden on cpu"),
        (dict(ignore_index=-100.0), TypeError, r"ignore_index must be a Python integer, got -100.0"),
        (dict(ignore_index=True), TypeError, r"ignore_index must be a Python integer, got True"),
        (dict(implementation=7), TypeError, r"implementation must be None, a name or a tuple of names, got 7"),
        (dict(implementation=()), TypeError, r"implementation must be None, a name or a tuple of names, got \(\)"),
        (dict(implementation="cutlass"), ValueError, r"unknown implementation 'cutlass'; known: .*\"xla\""),
        (dict(implementation="mosaic_gpu"), UnsupportedError, r"needs an NVIDIA GPU of compute capability 9.0"),
    ],
)  # fmt: skip
def test_refusal(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        linear_logprobs(**{**GOOD._asdict(), **given})


def test_a_mask_of_numbers() -> None:
    """As a bool it serves, as the message says."""
    two = p.Problem(GOOD.hidden.view(2, 3, 8), GOOD.weight, GOOD.labels.view(2, 3))
    keep = torch.tensor([[0, 1, 1], [0, 1, 1]])
    with pytest.raises(ValueError, match=rf"must have one dimension, got shape \(2, 3\); {MASK}"):
        linear_logprobs(*two, where=keep)
    want = linear_logprobs(*two).logprobs
    assert torch.equal(linear_logprobs(*two, where=keep.bool()).logprobs, want * keep)


@pytest.mark.parametrize(
    ("call", "known"),
    [
        (explain, r"known: bias, .*stats, mean_logit, candidates, where, ignore_index, .*implementation$"),
        (linear_entropy, r"known: bias, .*vocab_size, where, reduce_grad_hidden, .*implementation$"),
        (linear_cross_entropy, r"known: reduction, .*label_smoothing, .*vocab_size, reduce_grad_hidden, .*$"),
    ],
)
def test_options_of_other_functions(call: Any, known: str) -> None:
    """Unknown ones are refused by the function's own name, and no message holds a tensor's numbers."""
    given = GOOD[:2] if call is linear_entropy else GOOD
    with pytest.raises(TypeError, match=rf"^{call.__name__}: unknown option temprature; {known}"):
        call(*given, temprature=1.0)
    if call is not explain:
        with pytest.raises(TypeError, match=r"^candidates=torch.int64 \(6, 100\): .*linear_logprobs has this option$"):
            call(*given, candidates=torch.zeros(6, 100, dtype=torch.int64))


def test_a_refused_name_falls_back_only_where_a_tuple_says_so() -> None:
    out = linear_logprobs(*GOOD, implementation=("mosaic_gpu", "xla"))
    assert torch.equal(out.logprobs, linear_logprobs(*GOOD, implementation="xla").logprobs)


@pytest.mark.parametrize("wrong", [0.0, -0.5, float("nan"), float("inf"), 1e-42], ids=str)
def test_a_temperature_that_is_not_looked_at_stays_in_its_token(wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_checks, "may_look_at", lambda _: False)  # as on a GPU
    damaged, rest = torch.tensor([1, 3]), torch.tensor([0, 2, 4, 5])
    temperature = torch.tensor([1.0, 0.7, 1.0, 2.0, 0.5, 1.0])
    seeds = p.seeds_like(GOOD.labels, K=3)
    options = dict(stats=True, mean_logit=True, candidates=p.candidates_like(GOOD.labels, K=3, V=10))
    without = [seed.index_fill(0, damaged, 0.0) for seed in seeds]
    want, wanted = p.gradients(GOOD, without, temperature=temperature, **options)
    out, grads = p.gradients(GOOD, seeds, temperature=temperature.index_fill(0, damaged, wrong), **options)
    for got, true in zip(out[:7], want[:7], strict=True):
        assert got[damaged].isnan().all()
        assert torch.equal(got[rest], true[rest])
    assert all(p.relative_norm(got, true) < 1e-6 for got, true in zip(grads, wanted, strict=True))
