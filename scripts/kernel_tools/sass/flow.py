"""The control-flow graph of a kernel, and the kinds of every byte at every point of it.

A forward analysis to a fixpoint. What a register may hold at the start of a block is the union over
the blocks before it. An instruction under a predicate (``@P0 MOV R2, R3``) leaves what was there as
a second possibility, but not on the way on which a branch says that the predicate is true. A
function is followed once per chain of callers, so that the registers of two of them do not mix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from scripts.kernel_tools.sass.effects import COMPUTED_JUMPS, Effect, Reader, effect
from scripts.kernel_tools.sass.instructions import Instruction, parse_listing

ENDS_BLOCK = {"BRA", "CALL", "RET", "EXIT", "KILL", *COMPUTED_JUMPS}
Node = tuple[int, tuple[int, ...]]  # the first step of a block, and those its callers return to


@dataclass(frozen=True)
class Step:
    """An instruction, the registers that it writes, and the kinds that it gives them."""

    instruction: Instruction
    writes: tuple[int, ...]
    effect: Effect


class Flow:
    """One kernel.

    Attributes:
        name: of the kernel.
        steps: its instructions in the order of the listing.
        unknown: opcodes of which it is not known here what they do.
        nodes: the blocks that the entry reaches.

    Raises:
        ValueError: there are no instructions, or a jump or a call cannot be followed.
    """

    def __init__(self, name: str, listing: str) -> None:
        self.name = name
        self.steps: list[Step] = []
        self.unknown: set[str] = set()
        self._labels: dict[str, int] = {}
        self._read(listing)
        if not self.steps:
            raise ValueError(
                f"{name} has no instructions; is it of a listing of `nvdisasm -ndf -c`?"
            )
        starts = self._block_starts()
        self._ends = dict(zip(starts, [*starts[1:], len(self.steps)], strict=True))
        self._after = self._graph()
        self.nodes = list(self._after)
        self._written = self._written_registers()
        self._states: dict[Node, dict[int, int]] = {node: {} for node in self.nodes}
        self._find_states()

    def _read(self, listing: str) -> None:
        for found in parse_listing(listing):
            if isinstance(found, str):
                self._labels[found] = len(self.steps)
                continue
            writes, gives, is_known = effect(found)
            self.steps.append(Step(found, tuple(writes), gives))
            if not is_known:
                self.unknown.add(found.opcode)

    def indices(self, node: Node) -> range:
        """The steps of a block."""
        return range(node[0], self._ends[node[0]])

    # -- control flow

    def _block_starts(self) -> list[int]:
        starts = {0, *self._labels.values()}
        for i, step in enumerate(self.steps):
            if step.instruction.name in ENDS_BLOCK:
                starts.add(i + 1)
        return sorted(s for s in starts if s < len(self.steps))

    def _graph(self) -> dict[Node, dict[Node, str]]:
        """Block -> the blocks after it, each with the guard that holds there, "" if none does."""
        edges: dict[Node, dict[Node, str]] = {}
        todo: list[Node] = [(0, ())]
        while todo:
            node = todo.pop()
            if node in edges:
                continue
            following = self._following(self._ends[node[0]], node[1])
            edges[node] = {n: guard for n, guard in following if n[0] < len(self.steps)}
            if len(edges[node]) < len(following):  # two ways to one block: no guard holds
                edges[node] = dict.fromkeys(edges[node], "")
            todo += edges[node]
        return edges

    def _following(self, end: int, stack: tuple[int, ...]) -> list[tuple[Node, str]]:
        last = self.steps[end - 1].instruction
        onward = (end, stack)
        skipped = [(onward, _negated(last.guard))] if last.guard else []
        if last.name == "BRA" or _jumps(last):
            target = (self._target(last), stack)
            if _has_condition(last):  # beside its guard
                return [(target, ""), (onward, "")]
            return [(target, last.guard), *skipped]
        if last.name == "CALL":
            if len(stack) == 8:
                raise ValueError(f"{self.name} calls itself: {last}")
            self._check_return(end)
            return [((self._target(last), (*stack, end)), last.guard), *skipped]
        if last.name == "RET":
            if not stack:
                raise ValueError(f"{self.name} returns from no call: {last}")
            return [((stack[-1], stack[:-1]), last.guard), *skipped]
        if last.name in ("EXIT", "KILL"):
            return skipped
        if last.name in COMPUTED_JUMPS:
            raise ValueError(f"{self.name}: where does this jump to? {last}")
        return [(onward, "")]  # BSYNC too: it stands before the place where threads meet

    def _target(self, instruction: Instruction) -> int:
        if instruction.label not in self._labels:
            raise ValueError(f"{self.name}: where does this jump to? {instruction}")
        return self._labels[instruction.label]

    def _check_return(self, end: int) -> None:
        """A call returns to the next instruction, whose address a caller or callee names."""
        address = f"0x{self.steps[end].instruction.address:x}"
        if not any(step.instruction.operands[-1:] == (address,) for step in self.steps):
            raise ValueError(
                f"{self.name}: where does this return to? {self.steps[end - 1].instruction}"
            )

    # -- data flow

    def _written_registers(self) -> dict[Node, int]:
        """A bit for each register that an instruction on some path to a block has written."""
        written = dict.fromkeys(self.nodes, 0)

        def visit(node: Node) -> Iterator[Node]:
            after = written[node]
            for i in self.indices(node):
                for register in self.steps[i].writes:
                    after |= 1 << register
            for other in self._after[node]:
                if after | written[other] != written[other]:
                    written[other] |= after
                    yield other

        self._to_fixpoint(visit)
        return written

    def _find_states(self) -> None:
        """What each register may hold at the start of each block."""

        def visit(node: Node) -> Iterator[Node]:
            for other, guard in self._after[node].items():
                *_, (_, last) = self.run(node, guard)  # which has brought its state up to date
                before = dict(self._states[other])
                for register, flags in last.state.items():
                    self._states[other][register] = before.get(register, 0) | flags
                if self._states[other] != before:
                    yield other

        self._to_fixpoint(visit)

    def _to_fixpoint(self, visit: Callable[[Node], Iterable[Node]]) -> None:
        """Visit blocks, and again those that a visit says it has changed."""
        todo = dict.fromkeys(self.nodes)
        while todo:
            node = next(iter(todo))
            del todo[node]
            todo |= dict.fromkeys(visit(node))

    def run(
        self, node: Node, guard: str = "", end: int | None = None
    ) -> Iterator[tuple[int, Reader]]:
        """The steps of a block, each with a reader of the registers before it.

        Args:
            node: the block.
            guard: a predicate, or its negation, that holds at ``end``.
            end: a step of the block; None for its end.
        """
        state, written = dict(self._states[node]), self._written[node]
        since = self._last_set(guard, node, end)
        for i in self.indices(node):
            step = self.steps[i]
            reader = Reader(state, written)
            yield i, reader
            mine = step.instruction.guard
            if mine and guard and i > since:
                if mine == _negated(guard):
                    continue
                mine = "" if mine == guard else mine
            for register, flags in zip(step.writes, step.effect(reader), strict=True):
                state[register] = flags | state.get(register, 0) if mine else flags
                written |= 1 << register

    def _last_set(self, guard: str, node: Node, end: int | None) -> int:
        """The last step before ``end`` that may set this predicate, or -1."""
        steps, name = self.indices(node), guard.lstrip("!")
        before = range(steps.start, steps.stop if end is None else end)
        setting = (i for i in before if name in self.steps[i].instruction.predicates)
        return max(setting, default=-1)


def _jumps(instruction: Instruction) -> bool:
    """A call of a local label, which returns nowhere: a jump, where threads diverge."""
    return instruction.name == "CALL" and instruction.label.startswith(".L_")


def _has_condition(instruction: Instruction) -> bool:
    """``BRA.U UP0, ...`` or ``BRA P1, ...``, and what leaves only some threads behind."""
    operands = instruction.text.split(instruction.opcode, 1)[1].partition("`")[0]
    return bool(operands.strip()) or bool({"DIV", "CONV"} & set(instruction.modifiers))


def _negated(guard: str) -> str:
    return guard[1:] if guard.startswith("!") else f"!{guard}"
