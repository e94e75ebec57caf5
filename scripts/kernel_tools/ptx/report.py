"""What a run of a kernel found and counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from scripts.kernel_tools.ptx.program import Instruction, PtxError

KINDS = (
    "out of bounds",  # of global or shared memory
    "misaligned",
    "race",  # two threads access one byte of shared memory, at least one writes, no barrier between
    "conflicting stores",  # of one instruction: lanes that store different values at one address
    "program order",  # reads what another program of the same launch writes
    "uninitialised shared memory",
    "uninitialised register",
    "unfinished",  # an access to what an asynchronous copy or product, not waited for, still uses
    "proxy",  # an asynchronous product reads what no fence.proxy.async made visible to it
    "barrier",  # not all threads of a program, or of a mask, reach it
    "division by zero",  # of integers
)


@dataclass
class Finding:
    """A fault of one instruction: its kind (one of `KINDS`), and the first case."""

    kind: str
    instruction: Instruction
    detail: str
    count: int = 1  # how often the instruction had it

    def __str__(self) -> str:
        return f"{self.kind}: {self.instruction}: {self.detail} ({self.count} times)"


@dataclass
class Report:
    """The result of a launch.

    ``instructions``: opcode -> issues of the whole launch, one for each warp in which at least one
    thread reaches it, also where its guard is false. Divide by ``programs`` for one program.
    """

    kernel: str = ""
    programs: int = 0
    threads: int = 0  # of a program
    instructions: Counter[str] = field(default_factory=Counter)
    divergences: int = 0  # branches that lanes of one batch took differently
    form: str = ""  # which compilation of the kernel: equal for equal ones
    _findings: dict[tuple[str, int], Finding] = field(default_factory=dict)

    @property
    def findings(self) -> list[Finding]:
        """All of them, in the order in which they were met."""
        return list(self._findings.values())

    def find(self, kind: str, ins: Instruction, detail: str, count: int = 1) -> None:
        """Record a fault; later ones of the same instruction and kind are only counted."""
        assert kind in KINDS, kind
        known = self._findings.setdefault((kind, ins.line), Finding(kind, ins, detail, 0))
        known.count += count

    def check(self) -> None:
        """Raise if there are findings."""
        if self.findings:
            raise PtxError(f"{self.kernel}:\n" + "\n".join(f"  {f}" for f in self.findings))
