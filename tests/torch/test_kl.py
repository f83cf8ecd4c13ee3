"""`linear_kl` of torch: the cases of `lce_jax.linear_kl` against float64, autograd, compilation, refusals."""

from __future__ import annotations

import ast
import re
from typing import Any

import jax
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import lce_torch_bridge
from lce_jax import UnsupportedError
from lce_torch_bridge import linear_kl
from lce_torch_bridge._types import Operands
from lce_torch_bridge.operators import _operators
from tests import oracle
from tests.kl_cases import CALLS, Call, call, draw, expected
from tests.torch import problem as p

FLOAT32 = call("float32", leading=(37,), V=104, where=True, temperature=True, teacher_temperature=1.7, logit_scale=-1.3,
               teacher_logit_scale="same", bias=True, vocab_size=97)  # fmt: skip
KEPT = [
    test._replace(name=f"{test.name}, kept", options=(*test.options, ("cache_bytes", 1 << 22)))
    for test in (*CALLS[-1:], *(one for one in CALLS if one.name in ("bfloat16", "bfloat16 jsd")))
]


def tensors(test: Call) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...], dict[str, Any], torch.Tensor]:
    """The student's, the teacher's, the options and the cotangent; weights lie as torch's do."""
    drawn = draw(test)
    options = {name: p.to_torch(x) if isinstance(x, jax.Array) else x for name, x in drawn.options.items()}
    own = options.pop("weight_layout", "vh")
    layouts = own, options.pop("teacher_weight_layout", own)
    models = []
    for arrays, layout in zip((drawn.student, drawn.teacher), layouts, strict=True):
        hidden, weight, *bias = map(p.to_torch, arrays)
        models.append((hidden, weight if layout == "vh" else weight.T.contiguous(), *bias))
    if len(models[1]) == 3:
        options["teacher_bias"] = models[1][2]
    return models[0], models[1][:2], options, p.to_torch(drawn.seed)


def measured(test: Call, function: Any = linear_kl, **more: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The divergence, and the gradients of Σ seed · kl in the student's operands."""
    student, teacher, options, seed = tensors(test)
    leaves = [x.clone().requires_grad_() for x in student]
    biases = {"bias": leaves[2]} if len(leaves) == 3 else {}
    kl = function(*leaves[:2], *teacher, **options | biases | more)
    return kl, list(torch.autograd.grad((seed * kl).sum(), leaves))


# The rest are combinations of what these combine.
FAST = ("ragged jsd", "one column", "mixed", "bfloat16", "everything", "everything, jsd", FLOAT32.name, KEPT[0].name)


def each(test: Call) -> Any:
    marks = () if test.name in FAST else (pytest.mark.slow,)
    return pytest.param(test, id=test.name, marks=marks)


@pytest.mark.parametrize("test", [each(test) for test in (*CALLS, FLOAT32, *KEPT)])
def test_matches_float64(test: Call) -> None:
    kl, gradients = measured(test)
    want, layout = expected(draw(test)), dict(test.options).get("weight_layout", "vh")
    assert kl.dtype == torch.float32
    assert kl.shape == torch.Size(test.leading)
    assert oracle.value_error(kl.detach().numpy(), want.kl) < 4e-6
    true = [want.gradients[0], want.gradients[1] if layout == "vh" else want.gradients[1].T, *want.gradients[2:]]
    for got, wanted, operand in zip(gradients, true, tensors(test)[0], strict=True):
        bound = {torch.bfloat16: 3e-3, torch.float16: 4e-4, torch.float32: 3e-6}
        # dlogits and what is kept are rounded to the weight's dtype.
        coarse = max(
            bound[operand.dtype], bound[tensors(test)[0][1].dtype] if "cache_bytes" in dict(test.options) else 0
        )
        assert got.dtype == operand.dtype
        assert oracle.relative_norm(got.float().numpy(), wanted) < coarse


def test_rows_of_an_index() -> None:
    student, teacher, options, _ = tensors(FLOAT32)
    mask = options.pop("where")
    want = linear_kl(*student[:2], *teacher, bias=student[2], where=mask, **options)
    got = linear_kl(*student[:2], *teacher, bias=student[2], where=mask.nonzero()[:, 0].int(), **options)
    assert torch.equal(got, want)
    assert not want[~mask].any()


@pytest.mark.parametrize("direction", ["forward", "jsd"])
@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_no_tokens(shape: tuple[int, ...], direction: Any) -> None:
    hidden, weight = torch.zeros(*shape, 8, requires_grad=True), torch.ones(16, 8, requires_grad=True)
    kl = linear_kl(hidden, weight, torch.zeros(*shape, 4), torch.ones(16, 4), direction=direction, cache_bytes=9999)
    assert kl.shape == shape
    kl.sum().backward()
    assert not weight.grad.any()


def test_autograd_autocast_main_grad() -> None:
    test = call("plain", leading=(37,), V=104, direction="jsd", cache_bytes=1 << 20)
    (hidden, weight), teacher, options, seed = tensors(test)
    _, want = measured(test)
    leaves = [x.clone().requires_grad_() for x in (hidden, weight)]

    def objective(hidden: torch.Tensor, weight: torch.Tensor, **more: Any) -> torch.Tensor:
        return (seed * linear_kl(hidden, weight, *teacher, **options, **more)).sum()

    checkpoint(objective, *leaves, use_reentrant=False).backward()
    assert all(torch.equal(leaf.grad, true) for leaf, true in zip(leaves, want, strict=True))
    (alone,) = torch.autograd.grad(objective(hidden, leaves[1]), leaves[1])
    assert torch.equal(alone, want[1])
    parameter: Any = torch.nn.Parameter(weight.clone())
    parameter.main_grad = torch.ones_like(weight)
    objective(hidden, parameter, wgrad="main_grad").backward()
    assert torch.equal(parameter.main_grad, 1 + want[1])
    with torch.autocast("cpu", torch.bfloat16):
        cast = linear_kl(hidden, parameter, *teacher)
    of_bfloat16 = linear_kl(hidden, weight.bfloat16(), teacher[0], teacher[1].bfloat16())
    assert torch.equal(cast, of_bfloat16)
    assert all(map(torch.equal, torch.func.grad(objective, argnums=(0, 1))(hidden, weight), want))


def test_a_teacher_that_requires_gradients_gets_none() -> None:
    (hidden, weight), teacher, _, _ = tensors(CALLS[0])
    watched = [x.clone().requires_grad_() for x in (hidden, weight, *teacher)]
    linear_kl(*watched).sum().backward()
    assert watched[0].grad is not None
    assert watched[2].grad is watched[3].grad is None
    assert not linear_kl(hidden, weight, *watched[2:]).requires_grad


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")  # torch's own, of its jvp
def test_derivatives_that_are_refused() -> None:
    (hidden, weight), teacher, _, _ = tensors(CALLS[0])
    leaf = hidden.clone().requires_grad_()
    (grad,) = torch.autograd.grad(linear_kl(leaf, weight, *teacher).sum(), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        grad.sum().backward()
    with pytest.raises(NotImplementedError, match="give it the whole batch"):
        torch.func.vmap(lambda x, y: linear_kl(x, weight, y, teacher[1]))(hidden, teacher[0])
    with pytest.raises(NotImplementedError, match="use reverse mode"):
        torch.func.jvp(lambda x: linear_kl(x, weight, *teacher), (hidden,), (hidden,))


MIXTURE = dict(FLOAT32.options) | {"direction": "jsd", "beta": 0.3}


@pytest.mark.parametrize(
    "test",
    [
        FLOAT32._replace(name="padding", leading=(128,), where=False, options=tuple(MIXTURE.items())),
        # What is kept of padding may be NaN, which is not equal to itself.
        call("kept", leading=(128,), V=104, bias=True, temperature=True, direction="jsd", cache_bytes=1 << 20),
    ],
    ids=str,
)
def test_compiled(test: Call) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(linear_kl, fullgraph=True, backend="aot_eager")
    want, wanted = measured(test)
    got, grads = measured(test, compiled)
    assert all(map(torch.equal, (got, *grads), (want, *wanted)))
    kept = dict(test.options).get("cache_bytes", 0)
    vocab_size = 97 if test.name == "padding" else 104
    own = dict(function="kl", direction="jsd", beta=0.3, has_temperature=True, cache_bytes=kept)
    call = p.told(vocab_size, **own, teacher_logit_scale=-1.3, teacher_logit_softcap=3.0)
    student, teacher, _, seed = tensors(test)
    x = Operands(*student, torch.zeros(128, dtype=torch.int64), torch.rand(128) + 0.5)
    x, text = x._replace(teacher_hidden=teacher[0], teacher_weight=teacher[1]), _operators.text_of(call)
    torch.library.opcheck(_operators.forward, (list(x), True, text))
    _, *saved = _operators.forward(list(x), True, text)
    assert len(saved) == (6 if kept else 1)
    torch.library.opcheck(_operators.backward, (list(x), saved, [seed], [True, True, True], text))


ONES = {"hidden": torch.ones(6, 8), "weight": torch.ones(10, 8), "teacher_hidden": torch.ones(6, 4),
        "teacher_weight": torch.ones(10, 4)}  # fmt: skip


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (dict(direction="sideways"), ValueError, 'direction must be "forward", .* got .sideways'),
        (dict(beta=0.5), ValueError, 'beta=0.5 is a weight of direction="jsd"'),
        (dict(direction="jsd", beta=1.0), ValueError, r"beta must lie in \(0, 1\), got 1.0"),
        (dict(hidden=torch.ones(6, 8).double()), TypeError, "^hidden must be .* got torch.float64"),
        (
            dict(teacher_hidden=torch.ones(6, 4).double()),
            TypeError,
            "the teacher's hidden must be .* got torch.float64",
        ),
        (dict(teacher_hidden=torch.ones(5, 4)), ValueError, r"the teacher's hidden \(5, 4\) must have .*\(6,\s*8\)"),
        (dict(teacher_weight=torch.ones(10, 5)), ValueError, r"the teacher's hidden \(6, 4\) must end in the H of"),
        (dict(teacher_weight=torch.ones(9, 4)), ValueError, "weight has 10 rows, the teacher's 9: .*at most 9, as voc"),
        (dict(weight=torch.ones(80)), ValueError, r"^weight must be \[V, H\].* got shape \(80,\)\..* gather"),
        (
            dict(teacher_weight=torch.ones(0, 4)),
            ValueError,
            r"the teacher's weight must be \[V, H\].* \(0, 4\)\..* gath",
        ),
        (dict(teacher_weight=torch.ones(9, 4), vocab_size=10), ValueError, r"the teacher's vocab_size must .* got 10"),
        (dict(teacher_weight=[1]), TypeError, "the teacher's weight must be a torch.Tensor, got list"),
        (dict(teacher_hidden=torch.ones(6, 4, device="meta")), ValueError, "the teacher's .* meta"),
        (dict(teacher_temperature=torch.ones(5)), ValueError, r"the teacher's temperature \(5,\) must broadcast"),
        (dict(teacher_temperature=-1.0), ValueError, "the teacher's temperature must be .* got -1.0"),
        (dict(teacher_temperature="mine"), (ValueError, TypeError), "the teacher's temperature"),
        (dict(teacher_logit_softcap=0.0), ValueError, "the teacher's logit_softcap must be .* got 0.0"),
        (dict(logit_scale=0.5), ValueError, "^logit_scale=0.5 is the student's alone: write teacher_logit_scale="),
        (dict(logit_softcap=4.0, teacher_logit_scale=1.0), ValueError, "^logit_softcap=4.0 is the student's alone"),
        (dict(cache_bytes=-1), ValueError, "cache_bytes must .* got -1"),
        (dict(where=torch.ones(5, dtype=bool)), ValueError, r"where \(5,\) must have the tokens' shape \(6,\)"),
        (dict(bias=torch.ones(9)), ValueError, r"^bias \(9,\) must have one number"),
        (dict(teacher_bias=torch.ones(9)), ValueError, r"the teacher's bias \(9,\) must have one number"),
        (dict(implementation="mosaic_gpu"), UnsupportedError, "cpu"),
    ],
)
def test_refusals(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        linear_kl(**{**ONES, **given})


@pytest.mark.parametrize("name", ["logit_scale", "logit_softcap"])
def test_what_the_message_on_scale_and_cap_says_is_right(name: str) -> None:
    """As in `tests.ops.test_kl_advice`, whose words it has."""
    own = {"logit_scale": 1 / 16, "logit_softcap": 4.0}[name]
    test = call(name, spread=4.0, **{name: own})
    with pytest.raises(ValueError, match=f"{name}={own} is the student's alone") as refused:
        measured(test)
    advice = re.findall(rf'\bteacher_{name}=("same"|[\w.]+)', str(refused.value))
    assert len(advice) == 2
    for teachers in map(ast.literal_eval, advice):
        told = test._replace(options=(*test.options, (f"teacher_{name}", teachers)))
        (kl, gradients), want = measured(told), expected(draw(told))
        assert oracle.value_error(kl.detach().numpy(), want.kl) < 4e-6
        assert all(oracle.relative_norm(a.numpy(), b) < 3e-6 for a, b in zip(gradients, want.gradients, strict=True))


def test_what_is_changed_or_freed() -> None:
    """A temperature belongs to its call; a teacher's weight without memory is named."""
    (hidden, weight), teacher, _, _ = tensors(CALLS[0])
    temperature = torch.ones(24)
    (want,) = torch.autograd.grad(linear_kl(hidden, weight.requires_grad_(), *teacher).sum(), weight)
    kl = linear_kl(hidden, weight, *teacher, temperature=temperature)
    temperature.fill_(2.0)
    assert torch.equal(torch.autograd.grad(kl.sum(), weight)[0], want)
    with torch.inference_mode():
        made_there = torch.ones(24)
    linear_kl(hidden, weight, *teacher, temperature=made_there).sum().backward()
    freed = teacher[1].clone()
    freed.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"the teacher's weight \(104, 48\) has no memory"):
        linear_kl(hidden, weight, teacher[0], freed)


def test_a_mask_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    student, teacher, _, _ = tensors(CALLS[0])
    counted, count = [], torch.Tensor.nonzero
    monkeypatch.setattr(torch.Tensor, "nonzero", lambda x: counted.append(x) or count(x))
    linear_kl(*student, *teacher, where=torch.arange(24) % 3 == 0)
    assert len(counted) == 1


def test_it_is_not_launched_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lce_torch_bridge.launched_directly._way.on_gpu", lambda _: True)
    lce_torch_bridge.launch_with("direct")
    try:
        with pytest.raises(UnsupportedError, match=r'launch_with\("direct"\): linear_kl is a program of JAX'):
            linear_kl(**ONES)
    finally:
        lce_torch_bridge.launch_with(None)
