"""The case matrix on a GPU with each way forced: kernels launched directly, and run by JAX. Against float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests import cases
from tests.torch import problem as p
from tests.torch.test_parity import NOT_SERVED

pytestmark = pytest.mark.gpu

VALUE = 1e-5  # as in test_gpu
OF_OTHER_KERNELS = {"negative scale", "float32 hidden, bfloat16 weight", "bfloat16 hidden, float32 weight"}


def fitted(test: cases.TestCase) -> cases.TestCase:
    """The case in 16 bits and in shapes that the Hopper kernels take, few so that the cases share programs."""
    dtype = "float16" if test.dtype == "float16" else "bfloat16"
    return dataclasses.replace(test, dtype=dtype, H=128, V=384)


CASES = [
    fitted(test)
    for test in cases.MATRIX
    if not NOT_SERVED & {name for name, _ in test.options} and test.name not in OF_OTHER_KERNELS
]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("test", CASES, ids=str)
def test_case(test: cases.TestCase) -> None:
    problem, options, seeds = p.from_case(test)
    problem, seeds = problem.to("cuda"), [seed.cuda() for seed in seeds]
    options = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    out, (dhidden, dweight) = p.gradients(problem, seeds, **options)

    keep = options.get("where", torch.ones_like(problem.labels, dtype=torch.bool))
    temperature = options.get("temperature", 1.0)
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.expand(problem.labels.shape)[keep]
    told: Any = {name: options[name] for name in ("logit_scale", "logit_softcap", "vocab_size") if name in options}
    told["temperature"] = temperature
    true = p.Problem(problem.hidden[keep], problem.weight, problem.labels[keep])
    if out.entropy is None:
        seeds[1] = 0 * seeds[1]
    kept = [seed[keep] for seed in seeds]
    want, wanted = p.exact(true, kept, **told)
    _, plain = p.gradients(true, kept, call=p.stored, dtype=problem.weight.dtype, **told)
    scale = 1 + test.spread**2 / 10  # as in test_parity
    for got, exact in zip(out[:5], want[:5], strict=True):
        if got is not None:
            assert p.value_error(got[keep], exact) < VALUE * scale
            assert not got[~keep].any()
    assert not dhidden[~keep].any()
    for got, exact, path in zip((dhidden[keep], dweight), wanted, plain, strict=True):
        assert p.relative_norm(got, exact) <= 1.02 * p.relative_norm(path, exact)
