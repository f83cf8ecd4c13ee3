"""What a compiled program says of itself: the collectives that one device takes part in, and its largest array."""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

KINDS = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
BITS = {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64}  # of others the name says it: s32, u8, f8e4m3fn
_collective = re.compile(rf"= (?P<type>\S.*?) (?P<kind>{KINDS})(?P<start>-start)?\((?P<rest>.*)")
_array = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")


class Collective(NamedTuple):
    """A collective of a program, or several that look the same."""

    kind: str
    devices: int  # of one group
    arrays: str  # the types of the larger side, operands or results
    num_bytes: int  # of these, on one device
    times: int = 1


def collectives(text: str, devices: int) -> list[Collective]:
    """Those in the text of a program for ``devices``, the largest first. One in a loop counts once."""
    found = collections.Counter(_collectives(text, devices))
    alike = [one._replace(times=times) for one, times in found.items()]
    return sorted(alike, key=lambda one: (-one.num_bytes, one))


def largest_array(text: str) -> int:
    """The number of elements of the largest array that a program has, operands and results included."""
    return max(map(_elements, {shape for _, shape in _array.findall(text)}))


def _collectives(text: str, devices: int) -> Iterator[Collective]:
    for line in text.splitlines():
        match = _collective.search(line)
        if match is None:
            continue
        arrays, size = _array.findall(match["type"]), _group(match["rest"], devices)
        if match["start"]:  # a pair: what is sent, and what is received
            half = len(arrays) // 2
            arrays = max(arrays[:half], arrays[half:], key=_num_bytes)
        scattered = size if match["kind"] == "reduce-scatter" and not match["start"] else 1
        types = ", ".join(f"{dtype}[{shape}]" for dtype, shape in arrays)
        yield Collective(match["kind"], size, types, _num_bytes(arrays) * scattered)


def _num_bytes(arrays: list[tuple[str, str]]) -> int:
    return sum(_elements(shape) * _bits(dtype) // 8 for dtype, shape in arrays)


def _elements(shape: str) -> int:
    return math.prod(int(n) for n in shape.split(",") if n)


def _bits(dtype: str) -> int:
    return BITS.get(dtype) or int(re.findall(r"\d+", dtype)[0])


def _group(rest: str, devices: int) -> int:
    """The number of devices in a group, from one of the three forms that XLA writes."""
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", rest):
        sizes = dict(re.findall(r"'?(\w+)'?=(\d+)", named[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"\w+", named[2]))
    if counted := re.search(r"replica_groups=\[\d+,(\d+)\]", rest):
        return int(counted[1])
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", rest)
    return devices if listed is None else len(listed[1].split(","))
