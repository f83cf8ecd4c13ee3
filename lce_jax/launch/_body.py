"""The lines of a generated function, and the elements that they have computed so far."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from typing import Any

import jax.numpy as jnp
import numpy as np

from lce_jax.launch._graph import CONSTANT, Node
from lce_jax.launch._refusal import UnservedError

type Index = int | str  # a number, or a C++ expression

BOOL, INT32, UINT32, FLOAT32, BFLOAT16, FLOAT16 = map(
    jnp.dtype, (jnp.bool_, jnp.int32, jnp.uint32, jnp.float32, jnp.bfloat16, jnp.float16)
)
# As they are computed with, and as they are stored. 16-bit floats are computed with in float32 and rounded each time.
C_TYPES = {BOOL: "bool", INT32: "int", UINT32: "u32", FLOAT32: "float", BFLOAT16: "float", FLOAT16: "float"}
STORED = C_TYPES | {BOOL: "unsigned char", BFLOAT16: "u16", FLOAT16: "u16"}
NARROW = {BFLOAT16: "bf16", FLOAT16: "f16"}
COMBINED_BY = {"add": "+", "or": "|", "and": "&"}

type Operation = Callable[[Body, Node, tuple[Index, ...]], str]  # an element's expression


def stored(node: Node) -> str:
    """The type of an array's elements in memory."""
    return STORED[node.dtype]


def index_type(node: Node) -> str:
    """A type that counts an array's elements."""
    return "int" if node.size < 2**31 - 2**24 else "long long"


class Body:
    """The lines of a function, and the names of the elements computed so far in the enclosing scopes.

    ``slots`` says which buffer holds each stored array. What is in ``here`` is not there yet when the function runs.
    """

    def __init__(self, slots: Mapping[Node, int], here: Set[Node], operations: Mapping[str, Operation]) -> None:
        self._operations = operations
        self.lines: list[str] = []
        self._slots = {node: slot for node, slot in slots.items() if node not in here}
        self._scopes: list[dict[Any, str]] = [{}]
        self._names = 0

    def add(self, line: str) -> None:
        """One more line. A brace opens or closes a scope, outside of which its names are not known."""
        self.lines.append(line)
        for _ in range(line.count("{")):
            self._scopes.append({})
        for _ in range(line.count("}")):
            self._scopes.pop()

    def unravel(self, index: str, shape: tuple[int, ...]) -> tuple[Index, ...]:
        """The indices of the element with this number."""
        found: list[Index] = []
        for dim, size in enumerate(shape):
            stride = math.prod(shape[dim + 1 :])
            if size == 1:
                found.append(0)
            else:
                inner = index if stride == 1 else f"{index} / {stride}"
                found.append(self.named("int", inner if dim == 0 else f"({inner}) % {size}"))
        return tuple(found)

    def value(self, node: Node, indices: tuple[Index, ...]) -> str:
        """An element: loaded if the array is stored, otherwise computed."""
        return self._load(node, indices) if node in self._slots else self.computed(node, indices)

    def computed(self, node: Node, indices: tuple[Index, ...]) -> str:
        """An element, from those of the operands."""
        if node.op == CONSTANT and node.size == 1:
            return self.literal(node.value.reshape(())[()])
        key = (id(node), indices)
        for scope in self._scopes:
            if key in scope:
                return scope[key]
        if node.op not in self._operations:
            raise UnservedError(f"the operation {node.op}")
        name = self.named(C_TYPES[node.dtype], self._operations[node.op](self, node, indices))
        self._scopes[-1][key] = name
        return name

    def literal(self, value: Any) -> str:
        """A number, to the bit."""
        value = np.asarray(value)
        if value.dtype == BOOL:
            return "true" if value else "false"
        if value.dtype in (INT32, UINT32):
            return "(-2147483647 - 1)" if int(value) == -(2**31) else f"{int(value)}"
        return f"bits_to_float({np.float32(value).view(np.uint32)}u)"

    def to_storage(self, node: Node, value: str) -> str:
        """A value as it is stored."""
        return f"to_{NARROW[node.dtype]}({value})" if node.dtype in NARROW else value

    def identity(self, node: Node) -> Any:
        """What a reduction starts with."""
        start = node.operands[1]
        if start.op != CONSTANT:
            raise UnservedError("a reduction that starts with an operand")
        return start.value.reshape(())[()]

    def combined(self, node: Node, left: str, right: str) -> str:
        """One step of a reduction."""
        combine = node.attributes["combine"]
        if combine in COMBINED_BY:
            return self.rounded(node, f"{left} {COMBINED_BY[combine]} {right}")
        return f"{combine}({left}, {right})"

    def unused(self, prefix: str = "v") -> str:
        """A new name."""
        self._names += 1
        return f"{prefix}{self._names}"

    def named(self, kind: str, expression: str) -> str:
        """The name of a value, which is computed here."""
        name = self.unused()
        self.lines.append(f"const {kind} {name} = {expression};")
        return name

    def _load(self, node: Node, indices: tuple[Index, ...]) -> str:
        key = (id(node), indices)
        for scope in self._scopes:
            if key in scope:
                return scope[key]
        place = self.ravel(node, indices) if node.strided is None else self.strided(node, indices)
        element = f"((const {stored(node)}*)b.at[{self._slots[node]}])[{place}]"
        name = self.named(
            C_TYPES[node.dtype], f"of_{NARROW[node.dtype]}({element})" if node.dtype in NARROW else element
        )
        self._scopes[-1][key] = name
        return name

    def ravel(self, node: Node, indices: tuple[Index, ...]) -> Index:
        """The number of an element."""
        cast = "(long long)" if index_type(node) != "int" else ""
        terms, known = [], 0
        for dim, index in enumerate(indices):
            stride = math.prod(node.shape[dim + 1 :])
            if isinstance(index, int):
                known += index * stride
            else:
                terms.append(f"{cast}{index}" if stride == 1 else f"{cast}{index} * {stride}")
        if known or not terms:
            terms.append(str(known))
        return " + ".join(terms)

    def strided(self, node: Node, indices: tuple[Index, ...]) -> str:
        """The place of an element in memory that has only the rows that count; after these, that of the last row's."""
        assert node.strided is not None
        number, dim = node.strided
        row = f"minimum((long long){indices[dim]}, b.n[0] - 1)"
        terms = [f"{row} * b.n[{2 * number + 2}]"]
        terms += [f"{index} * b.n[{2 * number + 1}]" for index in indices[:dim]]
        inner = [f"{index} * {math.prod(node.shape[i + 1 :])}" for i, index in enumerate(indices) if i > dim]
        return " + ".join(terms + inner)

    def rounded(self, node: Node, expression: str) -> str:
        """A new value of an array's type: rounded if that has 16 bits."""
        kind = NARROW.get(node.dtype)
        return expression if kind is None else f"of_{kind}(to_{kind}({expression}))"

    def simple(self, index: Index) -> Index:
        """An index as a number or a name, so that equal ones are recognised."""
        if isinstance(index, int) or index.isidentifier():
            return index
        for scope in self._scopes:
            if index in scope:
                return scope[index]
        name = self.named("int", index)
        self._scopes[-1][index] = name
        return name

    def declared(self, node: Node) -> str:
        """The name of a variable, not written yet."""
        name = self.unused()
        self.lines.append(f"{C_TYPES[node.dtype]} {name};")
        return name

    def either(self, node: Node, condition: str, then: Any, otherwise: Any) -> str:
        """One of two elements, each an array and indices. The other is not touched."""
        name = self.declared(node)
        self.add(f"if ({condition}) {{")
        self.lines.append(f"{name} = {self.value(*then)};")
        self.add("}")
        self.add("else {")
        self.lines.append(f"{name} = {self.value(*otherwise)};")
        self.add("}")
        return name
