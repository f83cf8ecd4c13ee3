"""Calls of `linear_kl`, and their right results in NumPy float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lce_jax import linear_kl


class Call(NamedTuple):
    """One call. ``options`` go to the function, and ``G`` is the teacher's hidden size."""

    name: str
    leading: tuple[int, ...] = (24,)
    H: int = 32
    G: int = 48
    V: int = 104
    teachers_columns: int | None = None  # None: V
    dtypes: tuple[str, str, str, str] = ("float32",) * 4  # of hidden, weight, and the teacher's
    spread: float = 1.5  # standard deviation of the logits
    where: bool = False  # masked rows hold NaN
    temperature: bool = False  # one value per token
    bias: bool = False  # of both models, NaN in the padding
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return self.name


def call(name: str, **fields_and_options: Any) -> Call:
    fields = {key: fields_and_options.pop(key) for key in list(fields_and_options) if key in Call._fields}
    return Call(name, **fields, options=tuple(fields_and_options.items()))


EVERYTHING = call(
    "everything", leading=(4, 6), V=128, teachers_columns=120, vocab_size=113, where=True, temperature=True, bias=True,
    logit_softcap=4.0, teacher_logit_softcap=None, logit_scale=-1.3, teacher_logit_scale=0.7, teacher_temperature=1.7,
    weight_layout="hv", teacher_weight_layout="vh", spread=2.0, direction="reverse",
)  # fmt: skip
AS_JSD = (*EVERYTHING.options[:-1], ("direction", "jsd"), ("beta", 0.3))
MIXED = EVERYTHING._replace(name="everything, jsd", options=AS_JSD)
CALLS = [
    call("forward"),
    call("reverse", direction="reverse"),
    call("ragged", leading=(23,), H=31, G=17, V=1097, where=True, temperature=True),
    call("ragged, reverse", leading=(3, 5), H=31, V=1097, spread=4.0, direction="reverse", teacher_temperature=0.5),
    call("one column", leading=(), V=1),
    call("jsd", direction="jsd"),
    call("ragged jsd", leading=(23,), H=31, G=17, V=1097, where=True, temperature=True, direction="jsd", beta=0.1),
    call("bfloat16 jsd", leading=(64,), H=128, V=512, dtypes=("bfloat16",) * 4, direction="jsd", beta=0.9, spread=4.0),
    call("ragged tv", leading=(23,), H=31, G=17, V=1097, where=True, temperature=True, direction="tv"),
    call("the same cap and scale", logit_softcap=3.0, logit_scale=0.5, vocab_size=97, teacher_logit_softcap="same",
         teacher_logit_scale="same"),
    call("bfloat16", leading=(64,), H=128, V=512, dtypes=("bfloat16",) * 4),
    call("mixed", leading=(64,), H=128, V=512, dtypes=("float32", "bfloat16", "bfloat16", "float32"), where=True),
    call("float16, reverse", leading=(64,), H=128, V=512, dtypes=("float16",) * 4, direction="reverse"),
    EVERYTHING,
    EVERYTHING._replace(name="everything, forward", options=(*EVERYTHING.options[:-1], ("direction", "forward"))),
    MIXED,
    EVERYTHING._replace(name="everything, tv", options=(*EVERYTHING.options[:-1], ("direction", "tv"))),
]  # fmt: skip


class Drawn(NamedTuple):
    """The arrays of a call: the student's, which have gradients, the teacher's, the options and a cotangent."""

    student: tuple[jax.Array, ...]  # hidden, weight and the bias, if there is one
    teacher: tuple[jax.Array, ...]
    options: dict[str, Any]
    seed: jax.Array


def draw(test: Call, seed: int = 0) -> Drawn:
    rng, options = np.random.default_rng(seed), dict(test.options)
    unmasked = rng.random(test.leading) < 0.6
    if test.where:
        options["where"] = jnp.asarray(unmasked)
    if test.temperature:
        options["temperature"] = jnp.asarray(rng.uniform(0.5, 2.0, test.leading), jnp.float32)
    layout = options.get("weight_layout", "vh")
    layouts = layout, options.get("teacher_weight_layout", layout)
    columns = test.V, test.teachers_columns or test.V
    models = []
    for i, (size, count, layout) in enumerate(zip((test.H, test.G), columns, layouts, strict=True)):
        hidden = rng.standard_normal((*test.leading, size))
        hidden = np.where(unmasked[..., None], hidden, np.nan) if test.where else hidden
        weight = rng.standard_normal((count, size)) * (test.spread / np.sqrt(size))
        weight = weight if layout == "vh" else weight.T
        arrays = [jnp.asarray(x, dtype) for x, dtype in zip((hidden, weight), test.dtypes[2 * i :], strict=False)]
        if test.bias:
            bias = rng.standard_normal(count)
            bias[options.get("vocab_size", count) :] = np.nan
            arrays.append(jnp.asarray(bias, jnp.float32))
        models.append(tuple(arrays))
    return Drawn(*models, options, jnp.asarray(rng.standard_normal(test.leading), jnp.float32))


class Expected(NamedTuple):
    kl: np.ndarray
    gradients: tuple[np.ndarray, ...]


def expected(drawn: Drawn) -> Expected:
    """Computes the divergence and the gradients of Σ seed · kl from stored logits."""
    options, size = drawn.options, drawn.options.get("vocab_size")
    unmasked = np.ones(drawn.seed.shape, bool) if "where" not in options else np.asarray(options["where"])
    defaults = {"temperature": 1.0, "logit_softcap": None, "logit_scale": 1.0, "weight_layout": "vh"}
    student_options = {name: options.get(name, default) for name, default in defaults.items()}
    teacher_options = {name: options.get(f"teacher_{name}", "same") for name in defaults}
    teacher_options = {
        name: student_options[name] if isinstance(x, str) and x == "same" else x for name, x in teacher_options.items()
    }
    (log_q, slope, hidden, weight), (log_p, *_) = (
        _log_softmax(arrays, unmasked, size, **options_of_head)
        for arrays, options_of_head in ((drawn.student, student_options), (drawn.teacher, teacher_options))
    )
    q, p = np.exp(log_q), np.exp(log_p)
    seed = np.where(unmasked, np.asarray(drawn.seed, np.float64), 0)[..., None]
    if options.get("direction", "forward") == "forward":
        kl, dz = (p * (log_p - log_q)).sum(-1), q - p
    elif options["direction"] == "jsd":
        beta = np.float64(options.get("beta", 0.5))
        log_m = np.logaddexp(log_p + np.log(beta), log_q + np.log(1 - beta))
        kl = (beta * p * (log_p - log_m) + (1 - beta) * q * (log_q - log_m)).sum(-1)
        dz = (1 - beta) * _centred(-np.logaddexp(0, log_p - log_q + np.log(beta) - np.log(1 - beta)), q)
    elif options["direction"] == "tv":
        kl, dz = np.abs(p - q).sum(-1) / 2, _centred(np.sign(log_q - log_p) / 2, q)
    else:
        kl, dz = (q * (log_q - log_p)).sum(-1), _centred(log_q - log_p, q)
    draw_ = np.zeros((*unmasked.shape, len(weight)))
    draw_[..., : p.shape[-1]] = seed * dz * slope
    flat = draw_.reshape(-1, len(weight))
    dweight = flat.T @ hidden.reshape(-1, hidden.shape[-1])
    gradients = [draw_ @ weight, dweight if student_options["weight_layout"] == "vh" else dweight.T, flat.sum(0)]
    return Expected(np.where(unmasked, kl, 0), tuple(gradients[: len(drawn.student)]))


def _centred(t, q):
    """Returns q (t - Σ q t). t is relative to t at the largest q, so nothing large cancels if q is nearly one-hot."""
    t = t - np.take_along_axis(t, q.argmax(-1)[..., None], -1)
    return q * (t - (q * t).sum(-1, keepdims=True))


def _log_softmax(arrays, unmasked, vocab_size, temperature, logit_softcap, logit_scale, weight_layout):
    """Returns log-probabilities, d logit / d raw product, hidden, and the weight as [V, H]."""
    hidden, weight, *bias = arrays
    hidden = np.asarray(hidden.astype(weight.dtype).astype(jnp.float32), np.float64)
    weight = np.asarray(weight.astype(jnp.float32), np.float64)
    weight = weight if weight_layout == "vh" else weight.T
    hidden = np.where(unmasked[..., None], hidden, 0)
    raw = (hidden @ weight.T + (np.asarray(bias[0], np.float64) if bias else 0))[..., :vocab_size]
    z, slope = logit_scale * raw, np.full_like(raw, logit_scale)
    if logit_softcap is not None:
        slope /= np.cosh(z / logit_softcap) ** 2
        z = logit_softcap * np.tanh(z / logit_softcap)
    tau = np.broadcast_to(np.asarray(temperature, np.float64), unmasked.shape)[..., None]
    z, slope = z / tau, slope / tau
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True)), slope, hidden, weight


def evaluate(drawn: Drawn, function: Any = linear_kl, **more: Any) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Returns the divergence of ``function``, and the gradients of Σ seed · kl in the student's operands."""

    def objective(*student: jax.Array) -> Any:
        biases = {"bias": student[2], "teacher_bias": drawn.teacher[2]} if len(student) == 3 else {}
        options = {"precision": "highest", **drawn.options, **biases, **more}
        kl = function(*student[:2], *drawn.teacher[:2], **options)
        return jnp.sum(drawn.seed * kl), kl

    argnums = tuple(range(len(drawn.student)))
    gradients, kl = jax.jit(jax.grad(objective, argnums=argnums, has_aux=True))(*drawn.student)
    return kl, gradients
