"""Every kernel, launched directly on small calls, its results checked: what compute-sanitizer watches.

`test_gpu_sanitizer` runs it: ``compute-sanitizer --tool racecheck python -m tests.torch.sanitized whole counted``. The
calls and their oracles are those of `test_mosaic_interpret` and `test_mosaic_threshold`. JAX needs only its CPU.

``python -m tests.torch.sanitized filled whole counted`` makes each call twice: all new memory, results and workspace,
holds 0 before the first and NaN (each byte 0xFF) before the second. What they compute must be equal to the bit.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from lce_jax.mosaic import _generations, _live_backward
from lce_jax.mosaic._worklist import Batches, Worklist
from lce_torch_bridge import _direct, _rows, _torch, launch_with, linear_logprobs, linear_loss
from tests import test_mosaic_interpret as exact
from tests import test_mosaic_threshold as threshold
from tests.torch import problem as p

# Rows are left out in the second ones. There generated code loads numbers that no kernel has written, and drops them.
WHOLE = (
    "ragged", "half a cache, float16", "a shorter last chunk, hv", "padding, stats, softcap, temperature",
)  # fmt: skip
FORWARD = "ragged", "padding, stats, softcap, temperature"
COUNTED = ("clusters, rows left out, cache", "dhidden written once, rounded", "dweight added")
LIVE = [
    exact.call(
        "live tiles, clusters, batches",
        chunk=1,
        T=264,
        V=1040,
        H=64,
        cluster=2,
        num_rows=200,
        stats=True,
        temperature=True,
    ),
    exact.call("live tiles, hv, dweight added", T=136, V=1024, H=64, weight_layout="hv", adds_dweight=True),
]


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
        empty = _torch.empty  # none of torch's public functions
        self._patch = mock.patch.object(_torch, "empty", lambda *told: self._filled(empty(*told)))
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


kept: dict[int, Any] = {}  # the programs of a check, in its order


def launched(seen: list[Any], function: Any, *given: Any) -> Any:
    """``function``'s results by a direct launch. Arguments and results are JAX's arrays on the CPU.

    Those that are defined go to ``seen``: rows that count; of a forward not the cache, of which some is not written.
    """
    operands, *rest = given
    static = operands.num_columns if isinstance(operands.num_columns, int) else None
    leaves, tree = jax.tree.flatten((operands if static is None else operands._replace(num_columns=None), *rest))
    trees: list[Any] = []

    def flat(*leaves: Any) -> list[Any]:
        operands, *rest = jax.tree.unflatten(tree, leaves)
        found = function(operands if static is None else operands._replace(num_columns=static), *rest)
        trees.append(jax.tree.structure(found))
        return jax.tree.leaves(found)

    on_gpu = [p.to_torch(jnp.asarray(leaf)).cuda() for leaf in leaves]
    if len(seen) not in kept:
        kept[len(seen)] = _direct.program(flat, on_gpu, ()), trees
    program, trees = kept[len(seen)]
    assert not isinstance(program, str), program
    found = [jnp.asarray(x.cpu().float().numpy()).astype(str(x.dtype)[6:]) for x in _direct.run(program, on_gpu)]
    first, *others = results = jax.tree.unflatten(trees[0], found)
    seen += [x[: operands.num_rows] for x in jax.tree.leaves(first)] + (others if rest else [])
    return results


def check_exact(test: exact.Call, gradients_too: bool = True) -> list[Any]:
    """Statistics and gradients of a call, with and without what the forward keeps. Returns them."""
    seen: list[Any] = []
    case = exact.case_of(test)
    operands, cotangent = exact.draw(test)
    want, columns, rows, gradients = exact.traced(functools.partial(exact.expected, test, case), operands, cotangent)
    with (
        _generations.using(exact.kernels_of(test)),
        mock.patch.object(exact, "traced", functools.partial(launched, seen)),
    ):
        cache = exact.check_statistics(test, case, operands, want)
        if gradients_too:
            exact.check_gradients(test, case, operands._replace(candidates=columns), rows, cache, gradients)
    return seen


def check_live(test: exact.Call) -> list[Any]:
    """The live tiles of a call, found on the GPU, and the gradients over them. Returns statistics and gradients."""
    test, seen = threshold.with_threshold(test), list[Any]()
    with (
        _generations.using(threshold.kernels_of(test)),
        mock.patch.object(threshold, "traced", functools.partial(launched_live, seen)),
    ):
        threshold.check_live_tiles(test, exact.case_of(test))
    return seen


def launched_live(seen: list[Any], function: Any, operands: Any, *rest: Any) -> Any:
    """As `launched`. The lists, which a GPU makes through XLA alone, are made on the CPU and given to the program."""
    if not rest:
        return launched(seen, function, operands)
    told: list[Any] = []

    def noted(work: Worklist, slots: int, group: int, num_columns: Any) -> Batches:
        told.append((slots, group))
        return Batches.of(work, slots, group, num_columns)

    with mock.patch.object(_live_backward, "Batches", SimpleNamespace(of=noted)):
        jax.eval_shape(function, operands, *rest)
    ((slots, group),) = told
    work = jax.jit(functools.partial(Worklist.of, group=group, contracted=None))(rest[1])
    num_columns = jnp.int32(operands.weight.size // operands.hidden.shape[1])
    batches = jax.jit(lambda work: Batches.of(work, slots, group, num_columns))(work)

    def with_lists(operands: Any, work: Any, batches: Any, *rest: Any) -> Any:
        with (
            mock.patch.object(_live_backward, "Worklist", SimpleNamespace(of=lambda *_: work)),
            mock.patch.object(_live_backward, "Batches", SimpleNamespace(of=lambda *_: batches)),
        ):
            return function(operands, *rest)

    return launched(seen, with_lists, operands, work, batches, *rest)


def check_bridge() -> list[Any]:
    """The bridge's own programs: masks, a padded vocabulary, the mean logit, a cache, a loss in chunks."""
    seen: list[torch.Tensor] = []
    problem = p.draw(700, 128, 2080, torch.bfloat16)
    keep = torch.arange(700) % 3 > 0
    want = p.stored(problem.hidden.double(), problem.weight[:2003].double(), problem.labels)
    problem.weight[2003:] = float("nan")
    problem = problem.to("cuda")
    for cache_bytes in (0, 1 << 20, 1 << 30):
        leaves = problem.leaves()
        told: Any = dict(keep=keep.cuda(), vocab_size=2003, stats=True, mean_logit=True, cache_bytes=cache_bytes)
        out = linear_logprobs(*leaves, **told)
        assert p.value_error(out.lse.cpu()[keep], want.lse[keep]) < 1e-5
        objective = out.logprobs + out.entropy + out.lse + out.mean_logit
        grads = torch.autograd.grad(objective, leaves[:2], torch.ones_like(objective))
        assert all(bool(x.cpu().isfinite().all()) for x in grads)
        seen += [x.detach() for x in out if x is not None] + [*grads]
    leaves = problem.leaves()
    total, _ = linear_loss(lambda logprobs, *_: logprobs, *leaves, chunk_bytes=0, vocab_size=2003)
    seen += [total.detach(), *torch.autograd.grad(total, leaves[:2])]
    assert abs(total.item() / want.logprobs.sum().item() - 1) < 1e-5
    return [x.cpu().float().numpy() for x in seen]


def checks(parts: list[str]) -> Iterator[tuple[str, Callable[[], list[Any]]]]:
    """What checks each call of these parts, and returns its results."""
    known = {test.name: test for test in exact.CALLS}
    for part in parts:
        for name in {"whole": WHOLE, "counted": COUNTED}.get(part, ()):
            yield name, functools.partial(check_exact, known[name])
        for name in FORWARD if part == "forward" else ():
            yield name, functools.partial(check_exact, known[name], gradients_too=False)
        if part == "live":
            for test in LIVE:
                yield test.name, functools.partial(check_live, test)
        if part == "bridge":
            yield part, check_bridge


def filled(check: Callable[[], list[Any]]) -> None:
    """The results of a check are the same bits, whatever was in the memory before."""
    found = []
    for byte in (0x00, 0xFF):
        with Filled(byte) as mode:
            found.append([np.asarray(x).tobytes() for x in check()])
        assert {torch.uint8, torch.float32} <= mode.seen  # a workspace, and results
    assert found[0] == found[1]


def main() -> None:
    launch_with("direct")
    # Without padding in it, a small call would be as large as any: the sanitizer watches every row.
    _rows.FORWARD_ROWS = _rows.SMALLEST = 512
    for name, check in checks(sys.argv[1:]):
        kept.clear()
        filled(check) if "filled" in sys.argv else check()
        print("done", name, flush=True)
    print("done everything", flush=True)


if __name__ == "__main__":
    main()
