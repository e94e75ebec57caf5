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
`is_unconstrained`).

**torch.compile** needs them as constants while the forward is traced, before it is over. So the
forward is traced again: when the first trace ends, its `GradientFactors` are stored, and dynamo is
told to start over (``UnspecializeRestartAnalysis``, which it raises itself when a guess was wrong).
The second trace begins with these factors known. It takes the same path as the first, since it
traces the same code under the same guards; if not, there is a third. Dynamo runs `start` and `ask`
while it traces and takes their results for constants (``_dynamo_marked_constant``). They get
numbers, names and functions; tensors stay outside.

One number must be known before the forward: ``layers``, the number of residual additions, on which
``tau`` depends. It is counted once per model.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch._guards import CompileContext

from float8.unit_scaling.transforms.additions import (
    ADDITIONS,
    KEEP,
    RESIDUAL,
    SUM,
    classify,
    tau_of,
)
from float8.unit_scaling.transforms.contractions import Function, Path
from float8.unit_scaling.transforms.gradient_factors import (
    branch_factors,
    calls_on_cut_edges,
    has_conflict,
)
from float8.unit_scaling.transforms.history import (
    Call,
    Edge,
    History,
    Value,
    line_of_caller,
    name_of,
)
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
    """The factors of gradients of a whole forward."""

    reads: dict[Edge, float]
    unconstrained: set[int]


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

    ``outputs`` are the names of the parameters of u-muP's type "output". ``layers`` is the number
    of residual additions; None while they are counted. ``known`` has the factors that an earlier
    trace of the same forward found. ``logs`` says whether to log the decisions.
    """

    def __init__(
        self,
        replacements: Replacements,
        outputs: frozenset[str],
        layers: int | None = None,
        known: GradientFactors | None = None,
        logs: bool = False,
    ) -> None:
        self.replacements, self.outputs = replacements, outputs
        self.layers, self.known = layers, known
        self.history = History()
        self.logged: list[tuple[Step, str]] | None = None  # with the lines of the calls
        if logs and logger.isEnabledFor(logging.INFO):
            self.logged = []
        self.results: list[Value] | None = None  # what the forward returned, when it is over
        self._factors: GradientFactors | None = None

    def leaf(self, parameter: str | None, is_trained: bool, shape: tuple[int, ...]) -> int:
        """The number of a tensor that no call has returned; ``parameter`` as in `Value`."""
        value = self.history.add_leaf(len(shape), parameter, is_trained)
        value.shape = shape
        return value.number

    def view(self, base: int, dims: int) -> int:
        """The number of another view of a tensor, made by a call that the mode did not see."""
        self.history.add_call(Call("__get__", getattr, [((0, 0), self.history.values[base])]))
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
        refuse_unscaled(call, self.replacements, self.history)
        number = self.history.add_call(call)
        step = self._step(number, call, is_plain, defaults)
        if self.known is not None:
            reads = tuple((path, f) for (n, path), f in self.known.reads.items() if n == number)
            step = step._replace(reads=reads, is_unconstrained=number in self.known.unconstrained)
        if self.logged is not None:
            self.logged.append((step, line_of_caller()))
        return step

    def end(self, dims: tuple[int, ...]) -> tuple[int, ...]:
        """The numbers of the results of the call that began last.

        ``dims`` says how many dimensions each floating-point result has.
        """
        call = self.history.calls[-1]
        if call.kind:
            is_new = call.kind != KEEP
        else:
            is_new = call.function in self.replacements or any(v.is_learned for _, v in call.inputs)
        return tuple(self.history.add_result(n, is_new).number for n in dims)

    def finish(self, results: Sequence[int]) -> None:
        """End the forward, which has returned the tensors of these numbers."""
        self.results = [self.history.values[number] for number in results]
        self._factors = None
        if self.layers is None:
            self.layers = len(self.history.residuals)
            for place, number in enumerate(self.history.residuals):
                self.history.calls[number].tau = tau_of(place, self.layers)
        for step, line in self.logged or ():
            call = self.history.calls[step.number]
            role = f"residual-add, tau={call.tau:.4g}" if step.role == RESIDUAL else step.role
            if step.role != KEEP:
                logger.info("unit scaling function: %s (%s), %s", call.name, role, line)
            if self.is_unconstrained(step.number):
                logger.info("unconstraining node: %s, %s", call.name, line)

    def factors(self) -> GradientFactors:
        """The factors that follow from the calls so far; after the forward, from all calls."""
        if self._factors is None or self.results is None:
            unconstrained = calls_on_cut_edges(self.history, self.results or ())
            self._factors = GradientFactors(
                branch_factors(self.history, self.results or ()),
                {number for number in unconstrained if self._has_constraint(number)},
            )
        return self._factors

    def factor_of_read(self, call: int, path: Path) -> float | None:
        """The factor of the gradient of an operand, or None."""
        return self.factors().reads.get((call, path))

    def is_unconstrained(self, call: int) -> bool:
        """Whether a call's gradients need no constraint."""
        return call in self.factors().unconstrained

    def _step(self, number: int, call: Call, is_plain: bool, defaults: tuple[str, ...]) -> Step:
        function = call.function
        if function in ADDITIONS:
            function = torch.add
            self._classify(number, call, is_plain)
            if call.kind == RESIDUAL:
                return Step(number, RESIDUAL, skip=call.skip, tau=call.tau)
        if call.kind == KEEP or function not in self.replacements:
            return Step(number, KEEP)
        if is_readout(call, self.replacements, self.outputs):
            return Step(number, "readout")
        replacement = self.replacements[function]
        return Step(
            number,
            may_be_unconstrained=may_be_unconstrained(call, replacement),
            options=options_of(call, replacement, self.history),
            dropped=dropped_by(replacement, defaults) if defaults else (),
        )

    def _classify(self, number: int, call: Call, is_plain: bool) -> None:
        residuals = self.history.residuals
        classify(self.history, number, is_plain)
        if call.kind == RESIDUAL:
            # While the layers are counted any number will do: only tau depends on it.
            call.tau = tau_of(len(residuals), self.layers or 1)
            residuals.append(number)
            if self._is_read_as_weight(call.root) or has_conflict(self.history, number):
                residuals.pop()
                call.kind = SUM

    def _is_read_as_weight(self, root: int) -> bool:
        """Whether a parameter is a weight of its own branch: such reads multiply no gradient."""
        calls = self.history.calls
        return self.history.values[root].parameter is not None and any(
            is_weight(path, calls[number].function, self.replacements)
            for number, path in self.history.reads.get(root, ())
        )

    def _has_constraint(self, number: int) -> bool:
        call = self.history.calls[number]
        function = torch.add if call.kind == SUM else call.function
        return (
            call.kind in ("", SUM)
            and function in self.replacements
            and may_be_unconstrained(call, self.replacements[function])
        )


# --- torch.compile


class _Traces(threading.local):
    """What the forwards inside the frame that is being compiled have found, in their order."""

    def __init__(self) -> None:
        self.frame: Any = None
        self.attempt: Any = None
        self.found: list[GradientFactors] = []
        self.running: list[tuple[Any, Decisions]] = []


_TRACES = _Traces()


def start(transform: int, find: Callable[[int], Any]) -> int:
    """Begin a forward that is traced: its place in the frame that is compiled.

    ``find(transform)`` is the transform that decides: ``traced(known)`` makes the `Decisions`.
    """
    trace = CompileContext.current_trace_id()
    assert trace is not None
    if _TRACES.frame is not trace.compile_id:  # equal ones may be of earlier frames, after a reset
        _TRACES.frame, _TRACES.found, _TRACES.attempt = trace.compile_id, [], None
    if _TRACES.attempt != trace.attempt:
        _TRACES.attempt, _TRACES.running = trace.attempt, []
    place, decides = len(_TRACES.running), find(transform)
    known = _TRACES.found[place] if place < len(_TRACES.found) else None
    _TRACES.running.append((decides, decides.traced(known)))
    return place


def ask(decisions: Decisions | int, method: str, *what: Any) -> Any:
    """Call a method of `Decisions`, in eager mode or, by what `start` returned, in a trace."""
    if isinstance(decisions, Decisions):
        return getattr(decisions, method)(*what)
    transform, traced = _TRACES.running[decisions]
    answer = getattr(traced, method)(*what)
    if method == "begin" and traced.known is None:
        # The first trace is thrown away. It calls what the model calls, which is quicker to trace.
        return Step(answer.number, KEEP)
    if method == "finish":
        transform.layers, found = traced.layers, traced.factors()
        if traced.known != found:
            _TRACES.found[decisions:] = [found]  # those of later forwards may change too
            from torch._dynamo.exc import UnspecializeRestartAnalysis

            raise UnspecializeRestartAnalysis(
                restart_reason="unit_scale: the factors of gradients are known now"
            )
    return answer


start._dynamo_marked_constant = True  # type: ignore[attr-defined]
ask._dynamo_marked_constant = True  # type: ignore[attr-defined]
