"""`linear_loss`: the sum of any per-token loss, with gradients that the forward computes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, overload

import jax
import jax.numpy as jnp
from jax import lax

from lce_jax.call import _describe, _options
from lce_jax.call._describe import Bound
from lce_jax.call._options import MeshPlacement
from lce_jax.mesh import _collectives
from lce_jax.run import _loss, _runner, _token_chunks
from lce_jax.run._loss import LOSS, Inputs
from lce_jax.run._mixed_tokens import refuse_mixed_tokens
from lce_jax.types import _jax, loss_signatures, messages
from lce_jax.types._types import LogprobOutput, Results

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, ArrayLike, Bool, Float, Int
    from lce_jax.types._types import PerhapsWithoutEntropy


@overload
def linear_loss(  # type: ignore[overload-overlap]  # bool has True in it
    loss_fn: Callable[..., Array], hidden: Float[ArrayLike, "*b H"], weight: Float[ArrayLike, "V H"],
    labels: Int[ArrayLike, "*b"], *per_token: object, where: Bool[ArrayLike, "*b"] | None = None,
    ignore_index: int | None = None, chunk_bytes: int | None = None, entropy: Literal[True] = True, **options: object,
) -> tuple[Float[Array, ""], LogprobOutput]: ...  # fmt: skip
@overload
def linear_loss(
    loss_fn: Callable[..., Array], hidden: Float[ArrayLike, "*b H"], weight: Float[ArrayLike, "V H"],
    labels: Int[ArrayLike, "*b"], *per_token: object, where: Bool[ArrayLike, "*b"] | None = None,
    ignore_index: int | None = None, chunk_bytes: int | None = None, entropy: bool, **options: object,
) -> tuple[Float[Array, ""], PerhapsWithoutEntropy]: ...  # fmt: skip
def linear_loss(
    loss_fn: Callable[..., Array],
    hidden: Float[ArrayLike, "*b H"],
    weight: Float[ArrayLike, "V H"],
    labels: Int[ArrayLike, "*b"],
    *per_token: object,
    where: Bool[ArrayLike, "*b"] | None = None,
    ignore_index: int | None = None,
    chunk_bytes: int | None = None,
    **options: object,
) -> tuple[Float[Array, ""], LogprobOutput]:
    """The sum of ``loss_fn(logprob, entropy, lse, …)`` over the tokens; the forward computes the gradients.

    The derivative of a token's loss is known as soon as that token's results are known. So a differentiated call
    computes results, losses and gradients for one chunk of tokens after another. It recomputes no matrix product, and
    stores the exponentials of only one chunk, however many tokens there are. A call that is not differentiated only
    runs the forward. Divide the sum by any number that your objective needs.

    Args:
        loss_fn: ``loss_fn(logprob, entropy, lse, *per_token)``, the loss of one token. The first three arguments are
            scalars (``entropy`` is None with ``entropy=False``); the others are the token's slices of ``per_token``.
            ``loss_fn`` may be any JAX function that uses only this token's values and returns one floating-point
            scalar. It may close over arrays; traced ones have gradients too. Compute a loss that mixes tokens, such as
            a mean over a sequence (GSPO), from the results of `linear_logprobs` with `lce_jax.rows.segment_mean`.
        hidden, weight, labels, where, ignore_index: as in `linear_logprobs`.
        per_token: the further arguments of ``loss_fn``. Give them by name, such as ``advantage=...``: then they cannot
            be mixed up, and unknown or missing names raise an error. Each is an array or a tree of arrays. An array's
            shape is (), or begins with the shape of labels; there, a size of 1 is broadcast (``[b, 1]``: one value per
            sequence). Real and complex arrays are differentiable. Python and NumPy scalars become constants of the
            program.
        chunk_bytes: bytes per device that the exponentials of one chunk of tokens may take, in addition to the sum of
            dweight. A chunk has at least 128 tokens. Fewer chunks are faster, because each chunk adds to that sum. All
            tokens form a single chunk if this needs no more memory than several chunks and the sum. None: 1400 MiB (256
            MiB on a CPU).
        **options: those of `linear_logprobs` but ``cache_bytes``, ``candidates`` and ``vocab_part_size``. Any other
            name is an argument of ``loss_fn``.

    Returns:
        The sum over the rows that count, float32 (float64 for a float64 weight), and a `LogprobOutput` for metrics,
        through which no gradient flows. Inside ``shard_map`` both cover the rows of this shard.

    Raises:
        UnsupportedError: a requested implementation cannot serve the call; the message says why.
        ValueError, TypeError: shapes, dtypes or options do not fit; the message has the values. Also if ``loss_fn``
            does not return one floating-point scalar, or reduces a scalar (``jnp.mean(logprob)`` would be a mean over
            one token). Also if it closes over an array on a mesh, which JAX cannot use on one device, or inside
            ``shard_map`` over a traced array that devices with different tokens share: pass such arrays as per-token
            arguments.
        NotImplementedError: for a second derivative, and for forward mode (``jax.jvp``).

    Memory:
        A differentiated call takes O(chunk + T) beyond the gradients, and with several chunks V·H·4 bytes for dweight
        in float32. The forward already allocates the gradients. If hidden's gradient is summed over devices after the
        loop (because the sequence is gathered, or other axes share hidden), it is float32 until then.

    Numerics:
        dweight and dbias are summed over the chunks in float32. With a cotangent of 1, each gradient is rounded once.
        Any other cotangent, such as that of a mean, multiplies the rounded gradient, which rounds it again; to avoid
        this, scale the losses inside ``loss_fn``. (Under ``value_and_grad`` of the sum itself, XLA drops the product.)
        In float16, the gradient of a sum over many tokens may overflow even if the scaled gradient would not.

    Sharding:
        Under ``jit`` on a mesh, the call is partitioned like a matrix product, over batch, sequence and vocabulary: by
        the operands' types over Explicit axes, by XLA over Auto axes (which TPUs refuse). `sharded_linear_loss` takes
        the axes by name. Inside ``shard_map``, give ``axis_name``. Per-token arguments may have types that vary over
        this axis if every shard holds the same values; rows with different values return NaN. ``vmap`` computes its
        examples one by one; if an Explicit axis splits the examples, each device computes its own examples.

    Compilation:
        Outside ``jit``, each kind of call is compiled once for each ``loss_fn``, and the program lives as long as
        ``loss_fn``. Reuse the function object, because a new one is compiled again. Variables that the function reads
        may change between calls.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from lce_jax import linear_loss
        >>> def policy_gradient(logprob, entropy, lse, advantage):
        ...     return -advantage * logprob - 0.01 * entropy
        >>> hidden, weight, labels = jnp.ones((4, 8)), jnp.zeros((1000, 8)), jnp.arange(4)
        >>> advantages = jnp.array([1.0, -1.0, 2.0, 0.0])
        >>> def objective(weight):
        ...     return linear_loss(policy_gradient, hidden, weight, labels, advantage=advantages)
        >>> (total, out), dweight = jax.jit(jax.value_and_grad(objective, has_aux=True))(weight)
        >>> round(float(total), 3), out.logprobs.shape         # 2·ln 1000 - 4·0.01·ln 1000
        (13.539, (4,))

    References:
        Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training" (2024), which computes the gradients of
        the cross entropy in the forward.
    """
    placement = options.get("axis_name")
    axes = placement._asdict() if isinstance(placement, MeshPlacement) else {}
    parameters = {"where": where, "ignore_index": ignore_index, "chunk_bytes": chunk_bytes, **axes}
    known = _options.list_options("linear_loss")
    named, call_options = loss_signatures.split_loss_arguments(loss_fn, per_token, options, known, parameters)
    _options.check_names(linear_loss, call_options, loss_fn)
    parsed = _options.parse_arguments(call_options, hidden, weight, labels, where, ignore_index, function="linear_loss")
    limit = _token_chunks.check_chunk_bytes(chunk_bytes, call_options)
    parsed = parsed._replace(call=parsed.call.replace(chunk_bytes=limit))
    names = {**call_options, **{name: x for name, x in axes.items() if x is not None}}
    refusal = functools.partial(
        messages.mixed_tokens_error,
        function="sharded_linear_logprobs" if axes else "linear_logprobs",
        shape=jnp.shape(labels),
        where=None if where is None else "where",
        ignore_index=ignore_index,
        options=[name for name in names if name != "axis_name" or not axes],
    )
    arguments = per_token, named
    bound = _describe.bind_call(_describe.describe_call(parsed), arguments)
    return sum_losses(loss_fn, bound, arguments, refusal)


def sum_losses(
    loss_fn: Any, bound: Bound, arguments: Any, refusal: Callable[[str], ValueError] | None = None
) -> tuple[Array, LogprobOutput]:
    """Computes `linear_loss` for a bound call. ``arguments`` has the positional and the named arguments of ``loss_fn``.

    If the call computes the mean logit, ``loss_fn`` gets it after the other results. ``refusal`` makes the error for a
    ``loss_fn`` that mixes tokens; None skips this check, for functions of this package.
    """
    call, primals, rows, agree = bound
    flat, rebuild = _loss.flatten_arguments(arguments, rows.labels)
    if call.axis_name is not None:
        flat, flat_agree = _collectives.equalize_shards(flat, rows.labels.ndim, call.axis_name)
        agree = _collectives.join_agreement(agree, _collectives.ignore_masked_rows(flat_agree, rows.where))
        rows = _describe.tag_arrays(call, rows, flat)
    inputs = Inputs(primals, flat, ())
    axes = _runner.list_result_axes(call, (inputs, rows))
    run, cached_fn = (_runner.compute, loss_fn) if _jax.is_traced() else _loss.cache_program(loss_fn)
    loss, constants = _loss.trace(cached_fn, rebuild, call, flat, rows.labels.ndim, axes)
    if refusal is not None:
        refuse_mixed_tokens(loss.jaxpr.jaxpr, refusal)
    _loss.check_closure(constants, axes)
    inputs = inputs._replace(constants=constants)
    retraces = call.mesh is not None and not _runner.is_partitioned_by_xla(call, (inputs, rows))
    loss = loss if retraces else dataclasses.replace(loss, retrace=None)  # a closure would keep its arrays alive
    if run is not _runner.compute:
        loss, inputs = _loss.identify(loss, inputs)
    total, out = run(LOSS._replace(static=(loss,)), call, inputs, rows)
    if agree is not None:
        total = _collectives.set_nan_where_different(jnp.all(agree), total)
        out = _collectives.set_nan_where_different(agree, out)
    return total, jax.tree.map(lax.stop_gradient, Results(out).public)
