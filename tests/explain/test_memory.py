"""The bytes of a plan against what the passes ask for, and ``lce-jax explain``."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from typing import Any

import jax
import pytest

import lce_jax
from lce_jax import explain, linear_cross_entropy, linear_kl, linear_logprobs, linear_topk
from lce_jax.explain import __main__ as command
from lce_jax.explain._models import MODELS, find_model, model_head
from tests.pairs import values_of
from tests.torch.test_launches import backward, forward, head, held_bytes

struct = jax.ShapeDtypeStruct
T, H, V = 4096, 4096, 151936
SERVED: list[tuple[dict[str, Any], dict[str, Any]]] = [  # of a call from PyTorch, and of `explain`
    ({}, {}),
    ({"num_tokens": 65536}, {}),
    ({"has_temperature": True}, {"temperature": struct((T,), "float32")}),
    ({"cache_bytes": 1 << 29}, {"cache_bytes": 1 << 29}),
    ({"cache_bytes": 1 << 40}, {"cache_bytes": 1 << 40}),
    ({"gradient_threshold": 2.0**-12}, {"gradient_threshold": 2.0**-12}),
    ({"num_candidates": 8}, {"candidates": struct((T, 8), "int32")}),
]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("kind", "options"), SERVED, ids=str)
def test_it_is_what_the_launches_are_given(kind: dict[str, Any], options: dict[str, Any]) -> None:
    """But for numbers per token, of which a call from PyTorch has at most 16 in a pass, and 8 to keep."""
    of = head(**kind)
    given = (
        struct((of.call.num_tokens, H), "bfloat16"),
        struct((V, H), "bfloat16"),
        struct((of.call.num_tokens,), "int32"),
    )
    plan, of_forward = explain(*given, **{"cache_bytes": 0} | options), forward(of, keep_cache=True)
    of_backward = backward(of, owns_cache=bool(of.call.cache_bytes))
    numbers = 4 * (of.call.num_tokens + T) * (1 + of.call.num_candidates)
    assert abs(held_bytes(of_forward) - plan.forward_bytes) <= 16 * numbers
    assert abs(held_bytes(of_backward) - plan.backward_bytes) <= 16 * numbers
    kept = sum(math.prod(x.shape) * x.dtype.itemsize for x in of_forward.outputs)  # with the results
    assert abs(kept - plan.kept_bytes) <= 8 * numbers


def products(function: Any, *operands: Any) -> list[int]:
    """The bytes of each matrix product that a function makes, the largest first."""
    text = str(jax.make_jaxpr(function)(*operands))
    shapes = re.findall(r":f(\d+)\[([\d,]+)\] = dot_general", text)
    return sorted((int(bits) // 8 * math.prod(map(int, dims.split(","))) for bits, dims in shapes), reverse=True)


def test_a_tile_of_xla_is_what_a_product_gives() -> None:
    """Beside the tile, a CPU has its columns of the weight, which a product copies."""
    for T, V, options in ((2048, 32768, {}), (300, 50257, {"vocab_size": 50000}), (1, 50257, {}), (64, 600, {})):
        call = struct((T, 256), "float32"), struct((V, 256), "float32"), struct((T,), "int32")
        plan = explain(*call, **options)
        tile, columns = (
            products(lambda *x, o=options: linear_logprobs(*x, **o), *call)[0],
            min(plan.tiles["vocabulary"], V),
        )
        assert plan.forward_bytes == tile + 4 * 256 * columns
        assert plan.backward_bytes == tile + 4 * 256 * (columns + T)
        topk = explain(*call, k=4, **options)
        assert topk.forward_bytes == products(lambda h, w, o=options: linear_topk(h, w, 4, **o), *call[:2])[0]
        assert topk.backward_bytes == topk.kept_bytes == 0
        teacher = call[:2]
        kl = explain(*call, teacher=teacher, **options)
        assert kl.forward_bytes == 2 * products(lambda h, w, o=options: linear_kl(h, w, h, w, **o), *teacher)[0]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("adapter", [False, True], ids=["frozen", "lora"])
def test_a_frozen_weight_has_the_chunks_that_run(adapter: bool) -> None:
    """Several at 8,192 tokens, where a sum of dweight would make room for one chunk; and no such sum."""
    a, b = struct((8, H), "float32"), struct((V, 8), "float32")
    frozen: dict[str, Any] = {"lora": (a, b, 1.0)} if adapter else {"frozen_weight": True}
    for tokens in (8192, 32768):
        call = struct((tokens, H), "bfloat16"), struct((V, H), "bfloat16"), struct((tokens,), "int32")
        for kind in ({"gradients_in_forward": True}, {"reduction": "mean"}):
            both, plan = explain(*call, **kind), explain(*call, **kind, **frozen)
            assert plan.tiles["chunk of tokens"] == 4096
            assert "sum of dweight" not in str(plan)
            assert (both.tiles["chunk of tokens"] == 8192) == (tokens == 8192)
            assert ("sum of dweight" in str(both)) == (tokens > 8192)
            sums = V * H * 4 if tokens > 8192 else 0
            assert adapter or plan.backward_bytes == both.backward_bytes - sums or tokens == 8192

        def total(hidden: Any, weight: Any, labels: Any, a: Any, b: Any) -> Any:
            lora = (a, b, 1.0) if adapter else None
            return linear_cross_entropy(hidden, weight, labels, lora=lora)

        text = str(jax.make_jaxpr(jax.grad(total, 0))(*call, a, b))
        assert f"bf16[4096,{H + 64 * adapter}]" in text


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        pytest.param("float32", {"reduction": "mean", "frozen_weight": True}, marks=pytest.mark.slow),
        ("bfloat16", {"reduction": "mean", "cache_bytes": 0}),
        pytest.param(
            "bfloat16", {"reduction": "mean", "cache_bytes": 0, "frozen_weight": True}, marks=pytest.mark.slow
        ),
        ("float32", {"reduction": "mean", "lora": (struct((8, 64), "float32"), struct((16384, 8), "float32"), 0.5)}),
    ],
    ids=["frozen", "backward", "frozen, backward", "lora"],
)
def test_what_a_cpu_holds_is_a_tenth_from_the_plan(dtype: str, options: dict[str, Any]) -> None:
    """The compiled program differentiates what the plan does."""
    call = struct((512, 64), dtype), struct((16384, 64), dtype), struct((512,), "int32")
    plan = explain(*call, **options, compile=True)
    assert plan.compiled is not None
    assert abs(plan.compiled.backward / plan.most_bytes - 1) < 0.1


@values_of("dtype", ["float32", "bfloat16"], slow=["float32"])
def test_the_copy_of_the_rows_that_count_is_in_the_plan(dtype: str) -> None:
    call = struct((1024, 1024), dtype), struct((4096, 1024), dtype), struct((1024,), "int32")
    plan = explain(*call, where=struct((1024,), "bool"), compile=True)
    assert plan.compiled is not None
    assert abs(plan.compiled.forward / plan.forward_bytes - 1) < 0.1


@pytest.mark.parametrize("device", ["h200", "a100"])
def test_full_cache_bytes_is_the_least_that_spares_all(device: str) -> None:
    arguments = ["--model", "olmo3-7b", "--tensor-parallel", "4", "--tokens", "4096", "--device", device]
    call, _ = command.read(arguments)
    full = call.plan().full_cache_bytes

    def kept(cache_bytes: int) -> int:
        return call.plan(cache_bytes=cache_bytes).kept_bytes - call.plan(cache_bytes=0).kept_bytes

    assert kept(full) == kept(1 << 62) == full
    assert kept(full - 1) < full
    assert call.plan(cache_bytes=full).most_bytes >= full


def run(*arguments: str) -> str:
    return "\n".join(command.report(*command.read(list(arguments))))


def test_the_recommended_cache_is_what_the_call_would_keep() -> None:
    """The number that is printed, passed on, keeps that many bytes; a full one recomputes nothing."""
    for spare in ("4", "0.5"):
        arguments = ("--model", "qwen3-8b", "--tensor-parallel", "4", "--tokens", "32768", "--spare-gib", spare)
        text = run(*arguments)
        found = re.search(r"^else: cache_bytes=(\d+) (recomputes nothing|spares \d+%)", text, re.MULTILINE)
        assert found
        cache = int(found[1])
        assert cache <= float(spare) * (1 << 30)
        call, _ = command.read(list(arguments))
        plan = call.plan(cache_bytes=cache)
        assert plan.kept_bytes - call.plan(cache_bytes=0).kept_bytes == cache
        assert (found[2] == "recomputes nothing") == (cache == plan.full_cache_bytes) == (spare == "4")
        assert f"cache_bytes={cache}" in text.split("matrix products")[1].split("else:")[0]
    assert "else: cache_bytes=0, because one tile" in run(*arguments[:-1], "0")


def test_every_model_on_every_device() -> None:
    for name in MODELS:
        for device in command.DEVICES:
            text = run("--model", name, "--tokens", "8192", "--tensor-parallel", "8", "--device", device)
            assert name in text
            assert "logits stored" in text
            assert "linear_loss and linear_cross_entropy recompute nothing" in text
    assert "6 of padding: pad weight to 100284 rows, pass vocab_size=100278" in run(
        "--model", "olmo3-7b", "--tokens", "64", "--tensor-parallel", "12"
    )


@pytest.mark.slow
def test_as_a_command() -> None:
    """And `lce_jax.explain` stays the function, however it is imported."""
    arguments = ["--hidden", "4096", "--vocab", "131072", "--tokens", "8192"]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "lce_jax.explain", *arguments],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert all(x in done.stdout for x in ("H 4,096, V 131,072", "NVIDIA H200", "mosaic_gpu"))
    assert re.search(r"^logits stored, .* 4\.0 GiB ", done.stdout, re.MULTILINE)
    import lce_jax.explain as imported
    from lce_jax.explain import explain as inner

    assert lce_jax.explain is imported is inner is explain


def test_a_model_as_hugging_face_names_it() -> None:
    names = ("Qwen/Qwen3-8B", "Qwen3-8B-Base", "google/gemma-2-9b-it", "deepseek-ai/DeepSeek-V3", "qwen2.5-7b")
    assert [*map(find_model, names)] == ["qwen3-8b", "qwen3-8b", "gemma2-9b", "deepseek-v3", "qwen2.5-7b"]
    assert command.read(["--model", names[0], "--tokens", "64"])[0].head == model_head("qwen3-8b")
    for other in ("Qwen/Qwen3-8B-FP8", "Qwen/Qwen3-80B", "Qwen/Qwen2.5-Coder-7B"):
        assert find_model(other) == other


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "Qwen/Qwen3-80B"], "invalid choice: 'Qwen/Qwen3-80B' (choose from"),
        ([], "give --model, or --hidden and --vocab"),
        (["--hidden", "64"], "give --model, or --hidden and --vocab"),
        (["--model", "qwen3-8b", "--hidden", "64"], "give --model, or --hidden and --vocab"),
        (["--model", "gemma2-2b", "--softcap", "3"], "gemma2-2b has its own"),
        (["--model", "qwen3-8b", "--tensor-parallel", "0"], "0 is not between 1 and 2147483646"),
        (["--model", "qwen3-8b", "--tokens", str(10**20)], "100000000000000000000 is not between 1 and"),
        (["--hidden", "64", "--vocab", "1000", "--softcap", "0"], "got 0.0; leave --softcap out for no cap"),
        (["--hidden", "64", "--vocab", "1000", "--softcap", "nan"], "got nan; leave --softcap out for no cap"),
        (["--hidden", "64", "--vocab", "1000", "--softcap", "thirty"], "could not convert"),
        (["--model", "qwen3-8b", "--spare-gib", "-1"], "-1 must be a number of GiB"),
        (["--model", "qwen3-8b", "--spare-gib", "much"], "much must be a number of GiB, at least 0, such as 4"),
        (["--model", "qwen3-8b", "--hidden", "4k"], "'4k' is not a whole number: write all its digits, such as 8192"),
        (["--model", "qwen3-8b", "--sequence-parallel", "--tensor-parallel", "3"], "--tokens 64 must divide by"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main([*arguments, "--tokens", "64"])
    assert message in capsys.readouterr().err
