"""The text of a PTX kernel -> a `Program`: its parameters, registers, instructions and labels.

Only what compilers emit for one kernel is read: a single ``.entry``, whose body may hold nested
scopes (inline assembly) with registers of their own. Directives for debuggers and for ptxas are
skipped, but the ``.loc`` comments are kept: each instruction knows its line of the kernel's source.

A register is known by its name, and by its number of bits; ``%r1`` of a nested scope is another
register than ``%r1`` outside. Predicates have one bit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

SPECIAL = re.compile(
    r"%(?:n?tid|n?ctaid)\.[xyz]|%(?:laneid|warpid|nwarpid|clock|clock64|smid|globaltimer)"
    r"|%(?:n?clusterid|cluster_n?ctaid|cluster_ctarank|cluster_nctarank)(?:\.[xyz])?"
)


class PtxError(Exception):
    """PTX that this interpreter cannot read or run, or whose execution has findings."""


@dataclass(frozen=True)
class Register:
    """``%r1``: name and bits; 1 bit is a predicate. ``negated``: the operand was ``!%p1``."""

    name: str
    bits: int
    negated: bool = False


@dataclass(frozen=True)
class Special:
    """A register that the machine defines, such as ``%tid.x``."""

    name: str


@dataclass(frozen=True)
class Immediate:
    """A number. ``bits_of_float``: the bits of ``0f3F800000`` or ``0d...``, else None."""

    value: int
    bits_of_float: int | None = None


@dataclass(frozen=True)
class Vector:
    """``{%r1, %r2}``; its elements are operands."""

    elements: tuple[Operand, ...]


@dataclass(frozen=True)
class Address:
    """``[base + offset]``: a register, or the name of a parameter or of a variable."""

    base: Register | str
    offset: int


@dataclass(frozen=True)
class Symbol:
    """Any other name: a label, a variable, or ``_`` for a result that is not wanted."""

    name: str


Operand = Register | Special | Immediate | Vector | Address | Symbol


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    ``opcode`` is the full text (``ld.global.v4.b32``), ``name`` its first part and ``modifiers``
    the others; ``type`` is the last modifier. ``second`` is the other result of ``%r1|%p1``.
    """

    opcode: str
    operands: tuple[Operand, ...]
    guard: Register | None = None
    second: Register | None = None
    line: int = 0  # of the PTX
    source: str = ""  # "cast.py:91"
    name: str = field(init=False, default="")
    modifiers: tuple[str, ...] = field(init=False, default=())
    type: str = field(init=False, default="")

    def __post_init__(self) -> None:
        name, *modifiers = self.opcode.split(".")
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "modifiers", tuple(modifiers))
        object.__setattr__(self, "type", modifiers[-1] if modifiers else "")

    def __str__(self) -> str:
        where = f", {self.source}" if self.source else ""
        return f"line {self.line}{where}: {self.opcode}"


@dataclass(frozen=True)
class Parameter:
    """``type``: of PTX, such as ``u64``; ``bytes``: more than the type's for an array."""

    name: str
    type: str


@dataclass(frozen=True)
class Program:
    """A kernel.

    ``blocks[i]`` is the range of instructions of a basic block: control enters at its first one
    only, and leaves after its last one only. ``labels`` name blocks.
    """

    name: str
    target: str  # "sm_90a"
    threads: int | None  # of a program, where .reqntid or .maxntid says it
    parameters: tuple[Parameter, ...]
    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int]  # -> block
    blocks: tuple[range, ...]
    shared: Mapping[str, int]  # variables in shared memory -> bytes; 0: dynamic


# Control may leave, or wait, after these: they end a basic block.
ENDS_BLOCK = ("bra", "ret", "exit", "bar", "barrier")

_STATEMENT = re.compile(
    r"\s*(?:\.loc\b(?:[^\n]*//\s*(?P<source>[^\s:]+:\d+))?[^\n]*"
    r"|\.(?:file|section|pragma)\b[^\n]*|(?P<brace>[{}])"
    r"|(?P<label>[$A-Za-z_][\w$]*)\s*:(?!:)|(?P<code>[^;]+);)"
)
_GUARD = re.compile(r"@(!?)(%?[\w$]+)\s+")
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")
_VARIABLE = re.compile(r"\.shared\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d*)\])?")


def parse(text: str) -> Program:
    """Read the kernel of a PTX module."""
    entry = re.search(r"\.entry\s+([\w$]+)\s*\((.*?)\)(.*?)\{", text, re.S)
    if entry is None:
        raise PtxError("this text has no .entry: it is not the PTX of a kernel")
    if re.search(r"^\s*(?:\.visible\s+)?\.func\b", text, re.M):
        raise PtxError("this PTX defines a function beside its kernel, which is not supported")
    target = re.search(r"^\.target\s+(\w+)", text, re.M)
    threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)(?:\s*,\s*(\d+))?", entry[3])
    body = _Body(text, entry.end())
    blocks = body.blocks()
    shared = {
        name: (int(count) if count else 0) * _bits(type_) // 8
        for type_, name, count in _VARIABLE.findall(text)
    }
    return Program(
        name=entry[1],
        target=target[1] if target else "",
        threads=int(threads[1]) * int(threads[2] or 1) if threads else None,
        parameters=tuple(
            Parameter(name, type_)
            for type_, name in re.findall(r"\.param\s+\.(\w+)[^,]*?([\w$]+)\s*(?:,|$)", entry[2])
        ),
        instructions=tuple(body.instructions),
        labels=body.labels,
        blocks=tuple(blocks),
        shared=shared,
    )


class _Body:
    """Reads the statements between a kernel's braces."""

    def __init__(self, text: str, start: int) -> None:
        self.instructions: list[Instruction] = []
        self.starts: dict[str, int] = {}  # label -> instruction
        self.labels: dict[str, int] = {}  # label -> block
        self._scopes: list[dict[str, Register]] = [{}]
        self._ranges: dict[str, int] = {}  # "%r" of "%r<217>" -> bits
        self._locals = 0
        line = text.count("\n", 0, start) + 1
        text = re.sub(r"^(?!\s*\.loc\b)(.*?)//.*$", r"\1", text[start:], flags=re.M)
        at = counted = 0
        self._line, self._source = line, ""
        while self._scopes:
            found = _STATEMENT.match(text, at)
            if found is None:
                raise PtxError("the kernel's last brace is missing")
            at = found.end()
            self._source = found["source"] or self._source
            if found["brace"] == "{":
                self._scopes.append({})
            elif found["brace"]:
                self._scopes.pop()
            elif found["label"]:
                self.starts[found["label"]] = len(self.instructions)
            elif (code := found["code"]) and code.startswith(".reg"):
                self._declare(code)
            elif code and not code.startswith("."):
                self._line += text.count("\n", counted, found.start("code"))
                counted = found.start("code")
                self.instructions.append(self._instruction(code.strip()))

    def _declare(self, text: str) -> None:
        type_, names = re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", text, re.S).groups()  # type: ignore
        bits, is_inner = _bits(type_), len(self._scopes) > 1
        for name in names.split(","):
            stem, _, count = name.strip().partition("<")
            if count and not is_inner:
                self._ranges[stem] = bits
                continue
            for suffix in range(int(count.rstrip("> "))) if count else [""]:
                own = f"{stem}{suffix}"
                self._locals += is_inner
                unique = f"{own}'{self._locals}" if is_inner else own
                self._scopes[-1][own] = Register(unique, bits)

    def _instruction(self, text: str) -> Instruction:
        guard = second = None
        if found := _GUARD.match(text):
            guard = replace(self._known(found[2]), negated=found[1] == "!")
            text = text[found.end() :]
        opcode, *rest = text.split(None, 1)
        operands = [o.strip() for o in _OPERAND.findall(rest[0])] if rest else []
        if operands and "|" in operands[0]:
            operands[0], _, other = operands[0].partition("|")
            second = self._register(other.strip())
        parsed = tuple(self._operand(o.strip()) for o in operands)
        return Instruction(opcode, parsed, guard, second, self._line, self._source)

    def _register(self, name: str) -> Register | None:
        for scope in reversed(self._scopes):
            if name in scope:
                return scope[name]
        stem = name.rstrip("0123456789")
        bits = self._ranges.get(stem) if stem != name else None
        return None if bits is None else Register(name, bits)

    def _known(self, name: str) -> Register:
        register = self._register(name)
        if register is None:
            raise PtxError(f"line {self._line}: no register {name}")
        return register

    def _operand(self, text: str) -> Operand:
        if text[0] == "{":
            return Vector(tuple(self._operand(e.strip()) for e in text[1:-1].split(",")))
        if text[0] == "[":
            return self._address(text[1:-1])
        if text[0] == "!":
            return replace(self._known(text[1:]), negated=True)
        if register := self._register(text):
            return register
        if SPECIAL.fullmatch(text):
            return Special(text)
        return self._known(text) if text[0] == "%" else _number(text) or Symbol(text)

    def _address(self, text: str) -> Address:
        found = re.fullmatch(r"\s*([%$\w]+)\s*(?:([+-])\s*([+-]?\w+))?\s*", text)
        if found is None:
            raise PtxError(f"line {self._line}: the address [{text}] is not supported")
        base, sign, offset = found.groups()
        value = int(offset or "0", 0) * (-1 if sign == "-" else 1)
        if isinstance(number := _number(base), Immediate):
            return Address("", number.value + value)
        return Address(self._register(base) or base, value)

    def blocks(self) -> list[range]:
        """The basic blocks; fills ``labels``."""
        count = len(self.instructions)
        named = {o.name for i in self.instructions for o in i.operands if isinstance(o, Symbol)}
        starts = {0, *(at for name, at in self.starts.items() if name in named)}
        starts |= {i + 1 for i, ins in enumerate(self.instructions) if ins.name in ENDS_BLOCK}
        starts.add(count)
        ordered = sorted(starts)
        number = {start: i for i, start in enumerate(ordered)}
        self.labels = {name: number[at] for name, at in self.starts.items() if name in named}
        for ins in self.instructions:
            target = ins.operands[0] if ins.name == "bra" else None
            if isinstance(target, Symbol) and target.name not in self.labels:
                raise PtxError(f"{ins}: there is no label {target.name}")
        return [range(a, b) for a, b in pairwise(ordered)]


def fusible(program: Program) -> list[Instruction]:
    """The sums that ptxas may fuse with a product of float32 before them, into one rounding.

    It may where neither has a rounding in its opcode. The bits are then ptxas' choice; elsewhere
    PTX determines them.
    """
    free = [i for i in program.instructions if i.modifiers in (("f32",), ("ftz", "f32"))]
    products = {i.operands[0] for i in free if i.name == "mul"}
    return [i for i in free if i.name in ("add", "sub") and products & set(i.operands[1:])]


def _number(text: str) -> Immediate | None:
    if found := re.fullmatch(r"0[fF]([0-9A-Fa-f]{8})|0[dD]([0-9A-Fa-f]{16})", text):
        return Immediate(0, int(found[1] or found[2], 16))
    if re.fullmatch(r"-?(?:0[xX][0-9A-Fa-f]+|\d+)U?", text):
        return Immediate(int(text.rstrip("U"), 0))
    return None


def _bits(type_: str) -> int:
    """``b32`` -> 32; ``pred`` -> 1."""
    return 1 if type_ == "pred" else int(re.sub(r"\D", "", type_))
