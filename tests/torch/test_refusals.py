"""Bad input: the right exception, with the offending values, before anything is computed; what it advises is right."""

from __future__ import annotations

import ast
import contextlib
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import lce_torch_bridge
import lce_torch_bridge as bridge
from lce_torch_bridge import (
    explain,
    linear_cross_entropy,
    linear_entropy,
    linear_kl,
    linear_logprobs,
    linear_loss,
    verl,
)
from tests.torch import executor
from tests.torch import problem as p
from tests.torch.test_main_grad import WAYS


@pytest.fixture(autouse=True)
def programs(request: pytest.FixtureRequest) -> Iterator[None]:
    """JAX's say which implementations they have. Else float64 runs."""
    with contextlib.nullcontext() if request.function is test_refusal else executor.in_float64():
        yield


GOOD = p.draw(T=6, H=8, V=10)
ONES = torch.ones(6, 2, dtype=torch.int64)


def plain(logprobs: torch.Tensor, _entropy: Any, lse: torch.Tensor, *own: torch.Tensor) -> torch.Tensor:
    return lse - sum(own, logprobs)


def scaled(logprobs: torch.Tensor, _entropy: Any, _lse: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    return own * logprobs


HEAD = {"hidden": GOOD.hidden, "weight": GOOD.weight}
TEACHER = {"teacher_hidden": torch.ones(6, 4), "teacher_weight": torch.ones(10, 4)}
ARGUMENTS: dict[str, dict[str, Any]] = {  # by position, in this order; options follow
    "linear_logprobs": HEAD | {"labels": GOOD.labels},
    "linear_loss": {"loss_fn": plain} | HEAD | {"labels": GOOD.labels, "own": ()},
    "linear_cross_entropy": HEAD | {"labels": GOOD.labels},
    "linear_entropy": HEAD,
    "linear_logits": HEAD | {"ids": ONES},
    "linear_topk": HEAD | {"k": 2},
    "linear_kl": HEAD | TEACHER,
    "masked_logprobs": {"logits": torch.ones(6, 2), "ids": ONES, "labels": GOOD.labels},
}
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "linear_logprobs": [
        (dict(hidden=[1.0]), r"TypeError: .*hidden .*Tensor, got list"),
        (dict(hidden=torch.ones(6, 8, dtype=torch.float64)), r"TypeError: .*got torch.float64"),
        (dict(weight=torch.ones(10, 8, dtype=torch.int8)), r"TypeError: .*weight must be .* got torch.int8"),
        (dict(labels=torch.ones(6)), r"TypeError: .*labels .*integers.* got torch.float32"),
        (dict(labels=torch.ones(6, dtype=torch.bool)), r"TypeError: .*labels must be integers, got torch.bool"),
        (dict(weight=torch.ones(10)), r"ValueError: .*weight must be \[V, H\].* got shape \(10,\)"),
        (dict(weight=torch.ones(0, 8)), r"ValueError: .*neither of them 0, got shape \(0, 8\)"),
        (dict(weight=torch.ones(10, 7)), r"ValueError: .*hidden \(6, 8\) .*weight .*\(10, 7\)"),
        (dict(labels=torch.ones(5, dtype=int)), r"ValueError: .*labels \(5,\) .*\(6,\)"),
        (dict(labels=GOOD.labels.to("meta")), r"ValueError: .*labels is on meta, hidden on cpu"),
        (dict(tp_group="tp"), r"TypeError: .*tp_group .*ProcessGroup .* got 'tp'"),
        (dict(temperature=0.0), r"ValueError: .*temperature .*positive.* got 0.0"),
        (dict(temperature=torch.full((6,), 1e-46).double()), r"ValueError: .*in float32, got 0.0 in its values"),
        (dict(temperature=torch.tensor([1, 1, torch.inf, 1, 1, 1])),
         r"ValueError: .*finite in float32, got inf in its"),
        (dict(temperature=torch.tensor([1, torch.nan, 1, 1, 1, 1])),
         r"ValueError: .*finite in float32, got nan in its"),
        (dict(temperature=torch.ones(5)), r"ValueError: .*temperature \(5,\) .*\(6,\)"),
        (dict(temperature=torch.ones(2, 6)), r"ValueError: .*\(2, 6\) .*\(6,\)"),
        (dict(temperature=torch.ones(6, dtype=int)), r"TypeError: .*temperature must be floating point"),
        (dict(temperature=torch.ones(6, requires_grad=True)), r"ValueError: .*pass temperature.detach\(\)"),
        (dict(temperature=torch.ones(6, device="meta")), r"ValueError: .*temperature is on meta, hidden on cpu"),
        (dict(logit_scale=float("inf")), r"ValueError: .*logit_scale .*finite.* got inf"),
        (dict(logit_softcap=0), r"ValueError: .*logit_softcap .*positive.* got 0.0"),
        (dict(vocab_size=11), r"ValueError: .*vocab_size must lie in \[1, 10\].* got 11"),
        (dict(vocab_size=0), r"ValueError: .*vocab_size must lie in \[1, 10\].* got 0"),
        (dict(vocab_size=9.0), r"TypeError: .*vocab_size .*integer, got 9.0"),
        (dict(entropy="grad"), r'TypeError: .*entropy must be True, False or "metric", got .grad.'),
        (dict(out_of_vocab="nan"), r"""ValueError: .*out_of_vocab must be "zero" or "megatron", got 'nan'"""),
        (dict(wgrad="add"), r"""ValueError: .*wgrad must be "return" or "main_grad", got 'add'"""),
        (dict(stats=1), r"TypeError: .*stats .*True or False, got 1"),
        (dict(reduce_grad_hidden=None), r"TypeError: .*reduce_grad_hidden .*True or False, got None"),
        (dict(mean_logit="yes"), r"TypeError: .*mean_logit .*True or False, got 'yes'"),
        (dict(bias=[0.0] * 10), r"TypeError: .*bias .*Tensor, got list"),
        (dict(bias=torch.ones(10).double()), r"TypeError: .*bias .* torch.float64"),
        (dict(bias=torch.ones(6)), r"ValueError: .*bias \(6,\) .*\(10, 8\): \(10,\)"),
        (dict(bias=torch.ones(1, 10)), r"ValueError: .*bias \(1, 10\) .*\(10,\)"),
        (dict(bias=torch.ones(10, device="meta")), r"ValueError: .*bias is on meta, weight on cpu"),
        (dict(vocab_part_size=12), r"ValueError: .*vocab_part_size .*multiple of 8, got 12"),
        (dict(vocab_part_size=8, cache_bytes=5), r"ValueError: .*vocab_part_size=8 with cache_bytes=5: .* Write"),
        (dict(cache_bytes=-1), r"ValueError: .*cache_bytes .*bytes.* got -1"),
        (dict(cache_bytes=1e9), r"ValueError: .*cache_bytes .*bytes.* got 1000000000"),
        (dict(where=[True] * 6), r"TypeError: .*where .*Tensor, got list"),
        (dict(where=torch.ones(5, dtype=bool)), r"ValueError: .*where \(5,\) .*\(6,\)"),
        (dict(where=torch.ones(6)),
         r"TypeError: .*where must be bool, or .* index of rows, got torch.float32; .* pass where\.bool"),
        (dict(where=torch.ones(6).byte()),
         r"TypeError: .*where must be bool, or .*, got torch.uint8; .* pass where\.bool"),
        (dict(where=torch.tensor([0, 1] * 3)), r"ValueError: .*got 4 repeats; .* pass where\.bool"),
        (dict(where=torch.ones(2, 2, dtype=int)), r"ValueError: .*must have one dimension, got shape \(2, 2\)$"),
        (dict(where=torch.tensor([0, 6])), r"ValueError: .*where holds row 6, and there are 6 rows"),
        (dict(where=torch.tensor([-1])), r"ValueError: .*where holds row -1, and there are 6 rows"),
        (dict(where=torch.tensor([2, 2, 2])), r"ValueError: .*got 2 repeats$"),
        (dict(candidates=[[1]] * 6), r"TypeError: .*candidates .*Tensor, got list"),
        (dict(candidates=torch.ones(6, 2)), r"TypeError: .*candidates .*integers.* got torch"),
        (dict(candidates=GOOD.labels[:, None][:, :0]), r"ValueError: .*candidates \(6, 0\) .* 1 to 512"),
        (dict(candidates=torch.ones(6, 513, dtype=int)), r"ValueError: .*\(6, 513\) .* 1 to 512"),
        (dict(candidates=torch.tensor(3)), r"ValueError: .*candidates \(\) .*K"),
        (dict(candidates=torch.ones(5, 2, dtype=int)), r"ValueError: .*\(5, 2\) must be .* the shape of labels \(6,\)"),
        (dict(candidates=torch.ones(6, 2, dtype=int).to("meta")),
         r"ValueError: .*candidates is on meta, hidden on cpu"),
        (dict(ignore_index=-100.0), r"TypeError: .*ignore_index .*integer, got -100.0"),
        (dict(ignore_index=True), r"TypeError: .*ignore_index .*integer, got True"),
        (dict(implementation=7), r"TypeError: .*implementation .*tuple of names, got 7"),
        (dict(implementation=()), r"TypeError: .*implementation .*tuple of names, got \(\)"),
        (dict(implementation="cutlass"), r"ValueError: .*unknown implementation 'cutlass'; known: "),
        (dict(implementation="mosaic_gpu"), r"UnsupportedError: .*needs an NVIDIA GPU"),
        (dict(logit_floor=float("nan")), r"ValueError: .*logit_floor .*finite.* got nan"),
        (dict(logit_floor=torch.full((6,), torch.nan)), r"ValueError: .*logit_floor must be .* is nan in 6 places"),
        (dict(logit_floor=torch.ones(3)), r"ValueError: .*logit_floor \(3,\) must broadcast to .* \(6,\)"),
        (dict(logit_floor=torch.ones(6).int()), r"TypeError: .*logit_floor .*floating.* got torch\.int32"),
        (dict(logit_floor=torch.ones(6).requires_grad_()), r"ValueError: .*pass logit_floor\.detach\(\)"),
        (dict(logit_floor=0.0, mean_logit=True), r"ValueError: .*logit_floor with label_smoothing \(or mean_logit\)"),
        (dict(logit_floor=0.0, candidates=torch.zeros(6, 2).int()),
         r"ValueError: .*logit_floor with candidates, 2 per"),
    ],
    "linear_loss": [
        (dict(loss_fn=torch.ones(6), own=torch.ones(6)), r"TypeError: loss_fn must be a function of .*'torch.Tensor'"),
        (dict(loss_fn=lambda *_: 1.0), r"TypeError: .*loss_fn .*tensor.* got float"),
        (dict(loss_fn=lambda x, *_: x.sum()), r"ValueError: .*per token, .* got \(\)"),
        (dict(loss_fn=lambda x, *_: x > 0), r"ValueError: .*got \(6,\) of torch.bool"),
        (dict(own=(torch.ones(5),)), r"ValueError: .*per_token\[0\] \(5,\) .*labels \(6,\)"),
        (dict(own=(torch.ones(6), [1.0])), r"TypeError: .*per_token\[1\] .*Tensor, got list"),
        (dict(own=(torch.ones(6, device="meta"),)), r"ValueError: .*per_token\[0\] is on meta, hidden on cpu"),
        (dict(cache_bytes=1), r"TypeError: .*cache_bytes=1: .* chunk_bytes limits"),
        (dict(vocab_part_size=8), r"TypeError: .*vocab_part_size=8: .* a backward cannot use"),
        (dict(mean_logit=True), r"TypeError: .*mean_logit=True: loss_fn gets .*; linear_logprobs has this option"),
        (dict(candidates=GOOD.labels[:, None]), r"TypeError: .*linear_logprobs has this option"),
        (dict(temprature=1.0), r"TypeError: linear_loss: unknown option temprature .*; known: where, .*chunk_bytes"),
        (dict(loss_fn=scaled, owned=torch.ones(6)),
         r"TypeError: .*unknown option owned \(did you mean own\?\); known: where, .*; arguments of loss_fn: own"),
        (dict(loss_fn=scaled, temperature=0.5), r"TypeError: loss_fn: missing a required argument: 'own'"),
        (dict(loss_fn=lambda x, *_, stats=1: stats * x, stats=True), r"TypeError: stats is an option"),
        (dict(loss_fn=lambda x, *_, own: own * x, own=(), more=torch.ones(5)), r"TypeError: .*unknown option more;"),
        (dict(chunk_bytes=-1), r"ValueError: .*chunk_bytes .*bytes.* got -1"),
        (dict(wgrad="add"), r"""ValueError: .*wgrad must be "return" or "main_grad", got 'add'"""),
        (dict(entropy="none"), r'TypeError: .*entropy must be True, False or "metric", got .none.'),
        (dict(implementation="cutlass"), r"ValueError: .*unknown implementation 'cutlass'"),
    ],
    "linear_logits": [
        (dict(hidden=torch.ones(6, 8).double()), r"TypeError: .*hidden must be .* got torch.float64"),
        (dict(ids=[[1]] * 6), r"TypeError: .*ids .*Tensor, got list"),
        (dict(ids=torch.ones(6, 2)), r"TypeError: .*ids .*integers.* got torch.float32"),
        (dict(ids=torch.ones(6, 513, dtype=int)), r"ValueError: .*ids \(6, 513\) .* 1 to 512"),
        (dict(ids=torch.ones(5, 2, dtype=int)), r"ValueError: .*ids \(5, 2\) .* shape of hidden before H \(6,\)"),
        (dict(ids=ONES.to("meta")), r"ValueError: .*ids is on meta, hidden on cpu"),
        (dict(weight=torch.ones(10, 7)), r"ValueError: .*hidden \(6, 8\) .*weight"),
        (dict(temperature=torch.ones(5)), r"ValueError: .*temperature \(5,\) .*\(6,\)"),
        (dict(vocab_size=11), r"ValueError: .*vocab_size must lie in \[1, 10\].* got 11"),
        (dict(where=torch.ones(5, dtype=bool)), r"ValueError: .*where \(5,\) .*\(6,\)"),
        (dict(implementation="mosaic_gpu"), r"UnsupportedError: .*linear_logits runs no kernel"),
    ],
    "linear_topk": [
        (dict(k=0), r"ValueError: .*k must lie in \[1, 512\], got 0"),
        (dict(k=513), r"ValueError: .*k must lie in \[1, 512\], got 513"),
        (dict(k=11), r"ValueError: .*k .*vocabulary, 10, got 11"),
        (dict(k=9, vocab_size=8), r"ValueError: .*k .*vocabulary, 8, got 9"),
        (dict(k=2.0), r"TypeError: .*k .*integer, got 2.0"),
        (dict(hidden=torch.ones(6, 8).double()), r"TypeError: .*hidden must be .* got torch.float64"),
        (dict(weight=torch.ones(10, 7)), r"ValueError: .*hidden \(6, 8\) .*weight"),
        (dict(where=torch.ones(5, dtype=bool)), r"ValueError: .*where \(5,\) .*\(6,\)"),
        (dict(implementation="mosaic_gpu"), r"UnsupportedError: .*mosaic_gpu"),
    ],
    "linear_kl": [
        (dict(direction="sideways"), r'ValueError: .*direction must be "forward", .* got .sideways'),
        (dict(beta=0.5), r'ValueError: .*beta=0.5 .*direction="jsd"'),
        (dict(direction="jsd", beta=1.0), r"ValueError: .*beta must lie in \(0, 1\), got 1.0"),
        (dict(hidden=torch.ones(6, 8).double()), r"TypeError: hidden must be .* got torch.float64"),
        (dict(teacher_hidden=torch.ones(6, 4).double()),
         r"TypeError: .*the teacher's hidden must be .* got torch.float64"),
        (dict(teacher_hidden=torch.ones(5, 4)), r"ValueError: .*the teacher's hidden \(5, 4\) .*\(6,\s*8\)"),
        (dict(teacher_weight=torch.ones(10, 5)), r"ValueError: .*the teacher's hidden \(6, 4\)"),
        (dict(teacher_weight=torch.ones(9, 4)),
         r"ValueError: .*weight has 10 rows, the teacher's 9: .*at most 9, as voc"),
        (dict(weight=torch.ones(80)), r"ValueError: weight must be \[V, H\].* got shape \(80,\)\..* gather"),
        (dict(teacher_weight=torch.ones(0, 4)),
         r"ValueError: .*the teacher's weight must be \[V, H\].* \(0, 4\)\..* gath"),
        (dict(teacher_weight=torch.ones(9, 4), vocab_size=10),
         r"ValueError: .*the teacher's vocab_size must .* got 10"),
        (dict(teacher_weight=[1]), r"TypeError: .*the teacher's weight .*Tensor, got list"),
        (dict(teacher_hidden=torch.ones(6, 4, device="meta")), r"ValueError: .*the teacher's .* meta"),
        (dict(teacher_temperature=torch.ones(5)), r"ValueError: .*the teacher's temperature \(5,\) must broadcast"),
        (dict(teacher_temperature=-1.0), r"ValueError: .*the teacher's temperature must be .* got -1.0"),
        (dict(teacher_temperature="mine"), r"(Value|Type)Error: .*the teacher's temperature"),
        (dict(teacher_logit_softcap=0.0), r"ValueError: .*the teacher's logit_softcap must be .* got 0.0"),
        (dict(logit_scale=0.5), r"ValueError: logit_scale=0.5 .* write teacher_logit_scale="),
        (dict(logit_softcap=4.0, teacher_logit_scale=1.0), r"ValueError: logit_softcap=4.0 .*teacher"),
        (dict(cache_bytes=-1), r"ValueError: .*cache_bytes must .* got -1"),
        (dict(where=torch.ones(5, dtype=bool)), r"ValueError: .*where \(5,\) .*\(6,\)"),
        (dict(bias=torch.ones(9)), r"ValueError: bias \(9,\)"),
        (dict(teacher_bias=torch.ones(9)), r"ValueError: .*the teacher's bias \(9,\)"),
        (dict(implementation="mosaic_gpu"), r"UnsupportedError: .*cpu"),
    ],
    "linear_cross_entropy": [
        (dict(reduction="avg"), r"""ValueError: .*reduction must be "mean", "sum" or "none", got 'avg'"""),
        (dict(label_smoothing=1.1), r"ValueError: .*label_smoothing must lie in \[0, 1\], got 1.1"),
        (dict(label_smoothing="0.1"), r"TypeError: .*label_smoothing .*number, got str '0.1'"),
        (dict(z_loss=-1e-4), r"ValueError: .*z_loss .*negative, got -0.0001"),
        (dict(ignore_index=-100.0), r"TypeError: .*ignore_index .*integer, got -100.0"),
        (dict(entropy="metric"), r"TypeError: .*entropy='metric'"),
        (dict(stats=True), r"TypeError: .*stats=True"),
        (dict(labels=[1, 2]), r"TypeError: .*labels .*Tensor, got list"),
        (dict(labels=torch.ones(6)), r"TypeError: .*labels must be integers, got torch.float32"),
        (dict(where=torch.ones(5, dtype=bool)), r"ValueError: .*where \(5,\) .*\(6,\)"),
        (dict(smoothing=0.1), r"TypeError: .*unknown option smoothing .*; known: reduction, .*label_smoothing"),
    ],
    "linear_entropy": [
        (dict(entropy=False), r"TypeError: .*entropy=False: linear_entropy returns entropy and lse"),
        (dict(ignore_index=-100), r"TypeError: .*ignore_index=-100: linear_entropy returns"),
        (dict(where=torch.ones(5, dtype=bool)), r"ValueError: .*the tokens' shape \(6,\)"),
        (dict(hidden=torch.ones(6, 7)), r"ValueError: .*hidden \(6, 7\) .*weight .*\(10, 8\)"),
        (dict(hidden=[1.0]), r"TypeError: .*hidden .*Tensor, got list"),
        (dict(hidden=torch.tensor(1.0)), r"ValueError: .*hidden must be \[\.\.\., H\]"),
    ],
    "masked_logprobs": [
        (dict(logits=torch.ones(6, 3)), r"ValueError: logits \(6, 3\) of torch.float32 must be floating .*\(6, 2\)"),
        (dict(labels=GOOD.labels[:5]), r"ValueError: ids \(6, 2\) must be .* the shape of labels \(5,\) before K"),
        (dict(labels=torch.ones(6)), r"TypeError: labels must be integers"),
    ],
}  # fmt: skip
ROWS = [(function, *row) for function, rows in REFUSED.items() for row in rows]


def said(function: str, **given: Any) -> str:
    """The error and its words."""
    options = ARGUMENTS[function] | given
    positional = [options.pop(name) for name in ARGUMENTS[function]]
    if function == "linear_loss":
        positional += positional.pop()
    try:
        getattr(lce_torch_bridge, function)(*positional, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


@pytest.mark.parametrize(("function", "given", "message"), ROWS, ids=[f"{row[0]}, {', '.join(row[1])}" for row in ROWS])
def test_refusal(function: str, given: dict[str, Any], message: str) -> None:
    found = [said(function, **given)]
    if function == "linear_loss":  # which looks at some things only where it is differentiated
        found.append(said(function, **GOOD.leaves()._asdict() | given))
    assert all(re.match(message, text) for text in found), found


def test_a_mask_of_numbers() -> None:
    """As a bool it serves, as the message says."""
    two = p.Problem(GOOD.hidden.view(2, 3, 8), GOOD.weight, GOOD.labels.view(2, 3))
    keep = torch.tensor([[0, 1, 1], [0, 1, 1]])
    with pytest.raises(ValueError, match=r"must have one dimension, got shape \(2, 3\); .* pass where\.bool\(\)"):
        linear_logprobs(*two, where=keep)
    want = linear_logprobs(*two).logprobs
    assert torch.equal(linear_logprobs(*two, where=keep.bool()).logprobs, want * keep)


@pytest.mark.parametrize(
    ("call", "known"),
    [
        (explain, "known: .*candidates, .*implementation"),
        (linear_entropy, "known: .*vocab_size, .*implementation"),
        (linear_cross_entropy, "known: reduction, .*label_smoothing, .*vocab_size"),
    ],
)
def test_options_of_other_functions(call: Any, known: str) -> None:
    """Unknown ones are refused by the function's own name, and no message holds a tensor's numbers."""
    given = GOOD[:2] if call is linear_entropy else GOOD
    with pytest.raises(TypeError, match=rf"^{call.__name__}: unknown option temprature .did.*; {known}"):
        call(*given, temprature=1.0)
    if call is explain:
        with pytest.raises(ValueError, match=r"logit_floor with candidates, 2 per"):
            call(*given, logit_floor=0.0, candidates=ONES)
    else:
        with pytest.raises(TypeError, match=r"^candidates=torch.int64 \(6, 100\): .*linear_logprobs has this option$"):
            call(*given, candidates=torch.zeros(6, 100, dtype=torch.int64))


@pytest.mark.parametrize(("name", "own"), [("logit_scale", 1 / 16), ("logit_softcap", 4.0)])
def test_what_the_message_on_scale_and_cap_says_is_right(name: str, own: float) -> None:
    """As in `tests.ops.test_kl_advice`, whose words it has."""
    refused = said("linear_kl", **{name: own})
    advice = re.findall(rf'\bteacher_{name}=("same"|[\w.]+)', refused)
    assert len(advice) == 2
    scale = {name: own}
    z, y = p.capped(HEAD["hidden"] @ HEAD["weight"].T, **scale), TEACHER["teacher_hidden"] @ TEACHER["teacher_weight"].T
    for teachers in map(ast.literal_eval, advice):
        kl = linear_kl(*HEAD.values(), *TEACHER.values(), **scale, **{f"teacher_{name}": teachers})
        others = {"same": scale}.get(teachers, {name: teachers})
        log_p = p.capped(y, **others).log_softmax(-1)
        want = (log_p.exp() * (log_p - z.log_softmax(-1))).sum(-1)
        assert torch.allclose(kl, want, rtol=1e-5, atol=1e-6)


def test_a_tensor_that_loss_fn_closes_over() -> None:
    """Its gradient would be lost. Each of the remedies in the message."""
    leaves, scale = GOOD.leaves(), torch.nn.Parameter(torch.tensor(2.0))
    per_token = torch.randn(6, requires_grad=True)
    for closed in (scale, scale * 3, per_token):
        with pytest.raises(ValueError, match=r"loss_fn uses a tensor \((6,)?\) that requires a gradient"):
            linear_loss(lambda logprobs, *_, x=closed: x * logprobs, *leaves)

    want = torch.autograd.grad((per_token * linear_logprobs(*leaves).logprobs).sum(), (leaves.hidden, per_token))
    total, _ = linear_loss(lambda logprobs, _entropy, _lse, x: x * logprobs, *leaves, per_token)  # as an argument
    grads = torch.autograd.grad(total, (leaves.hidden, per_token))
    total, _ = linear_loss(lambda logprobs, *_: per_token.detach() * logprobs, *leaves)  # detached
    detached = torch.autograd.grad(total, leaves.hidden)
    assert max(map(p.relative_norm, (*grads, *detached), (*want, want[0]))) < 1e-6
    logprobs = linear_logprobs(*leaves).logprobs  # applied to the results, and summed
    (dscale,) = torch.autograd.grad((scale * logprobs).sum(), scale)
    assert p.relative_norm(dscale, logprobs.sum()) < 1e-6


def test_transforms_of_a_loss() -> None:
    leaves = GOOD.leaves()
    remedy = r"apply loss_fn to the results of linear_logprobs"
    with pytest.raises(NotImplementedError, match=remedy):
        torch.func.grad(lambda w: linear_loss(plain, GOOD.hidden, w, GOOD.labels)[0])(GOOD.weight)
    with pytest.raises(NotImplementedError, match=remedy):
        linear_loss(plain, *(x.to("meta") for x in GOOD))

    def summed(weight: torch.Tensor) -> torch.Tensor:
        return plain(*linear_logprobs(GOOD.hidden, weight, GOOD.labels)[:3]).sum()

    (want,) = torch.autograd.grad(linear_loss(plain, *leaves)[0], leaves.weight)
    assert p.relative_norm(torch.func.grad(summed)(GOOD.weight), want) < 1e-6


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own, after a break
def test_compile_leaves_a_loss_out_of_its_graphs() -> None:
    torch._dynamo.reset()
    leaves = GOOD.leaves()

    def call(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return 2 * linear_loss(plain, hidden * 1, weight, labels)[0]

    with pytest.raises(torch._dynamo.exc.Unsupported, match="linear_loss"):
        torch.compile(call, fullgraph=True, backend="eager")(*leaves)
    got = torch.autograd.grad(torch.compile(call, backend="aot_eager")(*leaves), leaves[:2])
    assert all(map(torch.equal, got, torch.autograd.grad(call(*leaves), leaves[:2])))


IDS, KEEP, BIAS = p.candidates_like(GOOD.labels, K=2, V=10), torch.tensor([True, False] * 3), torch.linspace(0, 1, 10)
SHARED: dict[str, torch.Tensor] = dict(
    hidden=GOOD.hidden, weight=GOOD.weight, bias=BIAS, temperature=torch.linspace(0.5, 2, 6), where=KEEP
)
LABELS = {"labels": GOOD.labels}


def sum_of(*results: Any) -> torch.Tensor:
    floats = [x for x in results if x is not None and x.is_floating_point()]
    return torch.stack([(x * torch.linspace(1, 2, x.numel()).view(x.shape)).sum() for x in floats]).sum()


def own_loss(logprobs: Any, entropy: Any, lse: Any, own: Any) -> Any:
    return own * logprobs - entropy + lse


CALLS: dict[str, tuple[Callable[..., Any], dict[str, torch.Tensor]]] = {
    "linear_logprobs": (lambda **x: sum_of(*bridge.linear_logprobs(**x)), SHARED | LABELS | {"candidates": IDS}),
    "linear_loss": (
        lambda own, hidden, weight, labels, **x: bridge.linear_loss(own_loss, hidden, weight, labels, own, **x)[0],
        SHARED | LABELS | {"own": torch.linspace(1, 2, 6)},
    ),
    "linear_cross_entropy": (lambda **x: bridge.linear_cross_entropy(**x), SHARED | LABELS),
    "linear_entropy": (lambda **x: sum_of(*bridge.linear_entropy(**x)), SHARED),
    "verl.linear_cross_entropy": (
        lambda **x: sum_of(*verl.linear_cross_entropy(**x)),
        {name: SHARED[name] for name in ("hidden", "weight")} | LABELS,
    ),
    "linear_logits": (lambda **x: sum_of(bridge.linear_logits(**x)), SHARED | {"ids": IDS}),
    "linear_topk": (lambda **x: sum_of(*bridge.linear_topk(k=2, **x)), SHARED),
    "masked_logprobs": (
        lambda **x: sum_of(*bridge.masked_logprobs(**x)),
        {"logits": torch.ones(6, 2), "ids": IDS.abs() + torch.tensor([0, 200]), "labels": GOOD.labels},
    ),
}
EACH = [(call, name) for call, (_, given) in CALLS.items() for name in given]
NUMBERS = [(call, name) for call, name in EACH if name != "where"]


def freed(x: torch.Tensor) -> torch.Tensor:
    """As a view in the middle of a flat parameter, which is how FSDP has it."""
    part = torch.cat([x.flatten(), x.flatten()])[x.numel() :].view(x.shape)
    part.untyped_storage().resize_(0)
    return part


def negated(x: torch.Tensor) -> torch.Tensor:
    """``x`` as it is, with the negative bit, as the imaginary part of a conjugate has it."""
    return torch._neg_view(x.neg())  # type: ignore[attr-defined]


@pytest.mark.parametrize(("call", "name"), EACH)
def test_freed(call: str, name: str) -> None:
    function, given = CALLS[call]
    with pytest.raises(RuntimeError, match=rf"{name.replace('own', 'per_token.0.')} \(.*\) has no memory"):
        function(**given | {name: freed(given[name])})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("call", "name"), NUMBERS)
def test_negated(call: str, name: str, way: str) -> None:
    function, given = CALLS[call]

    def with_gradients(**given: torch.Tensor) -> list[torch.Tensor]:
        leaves = [given.get(each, torch.ones(1)).requires_grad_() for each in ("hidden", "weight", "logits")]
        total = function(**given)
        grads = torch.autograd.grad(total, leaves, allow_unused=True) if total.requires_grad else []
        return [total, *(grad for grad in grads if grad is not None)]

    copies = {each: x.clone() for each, x in given.items()}
    with WAYS[way]():
        want = with_gradients(**copies)
        found = with_gradients(**{each: x.detach() for each, x in copies.items()} | {name: negated(given[name])})
    assert all(map(torch.equal, found, want))


@pytest.mark.parametrize("function", [bridge.linear_logprobs, bridge.linear_logits, bridge.linear_loss])
def test_freed_main_grad(function: Any) -> None:
    weight = torch.nn.Parameter(GOOD.weight.clone())
    weight.main_grad = freed(GOOD.weight)  # type: ignore[attr-defined]
    given = {bridge.linear_loss: (plain,)}.get(function, ())
    last = {bridge.linear_logits: IDS}.get(function, GOOD.labels)
    with pytest.raises(RuntimeError, match=r"weight.main_grad \(10, 8\) has no memory"):
        function(*given, GOOD.hidden, weight, last, wgrad="main_grad")


BACKWARD: dict[str, Callable[..., torch.Tensor]] = {
    "linear_logprobs": lambda *x, **options: bridge.linear_logprobs(*x, GOOD.labels, **options).logprobs,
    "linear_logits": lambda *x, **options: bridge.linear_logits(*x, IDS.abs() % 10, **options),
    "compiled": lambda *x, **options: torch.compile(BACKWARD["linear_logprobs"], backend="eager")(*x, **options),
}


@pytest.mark.parametrize("call", BACKWARD)
@pytest.mark.parametrize("name", ["hidden", "weight", "bias"])
def test_freed_between_forward_and_backward(call: str, name: str) -> None:
    given = {each: SHARED[each].clone().requires_grad_() for each in ("hidden", "weight", "bias")}
    leaves = list(given.values())
    out = BACKWARD[call](*leaves[:2], bias=given["bias"])
    memory = given[name].detach().clone()
    given[name].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=rf"{name} \(.*\) has no memory, .* until the backward is over"):
        torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    given[name].untyped_storage().resize_(memory.nbytes)  # gathered again
    given[name].data.copy_(memory)
    want = torch.autograd.grad(BACKWARD[call](*leaves[:2], bias=given["bias"]).sum(), leaves)
    assert all(map(torch.equal, torch.autograd.grad(out.sum(), leaves), want))


def test_freed_while_compiled() -> None:
    """Its memory is looked at in each call, not where the call is traced."""
    call = torch.compile(lambda *x: bridge.linear_logprobs(*x).lse, fullgraph=True, backend="eager")
    leaves = GOOD.leaves()
    call(*leaves)
    with pytest.raises(RuntimeError, match=r"weight \(10, 8\) has no memory"):
        call(leaves.hidden, freed(leaves.weight.detach()), leaves.labels)


def test_what_zero_leaves_in_place_of_a_weight() -> None:
    """It is refused in every forward and backward, and gathered again it has its gradient."""
    refused = r"weight \(0,\) has no memory, .* deepspeed.zero.GatheredParameters"

    def of_loss(*x: torch.Tensor) -> torch.Tensor:
        return bridge.linear_loss(lambda logprobs, *_: -logprobs, *x)[0]

    calls = lambda *x: -bridge.linear_logprobs(*x).logprobs.sum(), bridge.linear_cross_entropy, of_loss
    for call, dtype in itertools.product(calls, (None, torch.bfloat16)):
        weight, memory = GOOD.weight.clone().requires_grad_(), GOOD.weight.clone()
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss, again = (call(GOOD.hidden, weight, GOOD.labels) for _ in range(2))
            weight.data = torch.empty(0)
            with pytest.raises(RuntimeError, match=refused):
                call(GOOD.hidden, weight, GOOD.labels)
        with pytest.raises(RuntimeError, match=refused):
            loss.backward(retain_graph=True)
        weight.data = memory
        loss.backward()
        assert torch.equal(*torch.autograd.grad(again, weight), weight.grad)
    bias = torch.zeros(10, requires_grad=True)
    out = bridge.linear_logprobs(*GOOD, bias=bias)
    bias.data = torch.empty(0)
    with pytest.raises(RuntimeError, match=r"bias \(0,\) has no memory"):
        out.lse.sum().backward()


def test_what_zero_says_of_a_partitioned_weight() -> None:
    """deepspeed.zero.Init and the engine put these attributes on each parameter."""
    weight = torch.nn.Parameter(torch.empty(0))
    weight.ds_shape, weight.ds_status = torch.Size((10, 8)), "ZeroParamStatus.NOT_AVAILABLE"  # type: ignore[attr-defined]
    said = r"ds_shape \(10, 8\), ds_status ZeroParamStatus.* deepspeed.zero.GatheredParameters\(\[weight\]\)"
    for function, given in CALLS.values():
        if "weight" in given:
            with pytest.raises(RuntimeError, match=said):
                function(**given | {"weight": weight})
    weight.data = GOOD.weight  # gathered, as the message says
    assert torch.equal(bridge.linear_logprobs(GOOD.hidden, weight, GOOD.labels).lse, bridge.linear_logprobs(*GOOD).lse)


@pytest.mark.parametrize("shape", [(0, 8), (24,)])  # what FSDP2 and FSDP1 may leave a rank
def test_a_ranks_part_of_a_weight(shape: tuple[int, ...]) -> None:
    for function in (bridge.linear_logprobs, bridge.linear_cross_entropy):
        with pytest.raises(ValueError, match=r"the FSDP module that holds it, .* not its to_local"):
            function(GOOD.hidden, torch.ones(shape), GOOD.labels)


@pytest.mark.parametrize("call", list(BACKWARD)[:2])
def test_negated_cotangents(call: str) -> None:
    leaves = GOOD.leaves()
    out = BACKWARD[call](*leaves[:2])
    seed = torch.linspace(0, 1, out.numel()).view(out.shape)
    found, want = (torch.autograd.grad(out, leaves[:2], x, retain_graph=True) for x in (negated(seed), seed))
    assert all(map(torch.equal, found, want))


def test_a_loss_with_negated_derivatives() -> None:
    def negating(logprobs: Any, *_: Any) -> Any:
        return torch.view_as_complex(torch.stack([logprobs, -2 * logprobs], -1)).conj().imag

    leaves, plain = GOOD.leaves(), GOOD.leaves()
    found = torch.autograd.grad(bridge.linear_loss(negating, *leaves)[0], leaves[:2])
    want = torch.autograd.grad(2 * bridge.linear_logprobs(*plain).logprobs.sum(), plain[:2])
    assert max(map(p.relative_norm, found, want)) < 1e-6


@pytest.mark.parametrize(("call", "name"), EACH)
def test_sparse(call: str, name: str) -> None:
    """``.to_dense()`` serves, as the message says."""
    function, given = CALLS[call]
    sparse = given[name].to_sparse()
    with pytest.raises(TypeError, match=r"torch.sparse_coo: pass .*\.to_dense\(\)"):
        function(**given | {name: sparse})
    assert torch.equal(function(**given | {name: sparse.to_dense()}), function(**given))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("call", list(CALLS)[:-1])
def test_nested(call: str, layout: torch.layout) -> None:
    function, given = CALLS[call]
    hidden = torch.nested.nested_tensor([given["hidden"][:2], given["hidden"][2:]], layout=layout)
    with pytest.raises(TypeError, match=r"hidden is nested: pass torch.cat\(hidden.unbind\(\)\)"):
        function(**given | {"hidden": hidden})
    assert torch.equal(function(**given | {"hidden": torch.cat(hidden.unbind())}), function(**given))
