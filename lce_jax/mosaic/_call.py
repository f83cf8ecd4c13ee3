"""One call on its way through the kernels: its operands, as given and prepared, and the generation that serves it.

A call of two heads is the student's, which has the teacher's.

What a generation of GPUs gives: its tiles, what a launch covers, its tunings, and how it multiplies.

In `lce_jax.mosaic` a `Call` is named ``call``, and ``kernel_call`` is a `KernelCall`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from lce_jax.mathematics import _logprobs
from lce_jax.mathematics._kl import Pair
from lce_jax.mosaic import _operands
from lce_jax.mosaic._chunks import Budget
from lce_jax.mosaic._host import TRACED, Host
from lce_jax.mosaic._operands import Geometry, KLHead, KLOperands, Prepared, Span, Tiling, geometry
from lce_jax.types._types import Call, Operands, RequestedGradients
from lce_jax.xla._kl import KLPlan
from lce_jax.xla._walk import HeadTokens, Shard


class Machine(NamedTuple):
    """How a generation multiplies tiles. What becomes of them is the same for all: the epilogues in `common`.

    Attributes:
        kernel: ``(matmul, body, outputs, name, updated=None)``: ``body`` on every multiprocessor. Axes: "sm" is the
            cluster, "cluster" the block in it.
        walk_tiles: ``(matmul, lhs, rhs, offset, visit_all, consume, scratch)`` calls ``consume(tile, multiply,
            scratch)`` for every tile that ``visit_all`` visits, in every warpgroup with an epilogue. ``multiply()``
            waits for the products.
        kernel_of_heads: ``kernel`` for tiles of two heads, whose ``body`` is given last where those of p wait.
        walk_heads: ``(products, offset, visit_all, consume, held)``: as ``walk_tiles``, of two heads. ``multiply``
            has a function for each `Product`, to be called in turn.
        hold: ``(held, x)`` lets a warpgroup's part of a tile of p wait.
        held_bytes: of global memory in which tiles of p wait, for each multiprocessor.
        has_tma: whether copies to and from shared memory are TMA's, which leaves out what lies outside an array.
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
    """What the host code and the kernels with tensor cores read of a generation.

    Attributes:
        compute_capabilities: those that the kernels run on, the best known first: "9.0".
        devices: parts of the names of devices with that capability, as regular expressions; first a name that all know.
        tiling: the tile sizes.
        budget: what decides how much of the vocabulary one launch covers.
        tunings: the free choices of a kernel, ``tunings.of(call, kernel)``, and ``tunings.smem_bytes(call)``: what
            a block of each needs of shared memory.
        machine: how tiles are multiplied.
        smem_limit: the bytes of shared memory that a block may use.
        ran_on: the card that ran the same source, where none of its own has: the first call on one checks itself.
    """

    compute_capabilities: tuple[str, ...]
    devices: tuple[str, ...]
    tiling: Tiling
    budget: Budget
    tunings: Any
    machine: Machine
    smem_limit: int
    ran_on: str | None = None

    @property
    def has_tma(self) -> bool:
        """That of the machine."""
        return self.machine.has_tma


class KernelCall(NamedTuple):
    """What every step of a pass needs to know."""

    operands: Operands
    prepared: Prepared
    call: Call
    shape: Geometry
    generation: Generation
    host: Host = TRACED
    adapter: KernelCall | None = None  # the adapter's product u·Bᵀ: u in place of hidden, and B of the weight
    teacher: KernelCall | None = None  # of two heads: the other one; the tiles' geometry is the student's
    plan: KLPlan | None = None  # of two heads

    @property
    def products(self) -> tuple[KernelCall, ...]:
        """The calls whose products a chunk of dlogits enters."""
        return (self,) if self.adapter is None else (self, self.adapter)

    @property
    def heads(self) -> tuple[KernelCall, ...]:
        """The student's, and the teacher's if there is one."""
        return (self,) if self.teacher is None else (self, self.teacher)

    @property
    def sources(self) -> tuple[KernelCall, ...]:
        """The calls whose weights a kernel reads for a tile of logits, those of `products` first."""
        return self.products if self.teacher is None else self.heads

    @property
    def kl_calls(self) -> tuple[Call, Call]:
        """Of both heads, that of p first."""
        return self._ordered([one.call for one in self.heads])

    def kl_operands(self, weights: Sequence[Any]) -> KLOperands:
        """Both heads' as the kernels take them, with these ``weights``, the student's first."""
        both = zip(self.heads, weights, strict=True)
        heads = [KLHead(one.prepared.hidden, weight, one.prepared.row_scale) for one, weight in both]
        return KLOperands(self._ordered(heads), self.prepared.mask)

    @property
    def row_scales(self) -> tuple[Any, Any]:
        """The k of eq. 0, that of p first."""
        scales = (_logprobs.compute_row_scale(one.call, one.operands.inverse_temperature) for one in self.heads)
        return self._ordered([*scales])

    def _ordered[A](self, of_heads: Sequence[A]) -> tuple[A, A]:
        assert self.plan is not None
        student, teacher = of_heads
        return Pair(student, teacher).ordered(self.plan.student_first)

    def add_adapter(self) -> KernelCall:
        """Returns the call, whose hidden is [T, H + R], with the adapter's product if the operands have an adapter."""
        b, call = self.operands.adapter, self.call
        if b is None:
            return self
        u = self.host.compute(_from_column, self.prepared.hidden, call.hidden_size)
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
        """A `Span` of the call's live rows and columns, as a kernel takes it."""
        return self.host.numbers(*Span(self.prepared.num_rows, self.prepared.num_columns, **fields))

    @property
    def arrays(self) -> Prepared:
        """What kernels are given. How many rows and columns there are, their spans say: no kernel depends on it."""
        return self.prepared._replace(num_rows=None, num_columns=None)

    @classmethod
    def prepare(cls, operands: Operands, call: Call, generation: Generation) -> KernelCall:
        """The call of ``operands``, padded and marked."""
        shape = geometry(call, generation.tiling)
        return cls(operands, _operands.prepare(operands, call, shape), call, shape, generation).add_adapter()

    @classmethod
    def prepare_heads(cls, plan: KLPlan, shard: Shard, generation: Generation) -> KernelCall:
        """The call of two heads. Both have the columns that both have."""
        columns: Any = shard.num_columns
        if columns is None and plan.columns < max(head.weight.shape[0] for head in shard.heads):
            columns = plan.columns

        def kernel_call(call: Call, tokens: HeadTokens, weight: Any) -> KernelCall:
            call = dataclasses.replace(call, num_tokens=tokens.hidden.shape[0], columns=weight.shape[0])
            targets = jnp.full((call.num_tokens,), -1, jnp.int32)
            given = Operands(tokens.hidden, weight, targets, tokens.inverse_temperature, shard.num_rows, columns)
            return cls.prepare(given, call, generation)

        each = zip(plan.calls, shard.tokens, shard.heads, strict=True)
        student, teacher = [kernel_call(call, tokens, head.weight) for call, tokens, head in each]
        return student._replace(teacher=teacher, plan=plan)


def _from_column(xp: Any, x: Any, first: int) -> Any:
    del xp
    return x[:, first:]
