"""`local.KLShard`: shards of a vocabulary, merged by hand, against float64; what it refuses."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lce_jax import linear_kl, local
from lce_jax.local import KLShard
from tests import oracle
from tests.kl_cases import Call, call, draw, expected
from tests.pairs import values_of

EVERY = call(
    "everything", V=128, vocab_size=70, where=True, temperature=True, bias=True, logit_softcap=4.0,
    teacher_logit_softcap=None, logit_scale=-1.3, teacher_logit_scale=0.7, teacher_temperature=1.7,
)  # fmt: skip
CALLS = [
    call("forward", V=104),
    EVERY._replace(name="reverse, padding alone", options=(*EVERY.options, ("direction", "reverse"))),
    EVERY._replace(name="jsd, padding alone", options=(*EVERY.options, ("direction", "jsd"), ("beta", 0.3))),
    call("jsd, kept", V=128, direction="jsd", cache_bytes=1 << 20),
    call("bfloat16, kept", leading=(64,), H=128, V=512, dtypes=("bfloat16",) * 4, cache_bytes=1 << 20),
]


def of_shards(test: Call, shards: int) -> Any:
    """The function of all arrays that computes divergence and gradients shard by shard."""

    def run(student: Any, teacher: Any, seed: Any, options: Any) -> Any:
        columns = test.V // shards

        def shard(i: int) -> KLShard:
            own = slice(i * columns, (i + 1) * columns)
            biases = {"bias": student[2][own], "teacher_bias": teacher[2][own]} if test.bias else {}
            arrays = student[0], student[1][own], teacher[0], teacher[1][own]
            start = jnp.int32(i * columns) if i % 2 else i * columns
            return KLShard(*arrays, vocab_start=start, precision="highest", **options, **biases)

        each = [shard(i) for i in range(shards)]
        found = [one.statistics(keep_cache=True) for one in each]
        merged = each[0].merge(jnp.stack([jnp.stack(stats) for stats, _ in found]))
        sums = [one.mixture_sums(merged) for one in each]
        total = None if sums[0] is None else jax.tree.map(lambda *parts: sum(parts), *sums)
        parts = [one.gradients(merged, total, seed, cache) for one, (_, cache) in zip(each, found, strict=True)]
        dhidden = sum(part[0] for part in parts)
        return each[-1].finish(merged, total), (
            dhidden,
            *(jnp.concatenate(x) for x in list(zip(*parts, strict=True))[1:]),
        )

    return run


@values_of("shards", [1, 4], slow=[1])
@pytest.mark.parametrize("test", CALLS, ids=str)
def test_shards_merge_to_the_whole(test: Call, shards: int) -> None:
    drawn = draw(test)
    static = {name: value for name, value in drawn.options.items() if not isinstance(value, jax.Array)}
    traced = {name: value for name, value in drawn.options.items() if isinstance(value, jax.Array)}

    @jax.jit
    def run(student: Any, teacher: Any, seed: Any, traced: Any) -> Any:
        return of_shards(test, shards)(student, teacher, seed, static | traced)

    kl, gradients = run(drawn.student, drawn.teacher, drawn.seed, traced)
    want = expected(drawn)
    assert oracle.value_error(kl, want.kl) < 4e-6
    bound = 4e-3 if test.dtypes[0] == "bfloat16" else 4e-6
    for got, true in zip(gradients, want.gradients, strict=True):
        assert oracle.relative_norm(got, true) < bound
    assert gradients[0].dtype == jnp.float32
    if test.where:
        left_out = ~np.asarray(drawn.options["where"])
        assert (np.asarray(kl)[left_out] == 0).all()
        assert (np.asarray(gradients[0])[left_out] == 0).all()


@pytest.mark.parametrize("direction", ["reverse", "jsd"])
def test_no_tokens(direction: Any) -> None:
    shard = KLShard(*(jnp.ones((n, 4)) for n in (0, 9, 0, 9)), direction=direction, bias=jnp.ones(9))
    stats, cache = shard.statistics(keep_cache=True)
    merged = shard.merge(jnp.stack(stats)[None])
    assert cache is None
    assert shard.finish(merged, shard.mixture_sums(merged)).shape == (0,)
    dhidden, dweight, dbias = shard.gradients(merged, None, jnp.ones(0))
    assert dhidden.shape == (0, 4)
    assert not dweight.any()
    assert not dbias.any()


def test_a_derivative_is_refused() -> None:
    def value(hidden: jax.Array) -> Any:
        shard = KLShard(hidden, jnp.ones((9, 4)), jnp.ones((3, 4)), jnp.eye(9, 4))
        stats, _ = shard.statistics()
        return shard.finish(shard.merge(jnp.stack(stats)[None])).sum()

    with pytest.raises(NotImplementedError, match="derivative"):
        jax.grad(value)(jnp.ones((3, 4)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": jnp.ones((3, 2, 4)), "teacher_hidden": jnp.ones((3, 2, 4))}, r"\(3, 2, 4\) must be flat here"),
        ({"teacher_weight": jnp.ones((8, 4))}, "weight has 9 columns of the vocabulary, the teacher's 8"),
        ({"teacher_hidden": jnp.ones((2, 4))}, r"the teacher's hidden \(2, 4\) must have"),
        ({"axis_name": "tensor"}, "axis_name"),
        ({"direction": "sideways"}, "sideways"),
        ({"vocab_start": 1.5}, r"vocab_start must be an integer .* got 1.5"),
        ({"vocab_start": jnp.float32(1.5)}, "vocab_start must be an integer .* got Array"),
        ({"vocab_start": jnp.int32(-1)}, r"vocab_start must lie in \[0, 2147483646\], got -1"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    arrays = {"hidden": jnp.ones((3, 4)), "weight": jnp.ones((9, 4))}
    arrays |= {f"teacher_{name}": x for name, x in arrays.items()}
    with pytest.raises((ValueError, TypeError), match=message):
        KLShard(**arrays | changes)


def test_what_a_method_is_given() -> None:
    drawn = draw(call("plain", leading=(5,), V=20))
    arrays = *drawn.student, *drawn.teacher
    shard, mixed = local.KLShard(*arrays), local.KLShard(*arrays, direction="jsd")
    stats, _ = mixed.statistics()
    sums = mixed.mixture_sums(stats)
    for one, given in ((mixed, None), (shard, sums)):
        with pytest.raises(ValueError, match=r'direction=".*" (needs|has no) sums'):
            one.finish(stats, given)
        with pytest.raises(ValueError, match=r'direction=".*" (needs|has no) sums'):
            one.gradients(stats, given, jnp.ones(5))
    with pytest.raises(ValueError, match=r"cotangent \(\) must be \[T = 5\]"):
        shard.gradients(stats, None, jnp.float32(1.0))
    for parts in (jnp.stack(stats), jnp.stack(stats).T[None], jnp.ones((2, 6, 1)), [stats]):
        with pytest.raises(ValueError, match=r"parts must be an array \[N, 6, T = 5\], got"):
            shard.merge(parts)  # type: ignore[arg-type]


def test_one_shard_is_the_whole() -> None:
    drawn = draw(call("whole", V=104))
    arrays = *drawn.student, *drawn.teacher
    shard = local.KLShard(*arrays)
    stats, _ = shard.statistics()
    assert oracle.value_error(shard.finish(stats), np.asarray(linear_kl(*arrays), np.float64)) < 1e-6
