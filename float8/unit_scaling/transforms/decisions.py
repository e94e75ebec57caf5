"""What unit scaling does with each call of a forward, decided when the call comes.

`Decisions` sees a forward call by call, `begin` before each and `end` after it, as numbers and
functions without tensors. What a call becomes (`Step`) follows from what came before it:

    role     "scaled"    the function's unit-scaled version (`rules`)
             "residual"  `U.residual_add`, with ``tau`` (`residuals`)
             "keep"      the function as it is (`sums`)
             "readout"   `U.linear_readout`: the linear layer of the output weight
    options  those of `products` that are set
    dropped  keywords that torch's Python functions hand on with their defaults (``inplace=False``)
             and that the function called in their place does not have

Two things follow from what comes after it, and concern gradients alone (`Factors`):

    reads    operands whose gradients are multiplied, being where a residual branch begins
    free     calls whose gradients need no constraint: no residual addition follows, and all their
             activations come over cut-edges (`cut_edges`)

In eager mode they are asked for in the backward pass, when the forward is over (`factor_of_read`,
`is_free`). Compiled code has them as constants, found by tracing it before (`tracing`); there they
are ``known`` from the start.

One number has to be known before: ``layers``, the number of residual additions, which ``tau``
depends on. It is counted once per model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from float8.unit_scaling.transforms.cut_edges import calls_on_cut_edges
from float8.unit_scaling.transforms.recording import (
    Call,
    History,
    Path,
    Value,
    line_of_caller,
    name_of,
)
from float8.unit_scaling.transforms.residuals import Residual, conflicts, edges, tau_of
from float8.unit_scaling.transforms.rules import (
    Rules,
    dropped_by,
    is_readout,
    is_weight,
    may_be_free,
    options_of,
    refuse_unscaled,
)
from float8.unit_scaling.transforms.sums import ADDITIONS, KEEP, RESIDUAL, SUM, Kind, kind_of

logger = logging.getLogger(__name__)


class Factors(NamedTuple):
    """What is known of a forward when it is over; constants for compiled code."""

    reads: tuple[tuple[int, Path, float], ...] = ()
    free: frozenset[int] = frozenset()


class Step(NamedTuple):
    """What is done with one call; see the module. ``number`` is the call's."""

    number: int
    role: str = "scaled"
    skip: int = 0
    tau: float = 0.0
    may_be_free: bool = False
    free: bool = False
    options: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    reads: tuple[tuple[Path, float], ...] = ()


class Decisions:
    """The decisions for one forward.

    Args:
        rules: `rules.rules_of` the transform.
        output_weights: names of the parameters of u-muP's type "output".
        layers: the number of residual additions; None while they are counted.
        known: what tracing the same forward before has found.
        logs: whether to log what is done.
    """

    def __init__(
        self,
        rules: Rules,
        output_weights: frozenset[str],
        layers: int | None = None,
        known: Factors | None = None,
        logs: bool = False,
    ) -> None:
        self.rules, self.output_weights, self.layers = rules, output_weights, layers
        self.known, self.logs = known, logs and logger.isEnabledFor(logging.INFO)
        self.history = History()
        self.kinds: dict[int, Kind] = {}  # of the additions, by the numbers of their calls
        self.found: list[Residual] = []
        self.shapes: dict[int, tuple[int, ...]] = {}  # of parameters, by the numbers of values
        self.done: list[tuple[Step, str]] = []  # with the lines of the calls, if it is logged
        self.results: list[Value] | None = None  # what the forward returned, when it is over
        self._settled: Factors | None = None
        self._reads: dict[tuple[int, Path], float] = {}

    def outside(
        self, dims: int, parameter: str | None, trained: bool, shape: tuple[int, ...]
    ) -> int:
        """The number of a tensor that no call has made.

        ``parameter`` is its name, "" if it is a parameter of another model's, None if it is none.
        """
        value = self.history.outside(dims, parameter, trained)
        self.shapes[value.number] = shape
        return value.number

    def view(self, base: int, dims: int) -> int:
        """The number of a tensor that is another view of one, made by a call that was not seen."""
        inputs = [((0, 0), self.history.values[base])]
        self.history.calls.append(Call("__get__", getattr, inputs))
        return self.history.result(dims, mixes=False).number

    def begin(
        self,
        function: Callable[..., Any],
        inputs: tuple[tuple[Path, int], ...],
        reads_integers: bool,
        is_plain: bool,
        defaults: tuple[str, ...],
    ) -> Step:
        """What to do with a call.

        Args:
            function: what is called.
            inputs: the numbers of its floating-point operands, each with its path.
            reads_integers: whether it has tensor operands of another kind.
            is_plain: see `sums.kind_of`.
            defaults: its keywords whose values are None or False.
        """
        operands = [(path, self.history.values[number]) for path, number in inputs]
        call = Call(name_of(function), function, operands, reads_integers)
        refuse_unscaled(call, self.rules, self.history, self.shapes)
        self.history.calls.append(call)
        number = len(self.history.calls) - 1
        step = self._step(number, call, is_plain, defaults)
        if self.known is not None:
            reads = tuple((path, f) for n, path, f in self.known.reads if n == number)
            step = step._replace(reads=reads, free=number in self.known.free)
        if self.logs:
            self.done.append((step, line_of_caller()))
        return step

    def end(self, dims: tuple[int, ...]) -> tuple[int, ...]:
        """The numbers of the results of the call that began last.

        Args:
            dims: how many dimensions each floating-point result has.
        """
        number = len(self.history.calls) - 1
        call = self.history.calls[-1]
        if number in self.kinds:
            mixes = self.kinds[number].name != KEEP
        else:
            mixes = call.function in self.rules or any(v.learned for _, v in call.inputs)
        return tuple(self.history.result(n, mixes).number for n in dims)

    def finish(self, results: Sequence[int]) -> None:
        """The forward has returned the tensors of these numbers."""
        self.results = [self.history.values[number] for number in results]
        if self.layers is None:
            self.layers = len(self.found)
            self.found = [replace(r, tau=tau_of(i, self.layers)) for i, r in enumerate(self.found)]
        if self.logs:
            self._log()

    def factors(self) -> Factors:
        """What follows from the calls so far; once the forward is over, from all of them."""
        if self._settled is not None:
            return self._settled
        reads = edges(self.history, self.found)
        factors = Factors(
            tuple((call, path, factor) for (call, path), factor in reads.items()),
            frozenset(self._free()),
        )
        self._reads = reads
        if self.results is not None:
            self._settled = factors
        return factors

    def factor_of_read(self, call: int, path: Path) -> float | None:
        """What the gradient of an operand is multiplied by; None for nothing."""
        self.factors()
        return self._reads.get((call, path))

    def is_free(self, call: int) -> bool:
        """Whether a call's gradients need no constraint."""
        return call in self.factors().free

    def _step(self, number: int, call: Call, is_plain: bool, defaults: tuple[str, ...]) -> Step:
        if call.function in ADDITIONS:
            return self._addition(number, call, is_plain)
        if call.function not in self.rules:
            return Step(number, KEEP)
        if is_readout(call, self.rules, self.output_weights):
            return Step(number, "readout")
        rule = self.rules[call.function]
        return Step(
            number,
            may_be_free=may_be_free(call, rule),
            options=options_of(call),
            dropped=dropped_by(rule, defaults) if defaults else (),
        )

    def _addition(self, number: int, call: Call, is_plain: bool) -> Step:
        kind = kind_of(self.history, self.kinds, call, is_plain)
        if kind.name == RESIDUAL and self._is_read_as_weight(kind.root):
            kind = Kind(SUM)
        if kind.name == RESIDUAL:
            # While the layers are counted any number will do: what tau is depends on it alone.
            tau = tau_of(len(self.found), self.layers or 1)
            self.found.append(Residual(number, kind.skip, kind.root, tau))
            if conflicts(self.history, self.found):
                del self.found[-1]
                kind = Kind(SUM)
        self.kinds[number] = kind
        if kind.name == RESIDUAL:
            return Step(number, RESIDUAL, skip=kind.skip, tau=tau)
        if kind.name == KEEP or torch.add not in self.rules:
            return Step(number, KEEP)
        return Step(number, may_be_free=may_be_free(call, self.rules[torch.add]))

    def _is_read_as_weight(self, root: int) -> bool:
        """Whether a parameter is a weight of its own branch: such reads multiply no gradient."""
        return self.history.values[root].parameter is not None and any(
            value.number == root and is_weight(path, call.function, self.rules)
            for call in self.history.calls
            for path, value in call.inputs
        )

    def _free(self) -> set[int]:
        history = self.history
        before = 0
        for residual in self.found:
            for value in history.calls[residual.call].outputs:
                before |= value.origins | 1 << value.number
        cut = calls_on_cut_edges(history.calls, self.results or [])
        return {
            number
            for number in cut
            if self._is_scaled(history.calls[number], number)
            and not any(before >> v.number & 1 for v in history.calls[number].outputs)
        }

    def _is_scaled(self, call: Call, number: int) -> bool:
        if number in self.kinds and self.kinds[number].name != SUM:
            return False
        function = torch.add if number in self.kinds else call.function
        return function in self.rules and may_be_free(call, self.rules[function])

    def _log(self) -> None:
        taus = {r.call: f"residual-add, tau={r.tau:.4g}" for r in self.found}
        for step, line in self.done:
            name = self.history.calls[step.number].name
            if step.role != KEEP:
                what = taus.get(step.number, step.role)
                logger.info("unit scaling function: %s (%s), %s", name, what, line)
            if self.is_free(step.number):
                logger.info("unconstraining node: %s, %s", name, line)
