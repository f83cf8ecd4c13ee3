"""Every kernel, launched directly on small calls, its results checked: what compute-sanitizer watches.

`test_gpu_direct` runs it: ``compute-sanitizer --tool racecheck python -m tests.torch.sanitized plain cached``. JAX
needs only its CPU.

``as=8.0``, or 12.0: with the kernels of those GPUs, which a Hopper GPU runs too, their first call's comparison before.

``python -m tests.torch.sanitized filled plain cached`` makes each call twice: all new memory, results and workspace,
holds 0 before the first and NaN (each byte 0xFF) before the second. What they compute must be equal to the bit.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from lce_torch_bridge import launch_with, linear_kl, linear_logprobs, linear_loss
from lce_torch_bridge.tensors import _device, _padding
from tests.torch import problem as p

DEVICE = "cuda"


class Call(NamedTuple):
    """A call of `linear_logprobs`; its weight holds NaN from ``options["vocab_size"]`` on."""

    T: int = 300
    H: int = 128
    V: int = 2080  # copies by cp.async need a multiple of 128
    dtype: torch.dtype = torch.bfloat16
    tempered: bool = False  # a temperature for each token
    kept: bool = False  # every third token is left out
    candidates: int = 0
    backward: bool = True
    options: Any = None


ALL: Any = {"stats": True, "logit_softcap": 5.0, "logit_scale": 0.7, "vocab_size": 2003}
PARTS = {
    "forward": [Call(backward=False), Call(tempered=True, backward=False, options=ALL)],
    "plain": [Call(), Call(T=512, tempered=True, options=ALL), Call(T=5, H=192), Call(T=140, kept=True)],
    "cached": [
        Call(options={"cache_bytes": 1 << 40}),
        Call(T=512, dtype=torch.float16, tempered=True, options=ALL | {"cache_bytes": 1 << 19}),
    ],
    "candidates": [Call(candidates=5), Call(T=140, tempered=True, candidates=64, options=ALL)],
    "live": [
        Call(V=2176, options={"gradient_threshold": 1e-3}),
        Call(T=512, V=2176, tempered=True, options=ALL | {"gradient_threshold": 1e-3}),
    ],
}  # fmt: skip


DIVERGENCES = "kl=forward", "kl=reverse", "kl=jsd", "kl=tv"


class Filled(TorchFunctionMode):
    """Inside, each byte of memory that nothing has written yet holds this number."""

    def __init__(self, byte: int) -> None:
        super().__init__()
        self._byte = byte
        self.seen: set[torch.dtype] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        found = func(*args, **(kwargs or {}))
        return self._filled(found) if func.__name__ in ("empty", "empty_like", "new_empty") else found

    def __enter__(self) -> Filled:
        empty = _device.empty  # none of torch's public functions
        self._patch = mock.patch.object(_device, "empty", lambda *told: self._filled(empty(*told)))
        self._patch.start()
        super().__enter__()
        return self

    def __exit__(self, *told: Any) -> None:
        super().__exit__(*told)
        self._patch.stop()

    def _filled(self, x: torch.Tensor) -> torch.Tensor:
        x.untyped_storage().fill_(self._byte)
        self.seen.add(x.dtype)
        return x


def check(call: Call) -> list[torch.Tensor]:
    """Results and gradients of a call, as near to float64 as their dtype. Returns them."""
    options = dict(call.options or {})
    size = options.get("vocab_size", call.V)
    problem = p.draw(call.T, call.H, call.V, call.dtype)
    problem = problem._replace(labels=problem.labels % size)
    told: Any = {name: options[name] for name in ("logit_softcap", "logit_scale") if name in options}
    if call.tempered:
        told["temperature"] = torch.rand(call.T, generator=torch.Generator().manual_seed(5)) + 0.5
    if call.candidates:
        told["candidates"] = p.candidates_like(problem.labels, K=call.candidates, V=size)
    keep = torch.arange(call.T) % 3 > 0 if call.kept else torch.ones(call.T, dtype=torch.bool)
    seeds = [
        seed * (keep if seed.ndim == 1 else keep[:, None]) for seed in p.seeds_like(problem.labels, K=call.candidates)
    ]
    true = p.Problem(problem.hidden, problem.weight[:size], problem.labels)
    want, wanted = p.exact(true, seeds, **told)
    problem.weight[size:] = float("nan")
    here = p.Problem(*(x.to(DEVICE) for x in problem)).leaves()
    on_device = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in told.items()}
    out = linear_logprobs(*here, where=keep.to(DEVICE) if call.kept else None, **options | on_device)
    fields = [x.detach().cpu() for x in out if x is not None]
    names = ("logprobs", "entropy", "lse", "candidate_logprobs")
    for name in names:
        ours, theirs = getattr(out, name), getattr(want, name)
        if theirs is not None and ours is not None:
            assert p.value_error(ours.detach().cpu()[keep], theirs[keep]) < 2e-5, name
    if not call.backward:
        return fields
    total = p.objective(out, [seed.to(DEVICE) for seed in seeds])
    dhidden, dweight = (x.cpu() for x in torch.autograd.grad(total, here[:2]))
    assert not dweight[size:].any()
    rough = 2e-2 if "gradient_threshold" in options else 5e-3  # bfloat16 rounds by 2⁻⁹
    assert p.relative_norm(dhidden, wanted[0]) < rough
    assert p.relative_norm(dweight[:size], wanted[1]) < rough
    return [*fields, dhidden, dweight]


def check_loss() -> list[torch.Tensor]:
    """`linear_loss` in chunks, into ``main_grad`` and returned."""
    seen = []
    problem = p.draw(700, 128, 2176, torch.bfloat16)
    want = p.stored(problem.hidden.double(), problem.weight.double(), problem.labels).logprobs.sum()
    for wgrad in ("return", "main_grad"):
        leaves: Any = p.Problem(*(x.to(DEVICE) for x in problem)).leaves()
        leaves.weight.main_grad = torch.ones(leaves.weight.shape, device=DEVICE)
        total, _ = linear_loss(lambda logprobs, *_: logprobs, *leaves, chunk_bytes=0, wgrad=wgrad)
        total.backward()
        assert abs(total.item() / want.item() - 1) < 1e-5
        seen += [total.detach(), leaves.hidden.grad, leaves.weight.main_grad]
        seen += [] if wgrad == "main_grad" else [leaves.weight.grad]
    return [x.cpu() for x in seen]


def check_divergence(direction: Any) -> list[torch.Tensor]:
    """`linear_kl` of heads with padding, a temperature for each token, and some of the tiles in a cache."""
    T, V, size = 140, 784, 700
    own, other = (p.draw(T, H, V, torch.bfloat16, seed) for seed, H in enumerate((128, 192)))
    temperature, seed = torch.rand(T, generator=torch.Generator().manual_seed(5)) + 0.5, p.seeds_like(own.labels)[0]
    true = [x.double().requires_grad_() for x in (own.hidden, own.weight[:size])]
    log_q = (true[0] @ true[1].T / temperature.double()[:, None]).log_softmax(-1)
    log_p = (other.hidden.double() @ other.weight[:size].double().T).log_softmax(-1)
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)
    means = [(a.exp() * (a - b)).sum(-1) for a, b in ((log_p, log_q), (log_q, log_p), (log_p, log_m), (log_q, log_m))]
    variation = (log_p.exp() - log_q.exp()).abs().sum(-1) / 2
    divergences = {"forward": means[0], "reverse": means[1], "jsd": (means[2] + means[3]) / 2, "tv": variation}
    want = divergences[direction]
    wanted = torch.autograd.grad((seed * want).sum(), true)
    own.weight[size:] = other.weight[size:] = float("nan")
    leaves = own.to(DEVICE).leaves()[:2]
    options: Any = {"temperature": temperature.to(DEVICE), "teacher_temperature": 1.0, "cache_bytes": 1 << 20}
    kl = linear_kl(*leaves, *other.to(DEVICE)[:2], direction=direction, vocab_size=size, **options)
    dhidden, dweight = (x.cpu() for x in torch.autograd.grad((seed.to(DEVICE) * kl).sum(), leaves))
    assert p.value_error(kl.cpu(), want) < 2e-5
    assert not dweight[size:].any()
    assert max(map(p.relative_norm, (dhidden, dweight[:size]), wanted)) < 5e-3
    return [kl.detach().cpu(), dhidden, dweight]


def checks(words: list[str]) -> Iterator[tuple[str, Callable[[], list[torch.Tensor]]]]:
    """What checks each call of the parts among these words, and returns its results."""
    for part in words:
        for call in PARTS.get(part, []):
            call = call._replace(V=2176) if any(word.startswith("as=") for word in words) else call
            yield f"{part} {call}", functools.partial(check, call)
        if part == "loss":
            yield part, check_loss
        if part in DIVERGENCES:
            yield part, functools.partial(check_divergence, part.removeprefix("kl="))


def filled(check: Callable[[], list[torch.Tensor]]) -> None:
    """The results of a check are the same bits, whatever was in the memory before."""
    found = []
    for byte in (0x00, 0xFF):
        with Filled(byte) as mode:
            found.append([x.reshape(-1).view(torch.uint8).tolist() for x in check() if x.numel()])
        assert {torch.uint8, torch.float32} <= mode.seen  # a workspace, and results
    assert found[0] == found[1]


def described_as(capability: str) -> Callable[[int], Any]:
    """A `_device._describe_gpu` for which a GPU has this compute capability."""
    described = _device._describe_gpu
    return lambda index: described(index)._replace(compute_capability=capability)


def main() -> None:
    launch_with("direct")
    for word in sys.argv[1:]:
        if word.startswith("as="):
            _device._describe_gpu = described_as(word.removeprefix("as="))
    # Without padding in it, a small call would be as large as any: the sanitizer watches every row.
    _padding.SMALLEST = 512
    for name, check in checks(sys.argv[1:]):
        filled(check) if "filled" in sys.argv else check()
        print("done", name, flush=True)
    print("done everything", flush=True)


if __name__ == "__main__":
    main()
