"""`linear_cross_entropy`, `LinearCrossEntropyLoss` and `linear_entropy`, computed from results of `linear_logprobs`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Unpack

import torch

from lce_jax.types import scalars, shared_checks
from lce_torch_bridge._types import Reduction, Tensors, Wgrad, make_call
from lce_torch_bridge.call import _arguments, _checks
from lce_torch_bridge.call._arguments import Arguments, Options
from lce_torch_bridge.operators import _operators
from lce_torch_bridge.ops._logprobs import compute
from lce_torch_bridge.ops._loss import choose_chunk_rows, resolve_chunk_bytes, sum_losses
from lce_torch_bridge.tensors import _device, _tensor_parallel

if TYPE_CHECKING:
    from lce_torch_bridge.call._arguments import CrossEntropyOptions, EntropyOptions

NO_OUTPUTS = ("entropy", "stats", "mean_logit", "candidates", "out_of_vocab")
REFUSED = dict.fromkeys(NO_OUTPUTS, "a loss has no such output")
ADVICE = {
    "out_features": "call linear_cross_entropy with each head's rows of the weight",
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
    class_weights: torch.Tensor | None = None,
    where: torch.Tensor | None = None,
    chunk_bytes: int | None = None,
    **options: Unpack[CrossEntropyOptions],
) -> torch.Tensor:
    """Returns the cross entropy of a language-model head, without storing the logits.

    It equals ``torch.nn.functional.cross_entropy`` of the logits z, plus a penalty that keeps ``lse = ln Σ exp(z)``
    near 0. Each token's loss, with the smoothing ε, is ``(1 - ε)·(-logprob) + ε·(lse - mean_v z) + z_loss·lse²``.
    `lce_jax.linear_cross_entropy` is the same function. A label outside the vocabulary that is not ``ignore_index`` has
    logprob 0, and its token counts; torch raises an error for such a label.

    If a mean or sum is differentiated, its gradients are computed in the forward, as by `linear_loss`. Forward and
    backward take three matrix products in all, or two if only one of hidden and weight requires a gradient. With
    ``cache_bytes`` the gradients are computed in the backward.

    Args:
        hidden, weight, labels, ignore_index, where: as in `linear_logprobs`.
        reduction: "mean" over the tokens that count (0 if there are none; torch returns NaN), "sum", or "none" for
            losses ``[...]``, which are 0 for masked tokens.
        label_smoothing: ε in [0, 1]: the target is ``(1 - ε)·onehot + ε/V`` over the true vocabulary, as in torch.
            Megatron's ``vocab_parallel_cross_entropy`` spreads its ε over the other V - 1 vocabulary tokens: to
            reproduce it on one rank, pass ``ε·V / (V - 1)``. On several ranks Megatron takes V and the mean from each
            rank's own part.
        z_loss: weight of ``lse²``, at least 0 (PaLM: 1e-4).
        class_weights: ``[V]`` floats, called ``weight`` in torch: for each label, the factor of its tokens' losses.
            "mean" then divides by the sum of the tokens' factors. With ``tp_group``, pass the entries of this rank's
            rows of the weight; one more collective sums each token's factor over the group. A label outside the
            vocabulary has the factor 0. ``class_weights`` has no gradient, and is an error with ``label_smoothing``.
            None: every factor is 1.
        chunk_bytes: the bytes that the exponentials of one chunk of tokens may take. They do not include the float32
            sum of dweight, the gradient of ``weight``. A chunk has at least 128 tokens. Fewer chunks are faster,
            because each chunk adds to that sum. All tokens form one chunk if this takes no more memory than several
            chunks and the sum. None: 1400 MiB.
        **options: ``bias``, ``tp_group``, ``temperature``, ``logit_scale``, ``logit_softcap``, ``vocab_size``,
            ``reduce_grad_hidden``, ``wgrad``, ``cache_bytes``, ``gradient_threshold``, ``vocab_part_size``,
            ``logit_floor``, ``implementation`` and ``lora``, as in `linear_logprobs`. With ``cache_bytes``, including
            0, the gradients are computed in the backward, which recomputes what the forward does not cache.
            ``chunk_bytes`` is an error with ``cache_bytes``, ``gradient_threshold`` or ``vocab_part_size``, and for a
            smoothed loss with a softcap.

    Returns:
        The loss of this rank's tokens in nats, float32: a scalar, or ``[...]`` with ``reduction="none"``. It is the
        same on all ranks of ``tp_group``.

    Raises:
        lce_jax.UnsupportedError: an implementation requested by name cannot run the call; the message says why.
        ValueError, TypeError: shapes, dtypes, devices or options do not fit; the message has their values.
        NotImplementedError, RuntimeError: in the cases that `linear_logprobs` lists.

    Memory:
        A differentiated mean or sum takes the memory of `linear_loss`: the gradients, which exist from the forward on;
        O(chunk + T); and, with several chunks, a float32 dweight of V·H·4 bytes. With ``reduction="none"``,
        ``cache_bytes``, ``gradient_threshold`` or ``vocab_part_size``, for a smoothed loss with a softcap, and under
        ``torch.compile``, ``torch.func`` and other tracers, the call takes the memory of `linear_logprobs`.
        ``cache_bytes=0`` takes the least memory. With ``wgrad="main_grad"``, a single chunk caches its exponentials
        until the backward. The backward adds dweight to ``main_grad`` directly, so dweight takes no memory of its own.

    Numerics:
        Gradients are rounded once, and then multiplied by the cotangent of the loss. Multiplying by a power of two,
        such as 1 or a loss scale, is exact, and 1 takes no time. Any other cotangent rounds dhidden, and the dweight of
        a single chunk, a second time in their own dtype. This takes as long as reading and writing them once. float16
        gradients are rounded only after the product, as in `linear_loss`.

    Compilation:
        In a graph of ``torch.compile`` gradients are computed in the backward. Inside an activation checkpoint the
        first forward neither computes nor saves gradients, and the head takes four matrix products in all.

    Example:
        >>> import torch
        >>> from lce_torch_bridge import linear_cross_entropy
        >>> hidden, weight = torch.randn(4, 8, requires_grad=True), torch.zeros(1000, 8, requires_grad=True)
        >>> loss = linear_cross_entropy(hidden, weight, torch.tensor([1, 2, 3, -100]), label_smoothing=0.1)
        >>> round(loss.item(), 3)                           # ln 1000
        6.908
        >>> loss.backward()
    """
    _arguments.check_names(linear_cross_entropy, options, REFUSED)
    smoothing, z_loss, chunk_bytes, refusal = _check_loss_options(
        reduction, label_smoothing, z_loss, chunk_bytes, options
    )
    all_options = Options(where=where, ignore_index=ignore_index, entropy=False, mean_logit=smoothing > 0, **options)
    arguments, wgrad = _arguments.parse_arguments(hidden, weight, labels, all_options), all_options.wgrad
    vocab_size = arguments.call.jax.vocab_size
    _checks.warn_of_labels(arguments.labels, arguments.where, vocab_size, is_cross_entropy=True)
    x, rows = _arguments.flatten_operands(arguments, _arguments.prepare_weight(arguments, wgrad))
    factors = _select_factors(class_weights, arguments, x, rows, smoothing)
    loss_fn = functools.partial(_compute_token_loss, smoothing, z_loss)
    if reduction == "mean":
        loss_fn = functools.partial(loss_fn, divisor=_find_divisor(factors, rows, len(x.labels)))
    per_token = [] if factors is None else [factors]
    if not (refusal or _device.is_traced() or _device.any_is_watched(x)):
        if not _adds_one_chunk_to_main_grad(arguments, x, wgrad, chunk_bytes):
            return sum_losses(loss_fn, arguments, x, per_token, wgrad, None, chunk_bytes)[0]
        call = make_call(arguments.call.text, cache_bytes=resolve_chunk_bytes(chunk_bytes))
        arguments = arguments._replace(call=call)
    losses = loss_fn(_operators.apply(x, arguments.call), *per_token)
    losses = _arguments.place_results(losses, rows, arguments.labels)
    return losses if reduction == "none" else losses.sum()


def _check_loss_options(
    reduction: Any, label_smoothing: Any, z_loss: Any, chunk_bytes: Any, options: Mapping[str, Any]
) -> tuple[float, float, int | None, str | None]:
    """Checks the options. Returns smoothing, z_loss, chunk_bytes, and the result of `refuse_forward_gradients`."""
    scalars.check_choice("reduction", reduction, ("mean", "sum", "none"))
    smoothing, z_loss = scalars.smoothing(label_smoothing), scalars.not_negative("z_loss", z_loss)
    refusal = refuse_forward_gradients(reduction, smoothing, Options(**options))
    if chunk_bytes is not None:
        chunk_bytes = scalars.num_bytes("chunk_bytes", chunk_bytes)
        if refusal:
            raise ValueError(
                f"chunk_bytes={chunk_bytes!r} with {refusal}, where the gradients are computed in the backward: it "
                "limits the bytes of a chunk of tokens in a forward that computes the gradients. Leave chunk_bytes out"
            )
    return smoothing, z_loss, chunk_bytes, refusal


def _compute_token_loss(
    smoothing: float,
    z_loss: float,
    fields: dict[str, torch.Tensor],
    factors: torch.Tensor | None = None,
    divisor: int | torch.Tensor = 1,
) -> torch.Tensor:
    """Returns each token's loss, computed from its results, times the token's factor and divided by ``divisor``."""
    loss, lse = (smoothing - 1.0) * fields["logprobs"], fields["lse"]
    if smoothing > 0:
        loss = loss + smoothing * (lse - fields["mean_logit"])
    if z_loss > 0:
        loss = loss + z_loss * lse * lse
    return (loss if factors is None else loss * factors) / divisor


def _select_factors(
    class_weights: Any, arguments: Arguments, x: Tensors, rows: torch.Tensor | None, smoothing: float
) -> torch.Tensor | None:
    """Returns the class weight of each token's label, float32: 0 for a label outside the vocabulary."""
    call, is_split = arguments.call, arguments.call.group != _tensor_parallel.NO_GROUP
    if is_split and not _device.is_traced():
        _tensor_parallel.compare_options(call, x.hidden.device, class_weights=class_weights is not None)
    if class_weights is None:
        return None
    class_weights = _arguments.read_class_weights(class_weights, arguments.weight, call.group)
    shared_checks.check_class_weights(class_weights.shape, x.weight.shape, len(x.weight), smoothing)
    if is_split and _device.is_traced():
        raise ValueError(
            "class_weights with tp_group in a graph of torch.compile: call linear_cross_entropy outside it"
        )
    columns = x.labels - _tensor_parallel.size_and_rank(call.group)[1] * len(class_weights)
    is_here = (columns >= 0) & (columns < len(class_weights))
    if rows is not None and rows.dtype == torch.bool:  # the mask's values are unknown, so ``x`` has all tokens
        is_here = is_here & rows
    factors = class_weights.float()[columns.where(is_here, 0)].where(is_here, 0.0)
    return _tensor_parallel.all_reduce(factors, call.group) if is_split else factors


def _find_divisor(factors: torch.Tensor | None, rows: torch.Tensor | None, tokens: int) -> int | torch.Tensor:
    """Returns the divisor of a mean: the number of unmasked tokens or the sum of their factors, or 1 if that is 0."""
    if factors is None:
        return _arguments.count_tokens(rows, tokens)
    total = factors.sum()
    return total.where(total != 0, 1.0)


def refuse_forward_gradients(reduction: str, smoothing: float, options: Options) -> str | None:
    """Returns the option that forces gradients to be computed in the backward, as text; None if there is none.

    ``reduction="none"`` needs each token's cotangent, and ``cache_bytes`` requests gradients in the backward. With a
    gradient threshold the backward has little to recompute. With the other options the forward cannot cache
    exponentials, which would save a matrix product.
    """
    if reduction == "none":
        return f"reduction={reduction!r}"
    for name in ("cache_bytes", "vocab_part_size"):
        if getattr(options, name) is not None:
            return f"{name}={getattr(options, name)!r}"
    if options.gradient_threshold:
        return f"gradient_threshold={options.gradient_threshold!r}"
    if smoothing > 0 and options.logit_softcap is not None:
        return f"label_smoothing={smoothing!r} and logit_softcap={options.logit_softcap!r}"
    return None


def _adds_one_chunk_to_main_grad(arguments: Arguments, x: Tensors, wgrad: Wgrad, chunk_bytes: int | None) -> bool:
    """Whether all tokens are one chunk and dweight goes to ``main_grad``. The backward then computes the gradients.

    The forward does not know the cotangent, so it would have to round dweight and save it for the backward. Saved
    exponentials take no more memory, and let the backward add dweight to ``main_grad`` directly, in float32.
    """
    if wgrad != "main_grad" or not x.weight.requires_grad:
        return False
    tokens = len(x.labels)
    return choose_chunk_rows(tokens, x.weight, chunk_bytes, wgrad, arguments.call) >= tokens


def linear_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, **options: Unpack[EntropyOptions]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ``(entropy, lse)`` of a language-model head, for tokens without labels and without storing the logits.

    Args:
        hidden, weight: as in `linear_logprobs`.
        **options: ``bias``, ``tp_group``, ``temperature``, ``logit_scale``, ``logit_softcap``, ``vocab_size``,
            ``where``, ``reduce_grad_hidden``, ``wgrad``, ``cache_bytes``, ``gradient_threshold``, ``vocab_part_size``,
            ``logit_floor``, ``implementation`` and ``lora``, as in `linear_logprobs`, with hidden's leading shape
            instead of the shape of labels.

    Returns:
        Entropy and lse in nats: float32 tensors of hidden's leading shape, both differentiable.

    Raises:
        lce_jax.UnsupportedError: an implementation requested by name cannot run the call; the message says why.
        ValueError, TypeError: shapes, dtypes, devices or options do not fit; the message has their values.
        NotImplementedError, RuntimeError: in the cases that `linear_logprobs` lists.

    Memory:
        The call takes the memory of `linear_logprobs`.

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
    all_options = Options(**options)
    out = compute(_arguments.parse_arguments(hidden, weight, labels, all_options), all_options.wgrad)
    return out.entropy, out.lse


class LinearCrossEntropyLoss(torch.nn.Module):
    """A module that has a head and computes its `linear_cross_entropy`: torch's module of this name, without logits.

    The head is ``self.linear``, as in torch's module. Both modules have the same ``state_dict``.

    Args:
        in_features: H, the hidden size.
        num_classes: V, the size of the vocabulary.
        bias: whether the head has a bias.
        device, dtype: the weight's device and dtype.
        reduction, label_smoothing: as in `linear_cross_entropy`.
        ignore_index: as in `linear_cross_entropy`. None: -100, as in torch's module.
        weight: ``[V]``, the ``class_weights`` of `linear_cross_entropy`. It is a buffer of the module, as in torch.
        out_features, options: parameters of torch's module, for labels of several dimensions and the size of chunks.
            Only their defaults are accepted; the error says what to write instead.
        **more: options of `linear_cross_entropy`.

    Raises:
        ValueError, TypeError: a value does not fit, or an option is unknown.

    Example:
        >>> import torch
        >>> from lce_torch_bridge import LinearCrossEntropyLoss
        >>> loss_fn = LinearCrossEntropyLoss(8, 1000)
        >>> loss = loss_fn(torch.zeros(2, 3, 8), torch.ones(2, 3).long())  # input, target
        >>> round(loss.item(), 3)                           # ln 1000
        6.908
    """

    weight: torch.Tensor | None

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
        weight: torch.Tensor | None = None,
        out_features: tuple[()] = (),
        options: None = None,
        **more: object,
    ) -> None:
        super().__init__()
        for name, value in {"out_features": out_features or None, "options": options}.items():
            if value is not None:
                raise TypeError(f"LinearCrossEntropyLoss has no {name}, which torch's module has: {ADVICE[name]}")
        keywords = linear_cross_entropy.__kwdefaults__ or {}
        others = {name: more[name] for name in more if name not in keywords}
        _arguments.check_names(linear_cross_entropy, others, REFUSED)
        _check_loss_options(reduction, label_smoothing, more.get("z_loss", 0.0), more.get("chunk_bytes"), others)
        self.reduction, self.label_smoothing = reduction, label_smoothing
        self.linear = torch.nn.Linear(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        self.ignore_index = -100 if ignore_index is None else scalars.integer("ignore_index", ignore_index)
        _arguments.check_values(Options(**others), num_classes)  # type: ignore[arg-type]
        if weight is not None:
            shared_checks.check_class_weights(weight.shape, self.linear.weight.shape, num_classes, self.label_smoothing)
        self.register_buffer("weight", weight)
        self.options: dict[str, Any] = more

    def extra_repr(self) -> str:
        """Returns the options for ``repr``."""
        names = "reduction", "ignore_index", "label_smoothing"
        return _arguments.format_options({name: getattr(self, name) for name in names} | self.options)

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Returns the loss of hidden states ``[..., H]`` and ids ``[...]``. Raises if the head is wrapped or hooked."""
        head, lora = _checks.head(self.linear)
        adapter: dict[str, Any] = {} if lora is None else {"lora": lora}
        return linear_cross_entropy(
            input, head.weight, target, bias=head.bias, reduction=self.reduction, ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing, class_weights=self.weight, **adapter, **self.options,
        )  # fmt: skip
