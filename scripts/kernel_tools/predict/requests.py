"""What one program of a launch reads and writes: Triton's IR, followed for one program.

The IR (TTIR) of a kernel is a list of operations on scalars and tiles. Here every tile is
represented by its first element, which is enough for the bounds of loops, for conditions, and for
the address at which an access starts. A loop's body is followed once, and counts as often as the
loop runs. What depends on data is unknown (None); `program_of` says what is assumed then.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_BYTES = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "bf16": 2, "f16": 2, "f32": 4, "f64": 8}


@dataclass(frozen=True)
class Pointer:
    """An address: so many elements behind the start of a kernel's argument."""

    argument: str
    offset: float | None = 0


@dataclass(frozen=True)
class Loop:
    """A loop, and how often it runs for each time that it is reached."""

    number: int
    trips: float


@dataclass(frozen=True)
class Access:
    """A load or a store of a tile.

    Args:
        argument: the kernel's argument that holds the address.
        elements: of the tile.
        itemsize: bytes of an element.
        writes: a store, or an atomic operation.
        loops: those around it, from the outermost.
        start: the element of the argument at which it starts; None if that depends on data.
    """

    argument: str
    elements: int
    itemsize: float
    writes: bool
    loops: tuple[Loop, ...]
    start: float | None

    @property
    def times(self) -> float:
        """How often one program runs it."""
        return math.prod(loop.trips for loop in self.loops)

    @property
    def bytes(self) -> float:
        """What one program asks for."""
        return self.elements * self.itemsize * self.times


@dataclass(frozen=True)
class Program:
    """What one program does: its accesses, and all its loops in the order of the text."""

    accesses: tuple[Access, ...]
    loops: tuple[tuple[Loop, ...], ...]  # each with those around it


Number = float | int | None


def program_of(
    ttir: str,
    names: Sequence[str],
    arguments: Mapping[str, Any],
    programs: tuple[int, int],
    at: int,
    unknown_trips: float = 1,
) -> Program:
    """Follow program number ``at`` of a launch.

    Args:
        ttir: the IR.
        names: the runtime arguments, in the order of the signature.
        arguments: their values; what is no number is a pointer.
        programs: the size of the grid.
        at: the program's number in the grid's first dimension; in the second it is 0.
        unknown_trips: how often a loop runs whose bounds depend on data.
    """
    follower = _Follower(ttir, programs, at, unknown_trips)
    for name, variable in zip(names, follower.parameters, strict=True):
        value = arguments[name]
        is_number = isinstance(value, (int, float))
        follower.values[variable] = value if is_number else Pointer(name)
    follower.region(follower.start, ())
    return Program(tuple(follower.accesses), tuple(follower.loops))


class _Follower:
    def __init__(self, ttir: str, programs: tuple[int, int], at: int, unknown: float) -> None:
        lines = [re.sub(r"\s*loc\(.*$", "", line.strip()) for line in ttir.splitlines()]
        self.lines = [line for line in lines if line and not line.startswith("#")]
        first = next(i for i, line in enumerate(self.lines) if line.startswith("tt.func public"))
        whole = next(line for line in ttir.splitlines() if "tt.func public" in line)
        self.parameters = re.findall(r"(%[\w]+): [^%]", whole.partition("(")[2])
        self.start = first + 1
        self.programs, self.at, self.unknown = programs, at, unknown
        self.values: dict[str, Any] = {}
        self.accesses: list[Access] = []
        self.loops: list[tuple[Loop, ...]] = []

    def region(self, i: int, loops: tuple[Loop, ...], runs: bool = True) -> int:
        """Follow the lines from i to the end of the region; return the line behind it."""
        regions = {"for": self._for, "if": self._if, "while": self._while}
        while not self.lines[i].startswith("}"):
            line = self.lines[i]
            if found := re.search(r"(?:=|^)\s*scf\.(for|if|while) ", line):
                i = regions[found[1]](i, loops, runs)
            elif line.endswith("{"):  # such as the function that a reduction combines by
                i = self._skip(i)
            else:
                if runs:
                    self._operation(line, loops)
                i += 1
        return i

    def _skip(self, i: int) -> int:
        depth = 0
        while True:
            depth += self.lines[i].count("{") - self.lines[i].count("}")
            i += 1
            if depth <= 0:
                return i

    def _for(self, i: int, loops: tuple[Loop, ...], runs: bool) -> int:
        line = self.lines[i]
        found = re.search(r"scf\.for (?:unsigned )?(%\w+) = (\S+) to (\S+) step (\S+)", line)
        assert found is not None, line
        low, high, step = (self.values.get(found[n]) for n in (2, 3, 4))
        trips = self.unknown
        if low is not None and high is not None and step is not None:
            trips = max(0, math.ceil((high - low) / step))
        self.values[found[1]] = low
        for name, start in re.findall(r"(%\w+) = (%[\w#]+)", line.partition("iter_args(")[2]):
            self.values[name] = self.values.get(start)
        inside = (*loops, Loop(len(self.loops), trips))
        if runs:
            self.loops.append(inside)
        end = self.region(i + 1, inside, runs and trips > 0)
        results = [self.values.get(v) for v in self._yielded(end)]
        self._results(line, results)
        return end + 1

    def _yielded(self, end: int) -> list[str]:
        line = self.lines[end - 1]
        return re.findall(r"%[\w#]+", line.partition(" : ")[0]) if "scf.yield" in line else []

    def _results(self, line: str, values: list[Any]) -> None:
        if found := re.match(r"(%\w+)(?::\d+)? = ", line):
            for n, value in enumerate(values):
                self.values[f"{found[1]}#{n}" if len(values) > 1 else found[1]] = value

    def _if(self, i: int, loops: tuple[Loop, ...], runs: bool) -> int:
        line = self.lines[i]
        condition = self.values.get(line.partition("scf.if ")[2].split()[0])
        end = self.region(i + 1, loops, runs and condition is not False and condition != 0)
        yielded = self._yielded(end)
        if "else" in self.lines[end]:
            taken = condition is not None and not condition
            end = self.region(end + 1, loops, runs and taken)
            yielded = self._yielded(end) if taken else yielded
        self._results(line, [self.values.get(v) for v in yielded])
        return end + 1

    def _while(self, i: int, loops: tuple[Loop, ...], runs: bool) -> int:
        inside = (*loops, Loop(len(self.loops), self.unknown))
        if runs:
            self.loops.append(inside)
        end = self.region(i + 1, inside, runs)
        while "{" in self.lines[end]:  # `} do {`
            end = self.region(end + 1, inside, runs)
        return end + 1

    def _operation(self, line: str, loops: tuple[Loop, ...]) -> None:
        result, body = "", line
        if re.match(r"%\w+(:\d+)? = ", line):
            result, _, body = line.partition(" = ")
            result = result.partition(":")[0]
        name, _, rest = body.strip().partition(" ")
        operands = [self.values.get(v) for v in re.findall(r"%[\w#]+", rest)]
        if name in ("tt.load", "tt.store", "tt.atomic_rmw"):
            self._access(name, rest, operands[0], loops)
        elif result:
            self.values[result] = self._value(name, rest, operands)

    def _access(self, name: str, rest: str, pointer: Any, loops: tuple[Loop, ...]) -> None:
        types = rest.rpartition(" : ")[2]
        found = re.search(r"(?:tensor<((?:\d+x)*))?!tt\.ptr<(\w+)", types)
        if found is None or not isinstance(pointer, Pointer):
            raise ValueError(f"an access to no argument of the kernel: {name} {rest}")
        elements = math.prod(int(n) for n in (found[1] or "").split("x") if n)
        itemsize, writes = _BYTES.get(found[2], 1), "load" not in name  # 1: float8
        self.accesses.append(
            Access(pointer.argument, elements, itemsize, writes, loops, pointer.offset)
        )

    def _value(self, name: str, rest: str, operands: list[Any]) -> Any:
        if name in _NAMED:
            return _NAMED[name](self, rest, operands)
        if name in _SAME:
            return operands[0] if operands else None
        compute = _ARITHMETIC.get(name)
        if compute is None or any(v is None or isinstance(v, Pointer) for v in operands):
            return None
        return compute(*operands)


def _constant(follower: _Follower, rest: str, operands: list[Any]) -> Number:
    found = re.match(r"(?:dense<)?(-?[\d.]+(?:[eE][-+]?\d+)?|true|false)>?", rest)
    return None if found is None else _literal(found[1])


def _literal(text: str) -> float | int:
    if text in ("true", "false"):
        return int(text == "true")
    return int(text) if text.lstrip("-").isdecimal() else float(text)


def _range(follower: _Follower, rest: str, operands: list[Any]) -> Number:
    found = re.search(r"start = (-?\d+)", rest)
    return None if found is None else int(found[1])


def _moved(follower: _Follower, rest: str, operands: list[Any]) -> Any:
    pointer, offset = operands
    known = None not in (pointer.offset, offset)
    return Pointer(pointer.argument, pointer.offset + offset if known else None)


def _comparison(follower: _Follower, rest: str, operands: list[Any]) -> bool | None:
    how = rest.split(maxsplit=1)[0].strip(",")
    compare = getattr(operator, how if how in ("eq", "ne") else how[1:])  # slt, ult -> lt
    return None if None in operands else compare(*operands)


def _selected(follower: _Follower, rest: str, operands: list[Any]) -> Any:
    condition, yes, no = operands[:3]
    return None if condition is None else (yes if condition else no)


_NAMED: dict[str, Callable[[_Follower, str, list[Any]], Any]] = {
    "arith.constant": _constant, "tt.make_range": _range, "tt.addptr": _moved,
    "arith.cmpi": _comparison, "arith.select": _selected,
    "tt.get_program_id": lambda f, rest, _: f.at if rest.startswith("x") else 0,
    "tt.get_num_programs": lambda f, rest, _: f.programs[not rest.startswith("x")],
}  # fmt: skip
_SAME = {
    "tt.splat", "tt.expand_dims", "tt.broadcast", "tt.reshape", "tt.trans", "arith.extsi",
    "arith.extui", "arith.trunci", "arith.index_cast", "arith.sitofp", "tt.bitcast",
}  # fmt: skip
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "arith.addi": operator.add,
    "arith.subi": operator.sub,
    "arith.muli": operator.mul,
    **dict.fromkeys(("arith.divsi", "arith.divui"), lambda a, b: int(a / b) if b else None),
    "arith.ceildivsi": lambda a, b: -(-a // b) if b else None,
    **dict.fromkeys(
        ("arith.remsi", "arith.remui"), lambda a, b: int(math.fmod(a, b)) if b else None
    ),
    "arith.minsi": min,
    "arith.maxsi": max,
    "arith.andi": lambda a, b: int(a) & int(b),
    "arith.ori": lambda a, b: int(a) | int(b),
    "arith.xori": lambda a, b: int(a) ^ int(b),
    "arith.shli": lambda a, b: int(a) << int(b),
    "arith.shrsi": lambda a, b: int(a) >> int(b),
}
