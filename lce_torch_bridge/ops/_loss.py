"""`linear_loss`: any per-token loss of a head's results, with gradients computed in the forward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from lce_jax.types import loss_signatures, messages, scalars
from lce_torch_bridge._types import Entropy, LogprobOutput, Tensors, TorchCall, Wgrad, make_call
from lce_torch_bridge.call import _arguments, _checks, _dtensor
from lce_torch_bridge.call._arguments import Arguments, Options
from lce_torch_bridge.launched_directly._launch_with import choose_way
from lce_torch_bridge.operators import _loss
from lce_torch_bridge.operators._loss import LossAndGradients, LossPlan
from lce_torch_bridge.ops._mixed_tokens import TokenLosses, make_key, refuse_mixed_tokens
from lce_torch_bridge.tensors import _device, _padding, _tensor_parallel
from lce_torch_bridge.tensors._device import is_differentiated
from lce_torch_bridge.tensors._weight import check_main_grad

if TYPE_CHECKING:
    from lce_torch_bridge._types import PerhapsWithoutEntropy

CHUNK_BYTES = 1400 << 20  # 4096 tokens at a vocabulary of 151,936
NO_CANDIDATES = "loss_fn gets log-probability, entropy and lse"
NO_CACHE = "linear_loss saves no cache for a backward pass; chunk_bytes limits the bytes of one chunk"
NO_PARTS = "linear_loss caches exponentials of the forward's tiles, which a backward cannot use with vocabulary parts"
REFUSED = {
    "mean_logit": NO_CANDIDATES, "candidates": NO_CANDIDATES, "cache_bytes": NO_CACHE, "vocab_part_size": NO_PARTS,
}  # fmt: skip


@overload
def linear_loss(  # type: ignore[overload-overlap]  # True is a bool
    loss_fn: Callable[..., torch.Tensor], hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor,
    *per_token: torch.Tensor | float, where: torch.Tensor | None = None, ignore_index: int | None = None,
    wgrad: Wgrad = "return", cotangent: float | None = None, chunk_bytes: int | None = None,
    entropy: Literal[True, "metric"] = True, **options: object,
) -> tuple[torch.Tensor, LogprobOutput]: ...  # fmt: skip
@overload
def linear_loss(
    loss_fn: Callable[..., torch.Tensor], hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor,
    *per_token: torch.Tensor | float, where: torch.Tensor | None = None, ignore_index: int | None = None,
    wgrad: Wgrad = "return", cotangent: float | None = None, chunk_bytes: int | None = None,
    entropy: Entropy, **options: object,
) -> tuple[torch.Tensor, PerhapsWithoutEntropy]: ...  # fmt: skip
@_device.not_compiled("lce_torch_bridge.linear_loss differentiates loss_fn as it runs")
def linear_loss(
    loss_fn: Callable[..., torch.Tensor],
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *per_token: torch.Tensor | float,
    where: torch.Tensor | None = None,
    ignore_index: int | None = None,
    wgrad: Wgrad = "return",
    cotangent: float | None = None,
    chunk_bytes: int | None = None,
    **options: object,
) -> tuple[torch.Tensor, LogprobOutput]:
    """Returns Σ loss_fn(logprob, entropy, lse, …) over the tokens; the forward also computes the sum's gradients.

    The derivative of a per-token loss can be computed as soon as the token's results are known. So a differentiated
    call computes results, losses and gradients together, one chunk of tokens after another. It recomputes nothing, and
    caches the exponentials of one chunk at a time. A call that is not differentiated is a plain forward. Divide the sum
    by the number of tokens or of sequences, as your objective requires.

    Args:
        hidden, weight, labels, where, ignore_index: as in `linear_logprobs`.
        loss_fn: a function ``loss_fn(logprobs, entropy, lse, *per_token)`` of results of a chunk's tokens, ``[t]``
            each; ``entropy`` is None with ``entropy=False``. It is differentiable PyTorch code that returns ``[t]``
            losses. Each loss must depend only on the values of its own token, because chunks may end at any token.
            loss_fn may close over numbers and over tensors without a gradient. Compute a loss that mixes tokens, such
            as GSPO's with a sequence's mean, from the results of `linear_logprobs` with
            `lce_torch_bridge.rows.segment_mean`. A new function is tested: its losses of up to 16 tokens are computed
            in one call and again in two parts, and a difference raises. A function is new if its code, or a name, flag
            or function that it closes over, has not been seen. The test leaves torch's random state unchanged, and
            skips functions that draw random numbers or return other losses when called again.
        per_token: further arguments of ``loss_fn``. If you pass them by name, such as ``advantage=...``, unknown and
            missing names are errors. Each is a tensor of shape (), or one whose shape begins with labels' shape, where
            1 may replace a size (``[b, 1]`` for one value per sequence). Tensors that require a gradient get one.
            Python numbers are passed to ``loss_fn`` unchanged.
        wgrad: "return" returns the weight's gradient to autograd. "main_grad" adds it to ``weight.main_grad`` in the
            backward, as Megatron's gradient-accumulation fusion does, and sets ``grad_added_to_main_grad``. With
            several chunks, the sum that is added is float32.
        cotangent: the derivative of the final loss with respect to the returned sum, if it is known in advance: 1.0 if
            the sum itself is differentiated, 1 / n for a mean, or the factor of Megatron's schedule. The gradients are
            computed for this cotangent and rounded once. With ``wgrad="main_grad"`` the forward then adds the weight
            gradient (dweight) to ``weight.main_grad`` and needs no sum of its own. Run one backward per call, and zero
            ``main_grad`` before the call. The backward waits until the GPU has compared the actual cotangent with this
            one. If they differ by at most a relative 1e-6, as another order of the same products would cause, the
            backward scales the gradients that it returns, but not what is already in ``main_grad``. None: any
            cotangent.
        chunk_bytes: the bytes that the exponentials of one chunk of tokens may take. They do not include the float32
            sum of dweight, the gradient of ``weight``. A chunk has at least 128 tokens. Fewer chunks are faster,
            because each chunk adds to that sum. All tokens form one chunk if this takes no more memory than several
            chunks and the sum. None: 1400 MiB.
        **options: ``bias``, ``tp_group``, ``temperature``, ``logit_scale``, ``logit_softcap``, ``vocab_size``,
            ``entropy``, ``stats``, ``out_of_vocab``, ``reduce_grad_hidden``, ``gradient_threshold``, ``logit_floor``,
            ``implementation`` and ``lora``, as in `linear_logprobs`. All other names are arguments of ``loss_fn``.

    Returns:
        The float32 sum over the unmasked tokens, and a `LogprobOutput` for metrics, which has no gradient.

    Raises:
        lce_jax.UnsupportedError: an implementation requested by name cannot run the call; the message says why.
        ValueError, TypeError: shapes, dtypes, devices or options do not fit; the message has their values. They are
            also raised if loss_fn does not return one floating-point value per token, mixes tokens, or closes over a
            tensor that requires a gradient. The backward raises if the actual cotangent is not ``cotangent``.
        Exception: loss_fn raised it. If gradients have already been added to ``weight.main_grad``, a note on the
            exception says for how many tokens.
        NotImplementedError: with ``create_graph=True``, inside a transform of ``torch.func``, and for tensors without
            values (meta, fake).
        RuntimeError: in the cases that `linear_logprobs` lists.

    Memory:
        A differentiated call holds exponentials of ``chunk_bytes``, O(T), and the gradients, which exist from the
        forward on. Several chunks also take a float32 dweight of V·H·4 bytes. With ``cotangent`` and
        ``wgrad="main_grad"``, dweight takes no memory of its own if ``main_grad`` is float32 and the kernels are
        launched directly (see `explain`).

    Numerics:
        With several chunks, dweight is summed in float32, multiplied by the sum's cotangent (1/n for a mean) and
        rounded once. dhidden, and dweight of a single chunk, are rounded before and after that product. Multiplying by
        a power of two is exact, and 1 takes no time. For any other cotangent, pass ``cotangent`` or let ``loss_fn``
        scale its losses to avoid the second rounding. float16 gradients are rounded only after multiplying by the
        cotangent, because loss scaling must come first. The logits' derivatives are rounded to float16 before that: a
        power of two scales them below 2^15, and derivatives 2^39 times smaller than the largest one become 0. Two runs
        are bitwise equal.

    Compilation:
        ``torch.compile`` leaves the call out of its graphs. Inside an activation checkpoint the first forward neither
        computes nor saves gradients, and the head takes four matrix products in all instead of three.

    Example:
        >>> import torch
        >>> from lce_torch_bridge import linear_loss
        >>> def policy_gradient(logprobs, entropy, lse, advantage):
        ...     return -advantage * logprobs - 0.01 * entropy
        >>> hidden, weight = torch.ones(4, 8), torch.zeros(1000, 8, requires_grad=True)
        >>> advantages = torch.tensor([1.0, -1.0, 2.0, 0.0])
        >>> total, out = linear_loss(policy_gradient, hidden, weight, torch.arange(4), advantage=advantages)
        >>> total.backward()
        >>> round(total.item(), 3), out.logprobs.shape         # 2·ln 1000 - 4·0.01·ln 1000
        (13.539, torch.Size([4]))
    """
    parameters = {"where": where, "ignore_index": ignore_index, "wgrad": None if wgrad == "return" else wgrad,
                  "cotangent": cotangent, "chunk_bytes": chunk_bytes}  # fmt: skip
    named, rest = loss_signatures.split_loss_arguments(loss_fn, per_token, options, Options._fields, parameters)
    _arguments.check_names(linear_loss, rest, REFUSED, loss_fn)
    scalars.check_choice("wgrad", wgrad, ("return", "main_grad"))
    if chunk_bytes is not None:
        chunk_bytes = scalars.num_bytes("chunk_bytes", chunk_bytes)
    options_of_call = Options(where=where, ignore_index=ignore_index, wgrad=wgrad, **rest)
    arguments = _arguments.parse_arguments(hidden, weight, labels, options_of_call)
    if not (_checks.has_values(arguments.hidden) and _checks.has_values(arguments.weight)):
        raise NotImplementedError(
            "linear_loss differentiates loss_fn as it runs, which meta and fake tensors and transforms of torch.func "
            "do not allow: apply loss_fn to the results of linear_logprobs, and sum"
        )
    _checks.warn_of_labels(arguments.labels, arguments.where, arguments.call.jax.vocab_size)
    if cotangent is not None:
        cotangent = scalars.number("cotangent", cotangent)
    x, rows = _arguments.flatten_operands(arguments, _arguments.prepare_weight(arguments, wgrad))
    all_per_token = {f"per_token[{i}]": y for i, y in enumerate(per_token)} | named
    tensors = {
        name: _flatten_per_token(name, y, arguments, rows)
        for name, y in all_per_token.items()
        if not scalars.is_number(y)
    }

    def call_loss(fields: dict[str, torch.Tensor], *chunk: torch.Tensor) -> torch.Tensor:
        values = all_per_token | dict(zip(tensors, chunk, strict=True))
        by_place, by_name = list(values.values())[: len(per_token)], {name: values[name] for name in named}
        return loss_fn(fields["logprobs"], fields.get("entropy"), fields["lse"], *by_place, **by_name)

    flat = [*tensors.values()]
    total, fields = sum_losses(call_loss, arguments, x, flat, wgrad, cotangent, chunk_bytes)
    differentiable = arguments.call.differentiable if is_differentiated(*x[:3]) else ()
    refuse_mixed_tokens(
        make_key(loss_fn, all_per_token.values()),
        x.hidden.device,
        functools.partial(TokenLosses, call_loss, fields, flat, differentiable),
        functools.partial(
            _make_error, where, ignore_index, [*rest], labels, wgrad == "main_grad" and cotangent is not None
        ),
    )
    placed: Any = {name: _arguments.place_results(field, rows, arguments.labels) for name, field in fields.items()}
    return total, LogprobOutput(**{"entropy": None, **placed})


def _make_error(
    where: torch.Tensor | None,
    ignore_index: int | None,
    options: list[str],
    labels: torch.Tensor,
    is_in_main_grad: bool,
    reason: str,
) -> ValueError:
    """Returns the error for a ``loss_fn`` that mixes tokens.

    ``is_in_main_grad`` says whether the forward has added gradients to ``weight.main_grad``.
    """
    mask = "where"
    if where is not None and where.dtype != torch.bool:
        mask = "torch.zeros_like(labels, dtype=torch.bool).flatten().index_fill(0, where.long(), True).view_as(labels)"
    error = messages.mixed_tokens_error(
        reason,
        function="linear_logprobs",
        shape=labels.shape,
        where=None if where is None else mask,
        ignore_index=ignore_index,
        options=options,
    )
    if is_in_main_grad:
        error.add_note("weight.main_grad may hold the gradients of all tokens: zero it, or restore what it held")
    return error


def sum_losses(
    loss_fn: Callable[..., torch.Tensor],
    arguments: Arguments,
    x: Tensors,
    per_token: list[torch.Tensor],
    wgrad: Wgrad,
    cotangent: float | None,
    chunk_bytes: int | None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns the sum of ``loss_fn(results by name, *per_token)`` over the tokens of ``x``, and the results."""
    call = arguments.call
    rows = choose_chunk_rows(len(x.labels), x.weight, chunk_bytes, wgrad, call)
    plan = LossPlan(loss_fn, call, rows, choose_way(x.hidden))
    options: Any = {
        f"{name}.requires_grad": is_differentiated(y) for name, y in (("hidden", x.hidden), ("weight", x.weight))
    }
    options |= {"weight.dtype": x.weight.dtype, "chunk_bytes": resolve_chunk_bytes(chunk_bytes), "wgrad": wgrad}
    _tensor_parallel.compare_options(call, x.hidden.device, in_chunks=True, bias=x.bias is not None, **options)
    if not is_differentiated(*x[:3]):
        return _loss.sum_losses(plan, x, per_token)
    chunk_call = make_call(call.text, cache_bytes=_loss.ALL)
    main_grad = check_main_grad(arguments.weight) if wgrad == "main_grad" else None
    plan = plan._replace(call=chunk_call, main_grad=main_grad, cotangent=cotangent)
    _refuse_recomputation(plan)
    total, *fields = LossAndGradients.apply(plan, *x[:5], x.floor, *per_token)
    return total, dict(zip(call.fields, fields, strict=True))


def resolve_chunk_bytes(chunk_bytes: int | None) -> int:
    """Returns the value of ``chunk_bytes``, or its default for None."""
    return CHUNK_BYTES if chunk_bytes is None else chunk_bytes


def choose_chunk_rows(tokens: int, weight: torch.Tensor, chunk_bytes: int | None, wgrad: Wgrad, call: TorchCall) -> int:
    """Returns the number of tokens in a chunk: the largest number that fits.

    The products take the same time for chunks of any size, but each chunk also reads and writes the float32 sum of
    dweight, so fewer chunks are faster. More bytes never make more chunks.

    A single chunk needs no float32 sum. It computes dweight itself, which is smaller than the sum, from the cached
    exponentials. So all tokens are one chunk if their exponentials take at most ``chunk_bytes`` plus the bytes that the
    sum would take beyond dweight. This is faster and takes less memory. The extra bytes are not granted if a sum is
    needed anyway, if no exponentials are cached, or on a CPU, where exponentials are float32.
    """
    on_cpu, max_bytes = weight.device.type == "cpu", resolve_chunk_bytes(chunk_bytes)
    row_bytes = weight.shape[0] * (4 if on_cpu else weight.element_size())
    sums = wgrad == "return" and weight.requires_grad and weight.dtype == torch.bfloat16
    spared = weight.numel() * 2 if sums and not (on_cpu or call.jax.gradient_threshold) else 0
    if _padding.size(tokens) * row_bytes <= max_bytes + spared:
        return max(tokens, 1)
    return _padding.round_down(max_bytes // row_bytes)


def _refuse_recomputation(plan: LossPlan) -> None:
    """Refuses to add to main_grad inside a backward, where an activation checkpoint runs the forward a second time."""
    if plan.target is not None and _device.current_graph_task_id() != -1:
        raise NotImplementedError(
            f"linear_loss(wgrad='main_grad', cotangent={plan.cotangent!r}) adds to main_grad as it runs, and this is a "
            "backward pass, where an activation checkpoint runs it again, for each backward: leave the head out of the "
            "checkpoint, or leave cotangent out"
        )


def _flatten_per_token(name: str, y: Any, arguments: Arguments, rows: torch.Tensor | None) -> torch.Tensor:
    """Checks a per-token argument, and returns its values for the unmasked tokens, flattened."""
    labels = arguments.labels
    (plain,) = _dtensor.tokens(**{name: y})
    full = _checks.expand_per_token(name, plain, arguments.hidden, labels)
    flat: torch.Tensor = _arguments.select_rows(full.reshape(labels.numel(), *full.shape[labels.ndim :]), rows, 0.0)
    return flat
