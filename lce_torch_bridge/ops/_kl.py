"""`linear_kl`: the exact divergence of two heads over one vocabulary, without storing logits of either head."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, Never

import torch

from lce_jax.types import messages, scalars
from lce_torch_bridge._types import Wgrad, make_call
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
    direction: Literal["forward", "reverse", "jsd", "tv"] = "forward",
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
    """Returns the exact KL or JS divergence, or the total variation, of two heads over one vocabulary, per token.

    No logits of either head are stored.

    With the teacher's probabilities p and the student's q, ``"forward"`` is ``KL(p ‖ q) = Σ p (ln p - ln q)``,
    ``"reverse"`` is ``KL(q ‖ p) = Σ q (ln q - ln p)``, ``"jsd"`` is ``β KL(p ‖ m) + (1 - β) KL(q ‖ m)`` with
    ``m = β p + (1 - β) q``, the generalised Jensen-Shannon divergence, and ``"tv"`` is the total variation,
    ``½ Σ |p - q| = 1 - Σ min(p, q)``. The result is differentiable, once, in the student's ``hidden``, ``weight`` and
    ``bias``; the teacher has no gradient. At a temperature τ, multiply a KL or JSD by τ² to keep the size of its
    gradients. If you have only a teacher's top k, see `lce_torch_bridge.losses.distillation_loss`.

    Args:
        hidden, weight, bias, logit_scale, logit_softcap, reduce_grad_hidden: as in `linear_logprobs`.
        teacher_hidden: ``[..., G]``, the teacher's hidden states of the same tokens, with any size G and any dtype.
        teacher_weight: ``[V, G]``, this rank's rows of the teacher's head, over the same vocabulary.
        direction: "forward" gives the student probability wherever the teacher has it; "reverse" takes probability from
            the student wherever the teacher has none; "jsd" lies between them. "tv" is the probability that speculative
            decoding rejects a token that the student drafts for its teacher: see `lce_torch_bridge.losses.lk_alpha`.
        beta: for "jsd", the teacher's weight β in (0, 1). Each value compiles kernels of its own. None: 0.5.
        teacher_bias: ``[V]``, the teacher's bias, without a gradient.
        tp_group: the process group over which the vocabulary of both heads is split into parts of the same size. Rank r
            holds part r. All ranks pass the same hidden states and get bitwise-equal results. None: both weights are
            full weights.
        temperature: divides the float32 logits. It is a positive number, or a float tensor that broadcasts to ``[...]``
            (one value per token, or per sequence as ``[b, 1]``), and has no gradient. A tensor's values must be
            positive and finite. They are checked only on the CPU and outside of ``torch.compile``; elsewhere, a token
            with an invalid temperature gets NaN as result and no gradient, and other tokens are unaffected.
        teacher_temperature: the temperature of the teacher's logits. "same": the student's.
        teacher_logit_scale: the scale of the teacher's logits. "same": the student's. "unset": 1, and an error if the
            student's scale is not 1.
        teacher_logit_softcap: the cap of the teacher's logits. None: no cap. "same": the student's. "unset": no cap,
            and an error if the student has a cap, because each model has its own.
        vocab_size: the true size of the vocabulary of all ranks together. Columns from ``vocab_size`` on are padding:
            they are in no sum and have a gradient of zero, whatever they hold. None: every column counts. It is
            required if the weights have different numbers of rows. Over a ``tp_group``, all parts of both weights have
            the same number of rows.
        where: the tokens that count: a bool tensor of the shape ``[...]``, or the row indices of the flattened tokens,
            each at most once (int64 or int32). Other tokens have 0 as result and no gradient, and cost nothing. The
            host waits for the GPU to count a bool tensor, but not for an index. None: all tokens count.
        wgrad: "return" gives the weight its gradient. "main_grad" rounds the gradient to the weight's dtype and adds it
            to ``weight.main_grad``. It also sets ``grad_added_to_main_grad``, as Megatron's gradient-accumulation
            fusion does. A call that is launched directly adds the gradient to a float32 ``main_grad`` without rounding
            it. ``torch.compile`` does not support "main_grad".
        cache_bytes: the bytes that the forward may cache, so that the backward recomputes less. The cache has two
            numbers for each token and column of the first vocabulary tiles. 0: no cache. None: as in `linear_logprobs`.
            Under ``torch.compile`` a call with a cache needs one graph for each number of tokens, and ``where`` must be
            an index.
        implementation: "mosaic_gpu", "xla", or a tuple of names tried in order. None: the kernels if they support the
            call, else "xla".
        **unknown: an error; the message names the option that may be meant.

    Returns:
        ``[...]`` float32, at least 0: a divergence in nats, or a probability for "tv".

    Raises:
        lce_jax.UnsupportedError: an implementation requested by name cannot run the call; the message says why.
        ValueError, TypeError: shapes, dtypes, devices or options do not fit; the message has their values. The first
            call of a ``tp_group`` also raises if the ranks' vocabulary parts differ in size or overlap, or if the
            ranks' tokens or options differ. In later calls, such a difference gives NaN results and gradients on all
            ranks: in rows whose temperatures differ, and in all rows if the sizes differ.
        NotImplementedError: a second derivative, a forward-mode derivative or ``torch.func.vmap`` is requested
            (``torch.func.grad`` and ``vjp`` work).
        RuntimeError: in the cases that `linear_logprobs` lists.

    Memory:
        The call takes the memory of `lce_jax.linear_kl`, and copies of both hidden states. The copies are padded to 128
        or 512 tokens, or to a power of two from 2048 on (from 32,768 on, also to sizes halfway between two powers).
        Between forward and backward the call saves the operands, six numbers of four bytes per token ("jsd", "tv":
        eight), the temperatures and the cache. If the call is launched directly (the kernels on a Hopper GPU, without a
        bias), torch's allocator gives all memory, and a backward without ``retain_graph`` computes in the memory of the
        cache. Otherwise JAX keeps its own pool of GPU memory (`init`), which also holds the results and gradients.

    Numerics:
        Sums and rounding are those of `lce_jax.linear_kl`. float32 products are as exact as
        ``torch.set_float32_matmul_precision`` or torch's ``fp32_precision`` asks.

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
    _check_tokens(hidden, teacher_hidden)
    shared = Options(
        tp_group=tp_group, entropy=False, implementation=implementation, vocab_size=vocab_size, where=where
    )
    options = shared._replace(
        bias=bias, temperature=temperature, logit_scale=logit_scale, logit_softcap=logit_softcap,
        reduce_grad_hidden=reduce_grad_hidden, wgrad=wgrad, cache_bytes=cache_bytes,
    )  # fmt: skip
    no_labels = hidden.new_full(hidden.shape[:-1], -1, dtype=torch.int64)
    student = _arguments.parse_arguments(hidden, weight, no_labels, options)
    options = shared._replace(
        bias=teacher_bias,
        temperature=_resolve_same(teacher_temperature, temperature),
        logit_scale=_resolve_unset("logit_scale", teacher_logit_scale, student.call.jax.logit_scale, 1.0),
        logit_softcap=_resolve_unset("logit_softcap", teacher_logit_softcap, student.call.jax.logit_softcap, None),
    )
    with _name_teacher_in_errors():
        teacher = _arguments.parse_arguments(teacher_hidden, teacher_weight, student.labels, options)
    _check_columns(student, teacher, vocab_size)
    weight, bias, teacher_weight, teacher_bias = _select_heads(student, teacher, wgrad)
    x, rows = _arguments.flatten_operands(student, weight)
    y, _ = _arguments.flatten_operands(teacher._replace(where=rows), teacher_weight)
    x = x._replace(
        bias=bias,
        teacher_hidden=y.hidden.detach(),
        teacher_weight=teacher_weight,
        teacher_bias=teacher_bias,
        teacher_temperature=y.temperature,
    )
    call = make_call(
        student.call.text,
        function="linear_kl",
        direction=direction,
        beta=beta,
        teacher_logit_scale=teacher.call.jax.logit_scale,
        teacher_logit_softcap=teacher.call.jax.logit_softcap,
        has_temperature=x.temperature is not None,
        has_teacher_temperature=y.temperature is not None,
    )
    return _arguments.place_results(_operators.apply(x, call)["linear_kl"], rows, student.labels)


def _select_heads(student: Arguments, teacher: Arguments, wgrad: Wgrad) -> list[Any]:
    """Returns the student's weight and bias, then the teacher's without gradients, all over their common columns."""
    weight = _arguments.prepare_weight(student, wgrad)
    teacher_weight = _arguments.prepare_weight(teacher, "return").detach()
    heads = [weight, student.bias, teacher_weight, None if teacher.bias is None else teacher.bias.detach()]
    least = min(weight.shape[0], teacher_weight.shape[0])
    if student.call.group != _tensor_parallel.NO_GROUP or weight.shape[0] == teacher_weight.shape[0]:
        return heads
    return [None if x is None else x[:least] for x in heads]


def _resolve_same(teacher_value: Any, student_value: Any) -> Any:
    """Returns the teacher's value of an option, or the student's value if the teacher's is "same"."""
    return student_value if isinstance(teacher_value, str) and teacher_value == "same" else teacher_value


def _resolve_unset(name: str, teacher_value: Any, student_value: float | None, neutral: float | None) -> Any:
    """Returns the teacher's value of an option. "unset" gives the neutral value, which the student must have too."""
    if not (isinstance(teacher_value, str) and teacher_value == "unset"):
        return _resolve_same(teacher_value, student_value)
    if student_value != neutral:
        raise messages.student_only_error(name, student_value, neutral)
    return neutral


def _check_tokens(hidden: Any, teacher_hidden: Any) -> None:
    """Checks that both hidden states are of the same tokens."""
    _checks.hidden(hidden)
    with _name_teacher_in_errors():
        _checks.hidden(teacher_hidden)
        if teacher_hidden.shape[:-1] != hidden.shape[:-1]:
            raise ValueError(
                f"hidden {tuple(teacher_hidden.shape)} must have the leading shape of the student's "
                f"{tuple(hidden.shape)}"
            )
        if teacher_hidden.device != hidden.device:
            raise ValueError(f"hidden is on {teacher_hidden.device}, the student's on {hidden.device}")


def _check_columns(student: Arguments, teacher: Arguments, vocab_size: Any) -> None:
    """Refuses weights with different numbers of rows, unless ``vocab_size`` says which rows count.

    Over a group, `_tensor_parallel.check` refuses them on all ranks. If one rank raised here, others would wait for it.
    """
    rows, teacher_rows = student.weight.shape[0], teacher.weight.shape[0]
    if rows != teacher_rows and vocab_size is None and student.call.group == _tensor_parallel.NO_GROUP:
        raise ValueError(
            f"weight has {rows} rows, the teacher's {teacher_rows}: give the tokenizer's size, at most "
            f"{min(rows, teacher_rows)}, as vocab_size"
        )


@contextlib.contextmanager
def _name_teacher_in_errors() -> Iterator[None]:
    """Rewords errors that are raised in this context, so that they name the teacher's arguments."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError) as error:
        if type(error) not in (TypeError, ValueError, RuntimeError):
            raise  # an error of another package, whose class may take other arguments
        raise type(error)(messages.reword_for_teacher(error)) from None
