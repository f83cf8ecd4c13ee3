"""How signatures spell arrays: ``Float[Array, "T H"]`` is an `Array`, with the kind of its numbers and its shape.

For type checkers, who see `typing.Annotated`: nothing checks a shape, and nothing imports this module at run time.
Public functions take what `ArrayLike` says, and return `Array`.
"""

from typing import Annotated as Bool
from typing import Annotated as Float
from typing import Annotated as Int

import numpy as np
from jax import Array, ShapeDtypeStruct

__all__ = ["Array", "ArrayLike", "Bool", "Float", "Int", "Shaped"]

type ArrayLike = Array | np.ndarray | np.generic  # no number and no list, which `jax.typing.ArrayLike` has
type Shaped = ArrayLike | ShapeDtypeStruct  # of what only shape and dtype are read
