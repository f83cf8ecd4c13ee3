"""Array types for signatures: ``Float[Array, "T H"]`` is an `Array` of floats of shape ``[T, H]``.

Type checkers see `typing.Annotated`. Nothing checks the shapes, and no module imports this one at run time. Public
functions take `ArrayLike` and return `Array`.
"""

from typing import Annotated as Bool
from typing import Annotated as Float
from typing import Annotated as Int

import numpy as np
from jax import Array, ShapeDtypeStruct

__all__ = ["Array", "ArrayLike", "Bool", "Float", "Int", "Shaped"]

type ArrayLike = Array | np.ndarray | np.generic  # unlike `jax.typing.ArrayLike`, without Python numbers
type Shaped = ArrayLike | ShapeDtypeStruct  # an argument of which only shape and dtype are read
