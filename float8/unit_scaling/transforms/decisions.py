"""The decisions of unit scaling about each call of a forward, made when the call occurs.

`Decisions` gets a forward call by call, `begin` before each and `end` after it, as numbers and
functions without tensors. The replacement of a call (`Step`) depends on the calls before it:

    role     "scaled"    the function's unit-scaled version (`replacements`)
             "residual"  `U.residual_add`, with ``tau`` (`additions`)
             "keep"      the function as it is
             "readout"   `U.linear_readout`: the linear layer of the output weight
    options  those of `contractions` that are set
    dropped  keywords that torch's Python functions pass on with their defaults (``inplace=False``)
             and that the replacement does not have

Two decisions depend on the calls after it, and affect only gradients (`GradientFactors`):

    reads          operands whose gradients are multiplied, because a residual branch begins there
    unconstrained  calls whose gradients need no constraint: no residual addition follows, and all
                   their activations come over cut edges

In eager mode the backward pass looks them up, after the forward (`factor_of_read`,
`is_unconstrained`). Compiled code needs them as constants: `tracing` computes them in an earlier
trace and passes them as ``known``.

One number must be known before the forward: ``layers``, the number of residual additions, on which
``tau`` depends. It is counted once per model.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from float8.unit_scaling.transforms.additions import (
    ADDITIONS,
    KEEP,
    RESIDUAL,
    SUM,
    Addition,
    classify,
    tau_of,
)
from float8.unit_scaling.transforms.contractions import Function, Path
from float8.unit_scaling.transforms.gradient_factors import (
    branch_factors,
    calls_on_cut_edges,
    has_conflict,
)
from float8.unit_scaling.transforms.history import Call, History, Value, line_of_caller, name_of
from float8.unit_scaling.transforms.replacements import (
    Replacements,
    dropped_by,
    is_readout,
    is_weight,
    may_be_unconstrained,
    options_of,
    refuse_unscaled,
)

logger = logging.getLogger(__name__)


class GradientFactors(NamedTuple):
    """The factors of gradients of a whole forward; constants for compiled code."""

    reads: tuple[tuple[int, Path, float], ...] = ()  # call, path of the operand, factor
    unconstrained: frozenset[int] = frozenset()


class Step(NamedTuple):
    """The decision about one call; see the module. ``number`` is the number of the call."""

    number: int
    role: str = "scaled"
    skip: int = 0
    tau: float = 0.0
    may_be_unconstrained: bool = False
    is_unconstrained: bool = False
    options: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    reads: tuple[tuple[Path, float], ...] = ()


class Decisions:
    """The decisions for one forward.

    ``output_weights`` are the names of the parameters of u-muP's type "output". ``layers`` is the
    number of residual additions; None while they are counted. ``known`` has the factors that an
    earlier trace of the same forward found. ``logs`` says whether to log the decisions.
    """

    def __init__(
        self,
        replacements: Replacements,
        output_weights: frozenset[str],
        layers: int | None = None,
        known: GradientFactors | None = None,
        logs: bool = False,
    ) -> None:
        self.replacements, self.output_weights = replacements, output_weights
        self.layers, self.known = layers, known
        self.logs = logs and logger.isEnabledFor(logging.INFO)
        self.history = History()
        self.additions: dict[int, Addition] = {}  # by the numbers of their calls
        self.residuals: list[Addition] = []
        self.shapes: dict[int, tuple[int, ...]] = {}  # of parameters, by the numbers of values
        self.logged: list[tuple[Step, str]] = []  # with the lines of the calls
        self.results: list[Value] | None = None  # what the forward returned, when it is over
        self._final: GradientFactors | None = None
        self._reads: dict[tuple[int, Path], float] = {}

    def leaf(
        self, dims: int, parameter: str | None, is_trained: bool, shape: tuple[int, ...]
    ) -> int:
        """The number of a tensor that no call has returned; ``parameter`` as in `Value`."""
        value = self.history.add_leaf(dims, parameter, is_trained)
        self.shapes[value.number] = shape
        return value.number

    def view(self, base: int, dims: int) -> int:
        """The number of another view of a tensor, made by a call that the mode did not see."""
        inputs = [((0, 0), self.history.values[base])]
        self.history.calls.append(Call("__get__", getattr, inputs))
        return self.history.add_result(dims, is_new_signal=False).number

    def begin(
        self,
        function: Function,
        inputs: tuple[tuple[Path, int], ...],
        reads_integers: bool,
        is_plain: bool,
        defaults: tuple[str, ...],
    ) -> Step:
        """Decide about a call.

        ``inputs`` are the numbers of the call's floating-point operands, each with its path.
        ``reads_integers`` says whether it has tensor operands of another kind. For ``is_plain`` see
        `additions.classify`. ``defaults`` are its keywords whose values are None or False.
        """
        operands = [(path, self.history.values[number]) for path, number in inputs]
        call = Call(name_of(function), function, operands, reads_integers)
        refuse_unscaled(call, self.replacements, self.history, self.shapes)
        self.history.calls.append(call)
        number = len(self.history.calls) - 1
        step = self._step(number, call, is_plain, defaults)
        if self.known is not None:
            reads = tuple((path, f) for n, path, f in self.known.reads if n == number)
            step = step._replace(reads=reads, is_unconstrained=number in self.known.unconstrained)
        if self.logs:
            self.logged.append((step, line_of_caller()))
        return step

    def end(self, dims: tuple[int, ...]) -> tuple[int, ...]:
        """The numbers of the results of the call that began last.

        ``dims`` says how many dimensions each floating-point result has.
        """
        call, addition = self.history.calls[-1], self.additions.get(len(self.history.calls) - 1)
        if addition is not None:
            is_new = addition.kind != KEEP
        else:
            is_new = call.function in self.replacements or any(v.is_learned for _, v in call.inputs)
        return tuple(self.history.add_result(n, is_new).number for n in dims)

    def finish(self, results: Sequence[int]) -> None:
        """End the forward, which has returned the tensors of these numbers."""
        self.results = [self.history.values[number] for number in results]
        if self.layers is None:
            self.layers = len(self.residuals)
            self.residuals = [
                replace(r, tau=tau_of(i, self.layers)) for i, r in enumerate(self.residuals)
            ]
        if self.logs:
            self._log()

    def factors(self) -> GradientFactors:
        """The factors that follow from the calls so far; after the forward, from all calls."""
        if self._final is not None:
            return self._final
        self._reads = branch_factors(self.history, self.residuals, self.results or ())
        factors = GradientFactors(
            tuple((call, path, factor) for (call, path), factor in self._reads.items()),
            frozenset(self._unconstrained()),
        )
        if self.results is not None:
            self._final = factors
        return factors

    def factor_of_read(self, call: int, path: Path) -> float | None:
        """The factor of the gradient of an operand, or None."""
        self.factors()
        return self._reads.get((call, path))

    def is_unconstrained(self, call: int) -> bool:
        """Whether a call's gradients need no constraint."""
        return call in self.factors().unconstrained

    def _step(self, number: int, call: Call, is_plain: bool, defaults: tuple[str, ...]) -> Step:
        if call.function in ADDITIONS:
            return self._addition(number, call, is_plain)
        if call.function not in self.replacements:
            return Step(number, KEEP)
        if is_readout(call, self.replacements, self.output_weights):
            return Step(number, "readout")
        replacement = self.replacements[call.function]
        return Step(
            number,
            may_be_unconstrained=may_be_unconstrained(call, replacement),
            options=options_of(call, replacement),
            dropped=dropped_by(replacement, defaults) if defaults else (),
        )

    def _addition(self, number: int, call: Call, is_plain: bool) -> Step:
        addition = classify(self.history, self.additions, number, is_plain)
        if addition.kind == RESIDUAL:
            # While the layers are counted any number will do: only tau depends on it.
            tau = tau_of(len(self.residuals), self.layers or 1)
            addition = replace(addition, tau=tau)
            if self._is_read_as_weight(addition.root) or has_conflict(
                self.history, [*self.residuals, addition]
            ):
                addition = Addition(number, SUM)
        self.additions[number] = addition
        if addition.kind == RESIDUAL:
            self.residuals.append(addition)
            return Step(number, RESIDUAL, skip=addition.skip, tau=addition.tau)
        if addition.kind == KEEP or torch.add not in self.replacements:
            return Step(number, KEEP)
        scaled = self.replacements[torch.add]
        return Step(number, may_be_unconstrained=may_be_unconstrained(call, scaled))

    def _is_read_as_weight(self, root: int) -> bool:
        """Whether a parameter is a weight of its own branch: such reads multiply no gradient."""
        return self.history.values[root].parameter is not None and any(
            value.number == root and is_weight(path, call.function, self.replacements)
            for call in self.history.calls
            for path, value in call.inputs
        )

    def _unconstrained(self) -> set[int]:
        history = self.history
        before_a_residual = 0  # the values, as bits
        for residual in self.residuals:
            for value in history.calls[residual.call].outputs:
                before_a_residual |= value.origins | 1 << value.number
        return {
            number
            for number in calls_on_cut_edges(history.calls, self.results or [])
            if self._has_constraint(number)
            and not any(before_a_residual >> v.number & 1 for v in history.calls[number].outputs)
        }

    def _has_constraint(self, number: int) -> bool:
        call, addition = self.history.calls[number], self.additions.get(number)
        if addition is not None and addition.kind != SUM:
            return False
        function = call.function if addition is None else torch.add
        return function in self.replacements and may_be_unconstrained(
            call, self.replacements[function]
        )

    def _log(self) -> None:
        taus = {r.call: f"residual-add, tau={r.tau:.4g}" for r in self.residuals}
        for step, line in self.logged:
            name = self.history.calls[step.number].name
            if step.role != KEEP:
                role = taus.get(step.number, step.role)
                logger.info("unit scaling function: %s (%s), %s", name, role, line)
            if self.is_unconstrained(step.number):
                logger.info("unconstraining node: %s, %s", name, line)
