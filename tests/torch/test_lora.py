"""An adapter on a frozen head, against the merged weight with stored logits in float64."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch

from lce_torch_bridge import (
    LinearCrossEntropyLoss,
    defer_logits,
    explain,
    launch_with,
    linear_cross_entropy,
    linear_logprobs,
    linear_loss,
)
from tests.torch import problem as p
from tests.torch.as_gpu import Program, emulated
from tests.torch.framework_doubles import TOKENS, CausalLM, PeftLinear, right

SCALE = 1.75
type Factors = tuple[torch.Tensor, torch.Tensor]


def adapter(problem: p.Problem, rank: int, dtype: torch.dtype = torch.float32) -> Factors:
    """A and B, in float32 as PEFT has them by default."""
    generator = torch.Generator().manual_seed(3)
    (V, H), device = problem.weight.shape, problem.weight.device
    a = torch.randn(rank, H, generator=generator) / H**0.5
    b = torch.randn(V, rank, generator=generator) / rank**0.5
    return a.to(device, dtype).requires_grad_(), b.to(device, dtype).requires_grad_()


def logprobs(hidden: Any, weight: Any, labels: Any, **options: Any) -> torch.Tensor:
    out = linear_logprobs(hidden, weight, labels, **options)
    return (out.logprobs + 0.3 * out.entropy).sum()


def token_loss(hidden: Any, weight: Any, labels: Any, **options: Any) -> torch.Tensor:
    return linear_loss(lambda logprobs, entropy, _: logprobs * entropy, hidden, weight, labels, **options)[0]


def of_stored_logits(
    function: Any, hidden: Any, weight: Any, labels: Any, where: Any = True, ignore_index: int = -100,
    label_smoothing: float = 0.0, reduction: str = "mean", **how: Any,
) -> torch.Tensor:  # fmt: skip
    """What ``function`` computes, in float64."""
    out, counts = p.stored(hidden, weight, labels, **how), (labels != ignore_index) & where
    if function is linear_cross_entropy:
        losses = (label_smoothing - 1) * out.logprobs + label_smoothing * (out.lse - out.mean_logit)
        return losses[counts].sum() / (counts.sum() if reduction == "mean" else 1)
    each = out.logprobs + 0.3 * out.entropy if function is logprobs else out.logprobs * out.entropy
    return each[counts].sum()


def check(
    function: Any, problem: p.Problem, factors: Factors, bound: float = 1e-5, at_once: int = 4096, **options: Any
) -> None:
    """The function, and its gradients in hidden, A and B, are those of the merged weight, of so many tokens at once."""
    a, b = factors
    given = problem.hidden.detach().requires_grad_(), a, b
    value = function(given[0], problem.weight, problem.labels, lora=(a, b, SCALE), **options)
    found = torch.autograd.grad(value, given)
    wide = torch.float64 if problem.weight.numel() < 1 << 28 else torch.float32  # for the memory of a GPU
    exact = [x.detach().to(wide).requires_grad_() for x in given]
    asked, want = (
        {name: x for name, x in options.items() if not name.endswith("bytes")},
        torch.zeros_like(value).double(),
    )
    for hidden, labels in zip(exact[0].split(at_once), problem.labels.split(at_once), strict=True):
        merged = problem.weight.to(wide) + SCALE * exact[2] @ exact[1]
        part = of_stored_logits(function, hidden, merged, labels, dtype=wide, **asked)
        part.backward()
        want += part.detach()
    assert p.value_error(value, want) < bound * problem.labels.numel() ** 0.5
    for x, y, operand in zip(found, [x.grad for x in exact], given, strict=True):
        assert x.dtype == operand.dtype
        assert p.relative_norm(x, y) < max(bound, 2e-5)


WAYS = {
    "logprobs": (logprobs, {}),
    "full cache": (logprobs, {"cache_bytes": 1 << 30, "temperature": 0.7, "logit_softcap": 3.0, "vocab_size": 97}),
    "cross entropy": (linear_cross_entropy, {"label_smoothing": 0.1, "ignore_index": 3}),
    "in chunks": (linear_cross_entropy, {"chunk_bytes": 1, "reduction": "sum", "logit_scale": -0.5}),
    "loss": (token_loss, {"where": torch.arange(300) % 7 > 0, "chunk_bytes": 1}),
}


@pytest.mark.fast("full cache", "in chunks")
@pytest.mark.parametrize("way", WAYS)
def test_through_jax(way: str) -> None:
    function, options = WAYS[way]
    problem = p.draw(300)
    check(function, problem, adapter(problem, 5), **options)


@pytest.mark.fast("64")
@pytest.mark.parametrize(
    ("dtype", "rank", "of_factors"),
    [(torch.bfloat16, 1, torch.float32), (torch.bfloat16, 100, torch.bfloat16), (torch.float16, 64, torch.float32)],
)
def test_16_bits(dtype: torch.dtype, rank: int, of_factors: torch.dtype) -> None:
    problem = p.draw(300, 64, 520, dtype)
    for function in (logprobs, linear_cross_entropy):  # u and scale · A are rounded to eight bits
        check(function, problem, adapter(problem, rank, of_factors), 1.5e-2)


def test_rows_that_are_left_out_hold_anything() -> None:
    problem = p.draw(30)
    where, (a, b) = torch.arange(30) % 3 > 0, adapter(problem, 4)
    hidden = problem.hidden.where(where[:, None], torch.nan).requires_grad_()
    for rows in (where, where.nonzero().squeeze(1)):
        value = logprobs(hidden, problem.weight, problem.labels, lora=(a, b, SCALE), where=rows)
        assert all(x.isfinite().all() for x in torch.autograd.grad(value, (hidden, a, b)))
    empty = linear_cross_entropy(hidden[:0], problem.weight, problem.labels[:0], lora=(a, b, SCALE))
    assert [x.abs().sum().item() for x in torch.autograd.grad(empty, (a, b))] == [0, 0]


def test_what_is_around_the_call() -> None:
    """Autocast, a checkpoint, a graph; A alone; another kind of number."""
    problem = p.draw(40)
    a, b = adapter(problem, 4)

    def loss(a: torch.Tensor, b: torch.Tensor, scale: Any = SCALE) -> torch.Tensor:
        return logprobs(*problem, lora=(a, b, scale))

    assert loss(a, b, Fraction(SCALE)) == loss(a, b)
    want = torch.autograd.grad(loss(a, b), (a, b))
    checkpointed = torch.utils.checkpoint.checkpoint(loss, a, b, use_reentrant=False)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for found in (torch.autograd.grad(checkpointed, (a, b)), torch.autograd.grad(compiled(a, b), (a, b))):
        assert max(map(p.relative_norm, found, want)) < 1e-5
    assert p.relative_norm(torch.autograd.grad(loss(a, b.detach()), a)[0], want[0]) < 1e-5
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(loss(a, b), (a, b))
    assert [x.dtype for x in found] == [torch.float32] * 2
    assert max(map(p.relative_norm, found, want)) < 3e-2


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Program]]:
    """All programs that were loaded."""
    yield from emulated(monkeypatch)


@pytest.mark.fast("True")
@pytest.mark.parametrize("has_cache", [False, True])
def test_launched_directly(programs: list[Program], has_cache: bool) -> None:
    problem = p.draw(9 if has_cache else 256, 128, 520, torch.bfloat16)
    factors = adapter(problem, 8)
    assert explain(*problem, lora=(*factors, SCALE)).way == "direct"
    options: Any = {"cache_bytes": 1 << 30, "vocab_size": 500} if has_cache else {"cache_bytes": 0}
    check(logprobs, problem, factors, 1.5e-2, **options)
    assert programs


def test_explain_plans_what_is_differentiated() -> None:
    """No product for a frozen weight; of an adapter also the copies of B that the call makes."""
    problem = p.draw(512, 64, 16384, torch.bfloat16)
    hidden, weight, labels = problem.hidden.requires_grad_(), problem.weight.detach(), problem.labels
    both, frozen = (explain(hidden, x, labels).plan for x in (weight.clone().requires_grad_(), weight))
    assert both.backward_bytes - frozen.backward_bytes == both.tiles["vocabulary"] * 64 * 2
    assert both.forward_bytes == frozen.forward_bytes
    adapted = explain(hidden, weight, labels, lora=(torch.zeros(8, 64), torch.zeros(16384, 8), SCALE)).plan
    assert adapted.forward_bytes > frozen.forward_bytes + 16384 * 64 * 2
    assert adapted.backward_bytes > frozen.backward_bytes + 16384 * 64 * (2 + 4 + 4)


@pytest.mark.slow
def test_in_two_chunks(programs: list[Program]) -> None:
    problem = p.draw(200, 128, 520, torch.bfloat16)
    check(linear_cross_entropy, problem, adapter(problem, 8), 1.5e-2, chunk_bytes=1)
    assert programs


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"lora": torch.ones(3)}, TypeError, r"lora must be a tuple \(A \[r, H\], B \[V, r\], scale\), got Tensor"),
    ({"scale": "2"}, TypeError, "lora's scale .*number, got str '2'"),
    ({"a": torch.ones(4, 32, dtype=torch.int64)}, TypeError, "lora's A must be bfloat16, .* got torch.int64"),
    ({"b": torch.ones(104, 3)}, ValueError, r"B \(104, 3\) must be \[r, 32\] and \[104, r\], of weight \(104, 32\)"),
    ({"a": torch.ones(32)}, ValueError, r"lora's A \(32,\) and B"),
    ({"b": torch.ones(104, 4, device="meta")}, ValueError, "lora's B is on meta, hidden on cpu"),
    ({"bias": torch.ones(104)}, ValueError, r"bias=Tensor with lora: leave bias out, or give weight \+ scale \* B @ A"),
    ({"wgrad": "main_grad"}, ValueError, "wgrad='main_grad' with lora: leave wgrad out"),
]


@pytest.mark.parametrize(("given", "error", "match"), REFUSED)
def test_refusals(given: dict[str, Any], error: type[Exception], match: str) -> None:
    problem = p.draw()
    a, b = adapter(problem, 4)
    lora = (given.pop("a", a), given.pop("b", b), given.pop("scale", SCALE))
    with pytest.raises(error, match=match):
        linear_logprobs(*problem, **{"lora": lora, **given})


def test_a_weight_with_a_gradient_is_refused() -> None:
    hidden, weight, labels = p.draw().leaves()
    lora = (*adapter(p.draw(), 4), SCALE)
    with pytest.raises(ValueError, match=r"give weight.detach\(\), or call weight.requires_grad_\(False\)"):
        linear_cross_entropy(hidden, weight, labels, lora=lora)
    with torch.no_grad():
        linear_cross_entropy(hidden, weight, labels, lora=lora)


@pytest.mark.parametrize("name", ["trains", "is merged", "is disabled"])
def test_deferred_head_with_pefts_lora(name: str) -> None:
    """An adapter that is put around the head after its logits are deferred."""
    model = CausalLM()
    handle = defer_logits(model, strict=True)
    layer: Any = PeftLinear(model.lm_head, dropout=0.5)
    model.lm_head = layer.eval()  # without dropout
    layer.merged, layer.disable_adapters = name == "is merged", name == "is disabled"
    if name != "trains":
        layer.lora_A.requires_grad_(False), layer.lora_B.requires_grad_(False)
    loss = model(TOKENS, labels=TOKENS).loss
    assert handle.served == 1
    handle.undo()
    right(loss, model)


def test_torchs_loss_module_with_pefts_lora() -> None:
    loss_fn, hidden, labels = LinearCrossEntropyLoss(16, 64), torch.ones(2, 16), torch.ones(2).long()
    plain, loss_fn.linear = loss_fn.linear, (layer := PeftLinear(loss_fn.linear))
    want = torch.nn.functional.cross_entropy(layer(hidden), labels)
    torch.testing.assert_close(loss_fn(hidden, labels), want)
    lora = layer.lora_A["default"].weight, layer.lora_B["default"].weight, layer.scaling["default"]
    by_option = LinearCrossEntropyLoss(16, 64, lora=lora)
    by_option.linear = plain
    torch.testing.assert_close(by_option(hidden, labels), want)


OTHERS: dict[str, tuple[Any, str]] = {
    "lora_dropout=0.5: give LoraConfig(lora_dropout=0)": (lambda head: PeftLinear(head, dropout=0.5), ""),
    "2 active adapters: call set_adapter": (lambda head: PeftLinear(head, names=("a", "b")), ""),
    "a variant of LoRA: give LoraConfig(use_dora=False)": (PeftLinear, "layer.use_dora['default'] = True"),
    "a variant of LoRA: give": (PeftLinear, "layer.lora_variant['default'] = None"),
    "a bias: merge_and_unload() it": (PeftLinear, "layer.base_layer.bias = torch.nn.Parameter(torch.ones(64))"),
    "merged and disabled: unmerge_adapter() first": (PeftLinear,
        "layer.merged = layer.disable_adapters = True; layer.requires_grad_(False); layer.base_layer.requires_grad_()"),
    "the only supported adapter is PEFT's lora.Linear": (PeftLinear,
        "layer.lora_A['default'].forward = lambda x: 2 * (x @ layer.lora_A['default'].weight.T)"),
}  # fmt: skip


@pytest.mark.parametrize("message", OTHERS)
def test_with_what_else_an_adapter_has_the_head_computes_its_logits(message: str) -> None:
    wrap, change = OTHERS[message]
    model = CausalLM()
    model.lm_head = layer = wrap(model.lm_head)
    exec(change, {"layer": layer, "torch": torch})
    handle = defer_logits(model)
    torch.manual_seed(0)  # of dropout
    loss = model(TOKENS, labels=TOKENS).loss
    torch.manual_seed(0)
    right(loss, model)
    assert handle.served == 0
    assert any(message in place for place in handle.places), handle.places


def test_a_sharded_adapter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, (a, b) = p.draw(), adapter(p.draw(), 4)
    monkeypatch.setattr("lce_torch_bridge.call._dtensor.is_dtensor", lambda x: x is b)
    with pytest.raises(ValueError, match=r"lora's B is a DTensor: leave .* out of what is sharded \(ignored_params\)"):
        linear_logprobs(*problem, lora=(a, b, SCALE))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("T", "H", "V", "rank"), [(1003, 512, 50257, 8), (1003, 512, 50264, 16), (4096, 4096, 151936, 64)]
)
@pytest.mark.parametrize("way", ["direct", "jax"])
def test_on_a_gpu(way: str, T: int, H: int, V: int, rank: int) -> None:
    problem = p.draw(T, H, V, torch.bfloat16).to("cuda")
    factors = adapter(problem, rank)
    launch_with("jax" if way == "jax" or V % 8 else "direct")
    try:
        for function, options in (
            (logprobs, {}),
            *((linear_cross_entropy, {"chunk_bytes": x}) for x in (None, 1 << 28)),
        ):
            summed = {"reduction": "sum"} if function is linear_cross_entropy else {}
            check(function, problem, factors, 2e-2, at_once=512, **options, **summed)
    finally:
        launch_with(None)
