"""The decisions of unit scaling about each call of a forward, made when the call occurs.

`Decisions` gets a forward call by call, `begin` before each and `end` after it, as numbers and
functions without tensors. What replaces a call (`Decision`) depends on the calls before it:

    role     "scaled"    the function's unit-scaled version (`contractions`); "sum" of an addition
             "residual"  `U.residual_add`, with ``tau`` (`history`)
             "keep"      the function as it is
             "readout"   `U.linear_readout`: the linear layer of the output weight
    options  the further arguments of the replacement

Two decisions depend on the calls after it, and affect only gradients (`GradientFactors`):

    gradient_factors  of operands at which a residual branch begins
    constraint        an option: calls need none whose activations all come over cut edges, and
                      which no residual addition follows

In eager mode they are functions, and the backward pass calls them, after the forward.

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

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._guards import CompileContext

from float8.unit_scaling import functional as U
from float8.unit_scaling.registry import Function
from float8.unit_scaling.transforms.contractions import (
    CONTRACTIONS,
    OTHER_CONTRACTIONS,
    Path,
    Replacements,
    argument,
    may_contract_activations,
    signature_of,
)
from float8.unit_scaling.transforms.gradient_factors import (
    branch_factors,
    calls_on_cut_edges,
    has_conflict,
)
from float8.unit_scaling.transforms.history import (
    KEEP,
    READOUT,
    RESIDUAL,
    SCALED,
    SUM,
    CallInput,
    Edge,
    History,
    ModelCall,
    name_of,
    tau_of,
)

# Functions that concern a tensor's place in the graph, and do not read its values.
_OF_THE_GRAPH = frozenset(
    {
        *(torch.autograd.grad, torch.autograd.backward),
        *(Tensor.backward, Tensor.register_hook, Tensor.retain_grad),
    }
)


class GradientFactors(NamedTuple):
    """The factors of gradients of a whole forward."""

    by_edge: dict[Edge, float]
    unconstrained: set[int]


class Decision(NamedTuple):
    """The decision about one call; see the module."""

    role: str = KEEP
    options: tuple[tuple[str, Any], ...] = ()
    gradient_factors: tuple[tuple[Path, Any], ...] = ()


@dataclass(eq=False)
class Decisions(History):
    """The decisions for one forward, with its history.

    ``outputs`` are the names of the parameters of u-muP's type "output". ``layers`` is the number
    of residual additions; None while they are counted. ``known`` has the factors that an earlier
    trace of the same forward found. ``results`` are what the forward returned, when it is over.
    """

    replacements: Replacements
    outputs: frozenset[str]
    layers: int | None = None
    known: GradientFactors | None = None
    results: Sequence[int] | None = field(default=None, init=False)
    _factors: GradientFactors | None = field(default=None, init=False)

    def begin(
        self,
        function: Function,
        operands: tuple[tuple[Path, int, int], ...],
        reads_integers: bool,
        is_plain: bool,
    ) -> Decision:
        """Decide about a call.

        ``operands`` are its floating-point operands: path, number, and number of dimensions.
        ``reads_integers`` says whether it has tensor operands of another kind. For ``is_plain`` see
        `History.classify`.
        """
        inputs = [CallInput(path, self.values[number], dims) for path, number, dims in operands]
        call = ModelCall(torch.add if function is Tensor.add_ else function, inputs, reads_integers)
        if (reason := self._unscaled(call)) is not None:
            raise ValueError(f"unit_scale: {name_of(function)} {reason}")
        number = len(self.calls)
        self.calls.append(call)
        for operand in inputs:
            self.readers[operand.value.number].append((number, operand.path))
        if call.function is torch.add:
            self._classify(number, call, is_plain)
        elif call.function in self.replacements:
            call.role = READOUT if self._is_readout(call) else SCALED
        return Decision(call.role, tuple(self._options(number, call)), self._reads(number, call))

    def end(self, count: int) -> tuple[int, ...]:
        """The numbers of the floating-point results of the call that began last."""
        call = self.calls[-1]
        is_new = call.function in self.replacements or any(x.value.is_learned for x in call.inputs)
        is_new = call.role != KEEP if call.function is torch.add else is_new
        return tuple(self.add_result(is_new) for _ in range(count))

    def finish(self, results: Sequence[int]) -> None:
        """End the forward, which has returned the tensors of these numbers."""
        self.results, self._factors = results, None
        if self.layers is None:
            self.layers = len(self.residuals)
            for place, number in enumerate(self.residuals):
                self.calls[number].tau = tau_of(place, self.layers)

    def factors(self) -> GradientFactors:
        """The factors that follow from the calls so far; after the forward, from all calls."""
        if self._factors is None or self.results is None:
            cut = calls_on_cut_edges(self, self.results or ())
            free = {n for n in cut if self._has_free_gradients(self.calls[n])}
            self._factors = GradientFactors(branch_factors(self, self.results or ()), free)
        return self._factors

    def is_unconstrained(self, call: int) -> bool:
        """Whether a call's gradients need no constraint."""
        return call in (self.known or self.factors()).unconstrained

    def _reads(self, number: int, call: ModelCall) -> tuple[tuple[Path, Any], ...]:
        """The operands whose gradients are multiplied, with the factors or functions of them."""
        if self.known is not None:
            return tuple((path, f) for (n, path), f in self.known.by_edge.items() if n == number)
        return tuple(
            (x.path, partial(self._factor_of_read, (number, x.path)))
            for x in (() if call.function in _OF_THE_GRAPH else call.inputs)
            # Another transform looks at a weight's identity.
            if x.value.parameter is None or not is_weight(x.path, call.function, self.replacements)
        )

    def _factor_of_read(self, edge: Edge) -> float | None:
        return self.factors().by_edge.get(edge)

    def _options(self, number: int, call: ModelCall) -> Iterator[tuple[str, Any]]:
        """The further arguments of the function that is called in place of a call's."""
        if call.role == RESIDUAL:
            yield from (("skip", call.skip), ("tau", call.tau))
        if call.role not in (SCALED, SUM):
            return
        if self._has_free_gradients(call):
            if self.known is None:
                yield "constraint", partial(self._constrained, number)
            elif self.is_unconstrained(number):
                yield "constraint", None
        contraction = CONTRACTIONS.get(call.function)
        if (
            contraction is None
            or not may_contract_activations(call.function)
            or self.replacements[call.function] is not contraction.unit_scaled
        ):
            return
        right = call.operand(contraction.operands[1])
        if right and right.value.is_learned and right.dims == 2:
            yield "weight", True
        added = None if contraction.added is None else call.operand(contraction.added)
        # What depends on no parameter is a mask, and a learned vector a bias.
        if added and added.value.has_parameters and not (added.value.is_learned and added.dims < 2):
            yield "mix", True

    def _constrained(self, call: int, output: float, *grads: float) -> tuple[Any, ...]:
        """A constraint to the output's scale, or none; gradients' scales are chosen in backward."""

        def choose(grad: float) -> float:
            return grad if self.is_unconstrained(call) else output

        return (output, *[partial(choose, grad) for grad in grads])

    def _classify(self, number: int, call: ModelCall, is_plain: bool) -> None:
        self.classify(call, is_plain)
        if call.role == RESIDUAL:
            # While the layers are counted any number will do: only tau depends on it.
            call.tau = tau_of(len(self.residuals), self.layers or 1)
            self.residuals.append(number)
            if self._is_read_as_weight(call.root) or has_conflict(self, number):
                self.residuals.pop()
                call.role = SUM

    def _is_read_as_weight(self, root: int) -> bool:
        """Whether a parameter is a weight of its own branch: such reads multiply no gradient."""
        return self.values[root].parameter is not None and any(
            is_weight(path, self.calls[number].function, self.replacements)
            for number, path in self.readers.get(root, ())
        )

    def _unscaled(self, call: ModelCall) -> str | None:
        """The reason why a call cannot be unit-scaled, or None.

        It reads a trained parameter that does not belong to the model; or it contracts a weight and
        has no unit-scaled function: the weight has a standard deviation of 1, so the result would
        grow with its size.
        """
        contracts = call.function not in self.replacements and (
            name_of(call.function) in OTHER_CONTRACTIONS
            or (call.function in CONTRACTIONS and not hasattr(call.function, "implementation"))
        )
        for operand in call.inputs:
            if operand.value.is_trained and operand.value.parameter == "":
                return "reads a trained parameter that is not a parameter of the model: register it"
            if operand.value.is_trained and contracts and operand.dims >= 2:
                return (
                    f"multiplies by {operand.value.parameter} and has no unit-scaled function: "
                    "U.register one, use linear layers, or scale the weight and pass replace={f: f}"
                )
        return None

    def _is_readout(self, call: ModelCall) -> bool:
        """Whether a call is the linear layer of a weight of u-muP's type "output"."""
        weight = call.operand(argument(1, "weight")) if call.function is F.linear else None
        is_output = weight is not None and weight.value.parameter in self.outputs
        return is_output and self.replacements[F.linear] is U.linear

    def _has_free_gradients(self, call: ModelCall) -> bool:
        """Whether the gradients of a call's activations may take factors of their own.

        Not where two activations are multiplied: both gradients would need one. And not where the
        replacement has no ``constraint``, or a default other than "to_output_scale".
        """
        replacement = self.replacements.get(call.function)
        if replacement is None or call.role in (KEEP, RESIDUAL):
            return False
        has_weight = any(operand.value.is_learned for operand in call.inputs)
        constraint = (signature_of(replacement) or {}).get("constraint")
        return (has_weight or not may_contract_activations(call.function)) and (
            constraint is not None and constraint.default == "to_output_scale"
        )


def is_weight(path: Path, function: Function, replacements: Replacements) -> bool:
    """Whether a parameter at a place in the arguments of a function is its weight or bias."""
    return function in replacements and path not in argument(0, "input")


# --- torch.compile


# The transforms that decide, by id: functions that run while torch.compile traces take constants.
ALIVE: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


# What the forwards inside the frame that is being compiled have found, in their order, and the
# transforms and `Decisions` of those that run.
_trace = SimpleNamespace(frame=None, attempt=None, found=[], running=[])


def start(transform: int) -> int:
    """Begin a forward that is traced: its place in the frame that is compiled.

    ``transform`` is the id of the transform that decides: ``decisions(known)`` makes the
    `Decisions`.
    """
    trace = CompileContext.current_trace_id()
    assert trace is not None
    if _trace.frame is not trace.compile_id:  # equal ones may be of earlier frames, after a reset
        _trace.frame, _trace.found, _trace.attempt = trace.compile_id, [], None
    if _trace.attempt != trace.attempt:
        _trace.attempt, _trace.running = trace.attempt, []
    place, decides = len(_trace.running), ALIVE[transform]
    known = _trace.found[place] if place < len(_trace.found) else None
    _trace.running.append((decides, decides.decisions(known)))
    return place


def ask(decisions: Decisions | int, method: str, *what: Any) -> Any:
    """Call a method of `Decisions`, in eager mode or, by what `start` returned, in a trace."""
    if isinstance(decisions, Decisions):
        return getattr(decisions, method)(*what)
    transform, traced = _trace.running[decisions]
    answer = getattr(traced, method)(*what)
    if method == "begin" and traced.known is None:
        # The first trace is thrown away. It calls what the model calls, which is quicker to trace.
        return Decision()
    if method == "finish":
        transform.layers, found = traced.layers, traced.factors()
        if traced.known != found:
            _trace.found[decisions:] = [found]  # those of later forwards may change too
            from torch._dynamo.exc import UnspecializeRestartAnalysis

            raise UnspecializeRestartAnalysis(
                restart_reason="unit_scale: the factors of gradients are known now"
            )
    return answer


start._dynamo_marked_constant = True  # type: ignore[attr-defined]
ask._dynamo_marked_constant = True  # type: ignore[attr-defined]
