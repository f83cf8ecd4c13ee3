"""Where kernels are launched, and tensors as they read them by address.

torch's devices as `lce_jax` describes them. Tensors that are dense, their memory there, and nothing left to be done to
their numbers: torch itself does not look. Some of its own kernels read freed memory, and a tensor with the negative or
conjugate bit holds other numbers than its memory.

And private names of torch, which are in torch 2.11 and 2.14.1: what no public function tells, and what torch's compiler
calls for GPUs, because public functions take several times as long, and serve where it lacks. The few others that the
bridge reads stand where they are used: in `_weight`, `deferred._tensor`, `megatron._hooks`, and JAX's in
`through_jax._runtime`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import torch
from torch._C import _autograd, _functorch

from lce_jax.run import kernels
from lce_torch_bridge._types import PLAIN

ALIGNMENT = 16  # bytes, of what TMA reads
GATHER = (
    "If it is a sharded parameter, gather it until the backward is over: make the call inside the forward of the FSDP "
    "module that holds it, or write `with deepspeed.zero.GatheredParameters([weight]):` around call and backward; "
    "without a backward, FullyShardedDataParallel.summon_full_params does as well. FSDP2's DTensor is gathered here: "
    "pass it itself, not its to_local()"
)
is_batched: Callable[[torch.Tensor], bool] = _functorch.is_legacy_batchedtensor  # by is_grads_batched=True
current_graph_task_id: Callable[[], int] = torch._C._current_graph_task_id  # -1 outside of a backward
top_hooks: Any = _autograd._top_saved_tensors_default_hooks  # None if what autograd saves stays as it is
will_be_run: Callable[[Any], bool] = torch._C._will_engine_execute_node  # by this backward
RECORDING = (  # modules of what traces by a mode
    "torch.fx.experimental.proxy_tensor",
    "torch._subclasses.fake_tensor",
    "torch._subclasses.functional_tensor",
    "torch.utils.checkpoint",
)
OF_FIRST_FORWARD = "_checkpoint_hook."  # in torch.utils.checkpoint; that of the second one is _recomputation_hook


def not_compiled[**P, R](reason: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator, after which ``torch.compile`` leaves the function to Python, and says why."""
    return torch.compiler.disable(reason=reason)


def device_of(device: torch.device) -> kernels.Device | None:
    """``device`` as `lce_jax` describes it; None for what is no CUDA device, or is none of this machine's."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return _described(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _described(index: int) -> kernels.Device:
    properties = torch.cuda.get_device_properties(index)
    capability = f"{properties.major}.{properties.minor}"
    return kernels.Device("gpu", properties.name, capability, properties.multi_processor_count)


def why_not(device: torch.device) -> str | None:
    """Why no kernel is launched on ``device``; None if kernels may be."""
    described = device_of(device)
    if described is None:
        return f"{device} is no CUDA device of this machine"
    return kernels.device_refusal(described) or kernels.why_not()


def struct(x: torch.Tensor) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a tensor."""
    return jax.ShapeDtypeStruct(tuple(map(int, x.shape)), name_of(x.dtype))


def name_of(dtype: torch.dtype) -> str:
    """As JAX calls it."""
    return str(dtype).removeprefix("torch.")


def usable(x: torch.Tensor) -> torch.Tensor:
    """``x`` as the kernels read it: contiguous and aligned."""
    usable = x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0
    return x if usable else x.clone(memory_format=torch.contiguous_format)


def is_usable(x: torch.Tensor) -> bool:
    """Whether kernels can read and write ``x`` where it is."""
    return x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0


def readable(name: str, x: Any) -> Any:
    """A tensor with what its bits say carried out. What is no tensor is returned as it is.

    Raises:
        TypeError: it is sparse or nested.
        RuntimeError: its memory was freed.
    """
    if not isinstance(x, torch.Tensor):
        return x
    if x.is_nested:
        raise TypeError(f"{name} is nested: pass torch.cat({name}.unbind()), and the same of all that is per token")
    if x.layout is not torch.strided:
        raise TypeError(f"{name} {tuple(x.shape)} must be dense, got {x.layout}: pass {name}.to_dense()")
    if torch.compiler.is_compiling() or type(x) not in PLAIN or _functorch.is_functorch_wrapped_tensor(x):
        return x  # what is inside is looked at where it is computed
    left_by_zero = name in ("weight", "bias") and x.shape == (0,)  # in place of what ZeRO-3 has partitioned
    if left_by_zero or (x.numel() and not x.untyped_storage().nbytes()):
        raise RuntimeError(f"{name} {tuple(x.shape)} has no memory, because it was {_freed_by(x)}. {GATHER}")
    return x.resolve_neg().resolve_conj()


def _freed_by(x: torch.Tensor) -> str:
    """What has become of a tensor without memory. ZeRO-3 writes what it has partitioned onto the parameter."""
    whole = getattr(x, "ds_shape", None)
    if whole is None:
        return "freed"
    return f"partitioned by ZeRO-3 (ds_shape {tuple(whole)}, ds_status {getattr(x, 'ds_status', None)})"


def is_readable(x: Any) -> bool:
    """Whether ``x`` certainly needs no `readable`, or is nested. Takes little time. Not while torch compiles."""
    if type(x) not in PLAIN:
        return False
    try:
        return x.untyped_storage().nbytes() > 0 and not x.is_neg()
    except NotImplementedError:  # sparse, or inside a transform of torch.func
        return False


def nothing_watches() -> bool:
    """Whether nothing traces, transforms or counts operators, so that none need be called: each costs the host time."""
    return not (is_traced() or torch._C._len_torch_dispatch_stack() or _autograd._profiler_enabled())


def is_traced() -> bool:
    """Whether the operators of this call are recorded, transformed, or remembered by a selective checkpoint.

    Not where they are counted alone: a checkpoint may run a call twice of which only the first run is.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or torch._C._get_tracing_state():
        return True
    depth = torch._C._len_torch_dispatch_stack()
    return depth > 0 and any(type(torch._C._get_dispatch_stack_at(i)).__module__ in RECORDING for i in range(depth))


def once[R](function: Callable[..., R]) -> Callable[..., R]:
    """A decorator: the result for the same arguments is kept, because it takes the host's time. Not while traced."""
    kept = functools.lru_cache(maxsize=1024)(function)

    @functools.wraps(function)
    def of(*args: Any) -> R:
        return (function if is_traced() else kept)(*args)

    return of


def autocast_dtype(device: str) -> torch.dtype | None:
    """The dtype of the autocast context of this kind of device; None outside of one."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def is_differentiated(*operands: torch.Tensor | None) -> bool:
    """Whether a call is recorded for a backward."""
    return torch.is_grad_enabled() and bool([x for x in operands if x is not None and x.requires_grad])


def will_be_recomputed() -> bool:
    """Whether a non-reentrant activation checkpoint drops what autograd saves now, and will run this forward again.

    Hooks inside of the checkpoint that save what they are given, such as ``save_on_cpu``, come first.
    """
    hooks = top_hooks(False)
    return hooks is not None and getattr(hooks[0], "__qualname__", "").startswith(OF_FIRST_FORWARD)


def checkpoint_hook() -> Any:
    """What the non-reentrant checkpoint that is run, or run again, packs tensors with; None outside of one."""
    hooks = None if torch.compiler.is_compiling() else top_hooks(False)
    pack = None if hooks is None else hooks[0]
    return pack if getattr(pack, "__module__", "") == "torch.utils.checkpoint" else None


def any_is_watched(tensors: Iterable[torch.Tensor | None]) -> bool:
    """Whether one needs operators: a subclass, one without values, or a batch of is_grads_batched=True."""
    return bool([x for x in tensors if x is not None and (type(x) not in PLAIN or x.is_meta or is_batched(x))])


def graph_is_kept() -> bool:
    """Whether this backward may be followed by another one over the same graph (``retain_graph``)."""
    asked = getattr(_autograd, "_get_current_graph_task_keep_graph", None)
    return asked is None or bool(asked())


@contextlib.contextmanager
def in_turn(node: Any) -> Iterator[None]:
    """Inside, no other thread runs the backward of ``node``, a Function's ``ctx``, which may write to saved tensors.

    Threads that differentiate one graph may hold the same saved tensors. A backward that has written to them sets
    ``node.is_spent``.

    Raises:
        RuntimeError: another thread's backward has written to them. (After its end torch itself has freed them.)
    """
    own = vars(node)
    with own.setdefault("turn", threading.Lock()):
        if own.get("is_spent"):
            raise RuntimeError(
                "another thread has differentiated this graph without retain_graph, and its gradients lie where the "
                "saved tensors were: give retain_graph=True in every thread, or each thread a forward of its own"
            )
        yield


@contextlib.contextmanager
def without_hooks() -> Iterator[None]:
    """Inside, what autograd saves stays as it is. A checkpoint would run the head again for each chunk's loss_fn."""
    hooks: list[Any] = []
    while (top := top_hooks(False)) is not None:
        hooks.append(top)
        _autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            _autograd._push_saved_tensors_default_hooks(pack, unpack)


def fsdp2_groups() -> Iterator[tuple[torch.nn.Module, Any]]:
    """Each module of FSDP2 with a group of its parameters."""
    from torch.distributed._composable_state import _module_state_mapping  # no public way from parameter to module

    for module, reference in list(_module_state_mapping.items()):
        state = reference()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        yield from ((module, group) for group in groups if group is not None)


@contextlib.contextmanager
def gathered(weight: torch.Tensor) -> Iterator[None]:
    """Inside, FSDP2 has gathered a parameter that it frees after its module's forward. A backward frees it again.

    Raises:
        RuntimeError: the memory was freed by something else.
    """
    if torch.compiler.is_compiling() or weight.untyped_storage().nbytes():  # a graph cannot ask for a storage
        yield
        return
    module = _fsdp2_module_of(weight)
    if module is None:
        readable("weight", weight)
        raise RuntimeError(f"weight {tuple(weight.shape)} has no memory. {GATHER}")
    module.unshard()
    try:
        yield
    finally:
        if not (torch.is_grad_enabled() and weight.requires_grad):
            module.reshard()


def _fsdp2_module_of(weight: torch.Tensor) -> Any:
    """The module of FSDP2 whose gathered parameter ``weight`` is; None if there is none."""
    for module, group in fsdp2_groups():
        if any(getattr(each, "_unsharded_param", None) is weight for each in group.fsdp_params):
            return module
    return None


_distributed: Any = getattr(torch.distributed, "distributed_c10d", None)
group_of: Any = getattr(_distributed, "_resolve_process_group", None)  # of a name
_guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", lambda i: torch.cuda.current_stream(i).cuda_stream)
empty: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]  # shape, strides, dtype; on that device
empty = getattr(_guards, "_empty_strided_cuda", lambda *x: torch.empty_strided(*x[:2], dtype=x[2], device="cuda"))

type Allocated = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


def allocated(shape: Sequence[int], dtype: torch.dtype) -> Allocated:
    """What `empty` is given for a contiguous tensor.

    Example:
        >>> import torch
        >>> from lce_torch_bridge.tensors._device import allocated
        >>> allocated((5, 3, 2), torch.float32)[:2]
        ((5, 3, 2), (6, 2, 1))
    """
    return tuple(shape), tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape))), dtype
