"""`linear_kl`: the exact divergence of two heads over one vocabulary, without storing either's logits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, Never

import torch

from lce_jax.types import scalars
from lce_torch_bridge._types import Wgrad, call_with
from lce_torch_bridge.call import _arguments, _checks
from lce_torch_bridge.call._arguments import Arguments, Options
from lce_torch_bridge.operators import _operators
from lce_torch_bridge.tensors import _tensor_parallel

if TYPE_CHECKING:
    import torch.distributed as dist

type Same = Literal["same"]
type Unset = Literal["unset"]


def linear_kl(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor,
    *,
    direction: Literal["forward", "reverse", "jsd"] = "forward",
    beta: float | None = None,
    bias: torch.Tensor | None = None,
    teacher_bias: torch.Tensor | None = None,
    tp_group: dist.ProcessGroup | None = None,
    temperature: float | torch.Tensor = 1.0,
    teacher_temperature: float | torch.Tensor | Same = "same",
    logit_scale: float = 1.0,
    teacher_logit_scale: float | Same | Unset = "unset",
    logit_softcap: float | None = None,
    teacher_logit_softcap: float | Same | Unset | None = "unset",
    vocab_size: int | None = None,
    where: torch.Tensor | None = None,
    reduce_grad_hidden: bool = False,
    wgrad: Wgrad = "return",
    cache_bytes: int | None = None,
    implementation: str | tuple[str, ...] | None = None,
    **unknown: Never,
) -> torch.Tensor:
    """Exact KL or JS divergence of two heads over one whole vocabulary, per token, without storing either's logits.

    With the teacher's probabilities p and the student's q, ``"forward"`` is ``KL(p ‖ q) = Σ p (ln p - ln q)``,
    ``"reverse"`` ``KL(q ‖ p) = Σ q (ln q - ln p)``, and ``"jsd"`` ``β KL(p ‖ m) + (1 - β) KL(q ‖ m)`` with
    ``m = β p + (1 - β) q``, the generalised Jensen-Shannon divergence. Differentiable, once, in the student's
    ``hidden``, ``weight`` and ``bias``; the teacher has no gradient. At a temperature τ, multiply by τ² to keep the
    size of the gradients. If only a teacher's top k is at hand, see `lce_torch_bridge.losses.distillation_loss`.

    Args:
        hidden, weight, bias, logit_scale, logit_softcap, reduce_grad_hidden: as in `linear_logprobs`.
        teacher_hidden: ``[..., G]`` the teacher's hidden states at the same tokens, of any size G and dtype.
        teacher_weight: ``[V, G]``, this rank's rows of the teacher's head, over the same vocabulary.
        direction: "forward" spreads the student over all that the teacher does; "reverse" keeps it away from what the
            teacher does not do; "jsd" lies between them.
        beta: the teacher's weight β in (0, 1) in "jsd". Each value compiles programs of its own. None: 0.5.
        teacher_bias: ``[V]``, the same for the teacher, without a gradient.
        tp_group: the process group over which the vocabulary of both heads is split into parts of the same size; rank r
            holds the r-th. All ranks pass the same hidden states and get bitwise-equal results. None: both weights are
            whole.
        temperature: divides the float32 logits: a positive number, or a float tensor that broadcasts to ``[...]`` (one
            value per token, or per sequence as ``[b, 1]``). No gradient. A tensor's values are looked at only on the
            CPU and outside ``torch.compile``: there, one that is not positive and finite is refused. Elsewhere its
            token's result is NaN without a gradient, and the other tokens are not affected.
        teacher_temperature: that of the teacher's logits. "same": the student's.
        teacher_logit_scale: that of the teacher's logits. "same": the student's. "unset": 1, and refused if the
            student's is another.
        teacher_logit_softcap: that of the teacher's logits. None: no cap. "same": the student's. "unset": none, and
            refused if the student has one, because a cap belongs to its model.
        vocab_size: the true size of the vocabulary of all ranks together. Columns from it on are padding: in no sum,
            with zero gradient, whatever they hold. None: every column counts. Weights with different numbers of rows
            need it; over a ``tp_group`` all parts of both have as many.
        where: the tokens that count: bool of the shape ``[...]``, or the rows of the flattened tokens, each at most
            once (int64 or int32). The others are 0 and have no gradient, and cost nothing. The host waits for the GPU
            to count a bool tensor, but not for an index. None: all.
        wgrad: "return" gives the weight its gradient. "main_grad" rounds it to the weight's dtype, adds it to
            ``weight.main_grad``, as Megatron's gradient-accumulation fusion does, and sets
            ``grad_added_to_main_grad``. Not under ``torch.compile``.
        cache_bytes: bytes that the forward may keep, so that the backward recomputes less: two numbers of each column
            of the first vocabulary tiles, as in `lce_jax.linear_kl`. 0: nothing is kept. None: as in `linear_logprobs`.
            Under ``torch.compile`` each count of tokens then has a graph of its own, and ``where`` must be an index.
        implementation: "mosaic_gpu", "xla", or a tuple of names tried in order. None: the kernels where they serve the
            call, else "xla". JAX runs both: `launch_with` ``("direct")`` refuses the function.
        **unknown: refused; the message names the option that may be meant.

    Returns:
        ``[...]`` in nats, at least 0, float32.

    Raises:
        lce_jax.UnsupportedError: an implementation asked for by name cannot serve the call; the message says why.
        ValueError, TypeError: shapes, dtypes, devices or options that do not fit, with the offending values. Over a
            ``tp_group`` also, in its first call, ranks whose parts of the vocabulary are of different sizes or the same
            columns, or whose tokens or options differ. In later calls results and gradients are NaN on all ranks: in
            rows whose temperatures differ between ranks, and in all rows if the sizes do.
        NotImplementedError: on a second derivative, in forward mode, and under ``torch.func.vmap``
            (``torch.func.grad`` and ``vjp`` work).
        RuntimeError: in the cases that `linear_logprobs` lists.

    Memory:
        That of `lce_jax.linear_kl`, in JAX's pool on a GPU, and copies of both hidden states, padded to 128, 512, or
        the next power of two of tokens from 2048 on (from 32,768 on, or to halfway there).

    Numerics:
        That of `lce_jax.linear_kl`. float32 products are as exact as ``torch.set_float32_matmul_precision`` or torch's
        ``fp32_precision`` says.

    Example:
        >>> import torch
        >>> from lce_torch_bridge import linear_kl
        >>> hidden = torch.ones(3, 4, requires_grad=True)
        >>> weight, teacher_weight = torch.zeros(10, 4), torch.eye(10, 4)
        >>> kl = linear_kl(hidden, weight, torch.ones(3, 4), teacher_weight)
        >>> kl.mean().backward()
        >>> round(kl[0].item(), 4), hidden.grad.shape
        (0.1213, torch.Size([3, 4]))
    """
    _arguments.check_unknown(linear_kl, unknown)
    scalars.check_choice("direction", direction, scalars.DIRECTIONS)
    beta = scalars.check_beta(beta, "direction", direction, scalars.DIRECTIONS[:2])
    _same_tokens(hidden, teacher_hidden)
    shared = Options(
        tp_group=tp_group, entropy=False, implementation=implementation, vocab_size=vocab_size, where=where
    )
    options = shared._replace(
        bias=bias, temperature=temperature, logit_scale=logit_scale, logit_softcap=logit_softcap,
        reduce_grad_hidden=reduce_grad_hidden, wgrad=wgrad, cache_bytes=cache_bytes,
    )  # fmt: skip
    own = _arguments.of_call(hidden, weight, hidden.new_full(hidden.shape[:-1], -1, dtype=torch.int64), options)
    options = shared._replace(
        bias=teacher_bias,
        temperature=_or_same(teacher_temperature, temperature),
        logit_scale=_scale_or_cap("logit_scale", teacher_logit_scale, own.call.jax.logit_scale, 1.0),
        logit_softcap=_scale_or_cap("logit_softcap", teacher_logit_softcap, own.call.jax.logit_softcap, None),
    )
    with _of_the_teacher():
        others = _arguments.of_call(teacher_hidden, teacher_weight, own.labels, options)
    _check_columns(own, others, vocab_size)
    weight, bias, teacher_weight, teacher_bias = _heads(own, others, wgrad)
    x, rows = _arguments.operands(own, weight)
    y, _ = _arguments.operands(others._replace(where=rows), teacher_weight)
    x = x._replace(
        bias=bias,
        teacher_hidden=y.hidden.detach(),
        teacher_weight=teacher_weight,
        teacher_bias=teacher_bias,
        teacher_temperature=y.temperature,
    )
    call = call_with(
        own.call.text,
        function="linear_kl",
        direction=direction,
        beta=beta,
        teacher_logit_scale=others.call.jax.logit_scale,
        teacher_logit_softcap=others.call.jax.logit_softcap,
        has_temperature=x.temperature is not None,
        has_teacher_temperature=y.temperature is not None,
    )
    return _arguments.placed(_operators.apply(x, call)["linear_kl"], rows, own.labels)


def _heads(own: Arguments, others: Arguments, wgrad: Wgrad) -> list[Any]:
    """Weight and bias of the student, then of the teacher without a gradient; the columns that both have."""
    weight, teachers = _arguments.weight_of(own, wgrad), _arguments.weight_of(others, "return").detach()
    heads = [weight, own.bias, teachers, None if others.bias is None else others.bias.detach()]
    least = min(weight.shape[0], teachers.shape[0])
    if own.call.group != _tensor_parallel.NO_GROUP or weight.shape[0] == teachers.shape[0]:
        return heads
    return [None if x is None else x[:least] for x in heads]


def _or_same(teachers: Any, own: Any) -> Any:
    return own if isinstance(teachers, str) and teachers == "same" else teachers


def _scale_or_cap(name: str, teachers: Any, own: float | None, neutral: float | None) -> Any:
    """The teacher's; one that is not given is the neutral one, and none if the student's is not neutral."""
    if not (isinstance(teachers, str) and teachers == "unset"):
        return _or_same(teachers, own)
    if own != neutral:
        raise scalars.student_only_error(name, own, neutral)
    return neutral


def _same_tokens(hidden: Any, teacher_hidden: Any) -> None:
    _checks.hidden(hidden)
    with _of_the_teacher():
        _checks.hidden(teacher_hidden)
        if teacher_hidden.shape[:-1] != hidden.shape[:-1]:
            raise ValueError(
                f"hidden {tuple(teacher_hidden.shape)} must have the leading shape of the student's "
                f"{tuple(hidden.shape)}"
            )
        if teacher_hidden.device != hidden.device:
            raise ValueError(f"hidden is on {teacher_hidden.device}, the student's on {hidden.device}")


def _check_columns(own: Arguments, others: Arguments, vocab_size: Any) -> None:
    """Refuses weights of which one has more rows, unless ``vocab_size`` says which of them count.

    Over a group not here: one rank alone may have such, and the others would wait for it (`_tensor_parallel.check`).
    """
    rows, teachers = own.weight.shape[0], others.weight.shape[0]
    if rows != teachers and vocab_size is None and own.call.group == _tensor_parallel.NO_GROUP:
        raise ValueError(
            f"weight has {rows} rows, the teacher's {teachers}: give the tokenizer's size, at most "
            f"{min(rows, teachers)}, as vocab_size"
        )


@contextlib.contextmanager
def _of_the_teacher() -> Iterator[None]:
    """Errors about the teacher's arguments say so."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError) as error:
        if type(error) not in (TypeError, ValueError, RuntimeError):
            raise  # of another package, which may take other arguments
        raise type(error)(scalars.reword_for_teacher(error)) from None
