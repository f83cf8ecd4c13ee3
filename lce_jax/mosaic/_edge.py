"""The tile in which the true vocabulary ends, copied where the kernels cannot read it as it lies: [tile, H], 2 MiB.

* Where V is no multiple of the atom, a kernel cannot be given the last rows of the weight. The forward reads that tile
  from the copy; the backward copies every chunk.
* Where padding begins, dhidden's product would multiply dlogits of 0 by whatever the padding holds, and 0 · NaN is NaN.
  It ends before that tile, and takes the tile from the copy.

The copy holds zeros after the last true column.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from lce_jax.mathematics import _logprobs
from lce_jax.mosaic._call import KernelCall
from lce_jax.mosaic._candidates import PlacedCandidates
from lce_jax.mosaic._host import least
from lce_jax.mosaic.common._dlogits import dlogits, kl_dlogits
from lce_jax.mosaic.common._products import update_dhidden as add_product
from lce_jax.mosaic.common._tiles import ATOM_ROWS
from lce_jax.mosaic.common._tokens import copy

if TYPE_CHECKING:
    from lce_jax.types._shapes import Array, Float, Int


def whole_tiles(call: KernelCall) -> int:
    """The vocabulary tiles that a kernel can read where they lie."""
    return call.shape.num_tiles if call.shape.whole_atoms else call.shape.num_tiles - 1


def contracted_tiles(call: KernelCall) -> Int[Array, ""] | int:
    """The vocabulary tiles without padding, which dhidden's product reads where they lie."""
    if call.operands.num_columns is None:
        return call.shape.num_tiles
    return call.operands.num_columns // call.shape.tile


def is_left(call: KernelCall) -> bool:
    """Whether that product leaves out true columns."""
    columns = call.operands.num_columns
    return call.shape.whole_atoms and columns is not None and not _is_whole(columns, call.shape.tile)


def _is_whole(columns: Any, tile: int) -> bool:
    return isinstance(columns, int) and columns % tile == 0


def contracted_columns(call: KernelCall) -> Int[Array, ""] | int:
    """Where dhidden's product ends: it reads copies of chunks whole, and the weight up to the tile with padding."""
    if call.operands.num_columns is None or not call.shape.whole_atoms:
        return call.case.columns
    return contracted_tiles(call) * call.shape.tile


def weight(call: KernelCall, tile: Any) -> Float[Array, "tile H"]:
    """The copy of one tile."""
    column, (case, shape) = call.shape.column(tile), (call.case, call.shape)
    if not shape.whole_atoms or case.vocab_dim == 1:
        return columns_from(call, column, shape.tile)
    rows, width = case.columns // ATOM_ROWS, ATOM_ROWS * case.hidden_size
    numbers = call.host.numbers(column // ATOM_ROWS, call.prepared.num_columns - column)
    copied = call.host.launch(copy, case, call.host.reshape(call.prepared.weight, (rows, width)), numbers)
    return call.host.reshape(copied, (shape.tile, case.hidden_size))


def columns_from(call: KernelCall, column: Any, size: int) -> Float[Array, "size H"]:
    """A copy of so many columns of the vocabulary, zero where they are padding or do not exist."""
    columns = column + jnp.arange(size, dtype=jnp.int32)
    last = call.case.columns if call.operands.num_columns is None else call.operands.num_columns
    copied = jnp.take(call.operands.weight, columns, axis=call.case.vocab_dim, mode="clip")
    return _logprobs.without_padding(copied, columns < last, call.case)


def put_columns(
    call: KernelCall, dweight: Float[Array, "V H"], part: Float[Array, "size H"], column: Any, count: Any, add: Any
) -> Float[Array, "V H"]:
    """``dweight`` with the first ``count`` columns of ``part`` written, or added, from ``column`` on."""
    places = column + jnp.arange(part.shape[0], dtype=jnp.int32)
    # The others get a place outside dweight, where nothing is written.
    places = jnp.where(places < column + count, places, places + call.case.columns)
    if add is not False:
        part = jnp.where(add, dweight.at[places].get(mode="clip") + part, part)
    return dweight.at[places].set(part, mode="drop", indices_are_sorted=True, unique_indices=True)


@jax.named_scope("edge")
def update_dhidden(
    call: KernelCall,
    factors: Float[Array, "factors Tp"],
    candidates: PlacedCandidates | None,
    *sums: Float[Array, "splits Tp Hp"],
) -> list[Float[Array, "splits Tp Hp"]]:
    """The ``sums`` of each product with the tile's true columns added, if it has any."""
    tile = contracted_tiles(call)
    column, copied = tile * call.shape.tile, [weight(one, tile) for one in call.sources]
    depth = call.prepared.num_columns - column
    span = call.span(column=column, num_tiles=least(depth, 1), depth=depth, adds=1)
    d = compute_dlogits(call, factors, span, call.shape.tile, *copied)
    d = d if candidates is None else candidates.put(call, d, column, column + depth)
    each = zip(call.products, sums, copied[: len(sums)], strict=True)
    return [call.host.launch(add_product, call.generation, x, d, own, one.case, span) for one, x, own in each]


def compute_dlogits(
    call: KernelCall, factors: Float[Array, "factors Tp"], span: Int[Array, "fields"], columns: int, *weights: Any
) -> Float[Array, "T columns"]:
    """Of the span's tiles, from the products of one head or two, whose ``weights`` may lie elsewhere."""
    launch, generation = call.host.launch, call.generation
    if call.plan is not None:
        given = call.kl_cases, call.kl_operands(weights), factors, span, columns
        return launch(kl_dlogits, generation, *given, call.plan.direction)
    weight, *adapter = weights
    return launch(dlogits, generation, call.arrays, weight, call.case, factors, span, columns, *adapter)
