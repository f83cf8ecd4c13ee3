"""`linear_kl` launched directly, on the CPU: each kernel by Pallas's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from lce_jax import UnsupportedError
from lce_jax.call import _dispatch
from lce_jax.mosaic import sm90
from lce_torch_bridge import launch_with, linear_kl
from lce_torch_bridge._types import Tensors, make_call
from lce_torch_bridge.call import _checks
from lce_torch_bridge.launched_directly._launch_with import choose_way
from lce_torch_bridge.operators import _operators
from lce_torch_bridge.tensors import _device
from tests.mosaic import test_kl
from tests.mosaic_interpreter import afresh
from tests.torch import problem as p
from tests.torch.as_gpu import SMALL, Program, Ranks, emulated

H, G = 128, 192
type Heads = list[torch.Tensor]  # hidden, weight, and the teacher's


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Program]]:
    """All programs that were loaded."""
    yield from emulated(monkeypatch)


def draw(T: int, V: int) -> Heads:
    return [x for seed, size in ((0, H), (1, G)) for x in p.draw(T, size, V, torch.bfloat16, seed)[:2]]


def draw_seed(heads: Heads) -> torch.Tensor:
    return torch.randn(len(heads[0]), generator=torch.Generator().manual_seed(3))


def evaluate(heads: Heads, **options: Any) -> list[torch.Tensor]:
    """The divergence and both gradients."""
    leaves = [x.clone().requires_grad_() for x in heads[:2]]
    kl = linear_kl(*leaves, *heads[2:], **options)
    return [kl.detach(), *torch.autograd.grad((draw_seed(heads) * kl).sum(), leaves)]


def evaluate_by_xla(heads: Heads, **options: Any) -> list[torch.Tensor]:
    launch_with("jax")
    found = evaluate(heads, **{**options, "cache_bytes": 0}, implementation="xla")
    launch_with("direct")
    return found


def compare(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert p.value_error(found[0], wanted[0]) < 1e-5
    assert max(map(p.relative_norm, found[1:], wanted[1:])) < 5e-3  # bfloat16 rounds by 2⁻⁹


def slow(*case: Any) -> Any:
    """What others have together with more."""
    return pytest.param(*case, marks=pytest.mark.slow)


CAPS: Any = {"logit_softcap": 3.0, "teacher_logit_softcap": 5.0, "logit_scale": 0.5, "teacher_logit_scale": 2.0}
TILE = 256 * (6 * 256 + 12)  # bytes of a tile of up to 256 tokens that is kept


@pytest.mark.parametrize(
    ("T", "V", "options"),
    [
        (9, 520, CAPS | {"temperature": "each", "vocab_size": 500, "cache_bytes": TILE}),
        (9, 520, {"direction": "jsd", "beta": 0.9, "temperature": "each", "teacher_temperature": 0.7}),
        (9, 520, {"direction": "tv", "temperature": "each", "teacher_temperature": 0.7, "cache_bytes": TILE}),
        slow(140, 784, {"direction": "tv", "vocab_size": 700, "where": "some"} | CAPS),
        slow(9, 264, {}),
        slow(140, 784, {"direction": "reverse", "cache_bytes": 1 << 40} | CAPS),
        slow(128, 520, {"direction": "reverse", "where": "some", "teacher_temperature": 2.0}),
        slow(140, 784, {"direction": "jsd", "cache_bytes": 1 << 40, "vocab_size": 700} | CAPS),
        slow(12, 1032, {"direction": "jsd", "beta": 0.3, "cache_bytes": 2 * TILE, "where": "some"}),
        slow(12, 4400, {"vocab_size": 4200}),
    ],
)
def test_divergence_and_gradients(programs: list[Any], T: int, V: int, options: dict[str, Any]) -> None:
    """Those of XLA's implementation. Padding may hold anything."""
    heads, generator = draw(T, V), torch.Generator().manual_seed(5)
    heads[1][options.get("vocab_size", V) :] = heads[3][options.get("vocab_size", V) :] = torch.nan
    if options.get("temperature") == "each":
        options = {**options, "temperature": torch.rand(T, generator=generator) + 0.5}
    if options.get("where") == "some":
        options = {**options, "where": torch.rand(T, generator=generator) < 0.6}
    found = evaluate(heads, **options)
    names = {kernel.name for program in programs for kernel in program}
    assert names
    assert "cached_kl_dlogits" in names or "cache_bytes" not in options
    compare(found, evaluate_by_xla(heads, **options))


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["forward", "jsd"])
def test_a_cache_is_overwritten_by_the_last_backward_alone(programs: list[Any], direction: str) -> None:
    heads = draw(9, 520)
    leaves, seed = [x.clone().requires_grad_() for x in heads[:2]], draw_seed(heads)
    total = (seed * linear_kl(*leaves, *heads[2:], direction=direction, cache_bytes=1 << 40)).sum()
    first, second = (torch.autograd.grad(total, leaves, retain_graph=keep) for keep in (True, False))
    assert programs
    assert all(map(torch.equal, first, second))
    with pytest.raises(RuntimeError):
        torch.autograd.grad(total, leaves)


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["forward", "jsd"])
def test_rows_have_the_same_bits_in_every_call(programs: list[Any], direction: Any) -> None:
    """However many there are, and in whatever place."""
    heads, rows = draw(150, 784), torch.randperm(150, generator=torch.Generator().manual_seed(0))[:7]
    with torch.no_grad():
        every = linear_kl(*heads, direction=direction)
        some = linear_kl(heads[0][rows], heads[1], heads[2][rows], heads[3], direction=direction)
    assert programs
    assert torch.equal(every[rows], some)


def test_main_grad(programs: list[Any]) -> None:
    """Each backward adds dweight, which is not rounded first, and only the last one overwrites what is kept."""
    heads = draw(9, 520)
    hidden, weight = heads[0].clone().requires_grad_(), torch.nn.Parameter(heads[1].clone())
    weight.main_grad = torch.ones(weight.shape)  # type: ignore[attr-defined]
    kl = linear_kl(hidden, weight, *heads[2:], wgrad="main_grad", cache_bytes=1 << 40)
    total = (draw_seed(heads) * kl).sum()
    total.backward(retain_graph=True)
    total.backward()
    _, dhidden, dweight = evaluate(heads, cache_bytes=1 << 40)
    assert programs
    added: Any = (weight.main_grad - 1) / 2  # type: ignore[attr-defined]
    assert torch.equal(hidden.grad, 2 * dhidden)
    assert p.relative_norm(dweight, added) < 4e-3  # the rounding of dweight
    assert not torch.equal(added, added.bfloat16().float())


@pytest.mark.parametrize("direction", ["jsd", slow("forward"), slow("tv")])
def test_a_split_vocabulary(programs: list[Any], direction: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results and gradients of a whole one, the same bits on both ranks; NaN in the row that differs."""
    T, V = 9, 528
    heads, ranks = draw(T, V), Ranks(monkeypatch)
    beta = {"beta": {"jsd": 0.6, "tv": 0.5}[direction]} if direction != "forward" else {}
    call = make_call(
        function="linear_kl", direction=direction, vocab_size=V - 8, group="both", has_temperature=True,
        reduce_grad_hidden=True, requested=("mosaic_gpu",), **beta,
    )  # fmt: skip
    temperature, labels = torch.rand(T, generator=torch.Generator().manual_seed(5)) + 0.5, torch.zeros(T).long()
    parts = [
        Tensors(heads[0], weight, None, labels, temperature, None, None, heads[2], teacher_weight)
        for weight, teacher_weight in zip(heads[1].chunk(2), heads[3].chunk(2), strict=True)
    ]
    cotangents, found = {"linear_kl": draw_seed(heads)}, {}
    # Each receives what was sent before: first no statistics, then no sums, then no dhidden.
    for ranks.rank in (0, 1, 0, 1, 0) if beta else (0, 1, 0):
        ranks.gathered = {key: x for key, x in ranks.gathered.items() if key[0] != ranks.rank}
        x = parts[ranks.rank]
        kl, saved = _operators.run_forward(x, call, True, choose_way(x.hidden))
        grads = _operators.run_backward(x, [saved], cotangents, (True, True, False), call, choose_way(saved))
        found[ranks.rank] = [kl, *grads]
    assert programs
    assert torch.equal(found[0][0], found[1][0])
    options: Any = {"temperature": temperature, "teacher_temperature": 1.0, "vocab_size": V - 8}
    options |= beta if direction == "jsd" else {}
    want = evaluate_by_xla(heads, direction=direction, **options)
    compare([found[0][0], found[0][1], torch.cat([found[0][2], found[1][2]])], want)
    other = temperature.clone()
    other[2] += 0.25
    parts[1] = parts[1]._replace(temperature=other)
    ranks.gathered.clear()
    for ranks.rank in (0, 1, 0):
        kl, _ = _operators.run_forward(parts[ranks.rank], call, False, choose_way(kl))
    assert kl.isnan().nonzero().tolist() == [[2]]


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["forward", "jsd", "tv"])
def test_a_wrong_temperature(programs: list[Any], direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN in its row, and no gradient from it. On a GPU nobody looks at the values."""
    monkeypatch.setattr(_checks, "can_read_values", lambda _: False)
    heads, temperature = draw(6, 264), torch.tensor([1.0, 0.5, -1.0, 2.0, 1.0, 1.0])
    kl, *grads = evaluate(heads, direction=direction, temperature=temperature, teacher_temperature=1.0)
    assert programs
    want, *wanted = evaluate_by_xla(heads, direction=direction, temperature=temperature, teacher_temperature=1.0)
    assert kl.isnan().tolist() == want.isnan().tolist() == [False, False, True, False, False, False]
    assert not grads[0][2].any()
    assert max(map(p.relative_norm, grads, wanted)) < 5e-3


@pytest.mark.usefixtures("programs")
def test_a_call_that_no_kernel_serves_says_why() -> None:
    """JAX runs it after the line that the message names."""
    heads = draw(5, 264)
    with pytest.raises(UnsupportedError, match=r"bias: no kernel .* lce_torch_bridge.launch_with\(None\) lets JAX run"):
        linear_kl(*heads, bias=torch.zeros(264))
    with pytest.raises(UnsupportedError, match="V must be a multiple of 8, got 263"):
        linear_kl(heads[0], heads[1][:263], heads[2], heads[3][:263])
    with pytest.raises(UnsupportedError, match=r"the teacher: .*bfloat16 or float16"):
        linear_kl(*heads[:3], heads[3].float())
    launch_with(None)
    assert linear_kl(*heads, bias=torch.zeros(264)).isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["forward", "reverse", "jsd", "tv"])
def test_jax_computes_the_same_with_these_kernels(
    programs: list[Any], direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels of tiles have equal bits. XLA has another logarithm and another division for each token."""
    heads, temperature = draw(9, 520), torch.rand(9, generator=torch.Generator().manual_seed(5)) + 0.5
    options: Any = {"direction": direction, "cache_bytes": TILE, "logit_softcap": 3.0, "teacher_logit_softcap": None}
    found = evaluate(heads, temperature=temperature, teacher_temperature=1.0, **options)
    assert programs
    *arrays, seed, per_token = [
        jnp.asarray(x.float().numpy(), _device.name_dtype(x.dtype)) for x in (*heads, draw_seed(heads), temperature)
    ]
    options |= {"temperature": per_token, "teacher_temperature": 1.0}
    drawn: Any = SimpleNamespace(student=arrays[:2], teacher=arrays[2:], options=options, seed=seed)
    monkeypatch.setattr(_dispatch, "current_device", lambda *_, **__: SMALL)
    afresh()
    with test_kl.interpreted(sm90.HOPPER):
        kl, grads = test_kl.evaluate(drawn)
    wanted = [torch.tensor(np.asarray(x, np.float32)) for x in (kl, *grads)]
    assert p.value_error(found[0], wanted[0]) < 1e-6
    assert max(map(p.relative_norm, found[1:], wanted[1:])) < 2e-4  # few roundings to bfloat16 differ
