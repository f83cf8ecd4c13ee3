"""The edge: the tile in which the unpadded vocabulary ends. It is copied if kernels cannot read it: [tile, H], 2 MiB.

* A kernel moves at least one atom of rows. If V is not a multiple of the atom, kernels cannot read the weight's last
  rows in place. Then the forward reads the edge from its copy, and the backward reads every chunk of the weight from a
  copy of this chunk.
* If padding begins in the tile, the product for dhidden would multiply dlogits of 0 by arbitrary padding, and 0 · NaN
  is NaN. So the product ends before this tile, whose contribution is then computed from the copy.

After the last unpadded column, the copy holds zeros.
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


def count_whole_tiles(kernel_call: KernelCall) -> int:
    """Returns how many vocabulary tiles a kernel can read in place."""
    return kernel_call.shape.num_tiles if kernel_call.shape.whole_atoms else kernel_call.shape.num_tiles - 1


def count_contracted_tiles(kernel_call: KernelCall) -> Int[Array, ""] | int:
    """Returns how many vocabulary tiles have no padding. The product for dhidden reads these in place."""
    if kernel_call.operands.num_columns is None:
        return kernel_call.shape.num_tiles
    return kernel_call.operands.num_columns // kernel_call.shape.tile


def has_edge_tile(kernel_call: KernelCall) -> bool:
    """Whether the product for dhidden excludes unpadded columns, which the copied tile then adds."""
    columns = kernel_call.operands.num_columns
    ends_in_tile = not (isinstance(columns, int) and columns % kernel_call.shape.tile == 0)
    return kernel_call.shape.whole_atoms and columns is not None and ends_in_tile


def count_contracted_columns(kernel_call: KernelCall) -> Int[Array, ""] | int:
    """Returns the column at which the product for dhidden ends: that after the last tile without padding.

    It is the last column if there is no padding, and where kernels read copies of the weight's chunks, which have none.
    """
    if kernel_call.operands.num_columns is None or not kernel_call.shape.whole_atoms:
        return kernel_call.call.columns
    return count_contracted_tiles(kernel_call) * kernel_call.shape.tile


def copy_tile(kernel_call: KernelCall, tile: Any) -> Float[Array, "tile H"]:
    """Copies one tile of the weight."""
    column, (call, shape) = kernel_call.shape.column(tile), (kernel_call.call, kernel_call.shape)
    if not shape.whole_atoms or call.vocab_dim == 1:
        return copy_columns(kernel_call, column, shape.tile)
    rows, width = call.columns // ATOM_ROWS, ATOM_ROWS * call.hidden_size
    numbers = kernel_call.host.numbers(column // ATOM_ROWS, kernel_call.prepared.num_columns - column)
    copied = kernel_call.host.launch(
        copy, call, kernel_call.host.reshape(kernel_call.prepared.weight, (rows, width)), numbers
    )
    return kernel_call.host.reshape(copied, (shape.tile, call.hidden_size))


def copy_columns(kernel_call: KernelCall, column: Any, size: int) -> Float[Array, "size H"]:
    """Copies ``size`` columns of the vocabulary. The copy is 0 in padding and beyond the last column."""
    columns = column + jnp.arange(size, dtype=jnp.int32)
    last = kernel_call.call.columns if kernel_call.operands.num_columns is None else kernel_call.operands.num_columns
    copied = jnp.take(kernel_call.operands.weight, columns, axis=kernel_call.call.vocab_dim, mode="clip")
    return _logprobs.zero_padding(copied, columns < last, kernel_call.call)


def put_columns(
    kernel_call: KernelCall,
    dweight: Float[Array, "V H"],
    part: Float[Array, "size H"],
    column: Any,
    count: Any,
    add: Any,
) -> Float[Array, "V H"]:
    """Writes the first ``count`` columns of ``part`` to ``dweight`` from ``column`` on, or adds them if ``add``."""
    places = column + jnp.arange(part.shape[0], dtype=jnp.int32)
    # The other columns get a place outside dweight, so that they are not written.
    places = jnp.where(places < column + count, places, places + kernel_call.call.columns)
    if add is not False:
        part = jnp.where(add, dweight.at[places].get(mode="clip") + part, part)
    return dweight.at[places].set(part, mode="drop", indices_are_sorted=True, unique_indices=True)


@jax.named_scope("edge")
def update_dhidden(
    kernel_call: KernelCall,
    factors: Float[Array, "factors Tp"],
    candidates: PlacedCandidates | None,
    *sums: Float[Array, "splits Tp Hp"],
) -> list[Float[Array, "splits Tp Hp"]]:
    """Adds what the unpadded columns of the edge tile contribute to dhidden, if it has any, to each product's sums."""
    tile = count_contracted_tiles(kernel_call)
    column, copied = tile * kernel_call.shape.tile, [copy_tile(one, tile) for one in kernel_call.sources]
    depth = kernel_call.prepared.num_columns - column
    span = kernel_call.span(column=column, num_tiles=least(depth, 1), depth=depth, adds=1)
    d = compute_dlogits(kernel_call, factors, span, kernel_call.shape.tile, None, *copied)
    d = d if candidates is None else candidates.put(kernel_call, d, column, column + depth)
    each = zip(kernel_call.products, sums, copied[: len(sums)], strict=True)
    return [
        kernel_call.host.launch(add_product, kernel_call.generation, x, d, weight, one.call, span)
        for one, x, weight in each
    ]


def compute_dlogits(
    kernel_call: KernelCall,
    factors: Float[Array, "factors Tp"],
    span: Int[Array, "fields"],
    columns: int,
    memory: Float[Array, "T columns"] | None,
    *weights: Any,
) -> Float[Array, "T columns"]:
    """Computes the dlogits of the span's tiles, of one head or two, in ``memory`` if there is any.

    ``weights`` are the call's, or copies of the span's columns if kernels cannot read the weights in place.
    """
    launch, generation = kernel_call.host.launch, kernel_call.generation
    if kernel_call.plan is not None:
        arguments = kernel_call.kl_calls, kernel_call.kl_operands(weights), factors, span, columns
        return launch(kl_dlogits, generation, *arguments, kernel_call.plan.direction, memory)
    weight, adapter = weights if len(weights) == 2 else (*weights, None)
    return launch(
        dlogits, generation, kernel_call.arrays, weight, kernel_call.call, factors, span, columns, adapter, memory
    )
