"""`KernelCall`: a call with its operands, prepared for the kernels, and the `Generation` of GPUs that serves it.

A call of two heads is the student's `KernelCall`, which holds the teacher's. A `Generation` has the tile sizes, the
memory budget of a launch, the tunings, and a `Machine` that multiplies tiles. In `lce_jax.mosaic`, ``call`` is a `Call`
and ``kernel_call`` a `KernelCall`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from lce_jax.mathematics._kl import Pair
from lce_jax.mosaic import _operands
from lce_jax.mosaic._chunks import Budget
from lce_jax.mosaic._host import TRACED, Host
from lce_jax.mosaic._operands import Geometry, KLHead, KLOperands, Prepared, Span, Tiling, make_geometry
from lce_jax.types._types import Call, Operands, RequestedGradients
from lce_jax.xla._kl import KLPlan
from lce_jax.xla._walk import HeadTokens, Shard


class Machine(NamedTuple):
    """How a generation multiplies tiles. The epilogues in `common`, which process the tiles, serve all generations.

    Attributes:
        kernel: ``(matmul, body, outputs, name, updated=None)`` returns a kernel that runs ``body`` on every
            multiprocessor. The kernel's axis "sm" counts clusters; its axis "cluster" counts the blocks of a cluster.
        walk_tiles: ``(matmul, lhs, rhs, offset, visit_all, consume, scratch)`` calls ``consume(tile, multiply,
            scratch)`` for every tile that ``visit_all`` visits, in every warpgroup with an epilogue. ``multiply()``
            waits for the products.
        kernel_of_heads: like ``kernel``, for two heads, p and q. ``body`` gets memory for held tiles of p last.
        walk_heads: ``(products, offset, visit_all, consume, held)``: like ``walk_tiles``, for two heads. ``multiply``
            has a function for each `Product`; call these in order.
        hold: ``(held, x)`` stores a warpgroup's part of a tile of p until the tile of q is computed.
        held_bytes: bytes of global memory for held tiles, per multiprocessor.
        has_tma: whether TMA copies to and from shared memory; it skips rows and columns outside an array.
    """

    kernel: Callable[..., Callable[..., Any]]
    walk_tiles: Callable[..., None]
    kernel_of_heads: Callable[..., Callable[..., Any]]
    walk_heads: Callable[..., None]
    hold: Callable[..., Any]
    held_bytes: int = 0
    has_tma: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Generation:
    """What the host code and the kernels with tensor cores need to know of a generation of GPUs.

    Attributes:
        compute_capabilities: the compute capabilities that it serves, such as "9.0", the most common first.
        devices: regular expressions of device names with these capabilities, the best known device first.
        tiling: the tile sizes.
        budget: decides how much of the vocabulary one launch covers.
        tunings: ``tunings.of(call, kernel)`` returns a kernel's tuning parameters, and ``tunings.smem_bytes(call)`` the
            shared memory that a block of each kernel needs.
        machine: multiplies tiles.
        smem_limit: the bytes of shared memory that a block may use.
        ran_on: if no card of this generation has run its source, the cards of others that have; otherwise None. If it
            is not None, the first call on a card compares its results with XLA's.
    """

    compute_capabilities: tuple[str, ...]
    devices: tuple[str, ...]
    tiling: Tiling
    budget: Budget
    tunings: Any
    machine: Machine
    smem_limit: int
    ran_on: str | None = None


class KernelCall(NamedTuple):
    """A call with its operands and its generation. Every step of a pass gets one."""

    operands: Operands
    prepared: Prepared
    call: Call
    shape: Geometry
    generation: Generation
    host: Host = TRACED
    adapter: KernelCall | None = None  # the adapter's product u·Bᵀ, with u as hidden and B as the weight
    teacher: KernelCall | None = None  # the teacher's call in `linear_kl`, with the student's geometry
    plan: KLPlan | None = None  # only in `linear_kl`

    @property
    def products(self) -> tuple[KernelCall, ...]:
        """The calls whose gradients are products with dlogits: this call, and the adapter's if there is one."""
        return (self,) if self.adapter is None else (self, self.adapter)

    @property
    def heads(self) -> tuple[KernelCall, ...]:
        """The calls of the heads: the student's, and the teacher's if there is one."""
        return (self,) if self.teacher is None else (self, self.teacher)

    @property
    def sources(self) -> tuple[KernelCall, ...]:
        """The calls whose weights a tile of logits needs. It begins with `products`."""
        return self.products if self.teacher is None else self.heads

    @property
    def kl_calls(self) -> tuple[Call, Call]:
        """The `Call` of each head; that of p is first."""
        return self._ordered([head.call for head in self.heads])

    def kl_operands(self, weights: Sequence[Any]) -> KLOperands:
        """Returns both heads' operands for the kernels. The first of ``weights`` is the student's."""
        both = zip(self.heads, weights, strict=True)
        heads = [KLHead(head.prepared.hidden, weight, head.prepared.row_scale) for head, weight in both]
        return KLOperands(self._ordered(heads), self.prepared.mask)

    @property
    def kernel_scales(self) -> tuple[Any, Any]:
        """Each head's k of eq. 0 in base 2, as kernels take it; that of p is first."""
        return self._ordered([head.prepared.row_scale for head in self.heads])

    def _ordered[A](self, values: Sequence[A]) -> tuple[A, A]:
        assert self.plan is not None
        student, teacher = values
        return Pair(student, teacher).ordered(self.plan.student_first)

    def add_adapter(self) -> KernelCall:
        """If the operands have an adapter, and hidden is [T, H + R], returns the call with the adapter's product."""
        b, call = self.operands.adapter, self.call
        if b is None:
            return self
        u = self.host.compute(_slice_columns, self.prepared.hidden, call.hidden_size)
        adapter = self._replace(
            operands=self.operands._replace(weight=b, adapter=None),
            prepared=self.prepared._replace(hidden=u, weight=b),
            call=call.replace(
                hidden_size=call.rank,
                rank=0,
                gradients=RequestedGradients(call.gradients.hidden, call.gradients.adapter),
            ),
        )
        return self._replace(
            call=call.replace(gradients=RequestedGradients(call.gradients.hidden, weight=False)), adapter=adapter
        )

    def span(self, **fields: Any) -> Any:
        """Returns a `Span` with the numbers of unmasked rows and unpadded columns, as kernels take it."""
        return self.host.numbers(*Span(self.prepared.num_rows, self.prepared.num_columns, **fields))

    @property
    def arrays(self) -> Prepared:
        """The prepared operands, without the numbers of rows and columns, which kernels get from a `Span`."""
        return self.prepared._replace(num_rows=None, num_columns=None)

    @classmethod
    def prepare(cls, operands: Operands, call: Call, generation: Generation) -> KernelCall:
        """Pads and marks the operands, and makes their `KernelCall`."""
        shape = make_geometry(call, generation.tiling)
        return cls(operands, _operands.prepare(operands, call, shape), call, shape, generation).add_adapter()

    @classmethod
    def prepare_heads(cls, plan: KLPlan, shard: Shard, generation: Generation) -> KernelCall:
        """Makes the `KernelCall` of two heads. It covers the columns that both weights have."""
        columns: Any = shard.num_columns
        if columns is None and plan.columns < max(head.weight.shape[0] for head in shard.heads):
            columns = plan.columns

        def prepare_head(call: Call, tokens: HeadTokens, weight: Any) -> KernelCall:
            call = dataclasses.replace(call, num_tokens=tokens.hidden.shape[0], columns=weight.shape[0])
            targets = jnp.full((call.num_tokens,), -1, jnp.int32)
            operands = Operands(tokens.hidden, weight, targets, tokens.inverse_temperature, shard.num_rows, columns)
            return cls.prepare(operands, call, generation)

        each = zip(plan.calls, shard.tokens, shard.heads, strict=True)
        student, teacher = [prepare_head(call, tokens, head.weight) for call, tokens, head in each]
        return student._replace(teacher=teacher, plan=plan)


def _slice_columns(xp: Any, x: Any, first: int) -> Any:
    del xp
    return x[:, first:]
