"""Descriptions of devices, checks of tensors' memory, and queries of torch's state while a call runs.

- `describe_device` and `launch_refusal` describe a device to `lce_jax`, and say whether kernels can be launched on it.
- `check_readable` and `make_usable` check a tensor before kernels read it by its address: that it is dense, has memory,
  and has no negative or conjugate bit. torch does not check this: some of its own kernels read freed memory, and the
  values of a tensor with one of these bits differ from the values in its memory.
- Other functions say whether a call is traced, recorded for a backward, inside a checkpoint, or run again.

This module has most of torch's private names that the bridge uses; they exist in torch 2.11 and 2.15.0. Either no
public function gives the same information, or the public one takes several times as long and is used only if the
private name is missing. Other private names of torch are used in `_weight`, `deferred._tensor` and `megatron._api`, and
JAX's private names in `through_jax._dlpack` and `through_jax._runtime`.
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

ALIGNMENT = 16  # bytes, as TMA requires
GATHER = (
    "If it is a sharded parameter, gather it until the backward is over: make the call inside the forward of the FSDP "
    "module that holds it, or write `with deepspeed.zero.GatheredParameters([weight]):` around call and backward; "
    "without a backward, FullyShardedDataParallel.summon_full_params does as well. FSDP2's DTensor is gathered here: "
    "pass it itself, not its to_local()"
)
is_batched: Callable[[torch.Tensor], bool] = _functorch.is_legacy_batchedtensor  # from is_grads_batched=True
current_graph_task_id: Callable[[], int] = torch._C._current_graph_task_id  # -1 outside of a backward
top_hooks: Any = _autograd._top_saved_tensors_default_hooks  # None if no hooks change what autograd saves
will_be_run: Callable[[Any], bool] = torch._C._will_engine_execute_node  # whether this backward will run a node
RECORDING = (  # modules whose dispatch modes trace operators or cache their results
    "torch.fx.experimental.proxy_tensor",
    "torch._subclasses.fake_tensor",
    "torch._subclasses.functional_tensor",
    "torch.utils.checkpoint",
)
FIRST_FORWARD_HOOK = "_checkpoint_hook."  # in torch.utils.checkpoint; the second forward uses _recomputation_hook


def not_compiled[**P, R](reason: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Returns a decorator that makes ``torch.compile`` run a function in Python. Its messages give the reason."""
    return torch.compiler.disable(reason=reason)


def describe_device(device: torch.device) -> kernels.Device | None:
    """Returns ``device`` as `lce_jax` describes it; None if it is not a CUDA device of this machine."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return _describe_gpu(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _describe_gpu(index: int) -> kernels.Device:
    properties = torch.cuda.get_device_properties(index)
    capability = f"{properties.major}.{properties.minor}"
    return kernels.Device("gpu", properties.name, capability, properties.multi_processor_count)


def launch_refusal(device: torch.device) -> str | None:
    """Returns why no kernel can be launched directly on ``device``; None if kernels can be."""
    described = describe_device(device)
    if described is None:
        return f"{device} is no CUDA device of this machine"
    return kernels.device_refusal(described) or kernels.why_not()


def describe_tensor(x: torch.Tensor) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of a tensor, as JAX describes them."""
    return jax.ShapeDtypeStruct(tuple(map(int, x.shape)), name_dtype(x.dtype))


def name_dtype(dtype: torch.dtype) -> str:
    """Returns JAX's name of a torch dtype."""
    return str(dtype).removeprefix("torch.")


def make_usable(x: torch.Tensor) -> torch.Tensor:
    """Returns ``x`` if kernels can read it, because it is contiguous and aligned; else a copy that they can read."""
    fits = x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def is_usable(x: torch.Tensor) -> bool:
    """Whether kernels can read and write ``x`` itself, without a copy."""
    return x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0


def check_readable(name: str, x: Any) -> Any:
    """Checks a tensor's memory, and returns it without negative and conjugate bits. Returns other objects unchanged.

    Raises:
        TypeError: the tensor is sparse or nested.
        RuntimeError: the tensor's memory was freed.
    """
    if not isinstance(x, torch.Tensor):
        return x
    if x.is_nested:
        raise TypeError(
            f"{name} is nested: pass torch.cat({name}.unbind()), and do the same to every per-token argument"
        )
    if x.layout is not torch.strided:
        raise TypeError(f"{name} {tuple(x.shape)} must be dense, got {x.layout}: pass {name}.to_dense()")
    if torch.compiler.is_compiling() or type(x) not in PLAIN or _functorch.is_functorch_wrapped_tensor(x):
        return x  # the inner tensor is checked when the call is computed
    is_partitioned = name in ("weight", "bias") and x.shape == (0,)  # what ZeRO-3 leaves of a parameter
    if is_partitioned or (x.numel() and not x.untyped_storage().nbytes()):
        raise RuntimeError(f"{name} {tuple(x.shape)} has no memory, because it was {_freed_by(x)}. {GATHER}")
    return x.resolve_neg().resolve_conj()


def _freed_by(x: torch.Tensor) -> str:
    """Says how a tensor lost its memory. Parameters that ZeRO-3 has partitioned have ``ds_`` attributes."""
    full_shape = getattr(x, "ds_shape", None)
    if full_shape is None:
        return "freed"
    return f"partitioned by ZeRO-3 (ds_shape {tuple(full_shape)}, ds_status {getattr(x, 'ds_status', None)})"


def is_readable(x: Any) -> bool:
    """Tests quickly whether ``x`` can skip `check_readable`. True for nested tensors. torch.compile cannot trace it."""
    if type(x) not in PLAIN:
        return False
    try:
        return x.untyped_storage().nbytes() > 0 and not x.is_neg()
    except NotImplementedError:  # sparse, or inside a transform of torch.func
        return False


def nothing_watches() -> bool:
    """Whether nothing traces, transforms or counts operators. A call then skips operators, which take host time."""
    return not (is_traced() or torch._C._len_torch_dispatch_stack() or _autograd._profiler_enabled())


def is_traced() -> bool:
    """Whether the operators of this call are recorded, transformed, or cached by a selective checkpoint.

    Modes that only count operators do not count as tracing.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or torch._C._get_tracing_state():
        return True
    depth = torch._C._len_torch_dispatch_stack()
    return depth > 0 and any(type(torch._C._get_dispatch_stack_at(i)).__module__ in RECORDING for i in range(depth))


def cache_results[R](function: Callable[..., R]) -> Callable[..., R]:
    """Decorates a function to cache its results by the arguments, which saves time on the host.

    While torch traces, nothing is cached.
    """
    cached = functools.lru_cache(maxsize=1024)(function)

    @functools.wraps(function)
    def call(*args: Any) -> R:
        return (function if is_traced() else cached)(*args)

    return call


def autocast_dtype(device: str) -> torch.dtype | None:
    """Returns the dtype of the autocast context for a device type; None outside of a context."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def is_differentiated(*operands: torch.Tensor | None) -> bool:
    """Whether autograd would record a call with these operands."""
    return torch.is_grad_enabled() and bool([x for x in operands if x is not None and x.requires_grad])


def will_be_recomputed() -> bool:
    """Whether a non-reentrant activation checkpoint drops what autograd saves now, and will run this forward again.

    Only the innermost saved-tensor hooks count. If they save tensors, like ``save_on_cpu``, the checkpoint drops
    nothing.
    """
    hooks = top_hooks(False)
    return hooks is not None and getattr(hooks[0], "__qualname__", "").startswith(FIRST_FORWARD_HOOK)


def checkpoint_hook() -> Any:
    """Returns the pack hook of the current non-reentrant checkpoint, in its first or second run; None without one."""
    hooks = None if torch.compiler.is_compiling() else top_hooks(False)
    pack = None if hooks is None else hooks[0]
    return pack if getattr(pack, "__module__", "") == "torch.utils.checkpoint" else None


def any_is_watched(tensors: Iterable[torch.Tensor | None]) -> bool:
    """Whether torch watches one of the tensors, so that the call must run as this package's torch operator.

    torch watches a subclass, a meta tensor, and a tensor that ``is_grads_batched=True`` has batched.
    """
    return bool([x for x in tensors if x is not None and (type(x) not in PLAIN or x.is_meta or is_batched(x))])


def graph_is_kept() -> bool:
    """Whether another backward may run over the same graph, because of ``retain_graph``."""
    keep_graph = getattr(_autograd, "_get_current_graph_task_keep_graph", None)
    return keep_graph is None or bool(keep_graph())


@contextlib.contextmanager
def lock_backward(node: Any) -> Iterator[None]:
    """Lets one thread at a time run the backward of ``node``, a Function's ``ctx``, which may write to saved tensors.

    Threads that differentiate the same graph share its saved tensors. A backward that has written to them must set
    ``node.is_spent``.

    Raises:
        RuntimeError: another thread's backward has written to the saved tensors. (After that backward has ended, torch
            has freed them and raises an error itself.)
    """
    attributes = vars(node)
    with attributes.setdefault("turn", threading.Lock()):
        if attributes.get("is_spent"):
            raise RuntimeError(
                "another thread has differentiated this graph without retain_graph, and has overwritten the saved "
                "tensors with gradients: give retain_graph=True in every thread, or run a forward in each thread"
            )
        yield


@contextlib.contextmanager
def disable_hooks() -> Iterator[None]:
    """Disables saved-tensor hooks. A checkpoint's hook would otherwise rerun the head for each chunk's loss_fn."""
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
    """Yields pairs of an FSDP2 module and one of its parameter groups."""
    from torch.distributed._composable_state import _module_state_mapping  # no public function returns the modules

    for module, reference in list(_module_state_mapping.items()):
        state = reference()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        yield from ((module, group) for group in groups if group is not None)


@contextlib.contextmanager
def unshard_weight(weight: torch.Tensor) -> Iterator[None]:
    """Gathers a parameter that FSDP2 freed after its module's forward. It is freed again on exit, or by the backward.

    Raises:
        RuntimeError: something other than FSDP2 has freed the memory.
    """
    if torch.compiler.is_compiling() or weight.untyped_storage().nbytes():  # a compiled graph cannot read a storage
        yield
        return
    module = _find_fsdp2_module(weight)
    if module is None:
        check_readable("weight", weight)
        raise RuntimeError(f"weight {tuple(weight.shape)} has no memory. {GATHER}")
    module.unshard()
    try:
        yield
    finally:
        if not (torch.is_grad_enabled() and weight.requires_grad):
            module.reshard()


def _find_fsdp2_module(weight: torch.Tensor) -> Any:
    """Returns the FSDP2 module that owns a gathered ``weight``; None if there is none."""
    for module, group in fsdp2_groups():
        if any(getattr(each, "_unsharded_param", None) is weight for each in group.fsdp_params):
            return module
    return None


_distributed: Any = getattr(torch.distributed, "distributed_c10d", None)
group_of: Any = getattr(_distributed, "_resolve_process_group", None)  # finds a process group by its name
_guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", lambda i: torch.cuda.current_stream(i).cuda_stream)
empty: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]  # shape, strides, dtype; on the GPU
empty = getattr(_guards, "_empty_strided_cuda", lambda *x: torch.empty_strided(*x[:2], dtype=x[2], device="cuda"))

type Allocation = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


def describe_allocation(shape: Sequence[int], dtype: torch.dtype) -> Allocation:
    """Returns the arguments of `empty` for a contiguous tensor: shape, strides and dtype.

    Example:
        >>> import torch
        >>> from lce_torch_bridge.tensors._device import describe_allocation
        >>> describe_allocation((5, 3, 2), torch.float32)[:2]
        ((5, 3, 2), (6, 2, 1))
    """
    return tuple(shape), tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape))), dtype
