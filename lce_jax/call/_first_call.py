"""Checks kernels that have not yet run on this kind of card: the first call compares them with `lce_jax.xla`.

The comparison runs once per kind of device, on a small problem. The problem has tokens without labels, a vocabulary
that ends inside a tile, a cache of two tiles, both gradients, and a sum to which dweight is added. The device is
described with two multiprocessors, so that each of these computes several tiles. The first call of `linear_kl` also
compares the kernels of two heads. The comparison takes about as long as the compilation of the kernels. If results
differ, the process runs no kernels. If they agree, later processes of the user do not compare again (`_remembered`).
The comparison does not cover gradient thresholds, candidates, a padded vocabulary or mixtures of two heads.
"""

from __future__ import annotations

import contextvars
import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lce_jax import mosaic
from lce_jax.call import _remembered
from lce_jax.mathematics import _kl, _logprobs
from lce_jax.mathematics._kl import Pair
from lce_jax.mosaic import _generations
from lce_jax.mosaic._call import Generation
from lce_jax.types._types import Call, Device, LogprobOutput, Operands, RequestedGradients, Results
from lce_jax.xla import _kl as xla_kl
from lce_jax.xla import _logprobs as xla
from lce_jax.xla._walk import Head, HeadTokens, Shard

T, H, V, BLOCKS = 200, 256, 896, 2  # V is 3.5 tiles: two cached ones and two that share kernels with them
CACHE_BYTES = 300_000, 900_000  # enough for two tiles, with one head and with two
BOUNDS = dict.fromkeys(("logprobs", "entropy", "lse", "kl"), 1e-4)  # in nats
BOUNDS |= dict.fromkeys(("dhidden", "dweight", "dweight of a sum"), 0.03)  # relative

_logger = logging.getLogger("lce_jax")
_one_at_a_time = threading.Lock()
_recalled: dict[tuple[Generation, Device, int], str] = {}  # which earlier process compared, when, and in which file


def refuse_kernels(call: Call) -> str | None:
    """Returns what is wrong with the kernels of ``call``; None if they are right, or this process lacks the device."""
    device = call.device
    for heads in (1,) if call.teacher is None else (1, 2):
        local = list_devices(device) if _generations.unchecked(device, heads) else []
        reason = check_once(device, functools.partial(_compare, device, local[0], heads), heads) if local else None
        if reason is not None:
            return reason
    return None


def check_once(
    device: Device, compare: Callable[[], dict[str, float]], heads: int = 1, compared_by: str = "JAX"
) -> str | None:
    """Returns what is wrong with the kernels on ``device``; None if they are right.

    ``compare()`` returns the errors of `measure_errors`. ``compare`` runs only if neither this process nor an earlier
    one has compared. ``compared_by``: the caller's name, for the record.
    """
    with _one_at_a_time:
        generation = _generations.unchecked(device, heads)
        if generation is not None:
            key = generation, device, heads
            _generations.FAULTS[key] = reason = _recall_or_compare(*key, compare, compared_by)
            if reason is not None:
                function = "" if heads == 1 else " for linear_kl"
                _logger.warning('"mosaic_gpu" is not used in this process%s: %s', function, reason)
    return _generations.device_refusal(device, heads)


def _recall_or_compare(
    generation: Generation, device: Device, heads: int, compare: Callable[[], dict[str, float]], compared_by: str
) -> str | None:
    """Returns what is wrong; None if nothing is. Only comparisons of this package's own kernels are remembered."""
    here = functools.partial(_compare_in_thread, device, compare)
    comparison = _remembered.find_comparison(device, heads) if generation in _generations.RELEASED else None
    if comparison is None:
        return here()
    reason, recalled = _remembered.recall_or_compare(comparison, here, compared_by)
    if recalled is not None:
        _recalled[generation, device, heads] = recalled
        _logger.info("The kernels on %s are not compared again: %s", device.kind, recalled)
    return reason


def list_devices(device: Device) -> list[jax.Device]:
    """Returns the devices of this process that are of the same kind as ``device``."""
    return [one for one in jax.local_devices() if one.device_kind == device.kind]


def notes(device: Device) -> tuple[str, ...]:
    """Returns the plan's note on kernels that have not run on ``device``."""
    generation = _generations.serving(device)
    if generation is None or generation.ran_on is None:
        return ()
    then = "this process" if _generations.unchecked(device) is None else "the first call"
    compared = _recalled.get((generation, device, 1), f"{then} compares a small call with xla")
    return (f"the same source ran on {generation.ran_on}, not on {device.kind}: {compared}",)


def measure_errors(results: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> dict[str, float]:
    """Returns the largest error of each result: absolute for values, relative for gradients.

    A gradient's error is the largest of its rows' errors. A row's error is divided by the row's norm, or by the median
    norm if that is larger.
    """
    largest = {}
    for name, right in expected.items():
        apart, lengths = np.abs(results[name].astype(np.float64) - right), np.ones(1)
        if name.startswith("d"):
            apart, lengths = (np.linalg.norm(x.astype(np.float64), axis=1) for x in (apart, right))
        largest[name] = float((apart / np.maximum(lengths, np.median(lengths))).max())
    return largest


def _compare_in_thread(device: Device, compare: Callable[[], dict[str, float]]) -> str | None:
    """Runs ``compare`` in a new thread, because traces, meshes and modes of JAX and PyTorch belong to the thread."""
    reasons: list[str | None] = []

    def run() -> None:
        try:
            off = {name: error for name, error in compare().items() if not error <= BOUNDS[name]}
            errors = ", ".join(f"{name} {error:.1e} (at most {BOUNDS[name]})" for name, error in off.items())
            reason = f"is off by {errors}" if off else None
        except Exception as error:
            reason = f"raised {type(error).__name__}: {str(error).partition('\n')[0]}"
        reasons.append(reason and f"its first call on {device.kind} {reason}")

    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), name="lce_first_call")
    thread.start()
    thread.join()
    return reasons[0]


def _compare(device: Device, local: jax.Device, heads: int) -> dict[str, float]:
    """Runs the kernels and `lce_jax.xla` on the ``local`` device, and returns the errors of the kernels."""
    run_heads = _run_head if heads == 1 else _run_two_heads
    call = Call(
        num_tokens=T, hidden_size=H, columns=V, vocab_size=V, dtype=jnp.dtype("bfloat16"),
        device=device._replace(core_count=BLOCKS), cache_bytes=CACHE_BYTES[heads - 1],
    )  # fmt: skip
    rng = np.random.default_rng(0)
    hidden, weight = rng.standard_normal((T, H)), rng.standard_normal((V, H)) * 2 / np.sqrt(H)
    arrays: Any = [hidden.astype(call.dtype), weight.astype(call.dtype), rng.integers(-1, V, T).astype(np.int32)]
    arrays += [rng.uniform(0.5, 2.0, T).astype(np.float32), rng.standard_normal((3, T)).astype(np.float32)]
    with jax.default_device(local):
        programs = [jax.jit(functools.partial(run_heads, one, call)) for one in (mosaic, xla)]
        return measure_errors(*(jax.device_get(run(*jax.device_put(arrays, local))) for run in programs))


def _run_head(one: Any, call: Call, hidden: Any, weight: Any, targets: Any, inverse: Any, seeds: Any) -> dict[str, Any]:
    operands = Operands(hidden, weight, targets, inverse, None, None)
    stats, cache = one.statistics(operands, call, True)
    scale, factor = _logprobs.compute_row_scale(call, inverse), _logprobs.compute_row_factor(call, inverse)
    compute = functools.partial(mosaic.compute_per_token, call) if one is mosaic else lambda run, *x: run(*x)
    out = _logprobs.finish(stats, scale, targets, None, V, None, compute).outputs
    rows = _logprobs.row_coefficients(stats, Results(LogprobOutput(*seeds)), scale, factor, None, call, V)
    results = {"logprobs": out.logprobs, "entropy": out.entropy, "lse": out.lse}
    results["dhidden"], results["dweight"], *_ = one.gradients(operands, call, rows, cache, may_overwrite_cache=False)
    frozen_hidden, start = call.replace(gradients=RequestedGradients(hidden=False)), weight.astype(jnp.float32)
    results["dweight of a sum"] = one.gradients(operands, frozen_hidden, rows, cache, dweight=start)[1] - start
    return results


def _run_two_heads(
    one: Any, call: Call, hidden: Any, weight: Any, targets: Any, inverse: Any, seeds: Any
) -> dict[str, Any]:
    """Returns a divergence and its gradients.

    The teacher has the student's weight, and the student's hidden states in reverse order.
    """
    del targets
    factor, teacher_scale = _logprobs.compute_row_factor(call, inverse), _logprobs.compute_row_scale(call, None)
    plan = xla_kl.KLPlan(Pair(call, call), "reverse", call.columns)
    tokens = HeadTokens(hidden, inverse, None), HeadTokens(hidden[::-1], None, None)
    shard = Shard(tokens, (Head(weight, None),) * 2, None, None, None)
    kernels = mosaic.kl_statistics, mosaic.kl_gradients
    statistics, gradients = kernels if one is mosaic else (xla_kl.statistics, xla_kl.gradients)
    stats, cache = statistics(plan, shard, True)
    dhidden, dweight, *_ = gradients(plan, shard, _kl.coefficients(stats, seeds[0], factor, None), cache)
    return {"kl": _kl.finish(stats, teacher_scale, None), "dhidden": dhidden, "dweight": dweight}
