"""`linear_kl` and its gradients as operators over the programs of `through_jax._kl_programs`.

    kl            hidden, weight, bias, the teacher's, temperatures  ->  the divergence [T], S [T, S], the cache
    kl_gradients  both heads, S, the cache and the cotangent [T]     ->  dhidden, dweight, dbias, as wanted

Over a group, one all-gather of seven numbers per token merges the shards' statistics, and of a "jsd" one of two numbers
their sums. Every rank merges them alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import torch

from lce_torch_bridge.launched_directly._way import way_of
from lce_torch_bridge.operators._derivatives import (
    gradients_function,
    is_differentiated,
    refuse_derivatives_of,
    without_forward_mode,
)
from lce_torch_bridge.operators._execute import those_wanted
from lce_torch_bridge.operators._registered import NAME, operator, refuse_vmap
from lce_torch_bridge.tensors import _device, _padding, _tensor_parallel
from lce_torch_bridge.through_jax import _kl_programs, _run
from lce_torch_bridge.through_jax import _runtime as runtime
from lce_torch_bridge.through_jax._key import precision_of
from lce_torch_bridge.through_jax._kl_programs import CALL_SCHEMA, KLCall, KLKey


class Operands(NamedTuple):
    """The tensors of a call, flattened: the leading arguments of both operators."""

    hidden: torch.Tensor  # [T, H]
    weight: torch.Tensor  # [V, H]
    bias: torch.Tensor | None  # [V]
    teacher_hidden: torch.Tensor  # [T, G]
    teacher_weight: torch.Tensor  # [V, G]
    teacher_bias: torch.Tensor | None


OPERANDS_SCHEMA = (
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor teacher_hidden, Tensor teacher_weight, Tensor? teacher_bias"
)
NUM_OPERANDS = len(Operands._fields)


def apply(operands: Operands, temperatures: torch.Tensor, call: KLCall) -> torch.Tensor:
    """The divergence ``[T]``, differentiable in the student's hidden, weight and bias.

    ``temperatures``: float32 ``[T, 0]``, or with a column for the student's, for the teacher's, or for both.
    """
    differentiated = is_differentiated(*operands[:3])
    keep_cache = differentiated and call.cache_bytes > 0
    if not torch.compiler.is_compiling():
        return Uncompiled.apply(*operands, temperatures, keep_cache, *call)[0]
    function = LinearKL.apply if differentiated else kl
    return function(*operands, temperatures, keep_cache, *call)[0]


class LinearKL(torch.autograd.Function):
    """``(*Operands, temperatures, keep_cache, *KLCall) -> (divergence, S, *cache)``; the first has a gradient."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[torch.Tensor, ...]:
        """Runs the operator."""
        return tuple(kl(*inputs))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        """Keeps the operands, S and the cache."""
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*inputs[:NUM_OPERANDS], *output[1:])
        ctx.call = inputs[NUM_OPERANDS + 2 :]

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        """Those of dhidden, dweight and dbias that are wanted."""
        kept, wanted = ctx.saved_tensors, ctx.needs_input_grad[:3]
        operands, (saved, *cache) = kept[:NUM_OPERANDS], kept[NUM_OPERANDS:]
        run = Gradients.apply if torch.is_grad_enabled() else kl_gradients
        found = list(run(*operands, saved, cache, cotangent, *wanted, *ctx.call))
        grads = [found.pop(0) if want else None for want in wanted]
        return *grads, *(None,) * (NUM_OPERANDS - 1 + len(ctx.call))

    @staticmethod
    def vmap(*_: Any) -> Any:
        """Refuses ``torch.func.vmap``."""
        refuse_vmap()


Uncompiled = without_forward_mode(LinearKL)


@operator("kl", f"({OPERANDS_SCHEMA}, Tensor temperatures, bool keep_cache, {CALL_SCHEMA}) -> Tensor[]")
def kl(*inputs: Any) -> list[torch.Tensor]:
    """The divergence ``[T]`` in float32, S with the temperatures first, and the leaves of the cache."""
    x, (temperatures, keep_cache, *rest) = Operands(*inputs[:NUM_OPERANDS]), inputs[NUM_OPERANDS:]
    call, tokens = KLCall(*rest), x.hidden.shape[0]
    way = way_of(x.hidden)
    _tensor_parallel.check(call.group, way.direct, x.hidden, None, call.vocab_size, x.weight, x.teacher_weight)
    if tokens == 0:
        return _structs(x, keep_cache, call)
    way.refuse("linear_kl is a program of JAX")
    key, bits = _key(x, call), temperatures.view(torch.int32)
    given = _inputs(x, bits)
    if call.group == _tensor_parallel.NO_GROUP:
        packed, *cache = _execute(_kl_programs.forward(key, keep_cache), given)
    else:
        stats, *cache = _execute(_kl_programs.statistics(key, keep_cache), given)
        every, sums = _tensor_parallel.gather(stats, call.group), None
        if call.direction == "jsd":
            (part,) = _execute(_kl_programs.mixture(key), (*given, every))
            sums = _tensor_parallel.gather(part, call.group)
        (packed,) = _execute(_kl_programs.finish(key), (*given, every, sums))
    found = packed[:, :tokens]
    return [found[0].view(torch.float32).clone(), torch.cat([bits, found[1:].T], 1), *cache]


@torch.library.register_fake(f"{NAME}::kl")  # type: ignore[untyped-decorator]
def _(*inputs: Any) -> list[torch.Tensor]:
    x, (_, keep_cache, *call) = Operands(*inputs[:NUM_OPERANDS]), inputs[NUM_OPERANDS:]
    return _structs(x, keep_cache, KLCall(*call))


def _structs(x: Operands, keep_cache: bool, call: KLCall) -> list[torch.Tensor]:
    """What `kl` returns, uninitialised."""
    tokens = x.hidden.shape[0]
    cache = jax.tree.leaves(_cache_structure(x, call)) if keep_cache and tokens else []
    return [
        x.hidden.new_empty((tokens,), dtype=torch.float32),
        x.hidden.new_empty((tokens, call.num_temperatures + call.num_statistics), dtype=torch.int32),
        *(x.hidden.new_empty(leaf.shape, dtype=getattr(torch, leaf.dtype.name)) for leaf in cache),
    ]


GRADIENTS_SCHEMA = "Tensor saved, Tensor[] cache, Tensor cotangent, bool want_hidden, bool want_weight, bool want_bias"


@operator("kl_gradients", f"({OPERANDS_SCHEMA}, {GRADIENTS_SCHEMA}, {CALL_SCHEMA}) -> Tensor[]")
def kl_gradients(*inputs: Any) -> list[torch.Tensor]:
    """Those of dhidden, dweight and dbias that are wanted."""
    x, (saved, cache, cotangent, *rest) = Operands(*inputs[:NUM_OPERANDS]), inputs[NUM_OPERANDS:]
    wanted, call, tokens = tuple(rest[:3]), KLCall(*rest[3:]), x.hidden.shape[0]
    if tokens == 0:
        return [y.new_zeros(y.shape) for y in those_wanted(x.hidden, x.weight, x.bias, wanted)]
    way_of(x.hidden).refuse("linear_kl is a program of JAX")
    over = call.group if call.reduce_grad_hidden else _tensor_parallel.NO_GROUP
    tree = jax.tree.structure(_cache_structure(x, call)) if cache else None
    program = _kl_programs.gradients(_key(x, call), wanted, over == _tensor_parallel.NO_GROUP, tree)
    per_token = torch.cat([saved, cotangent.contiguous().view(torch.int32)[:, None]], 1)
    grads = _execute(program, (*_inputs(x, per_token), *cache))
    if wanted[0]:
        grads[0] = _tensor_parallel.total_dhidden(grads[0][:tokens], x.hidden.dtype, over)
    return grads


@torch.library.register_fake(f"{NAME}::kl_gradients")  # type: ignore[untyped-decorator]
def _(*inputs: Any) -> list[torch.Tensor]:
    x, wanted = Operands(*inputs[:NUM_OPERANDS]), inputs[NUM_OPERANDS + 3 : NUM_OPERANDS + 6]
    return [y.new_empty(y.shape) for y in those_wanted(x.hidden, x.weight, x.bias, wanted)]


Gradients = gradients_function(kl_gradients)
refuse_derivatives_of("kl_gradients")


def _key(x: Operands, call: KLCall) -> KLKey:
    shards, rank = _tensor_parallel.size_and_rank(call.group)
    rows, vocab_size = int(x.weight.shape[0]), int(call.vocab_size)
    call = call._replace(group="", vocab_size=vocab_size, reduce_grad_hidden=False)
    precision = precision_of(x.weight) or precision_of(x.teacher_weight)
    return KLKey(call, rank * rows, vocab_size < shards * rows, precision)


def _inputs(x: Operands, per_token: torch.Tensor) -> tuple[Any, ...]:
    """The inputs of a program, padded to its rows."""
    rows = _padding.size(x.hidden.shape[0])
    hidden, teacher_hidden = _padding.pad(x.hidden, rows), _padding.pad(x.teacher_hidden, rows)
    operands = hidden, x.weight, x.bias, teacher_hidden, x.teacher_weight, x.teacher_bias
    return *operands, _padding.with_count(per_token, rows)


def _execute(program: Any, given: Sequence[Any]) -> list[torch.Tensor]:
    (found,) = _run.run(program, given, waits=_kl_programs.NUM_OPERANDS)
    return found


def _cache_structure(x: Operands, call: KLCall) -> Any:
    rows, key, struct = _padding.size(int(x.hidden.shape[0])), _key(x, call), jax.ShapeDtypeStruct
    described = _device.device_of(x.hidden.device)
    device = runtime.jax_device(x.hidden.device) if described is None else described
    operands = [None if y is None else _device.struct(y) for y in x]
    for i, y in (0, x.hidden), (3, x.teacher_hidden):  # which are padded
        operands[i] = struct((rows, int(y.shape[1])), _device.name_of(y.dtype))
    return _kl_programs.cache_structure(key, device, *operands, struct((1 + rows * call.num_temperatures,), "int32"))
