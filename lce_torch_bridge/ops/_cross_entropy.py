"""Functions made of `linear_logprobs`: the loss, also as a module, and the entropy alone."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Unpack

import torch

from lce_jax.types import scalars
from lce_torch_bridge._types import Reduction, Tensors, Wgrad, call_with
from lce_torch_bridge.call import _arguments, _checks
from lce_torch_bridge.call._arguments import Arguments, Options
from lce_torch_bridge.operators import _operators
from lce_torch_bridge.ops._logprobs import compute
from lce_torch_bridge.ops._loss import chunk_rows, limit, sum_of_losses
from lce_torch_bridge.tensors import _device

if TYPE_CHECKING:
    from lce_torch_bridge.call._arguments import CrossEntropyOptions, EntropyOptions

NO_OUTPUTS = ("entropy", "stats", "mean_logit", "candidates", "out_of_vocab")  # options of what a loss does not return
OF_NO_LOSS = dict.fromkeys(NO_OUTPUTS, "a loss has no such output")
OF_TORCH = {
    "out_features": "call linear_cross_entropy with each head's rows of the weight",
    "weight": scalars.CLASS_WEIGHTS,
    "options": "chunk_bytes= bounds the memory",
}


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    reduction: Reduction = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    where: torch.Tensor | None = None,
    chunk_bytes: int | None = None,
    **options: Unpack[CrossEntropyOptions],
) -> torch.Tensor:
    """Cross entropy of a language-model head, without storing the logits.

    ``torch.nn.functional.cross_entropy`` of the logits, with a penalty that keeps ``lse`` near 0. Per token, with ε the
    smoothing, ``(1 - ε)·(-logprob) + ε·(lse - mean_v z) + z_loss·lse²``. `lce_jax.linear_cross_entropy` is the same.
    A label outside the vocabulary that is not ``ignore_index`` has logprob 0 and counts as a token; torch raises there.

    A mean or a sum that is differentiated computes its gradients in the forward, as `linear_loss` does: three matrix
    products in all, two where hidden or the weight requires no gradient, and one where nothing does. With
    ``cache_bytes`` it does not.

    Args:
        hidden, weight, labels, ignore_index, where: as in `linear_logprobs`.
        reduction: "mean" over the tokens that count (0 if there are none; torch has NaN), "sum", or "none" for
            ``[...]``, 0 on the others.
        label_smoothing: ε in [0, 1]: the target is ``(1 - ε)·onehot + ε/V`` over the true vocabulary, as in torch.
            Megatron's ``vocab_parallel_cross_entropy`` spreads ε over the other tokens alone: its ε is
            ``ε·V / (V - 1)`` here, on one rank. On several, it takes V and the mean from each rank's own part.
        z_loss: weight of ``lse²``, at least 0 (PaLM: 1e-4).
        chunk_bytes: bytes that the exponentials of one chunk of tokens may take beside the sum of dweight; at least 128
            tokens are a chunk. Fewer chunks are faster, because each adds to that sum. All tokens are one chunk where
            they need no more memory than several chunks and their sum. None: 1400 MiB.
        **options: ``bias``, ``tp_group``, ``temperature``, ``logit_scale``, ``logit_softcap``, ``vocab_size``,
            ``reduce_grad_hidden``, ``wgrad``, ``cache_bytes``, ``gradient_threshold``, ``vocab_part_size``,
            ``logit_floor``, ``implementation`` and ``lora``, as in `linear_logprobs`. With ``cache_bytes``, 0 too, the
            gradients are computed in the backward, which recomputes what the forward does not keep. ``chunk_bytes`` is
            refused then, with ``gradient_threshold`` or ``vocab_part_size``, and for a smoothed loss with a softcap.

    Returns:
        The loss in nats, float32: a scalar, or ``[...]`` with ``reduction="none"``. It covers this rank's tokens,
        and is the same on all ranks of ``tp_group``.

    Raises:
        lce_jax.UnsupportedError: an implementation asked for by name cannot serve the call; the message says why.
        ValueError, TypeError: shapes, dtypes, devices or options that do not fit, with the offending values.
        NotImplementedError, RuntimeError: in the cases that `linear_logprobs` lists.

    Memory:
        Of a differentiated mean or sum that of `linear_loss`: the gradients, which exist from the forward on, beside
        them O(chunk + T), and with several chunks dweight in float32, V·H·4 bytes. Else that of `linear_logprobs`: with
        ``reduction="none"``, ``cache_bytes``, ``gradient_threshold`` or ``vocab_part_size``, for a smoothed loss with a
        softcap, and in what ``torch.compile``, ``torch.func`` and other tracers see. ``cache_bytes=0`` takes the least.
        With ``wgrad="main_grad"``, a single chunk keeps its exponentials until the backward, which adds dweight
        to ``main_grad`` where it lies: there is no dweight at all.

    Numerics:
        Gradients are rounded once, and multiplied by the cotangent of the loss after that. A power of two, such as 1 or
        a loss scale, changes no digit, and 1 takes no time; any other rounds dhidden and the dweight of one chunk a
        second time, in their own dtype, and takes as long as reading and writing them once. float16 gradients are
        rounded after the product alone, as in `linear_loss`.

    Compilation:
        In a graph of ``torch.compile`` gradients are computed in the backward. Inside an activation checkpoint the
        first forward computes no gradients and keeps none: four products in all.

    Example:
        >>> import torch
        >>> from lce_torch_bridge import linear_cross_entropy
        >>> hidden, weight = torch.randn(4, 8, requires_grad=True), torch.zeros(1000, 8, requires_grad=True)
        >>> loss = linear_cross_entropy(hidden, weight, torch.tensor([1, 2, 3, -100]), label_smoothing=0.1)
        >>> round(loss.item(), 3)                           # ln 1000
        6.908
        >>> loss.backward()
    """
    _arguments.check_names(linear_cross_entropy, options, OF_NO_LOSS)
    smoothing, z_loss, chunk_bytes, left = _checked(reduction, label_smoothing, z_loss, chunk_bytes, options)
    told = Options(where=where, ignore_index=ignore_index, entropy=False, mean_logit=smoothing > 0, **options)
    given = _arguments.of_call(hidden, weight, labels, told)
    _checks.warn_of_labels(given.labels, given.where, given.call.jax.vocab_size, is_cross_entropy=True)
    x, rows = _arguments.operands(given, _arguments.weight_of(given, told.wgrad))
    loss_fn = functools.partial(_loss_of_token, smoothing, z_loss)
    if reduction == "mean":
        loss_fn = functools.partial(loss_fn, divisor=_arguments.count(rows, len(x.labels)))
    if not (left or _device.is_traced() or _device.any_is_watched(x)):
        if not _fills_main_grad_at_once(given, x, told.wgrad, chunk_bytes):
            return sum_of_losses(loss_fn, given, x, [], told.wgrad, None, chunk_bytes)[0]
        given = given._replace(call=call_with(given.call.text, cache_bytes=limit(chunk_bytes)))
    losses = _arguments.placed(loss_fn(_operators.apply(x, given.call)), rows, given.labels)
    return losses if reduction == "none" else losses.sum()


def _checked(
    reduction: Any, label_smoothing: Any, z_loss: Any, chunk_bytes: Any, options: Mapping[str, Any]
) -> tuple[float, float, int | None, str | None]:
    """The smoothing, the weight of lse² and the bytes of a chunk, checked, and what is left to the backward."""
    scalars.check_choice("reduction", reduction, ("mean", "sum", "none"))
    smoothing, z_loss = scalars.smoothing(label_smoothing), scalars.not_negative("z_loss", z_loss)
    left = _left_to_the_backward(reduction, smoothing, Options(**options))
    if chunk_bytes is not None:
        chunk_bytes = scalars.num_bytes("chunk_bytes", chunk_bytes)
        if left:
            raise ValueError(
                f"chunk_bytes={chunk_bytes!r} with {left}, where the gradients are computed in the backward: it says "
                "how many bytes a chunk of tokens may take in a forward that computes the gradients. Leave chunk_bytes "
                "out"
            )
    return smoothing, z_loss, chunk_bytes, left


def _loss_of_token(
    smoothing: float, z_loss: float, fields: dict[str, torch.Tensor], divisor: int | torch.Tensor = 1
) -> torch.Tensor:
    """The loss of each token by its results, divided by what a mean is divided by."""
    loss, lse = (smoothing - 1.0) * fields["logprobs"], fields["lse"]
    if smoothing > 0:
        loss = loss + smoothing * (lse - fields["mean_logit"])
    if z_loss > 0:
        loss = loss + z_loss * lse * lse
    return loss / divisor


def _left_to_the_backward(reduction: str, smoothing: float, told: Options) -> str | None:
    """The options for which the gradients are computed in the backward; None if they may be in the forward.

    Some ask for it. With a threshold there is little to recompute, and with the others no exponentials are kept.
    """
    if reduction == "none":
        return f"reduction={reduction!r}"
    for name in ("cache_bytes", "vocab_part_size"):
        if getattr(told, name) is not None:
            return f"{name}={getattr(told, name)!r}"
    if told.gradient_threshold:
        return f"gradient_threshold={told.gradient_threshold!r}"
    if smoothing > 0 and told.logit_softcap is not None:
        return f"label_smoothing={smoothing!r} and logit_softcap={told.logit_softcap!r}"
    return None


def _fills_main_grad_at_once(given: Arguments, x: Tensors, wgrad: Wgrad, chunk_bytes: int | None) -> bool:
    """Whether one chunk has all tokens, whose dweight goes to ``main_grad``.

    In the forward the cotangent is not known, so dweight would be kept until the backward, and rounded for that. The
    exponentials take no more, and the backward adds to ``main_grad`` from them where it lies, in float32.
    """
    if wgrad != "main_grad" or not x.weight.requires_grad:
        return False
    tokens = len(x.labels)
    return chunk_rows(tokens, x.weight, chunk_bytes, wgrad, given.call) >= tokens


def linear_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, **options: Unpack[EntropyOptions]
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(entropy, lse)`` of a language-model head for tokens that have no labels, without storing the logits.

    Args:
        hidden, weight: as in `linear_logprobs`.
        **options: ``bias``, ``tp_group``, ``temperature``, ``logit_scale``, ``logit_softcap``, ``vocab_size``,
            ``where``, ``reduce_grad_hidden``, ``wgrad``, ``cache_bytes``, ``gradient_threshold``, ``vocab_part_size``,
            ``logit_floor``, ``implementation`` and ``lora``, as in `linear_logprobs`, with hidden's leading shape in
            place of the shape of labels.

    Returns:
        Entropies and lse, in nats, float32 of hidden's leading shape, both differentiable.

    Raises:
        lce_jax.UnsupportedError: an implementation asked for by name cannot serve the call; the message says why.
        ValueError, TypeError: shapes, dtypes, devices or options that do not fit, with the offending values.
        NotImplementedError, RuntimeError: in the cases that `linear_logprobs` lists.

    Memory:
        That of `linear_logprobs`.

    Example:
        >>> import torch
        >>> from lce_torch_bridge import linear_entropy
        >>> entropy, lse = linear_entropy(torch.ones(2, 3, 8), torch.zeros(100, 8))
        >>> entropy.shape, round(entropy[0, 0].item(), 3)   # ln 100
        (torch.Size([2, 3]), 4.605)
    """
    refused = dict.fromkeys((*NO_OUTPUTS, "ignore_index"), "linear_entropy returns entropy and lse")
    _arguments.check_names(linear_entropy, options, refused)
    _checks.hidden(hidden)
    labels = hidden.new_full(hidden.shape[:-1], -1, dtype=torch.int64)
    told = Options(**options)
    out = compute(_arguments.of_call(hidden, weight, labels, told), told.wgrad)
    return out.entropy, out.lse


class LinearCrossEntropyLoss(torch.nn.Module):
    """``torch.nn.LinearCrossEntropyLoss`` without logits: a head, and `linear_cross_entropy` of it.

    The head is ``self.linear``, as in torch's module, whose ``state_dict`` this one takes, and gives.

    Args:
        in_features: H, the hidden size.
        num_classes: V, the vocabulary.
        bias: whether the head has one.
        device, dtype: of the weight.
        reduction, label_smoothing: as in `linear_cross_entropy`.
        ignore_index: as in `linear_cross_entropy`. None: -100, as in torch's module.
        weight, out_features, options: of torch's module, which takes class weights, several dimensions of labels, and
            the size of its chunks. Only torch's defaults are accepted; the message says what to write instead.
        **more: options of `linear_cross_entropy`.

    Raises:
        ValueError, TypeError: a value that does not fit, or an option that is not known.

    Example:
        >>> import torch
        >>> from lce_torch_bridge import LinearCrossEntropyLoss
        >>> loss_fn = LinearCrossEntropyLoss(8, 1000)
        >>> loss = loss_fn(torch.zeros(2, 3, 8), torch.ones(2, 3).long())  # input, target
        >>> round(loss.item(), 3)                           # ln 1000
        6.908
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        reduction: Reduction = "mean",
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        weight: None = None,
        out_features: tuple[()] = (),
        options: None = None,
        **more: object,
    ) -> None:
        super().__init__()
        for name, value in {"out_features": out_features or None, "weight": weight, "options": options}.items():
            if value is not None:
                raise TypeError(f"LinearCrossEntropyLoss has no {name}, which torch's module has: {OF_TORCH[name]}")
        own = linear_cross_entropy.__kwdefaults__ or {}
        others = {name: more[name] for name in more if name not in own}
        _arguments.check_names(linear_cross_entropy, others, OF_NO_LOSS)
        _checked(reduction, label_smoothing, more.get("z_loss", 0.0), more.get("chunk_bytes"), others)
        self.linear = torch.nn.Linear(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        self.ignore_index = -100 if ignore_index is None else scalars.integer("ignore_index", ignore_index)
        _arguments.check_values(Options(**others), num_classes)  # type: ignore[arg-type]
        self.reduction, self.label_smoothing = reduction, label_smoothing
        self.options: dict[str, Any] = more

    def extra_repr(self) -> str:
        """What ``repr`` says beside the head."""
        names = "reduction", "ignore_index", "label_smoothing"
        return _arguments.shown({name: getattr(self, name) for name in names} | self.options)

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The loss of ``[..., H]`` and ids ``[...]``. A head that is more than its weight and bias is refused."""
        head, lora = _checks.head(self.linear)
        adapter: dict[str, Any] = {} if lora is None else {"lora": lora}
        return linear_cross_entropy(
            input, head.weight, target, bias=head.bias, reduction=self.reduction, ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing, **adapter, **self.options,
        )  # fmt: skip
