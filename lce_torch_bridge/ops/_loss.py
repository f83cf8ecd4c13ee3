"""`linear_loss`: any per-token loss of a head's results, its gradients computed in the forward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from lce_jax.types import scalars
from lce_torch_bridge._types import Entropy, LogprobOutput, Tensors, TorchCall, Wgrad, call_with
from lce_torch_bridge.call import _arguments, _checks, _dtensor
from lce_torch_bridge.call._arguments import Arguments, Options
from lce_torch_bridge.launched_directly._way import way_of
from lce_torch_bridge.operators import _loss
from lce_torch_bridge.operators._loss import LossAndGradients, LossPlan
from lce_torch_bridge.ops._mixed_tokens import TokenLosses, key_of, refuse_mixed_tokens
from lce_torch_bridge.tensors import _device, _padding, _tensor_parallel
from lce_torch_bridge.tensors._device import is_differentiated
from lce_torch_bridge.tensors._weight import main_grad_of

if TYPE_CHECKING:
    from lce_torch_bridge._types import PerhapsWithoutEntropy

CHUNK_BYTES = 1400 << 20  # chunks of 4096 tokens at V 151936
NO_CANDIDATES = "loss_fn gets log-probability, entropy and lse"
NO_CACHE = "linear_loss keeps nothing for a backward pass, and chunk_bytes says how many bytes one chunk may take"
NO_PARTS = "linear_loss keeps exponentials of the forward's tiles, which no backward can use of a vocabulary in parts"
REFUSED = {
    "mean_logit": NO_CANDIDATES, "candidates": NO_CANDIDATES, "cache_bytes": NO_CACHE, "vocab_part_size": NO_PARTS,
}  # fmt: skip


@overload
def linear_loss(  # type: ignore[overload-overlap]  # bool has True in it
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
    """Σ loss_fn(logprob, entropy, lse, …) over the tokens, its gradients computed in the forward.

    The derivative of a per-token loss is known as soon as the token's results are. So a call that is differentiated
    computes results, losses and gradients together, one chunk of tokens after the other. It recomputes nothing, and
    keeps the exponentials of one chunk alone. A call that is not differentiated is a plain forward. Divide the sum by
    what you like.

    Args:
        hidden, weight, labels, where, ignore_index: as in `linear_logprobs`.
        loss_fn: ``loss_fn(logprobs, entropy, lse, *per_token)`` of a chunk's tokens, ``[t]`` each, ``entropy`` None
            with ``entropy=False``. Any differentiable PyTorch code that returns ``[t]`` losses, each made of its own
            token's numbers alone, because chunks end anywhere. It may close over numbers and tensors without a
            gradient. A loss that mixes tokens, such as one with a sequence's mean (GSPO), is computed from the results
            of `linear_logprobs`. The first call also gives the function up to 16 of the tokens, together and in two
            parts, and refuses it if their losses differ. A call is the first one with the function's code, and with the
            names, flags and functions that the code closes over. torch's random numbers are as they would be. A
            function that draws some, or does not repeat itself, is not compared.
        per_token: the further arguments of ``loss_fn``. Give them by name, ``advantage=...``: then none is taken for
            another, and a name that ``loss_fn`` does not have, or that is missing, is refused. Each is a tensor whose
            shape begins with that of labels, with 1 in place of a size where all are the same (``[b, 1]`` for one
            number per sequence), or is (); those that require a gradient get one. ``loss_fn`` gets numbers as they are.
        wgrad: "return" gives the weight its gradient. "main_grad" adds it to ``weight.main_grad`` in the backward, in
            float32 if there are several chunks, as Megatron's gradient-accumulation fusion does, and sets
            ``grad_added_to_main_grad``.
        cotangent: the number that the sum will be multiplied by until the backward begins, if it is known before: 1.0
            if the sum itself is differentiated, 1 / n for a mean, or what Megatron's schedule multiplies by. The
            gradients are computed for this number and rounded once. With ``wgrad="main_grad"`` the forward then adds
            the weight gradient (dweight) to ``weight.main_grad`` and needs no sum of its own: call it once for each
            backward, and zero ``main_grad`` before. The backward waits for the GPU to compare its cotangent with this
            one. If they differ by at most 1e-6 of it, as other orders of the same products do, the backward scales what
            is returned, not what has been added. None: any number.
        chunk_bytes: bytes that the exponentials of one chunk of tokens may take beside the sum of dweight; at least 128
            tokens are a chunk. Fewer chunks are faster, because each adds to that sum. All tokens are one chunk where
            they need no more memory than several chunks and their sum. None: 1400 MiB.
        **options: ``bias``, ``tp_group``, ``temperature``, ``logit_scale``, ``logit_softcap``, ``vocab_size``,
            ``entropy``, ``stats``, ``out_of_vocab``, ``reduce_grad_hidden``, ``gradient_threshold``, ``logit_floor``,
            ``implementation`` and ``lora``, as in `linear_logprobs`. All other names are arguments of ``loss_fn``.

    Returns:
        The sum over the tokens that are kept, float32, and a `LogprobOutput` for metrics, through which no gradient
        flows.

    Raises:
        lce_jax.UnsupportedError: an implementation asked for by name cannot serve the call; the message says why.
        ValueError, TypeError: shapes, dtypes, devices or options that do not fit, with the offending values. Also a
            loss_fn that does not return one floating-point number per token, that mixes tokens, or that closes over a
            tensor that requires a gradient. And, in the backward, another cotangent than the one given.
        Exception: what loss_fn raises. If the forward has added to ``weight.main_grad`` by then, a note of the
            exception says the gradients of how many tokens.
        NotImplementedError: under ``create_graph=True``, inside a transform of ``torch.func``, and for tensors without
            values (meta, fake).
        RuntimeError: in the cases that `linear_logprobs` lists.

    Memory:
        A call that is differentiated holds ``chunk_bytes`` and O(T) beyond the gradients, which exist from the forward
        on. Several chunks also take the weight gradient (dweight) in float32, V·H·4 bytes. With ``cotangent`` and
        ``wgrad="main_grad"`` there is no dweight at all, if ``main_grad`` is float32 and the kernels are launched
        directly (`explain`).

    Numerics:
        dweight of several chunks is summed over them in float32, multiplied by the sum's cotangent (1/n for a mean) and
        rounded once. dhidden, and dweight of one chunk, are rounded before that product and after it. A cotangent that
        is a power of two changes no digit, and 1 takes no time. ``cotangent``, or losses that ``loss_fn`` scales
        itself, avoid the second rounding of any other. In float16 they are rounded only after the
        product, because loss scaling must come first. float16 products take the derivatives of the logits before: a
        power of two scales them below 2^15, and those 2^39 times smaller than the largest are 0. Two runs are bitwise
        equal.

    Compilation:
        ``torch.compile`` leaves the call out of its graphs. Inside an activation checkpoint the first forward computes
        no gradients and keeps none: four products in all. Left out of the checkpoint, the head takes three.

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
    named, rest = scalars.split_loss_arguments(loss_fn, per_token, options, Options._fields, parameters)
    _arguments.check_names(linear_loss, rest, REFUSED, loss_fn)
    scalars.check_choice("wgrad", wgrad, ("return", "main_grad"))
    if chunk_bytes is not None:
        chunk_bytes = scalars.num_bytes("chunk_bytes", chunk_bytes)
    told = Options(where=where, ignore_index=ignore_index, wgrad=wgrad, **rest)
    given = _arguments.of_call(hidden, weight, labels, told)
    if not (_checks.has_values(given.hidden) and _checks.has_values(given.weight)):
        raise NotImplementedError(
            "linear_loss differentiates loss_fn as it runs, which meta and fake tensors and transforms of torch.func "
            "do not allow: apply loss_fn to the results of linear_logprobs, and sum"
        )
    _checks.warn_of_labels(given.labels, given.where, given.call.jax.vocab_size)
    if cotangent is not None:
        cotangent = scalars.number("cotangent", cotangent)
    x, rows = _arguments.operands(given, _arguments.weight_of(given, wgrad))
    arguments = {f"per_token[{i}]": y for i, y in enumerate(per_token)} | named
    tensors = {name: _flat(name, y, given, rows) for name, y in arguments.items() if not scalars.is_number(y)}

    def of_fields(fields: dict[str, torch.Tensor], *own: torch.Tensor) -> torch.Tensor:
        found = arguments | dict(zip(tensors, own, strict=True))
        by_place, by_name = list(found.values())[: len(per_token)], {name: found[name] for name in named}
        return loss_fn(fields["logprobs"], fields.get("entropy"), fields["lse"], *by_place, **by_name)

    own = [*tensors.values()]
    total, fields = sum_of_losses(of_fields, given, x, own, wgrad, cotangent, chunk_bytes)
    differentiable = given.call.differentiable if is_differentiated(*x[:3]) else ()
    refuse_mixed_tokens(
        key_of(loss_fn, arguments.values()),
        x.hidden.device,
        functools.partial(TokenLosses, of_fields, fields, own, differentiable),
        functools.partial(
            _refusal, where, ignore_index, [*rest], labels, wgrad == "main_grad" and cotangent is not None
        ),
    )
    placed: Any = {name: _arguments.placed(field, rows, given.labels) for name, field in fields.items()}
    return total, LogprobOutput(**{"entropy": None, **placed})


def _refusal(
    where: torch.Tensor | None,
    ignore_index: int | None,
    options: list[str],
    labels: torch.Tensor,
    adds: bool,
    found: str,
) -> ValueError:
    """The error of a ``loss_fn`` that mixes tokens; ``adds``: the forward has added its gradients to main_grad."""
    mask = "where"
    if where is not None and where.dtype != torch.bool:
        mask = "torch.zeros_like(labels, dtype=torch.bool).flatten().index_fill(0, where.long(), True).view_as(labels)"
    error = scalars.mixed_tokens_error(
        found,
        function="linear_logprobs",
        shape=labels.shape,
        where=None if where is None else mask,
        ignore_index=ignore_index,
        options=options,
        mean=("x.mean(-1)", "torch.where(mask, x, 0).sum(-1) / mask.sum(-1).clamp(min=1)"),
    )
    if adds:
        error.add_note("weight.main_grad may hold the gradients of all tokens: zero it, or restore what it held")
    return error


def sum_of_losses(
    loss_fn: Callable[..., torch.Tensor],
    given: Arguments,
    x: Tensors,
    own: list[torch.Tensor],
    wgrad: Wgrad,
    cotangent: float | None,
    chunk_bytes: int | None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The sum of ``loss_fn(results by name, *own)`` over the tokens of ``x``, and these results."""
    plan = LossPlan(
        loss_fn, given.call, chunk_rows(len(x.labels), x.weight, chunk_bytes, wgrad, given.call), way_of(x.hidden)
    )
    told: Any = {
        f"{name}.requires_grad": is_differentiated(y) for name, y in (("hidden", x.hidden), ("weight", x.weight))
    }
    told |= {"weight.dtype": x.weight.dtype, "chunk_bytes": limit(chunk_bytes), "wgrad": wgrad}
    _tensor_parallel.compare_options(given.call, x.hidden.device, in_chunks=True, bias=x.bias is not None, **told)
    if not is_differentiated(*x[:3]):
        return _loss.without_gradients(plan, x, own)
    of_chunks = call_with(plan.call.text, cache_bytes=_loss.ALL)
    main_grad = main_grad_of(given.weight) if wgrad == "main_grad" else None
    plan = plan._replace(call=of_chunks, main_grad=main_grad, cotangent=cotangent)
    _refuse_recomputation(plan)
    total, *found = LossAndGradients.apply(plan, *x[:5], x.floor, *own)
    return total, dict(zip(given.call.fields, found, strict=True))


def limit(chunk_bytes: int | None) -> int:
    """What an option of chunk_bytes stands for."""
    return CHUNK_BYTES if chunk_bytes is None else chunk_bytes


def chunk_rows(tokens: int, weight: torch.Tensor, chunk_bytes: int | None, wgrad: Wgrad, call: TorchCall) -> int:
    """Rows of a chunk: as many as fit.

    The products take the same time in any chunks, and each chunk also reads and writes the float32 sum of dweight. So
    the cost is the number of chunks, which more bytes never raise.

    One chunk has no sum, which takes more than dweight itself: dweight exists after the sum only. So all tokens are one
    chunk where they take no more than a chunk and what the sum has beyond dweight: it is faster and holds less. Not
    where a sum is kept anyway, where no exponentials are, or on a CPU, where they are float32.
    """
    on_cpu, given = weight.device.type == "cpu", limit(chunk_bytes)
    row_bytes = weight.shape[0] * (4 if on_cpu else weight.element_size())
    sums = wgrad == "return" and weight.requires_grad and weight.dtype == torch.bfloat16
    spared = weight.numel() * 2 if sums and not (on_cpu or call.jax.gradient_threshold) else 0
    if _padding.size(tokens) * row_bytes <= given + spared:
        return max(tokens, 1)
    return _padding.at_most(given // row_bytes)


def _refuse_recomputation(plan: LossPlan) -> None:
    """Refuses to add to main_grad in a backward, where an activation checkpoint runs its forward a second time."""
    if plan.into is not None and _device.current_graph_task_id() != -1:
        raise NotImplementedError(
            f"linear_loss(wgrad='main_grad', cotangent={plan.cotangent!r}) adds to main_grad as it runs, and this is a "
            "backward pass, where an activation checkpoint runs it again, for each backward: leave the head out of the "
            "checkpoint, or leave cotangent out"
        )


def _flat(name: str, y: Any, given: Arguments, rows: torch.Tensor | None) -> torch.Tensor:
    """A per-token argument of the tokens that are kept, flat."""
    labels = given.labels
    (plain,) = _dtensor.tokens(**{name: y})
    whole = _checks.per_token(name, plain, given.hidden, labels)
    flat: torch.Tensor = _arguments.only_rows(whole.reshape(labels.numel(), *whole.shape[labels.ndim :]), rows, 0.0)
    return flat
