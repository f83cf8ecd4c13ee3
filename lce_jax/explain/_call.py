"""`lce_jax.explain`: the plan of a call, made without running it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import lce_jax
from lce_jax import mosaic
from lce_jax.call import _describe, _dispatch, _options
from lce_jax.call._describe import divide_call, find_layout
from lce_jax.call._options import MeshPlacement
from lce_jax.mathematics._kl import Direction, Pair
from lce_jax.ops._cross_entropy import Reduction
from lce_jax.run import _token_chunks
from lce_jax.run._kl import KLArguments, check_columns
from lce_jax.types import scalars, shared_checks
from lce_jax.types._types import PassBytes, Plan, RequestedGradients, is_array
from lce_jax.xla import _kl, _logits
from lce_jax.xla._kl import KLPlan

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh

    from lce_jax.call._options import Arguments, KLOptions
    from lce_jax.mesh._layout import Axes
    from lce_jax.types._shapes import Bool, Float, Int, Shaped
    from lce_jax.types._types import Call


def example_loss(logprob: Any, entropy: Any, _: Any) -> Any:
    """Returns a token's loss, to compile `lce_jax.linear_loss`. Any loss of log-probability and entropy would do."""
    return -logprob if entropy is None else -logprob - 0.01 * entropy


def measure_programs(
    plan: Plan, name: str, hidden: Any, weight: Any, arguments: dict[str, Any], placement: MeshPlacement
) -> PassBytes:
    """Compiles the programs of the public function ``name`` and returns their temporary memory.

    The function takes hidden, weight and ``arguments``. The backward's program computes the gradients that the plan's
    call requests, and the gradients of an adapter's factors.
    """
    a, b, scale = arguments.pop("lora", None) or (None, None, 1.0)
    arrays = {key: _struct(x) for key, x in arguments.items() if is_array(x) and not isinstance(x, np.generic)}
    hidden, weight = _struct(hidden), _struct(weight)
    options = {key: arguments[key] for key in arguments.keys() - arrays}
    factors = () if a is None else (_struct(a), _struct(b))
    _check_devices(plan, (hidden, weight, *factors, *arrays.values()), placement, options.get("axis_name"))
    axes = placement._asdict() if placement.names_axes else {}
    function, first = getattr(lce_jax, f"sharded_{name}" if axes else name), [example_loss] * (name == "linear_loss")

    def call(hidden: Any, weight: Any, factors: Any, arrays: dict[str, Any]) -> Any:
        lora = {"lora": (*factors, scale if scalars.is_number(scale) else 1.0)} if factors else {}
        return function(*first, hidden, weight, **arrays, **lora, **options, **axes)

    operands, gradients = (hidden, weight, factors, arrays), (True, plan.call.gradients.weight, bool(factors))
    trained = (*(i for i, is_requested in enumerate(gradients) if is_requested),)
    forward, both = (
        compile_program(call, operands, differentiated).memory_analysis().temp_size_in_bytes
        for differentiated in ((), () if name == "linear_topk" else trained)
    )
    return PassBytes(forward, both)


def compile_program(call: Callable[..., Any], operands: tuple[Any, ...], trained: tuple[int, ...]) -> Any:
    """Compiles ``call`` for the devices of its operands, with gradients of the operands at the indices ``trained``."""

    def total(*operands: Any) -> Any:
        return sum(jnp.sum(x) for x in jax.tree.leaves(call(*operands)))

    if not trained:
        return jax.jit(call).lower(*operands).compile()
    results = None, tuple(jax.tree.map(lambda x: x.sharding, operands[i]) for i in trained)
    return jax.jit(jax.value_and_grad(total, trained), out_shardings=results).lower(*operands).compile()


def _struct(x: Any) -> jax.ShapeDtypeStruct:
    sharding = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _check_devices(
    plan: Plan, operands: Iterable[jax.ShapeDtypeStruct], placement: MeshPlacement, axis_name: Any
) -> None:
    """Refuses to compile a program for devices other than the plan's."""
    if axis_name is not None:
        raise ValueError(
            f"compile=True with axis_name={axis_name!r}: one shard alone cannot be compiled. Give the global arrays, "
            f"mesh= and vocab_axis={axis_name!r} in place of axis_name"
        )
    shardings = [x.sharding for x in operands if x.sharding is not None]
    meshes = [
        placement.mesh,
        jax.sharding.get_mesh(),
        jax.sharding.get_abstract_mesh(),
        *(getattr(x, "mesh", None) for x in shardings),
    ]
    named = [mesh for mesh in meshes if mesh is not None and not mesh.empty]
    if any(isinstance(mesh, Mesh) for mesh in named) or len(shardings) > sum(hasattr(x, "mesh") for x in shardings):
        return
    device = plan.call.device
    with _dispatch.trace_for_device(None):
        is_local = device == _dispatch.current_device()
    if named or not is_local:
        raise ValueError(
            f"compile=True: neither operands nor mesh name devices of {device.kind or device.platform}. Give operands "
            "on a jax.sharding.Mesh of such devices. If this machine has none, describe them with "
            "jax.experimental.topologies.get_topology_desc, as lce-jax explain --compile does"
        )


FUNCTIONS = {"k": "linear_topk", "ids": "linear_logits", "teacher": "linear_kl"}  # which function each argument selects


def check_function(selecting: dict[str, Any], options: KLOptions, *loss_arguments: Any) -> None:
    """Refuses options and loss arguments that the function selected by k, ids or teacher does not have."""
    names = [name for name, x in selecting.items() if x is not None]
    known = _options.list_options("linear_logprobs")
    if "teacher" not in names and (wrong := [name for name in options if name not in known]):
        raise TypeError(f"{wrong[0]} is an option of linear_kl: give teacher too")
    if not names:
        return
    if len(names) > 1:
        raise ValueError(f"{' and '.join(names)} belong to different functions: give one of them")
    function = FUNCTIONS[names[0]]
    if any(is_array(x) or x for x in loss_arguments):
        raise ValueError(
            f"{names[0]} is an argument of {function}, which is not a loss: leave out the arguments of losses"
        )
    _options.refuse_options(function, options)


def plan_logits(arguments: Arguments, placement: MeshPlacement) -> Plan:
    """Returns the plan of `lce_jax.linear_logits`."""
    arguments = _describe.describe_call(arguments)
    call = dataclasses.replace(arguments.call, partial_rows=False)  # `linear_logits` leaves masked rows where they are
    return _logits.plan(divide_call(call, find_layout(arguments, [arguments.candidates], placement)[0]))


def plan_kl(arguments: KLArguments, labels: Any, placement: MeshPlacement) -> Plan:
    """Returns the plan of `lce_jax.linear_kl`."""
    heads = arguments.describe()
    student = heads.student
    _describe.describe_call(student._replace(labels=labels))
    tokens = jax.ShapeDtypeStruct(tuple(labels.shape), jnp.int32)
    layout, _ = find_layout(student, [tokens if student.where is None else student.where], placement)
    names_axis = student.call.axis_name is not None
    check_columns(heads, names_axis or (layout is not None and layout.vocab_axes is not None))
    call = arguments.combine_calls(*(divide_call(head.call, layout) for head in heads))
    columns = min(head.columns for head in call.heads)
    if not names_axis and (layout is None or layout.vocab_shards == 1):
        columns = min(columns, call.vocab_size)
    planned = KLPlan(Pair(*call.heads), call.direction, columns)
    chosen, refused = _dispatch.choose(call)
    plan = mosaic.kl_plan if chosen.NAME == mosaic.NAME else _kl.make_plan
    return dataclasses.replace(plan(planned), refused=refused)


def explain(
    hidden: Float[Shaped, "*b H"],
    weight: Float[Shaped, "V H"],
    labels: Int[Shaped, "*b"],
    *,
    where: Bool[Shaped, "*b"] | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    vocab_axis: Axes = None,
    batch_axes: Axes = None,
    sequence_axis: Axes = None,
    ignore_index: int | None = -100,
    reduction: Reduction | None = None,
    label_smoothing: float = 0.0,
    z_loss: float | Float[Shaped, ""] = 0.0,
    normalizer: float | Float[Shaped, ""] | None = None,
    gradients_in_forward: bool = False,
    chunk_bytes: int | None = None,
    frozen_weight: bool = False,
    k: int | None = None,
    ids: Int[Shaped, "*b K"] | None = None,
    teacher: tuple[Float[Shaped, "*b G"], Float[Shaped, "V G"]] | None = None,
    direction: Direction = "forward",
    compile: bool = False,
    **options: Unpack[KLOptions],
) -> Plan:
    """Plans a call: its implementation, why others cannot serve it, its tiles, and its bytes per device.

    The arguments select the function that is planned:

    - `linear_logprobs` by default
    - `linear_cross_entropy` with ``ignore_index``, ``reduction``, ``label_smoothing``, ``z_loss`` or ``normalizer``
    - a differentiated `linear_loss` with ``gradients_in_forward``
    - `linear_topk` with ``k``
    - `linear_logits` with ``ids``
    - `linear_kl` with ``teacher``

    With a mesh or a mesh axis, the plan is for the sharded function, and counts one device's tokens and columns. If the
    arrays are already split over a mesh, the plan is for that split, because XLA or their types partition the call in
    this way (for `linear_logits` and `linear_kl`, only over Explicit axes). Nothing is computed, so operands may be
    tracers or ``jax.ShapeDtypeStruct``. The plan is for the devices that the mesh or the operands' shardings name; this
    machine need not have them (`jax.experimental.topologies`). If none are named, the plan is for this machine's
    devices. With ``axis_name``, give the shapes of one shard; the axis need not be bound.

    Args:
        hidden: ``[..., H]`` hidden states with any leading shape, even an empty one, in bfloat16, float16, float32 or
            float64. They are cast to the weight's dtype for the matrix products.
        weight: ``[V, H]`` weight of the head (``[H, V]`` with ``weight_layout="hv"``). Its dtype is that of the matrix
            products.
        labels: ``[...]`` integer vocabulary ids; they stay global ids if the vocabulary is split. A label outside the
            vocabulary (negative, or at least V) has logprob 0, with the gradient of ``-lse``; its row counts unless
            ``ignore_index`` excludes it.
        where: ``[...]`` bool, the rows that count. The others are exactly 0 in outputs and gradients, whatever they
            hold, and cost no work. None: every row counts.
        mesh: the mesh. None: the mesh of ``jax.set_mesh``.
        vocab_axis: the mesh axis (or axes) that splits the vocabulary. V must be a multiple of its size: pad the weight
            and give the true ``vocab_size``. None: each device holds the full vocabulary.
        batch_axes: the mesh axis (or axes) that splits the batch, hidden's first dimension. None: the Explicit axes in
            hidden's type, if any; otherwise the batch is not split.
        sequence_axis: the mesh axis (or axes) that splits the sequence, hidden's last dimension but one. If
            ``sequence_axis`` equals ``vocab_axis`` or ends with it, hidden states are all-gathered over ``vocab_axis``
            in the forward, and their gradient is reduce-scattered in the backward. That is Megatron's sequence
            parallelism; ``("context", "tensor")`` adds context parallelism. None: the sequence is not split.
        ignore_index: rows with this label do not count, as in PyTorch. None: every label counts; a label outside the
            vocabulary has logprob 0.
        reduction: "mean" over the rows that count (0 if there are none), "sum", or "none" for ``[...]``.
        label_smoothing: ε in [0, 1].
        z_loss: weight of ``lse²``, at least 0 (PaLM: 1e-4); a number, or an array of shape (), which may be traced
            and is differentiable.
        normalizer: the divisor of "mean", in place of the number of rows that count in this call. Give the number of
            rows in all micro-batches, or inside ``shard_map`` on all devices, so that the losses and their gradients
            add up to the mean over all rows. It is a positive number, or an array of shape (), which may be traced; a 0
            in an array counts as 1. None: the number of rows that count in this call.
        gradients_in_forward: True to plan `linear_loss`, including the memory that all its chunks share.
        chunk_bytes: bytes per device that the exponentials of one chunk of tokens may take, in addition to the sum of
            dweight. A chunk has at least 128 tokens. Fewer chunks are faster, because each chunk adds to that sum. All
            tokens form a single chunk if this needs no more memory than several chunks and the sum. None: 1400 MiB (256
            MiB on a CPU).
        frozen_weight: True to plan a call without a gradient of the weight (``jax.lax.stop_gradient(weight)``, or a
            parameter that is not differentiated). Such a call has no sum of dweight, and its chunks may have other
            sizes. ``lora`` implies it.
        k: the k of `linear_topk`, to plan that function. Only the shape of the labels matters then.
        ids: ``[..., K]``, the ids of `linear_logits`, to plan that function. Only the shape of the labels matters then.
        teacher: the teacher's hidden states ``[..., G]`` and its weight, to plan `linear_kl`. Only the shape of the
            labels matters then.
        direction: the direction of `linear_kl`: "forward", "reverse", "jsd" or "tv". All but "forward" keep more
            memory between the passes.
        compile: True to compile the call's programs and report their memory (``Plan.compiled``). That takes as long as
            compiling for a run. Operands or mesh must name devices, or the plan must be for this machine's devices.
        **options: ``temperature``, ``logit_softcap``, ``logit_scale``, ``entropy``, ``stats``, ``vocab_size``,
            ``weight_layout``, ``axis_name``, ``cache_bytes``, ``precision``, ``implementation``, ``bias``,
            ``candidates``, ``gradient_threshold``, ``vocab_part_size``, ``logit_floor`` and ``lora``; with a teacher
            also ``beta``, ``teacher_temperature``, ``teacher_logit_softcap``, ``teacher_logit_scale``,
            ``teacher_weight_layout`` and ``teacher_bias``, as in `linear_logprobs` and `linear_kl`.

    Returns:
        A `Plan`; ``print`` it. ``python -m lce_jax.explain`` prints the plans for a named model, even on a machine
        without a GPU.

    Raises:
        UnsupportedError: an implementation requested by name cannot serve the call; the message says why.
        ValueError, TypeError: the planned function would refuse these shapes or options.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from lce_jax import explain
        >>> struct = jax.ShapeDtypeStruct
        >>> call = struct((4096, 512), jnp.float32), struct((65536, 512), jnp.float32), struct((4096,), jnp.int32)
        >>> print(str(explain(*call, implementation="xla")).splitlines()[5].strip())
        logits     1.0 GiB if they were stored
        >>> mesh = jax.sharding.AbstractMesh((4, 2), ("data", "tensor"))
        >>> plan = explain(*call, implementation="xla", mesh=mesh, vocab_axis="tensor", batch_axes="data")
        >>> plan.call.num_tokens, plan.call.columns
        (1024, 32768)
        >>> call = struct((64, 8), jnp.float32), struct((4096, 8), jnp.float32), struct((64,), jnp.int32)
        >>> explain(*call, compile=True).compiled.forward < 64 * 4096 * 4  # on this machine
        True
    """
    _options.check_names(explain, options)
    shared_checks.require_labels(labels, 'jax.ShapeDtypeStruct(hidden.shape[:-1], "int32") serves')
    smoothing, penalty, divisor = _options.check_loss(reduction or "mean", label_smoothing, z_loss, normalizer)
    loss_options = (reduction, divisor, None if ignore_index == -100 else "ignore_index")
    loss_arguments = (*loss_options, smoothing, penalty, gradients_in_forward or None, chunk_bytes)
    check_function({"k": k, "ids": ids, "teacher": teacher}, options, *loss_arguments)
    scalars.flag("gradients_in_forward", gradients_in_forward)
    is_frozen = scalars.flag("frozen_weight", frozen_weight) or options.get("lora") is not None
    gradients = RequestedGradients(weight=not is_frozen)
    placement = MeshPlacement(mesh, vocab_axis, batch_axes, sequence_axis)
    is_loss = bool(smoothing) or is_array(penalty) or bool(penalty) or any(x is not None for x in loss_options)
    more: dict[str, Any]  # further arguments of the public function that is compiled
    if teacher is not None:
        if not isinstance(teacher, tuple | list) or len(teacher) != 2:
            raise TypeError(
                f"teacher must be the pair of its hidden states and its weight, got {type(teacher).__name__}"
            )
        arrays: Any = Pair((hidden, weight), tuple(teacher))
        plan = plan_kl(KLArguments.of(arrays, where, direction, options), labels, placement)
        name, more = "linear_kl", {"teacher_hidden": teacher[0], "teacher_weight": teacher[1], "direction": direction}
    elif direction != "forward":
        raise ValueError(f"direction={direction!r} is an argument of linear_kl: give teacher too")
    elif ids is not None:
        arguments = _options.parse_arguments_with_ids(options, hidden, weight, ids, where)
        plan = plan_logits(arguments._replace(labels=labels), placement)
        name, more = "linear_logits", {"ids": ids}
    else:
        loss = _PlannedLoss(reduction, ignore_index, smoothing) if is_loss else None
        chunks = (gradients_in_forward, chunk_bytes)
        plan = _plan_head(hidden, weight, labels, where, placement, options, k, gradients, loss, *chunks)
        plan = _add_adapter_copies(plan, options.get("lora"))
        name, more = "linear_logprobs", {"labels": labels}
    if not scalars.flag("compile", compile):
        return plan
    plan = dataclasses.replace(plan, call=plan.call.replace(gradients=gradients))
    if k is not None:
        name, more = "linear_topk", {"k": k}
    elif gradients_in_forward:
        name, more = "linear_loss", more | {"chunk_bytes": chunk_bytes}
    elif is_loss:
        name = "linear_cross_entropy"
        more |= {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "z_loss": z_loss}
        more |= {"reduction": reduction or "mean", "normalizer": normalizer, "chunk_bytes": chunk_bytes}
    more |= options | {"where": where}
    return dataclasses.replace(plan, compiled=measure_programs(plan, name, hidden, weight, more, placement))


class _PlannedLoss(NamedTuple):
    """The arguments of a loss on which its plan depends."""

    reduction: Reduction | None
    ignore_index: int | None
    smoothing: float


def _plan_head(
    hidden: Any,
    weight: Any,
    labels: Any,
    where: Any,
    placement: MeshPlacement,
    options: KLOptions,
    k: int | None,
    gradients: RequestedGradients,
    loss: _PlannedLoss | None,
    gradients_in_forward: bool,
    chunk_bytes: int | None,
) -> Plan:
    """Returns the plan of `lce_jax.linear_logprobs`, of a loss, or with ``k`` of `lce_jax.linear_topk`."""
    known_options = options if loss is None else _options.check_loss_options(options)
    smooths = loss is not None and loss.smoothing > 0
    arguments = _describe.describe_call(
        _options.parse_arguments(known_options, hidden, weight, labels, where, mean_logit=smooths, top_k=k)
    )
    _describe.check_values(arguments)
    described = arguments.call.replace(gradients=gradients)
    if loss is not None and loss.ignore_index is not None:
        scalars.integer("ignore_index", loss.ignore_index)
        described = dataclasses.replace(described, partial_rows=True)
    layout, known = find_layout(arguments, [labels, *([] if where is None else [where])], placement)
    call, reason = divide_call(described, layout), None
    if gradients_in_forward:
        limit = _token_chunks.check_chunk_bytes(chunk_bytes, options)
        return _token_chunks.plan(dataclasses.replace(call, chunk_bytes=limit))
    if loss is not None:
        reason = _token_chunks.refuse_forward_gradients(call, loss.reduction, options)
        limit = _token_chunks.check_loss_chunk_bytes(chunk_bytes, reason)
        if reason is None:
            return _token_chunks.plan(dataclasses.replace(call, chunk_bytes=limit))
    elif chunk_bytes is not None:
        raise ValueError(
            f"chunk_bytes={chunk_bytes!r} is for linear_loss and linear_cross_entropy: give gradients_in_forward=True "
            "or reduction= too"
        )
    plan = _dispatch.explain(call) if known is layout else _plan_auto_axes(call)
    notes = () if reason is None else (f"the gradients are computed in the backward: {reason}",)
    return dataclasses.replace(plan, notes=(*notes, *plan.notes))


def _add_adapter_copies(plan: Plan, lora: Any) -> Plan:
    """Adds the copies of an adapter's B to the plan: the padded and cast B, and its gradient."""
    if lora is None:
        return plan
    call, b = plan.call, lora[1]
    size, is_padded, is_cast = call.columns * call.rank, b.shape[1] != call.rank, b.dtype != call.dtype
    operand = size * call.dtype.itemsize if is_padded or is_cast else 0
    # A program with both passes stores the padded B before it is cast; a forward alone pads and casts in one step.
    padded = size * jnp.dtype(b.dtype).itemsize if is_padded and is_cast else 0
    gradient = size * call.stat_dtype.itemsize if is_padded or b.dtype != call.stat_dtype else 0
    forward, backward = plan.forward_bytes + operand, plan.backward_bytes + operand + padded + gradient
    return dataclasses.replace(plan, forward_bytes=forward, backward_bytes=backward)


def _plan_auto_axes(call: Call) -> Plan:
    """Returns the plan of a call that XLA partitions over Auto axes. Tiles have no global shape, so none are saved."""
    advice = "call sharded_linear_logprobs, or make them Explicit"
    plan = _dispatch.explain(dataclasses.replace(call, cache_bytes=0, gradient_threshold=0.0))
    notes = []
    if call.cache_bytes:
        notes.append(f"cache_bytes={call.cache_bytes} keeps nothing over Auto axes: {advice}")
    if call.gradient_threshold:
        notes.append(f"gradient_threshold={call.gradient_threshold:g} is not used over Auto axes: {advice}")
    return dataclasses.replace(plan, notes=(*plan.notes, *notes))
