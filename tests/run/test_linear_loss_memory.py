"""What `linear_loss` holds and compiles: chunks, whatever the tokens; kernels that add; what `explain` says of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import lce_jax
from lce_jax import linear_loss
from lce_jax.explain._compile_targets import GPUS
from lce_jax.run._token_chunks import choose_chunk_rows
from lce_jax.types._types import CPU, Call, Device
from tests.mosaic.test_lowering import lower, overwrites_cache


def compiled_step(tokens: int, chunk_bytes: int, where: bool = False, factor: float = 1.0) -> tuple[int, str]:
    """The temporary bytes of value and gradients, and the program."""
    H, width, struct = 64, 8192, jax.ShapeDtypeStruct
    hidden, weight, labels = struct((tokens, H), "float32"), struct((width, H), "float32"), struct((tokens,), "int32")

    def total(hidden: Any, weight: Any, labels: Any, where: Any) -> Any:
        return factor * linear_loss(
            lambda logprob, entropy, _: -logprob - 0.1 * entropy, hidden, weight, labels,
            where=where, chunk_bytes=chunk_bytes,
        )[0]  # fmt: skip

    mask = struct((tokens,), "bool") if where else None
    compiled = jax.jit(jax.value_and_grad(total, argnums=(0, 1))).lower(hidden, weight, labels, mask).compile()
    return compiled.memory_analysis().temp_size_in_bytes, compiled.as_text()


@pytest.mark.fast("True")
@pytest.mark.parametrize("where", [False, True])
def test_memory_follows_the_chunk_not_the_tokens(where: bool) -> None:
    chunk_bytes = 512 * 8192 * 4
    small, _ = compiled_step(2048, chunk_bytes, where)
    large, _ = compiled_step(16384, chunk_bytes, where)
    per_token = (16384 - 2048) * 16 * 4  # a dozen numbers per token: results, losses, labels
    assert large <= small + per_token
    assert large < 16384 * 8192 * 4 / 8


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("tokens", "dtype", "options", "rows"),
    [
        (8192, "bfloat16", {}, 8192),  # 2.3 GiB: as much as a chunk's 1.2, and a sum's 1.2 beyond dweight's
        (8920, "bfloat16", {}, 8920),
        (9216, "bfloat16", {}, 4608),
        (8192, "bfloat16", {"gradient_threshold": 2.0**-12}, 4096),  # no exponentials are kept
        (8192, "float32", {"implementation": "xla"}, 2048),  # dweight is the sum
    ],
)
def test_one_chunk_where_it_takes_no_more(tokens: int, dtype: str, options: dict[str, Any], rows: int) -> None:
    args = (
        jax.ShapeDtypeStruct((tokens, 4096), dtype),
        jax.ShapeDtypeStruct((151936, 4096), dtype),
        jax.ShapeDtypeStruct((tokens,), "int32"),
    )
    plan = lce_jax.explain(*args, gradients_in_forward=True, **options)
    assert plan.tiles["chunk of tokens"] == rows
    if rows == tokens:
        several = lce_jax.explain(*args, gradients_in_forward=True, chunk_bytes=1100 << 20, **options)
        assert several.tiles["chunk of tokens"] < tokens
        unused = (1400 << 20) - several.tiles["chunk of tokens"] * 151936 * 2
        assert plan.backward_bytes <= several.backward_bytes + unused - 151936 * 4096 * 2  # dweight, after the sum


BUDGETS = [0, *(int(2 ** (n / 3)) for n in range(66, 108)), 1400 << 20]  # 4 MiB to 50 GiB


@pytest.mark.parametrize("device", ["h100", "cpu"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("T", "H", "V"),
    [(4096, 4096, 151936), (8192, 4096, 151936), (65536, 4096, 151936), (8920, 1024, 50257), (100, 64, 1000)],
)
def test_more_bytes_never_cost_more(T: int, H: int, V: int, dtype: str, device: str) -> None:
    """Nor do chunks hold more than the bytes say beside a sum of dweight, of which dweight itself is a part."""
    of = GPUS["h100"]
    gpu = Device("gpu", of.kind, "9.0", of.core_count)
    case = Call(num_tokens=T, hidden_size=H, columns=V, dtype=jnp.dtype(dtype), device=gpu)
    case = case if device == "h100" else dataclasses.replace(case, device=CPU)
    kept, own, costs = 4 if device == "cpu" else case.dtype.itemsize, V * H * case.dtype.itemsize, []
    for chunk_bytes in sorted(BUDGETS):
        rows = choose_chunk_rows(dataclasses.replace(case, chunk_bytes=chunk_bytes))
        chunks = -(-T // rows)
        costs.append(chunks if T % rows == 0 else 1.25 * chunks)
        assert rows * V * kept + (own if chunks == 1 else V * H * 4) <= max(chunk_bytes, 128 * V * kept) + V * H * 4
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] == 1
    assert choose_chunk_rows(dataclasses.replace(case, chunk_bytes=None)) == choose_chunk_rows(
        dataclasses.replace(case, chunk_bytes=1400 << 20 if device == "h100" else 256 << 20)
    )


def of_the_outputs(hidden, weight, labels, **options):
    return linear_loss(lambda logprob, entropy, lse: logprob + entropy + lse, hidden, weight, labels, **options)[:1]


@pytest.mark.slow
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("T", "H", "V", "options"),
    [
        pytest.param(8192, 4096, 151936, {}, marks=pytest.mark.slow),
        pytest.param(65536, 4096, 151936, {"where": True, "temperature": True}, marks=pytest.mark.slow),
        (9001, 2048, 50257, {"where": True, "vocab_size": 50000, "logit_softcap": 30.0}),
        pytest.param(9000, 1024, 128256, {"weight_layout": "hv"}, marks=pytest.mark.slow),
    ],
)
def test_kernels(T: int, H: int, V: int, options: dict) -> None:
    """Nothing of V x T, also where tokens come in chunks; dweight is a sum in fp32."""
    text = lower(T, H, V, function=of_the_outputs, **options)
    assert f"{T}x{V}" not in text
    shape = (H, V) if "weight_layout" in options else (V, H)
    assert "{}x{}xf32".format(*shape) in text
    if options.get("vocab_size") is None:
        assert overwrites_cache(text)


@pytest.mark.usefixtures("hopper")
def test_the_chunks_of_a_hopper() -> None:
    """65,536 tokens take no more than 16,384: dweight's sum, a chunk's exponentials, and a few numbers per token."""
    struct = jax.ShapeDtypeStruct

    def plan(T: int) -> lce_jax.Plan:
        args = struct((T, 4096), "bfloat16"), struct((151936, 4096), "bfloat16"), struct((T,), "int32")
        return lce_jax.explain(*args, gradients_in_forward=True)

    few, many = plan(16384), plan(65536)
    assert many.tiles["chunk of tokens"] == few.tiles["chunk of tokens"] == 4096
    assert many.backward_bytes - few.backward_bytes == 6 * 4 * (65536 - 16384)
    assert many.backward_bytes < 3.7 * 2**30
    with pytest.raises(ValueError, match="chunk_bytes=7 is for linear_loss"):
        lce_jax.explain(*(struct(s, "float32") for s in ((4, 8), (16, 8))), struct((4,), "int32"), chunk_bytes=7)
