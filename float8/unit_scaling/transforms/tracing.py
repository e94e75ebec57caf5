"""`Decisions` under ``torch.compile``.

Compiled code needs the factors of gradients as constants while the forward is traced, before it is
over. So the forward is traced again: when the first trace ends, its `GradientFactors` are stored,
and dynamo is told to start over (``UnspecializeRestartAnalysis``, which it raises itself when a
guess was wrong). The second trace begins with these factors known. It takes the same path as the
first, since it traces the same code under the same guards; if not, there is a third.

Dynamo runs the functions below while it traces and takes their results for constants
(``_dynamo_marked_constant``). They get numbers, names and functions; tensors stay outside.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from typing import Any

from torch import nn
from torch._guards import CompileContext

from float8.unit_scaling.transforms.additions import KEEP
from float8.unit_scaling.transforms.decisions import Decisions, GradientFactors, Step
from float8.unit_scaling.transforms.transformed import Transform, Transformed, model_of


class Traceable(Transform):
    """A transform that decides by `Decisions`; ``layers`` as there."""

    layers: int | None = None

    @abstractmethod
    def traced(self, model: nn.Module, known: GradientFactors | None) -> Decisions:
        """The decisions for a forward that is traced; ``known`` from the trace before."""


class _Traces(threading.local):
    """What the forwards inside the frame that is being compiled have found, in their order."""

    def __init__(self) -> None:
        self.frame: Any = None
        self.attempt: Any = None
        self.found: list[GradientFactors] = []
        self.running: list[tuple[Traceable, Decisions]] = []


_TRACES = _Traces()


class TracedDecisions:
    """The decisions for a forward that is traced, with the methods of `Decisions`.

    ``model`` is the id of the transformed model.
    """

    def __init__(self, model: int) -> None:
        self.key = _start(model)

    def leaf(self, *what: Any) -> int:
        """See `Decisions`."""
        number: int = _ask(self.key, "leaf", *what)
        return number

    def view(self, *what: Any) -> int:
        """See `Decisions`."""
        number: int = _ask(self.key, "view", *what)
        return number

    def begin(self, *what: Any) -> Step:
        """See `Decisions`."""
        return _begin(self.key, *what)

    def end(self, *what: Any) -> tuple[int, ...]:
        """See `Decisions`."""
        numbers: tuple[int, ...] = _ask(self.key, "end", *what)
        return numbers

    def finish(self, results: tuple[int, ...]) -> None:
        """See `Decisions`; starts over if this was the first trace."""
        _finish(self.key, results)


def _start(model: int) -> int:
    trace = CompileContext.current_trace_id()
    assert trace is not None
    if _TRACES.frame is not trace.compile_id:  # equal ones may be of earlier frames, after a reset
        _TRACES.frame, _TRACES.found = trace.compile_id, []
        _TRACES.attempt = None
    if _TRACES.attempt != trace.attempt:
        _TRACES.attempt, _TRACES.running = trace.attempt, []
    key = len(_TRACES.running)
    known = _TRACES.found[key] if key < len(_TRACES.found) else None
    transformed = model_of(model)
    assert isinstance(transformed, Transformed)
    (transform,) = (t for t in transformed.transforms if isinstance(t, Traceable))
    _TRACES.running.append((transform, transform.traced(transformed, known)))
    return key


def _ask(key: int, method: str, *what: Any) -> Any:
    return getattr(_TRACES.running[key][1], method)(*what)


def _begin(key: int, *what: Any) -> Step:
    decisions = _TRACES.running[key][1]
    step = decisions.begin(*what)
    # The first trace is thrown away. It calls what the model calls, which is quicker to trace.
    return step if decisions.known is not None else Step(step.number, KEEP)


def _finish(key: int, results: tuple[int, ...]) -> None:
    transform, decisions = _TRACES.running[key]
    decisions.finish(results)
    transform.layers, found = decisions.layers, decisions.factors()
    if decisions.known == found:
        return
    _TRACES.found[key:] = [found]  # those of later forwards may change too
    from torch._dynamo.exc import UnspecializeRestartAnalysis

    raise UnspecializeRestartAnalysis(
        restart_reason="unit_scale: the factors of gradients are known now"
    )


_RUN_WHILE_TRACING: tuple[Any, ...] = (_start, _ask, _begin, _finish)
for _function in _RUN_WHILE_TRACING:
    _function._dynamo_marked_constant = True
