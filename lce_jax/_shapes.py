"""How signatures spell arrays: ``Float[Array, "T H"]`` is an `Array`, with the kind of its numbers and its shape.

For type checkers, who see `typing.Annotated`: nothing checks a shape, and nothing imports this module at run time.
"""

from typing import Annotated as Bool
from typing import Annotated as Float
from typing import Annotated as Int

from jax import Array, ShapeDtypeStruct

__all__ = ["Array", "Bool", "Float", "Int", "Shaped"]

type Shaped = Array | ShapeDtypeStruct  # of what only shape and dtype are read
