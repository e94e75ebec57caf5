"""`Decisions` under ``torch.compile``.

Compiled code needs the factors of gradients as constants while the forward is traced, before it is
over. So the forward is traced again: when the first trace ends, what it has found is stored, and
dynamo is told to start over (``UnspecializeRestartAnalysis``, which it raises itself when a guess
was wrong). The second trace begins with these `Factors` known. It takes the same path as the first,
since it traces the same code under the same guards; if not, there is a third.

Dynamo runs the functions below while it traces and takes their results for constants
(``_dynamo_marked_constant``). They get numbers, names and functions; tensors stay outside.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from torch import nn
from torch._guards import CompileContext

from float8.unit_scaling.transforms.decisions import Decisions, Factors, Step
from float8.unit_scaling.transforms.recording import Path
from float8.unit_scaling.transforms.sums import KEEP
from float8.unit_scaling.transforms.transformed import Transform, Transformed, model_of


class Traceable(Transform):
    """A transform that decides by `Decisions`; ``layers`` as there."""

    layers: int | None = None

    @abstractmethod
    def traced(self, model: nn.Module, known: Factors | None) -> Decisions:
        """The decisions for a forward that is traced; ``known`` from the trace before."""


class _Traces(threading.local):
    """What the forwards inside the frame that is being compiled have found, in their order."""

    def __init__(self) -> None:
        self.frame: Any = None
        self.attempt: Any = None
        self.found: list[Factors] = []
        self.running: list[tuple[Traceable, Decisions]] = []


_TRACES = _Traces()


class TracedDecisions:
    """The decisions for a forward that is traced; the methods of `Decisions`.

    Args:
        model: the id of the transformed model.
    """

    def __init__(self, model: int) -> None:
        self.key = _start(model)

    def outside(
        self, dims: int, parameter: str | None, trained: bool, shape: tuple[int, ...]
    ) -> int:
        """See `Decisions`."""
        return _outside(self.key, dims, parameter, trained, shape)

    def view(self, base: int, dims: int) -> int:
        """See `Decisions`."""
        return _view(self.key, base, dims)

    def begin(
        self,
        function: Callable[..., Any],
        inputs: tuple[tuple[Path, int], ...],
        reads_integers: bool,
        is_plain: bool,
        defaults: tuple[str, ...],
    ) -> Step:
        """See `Decisions`."""
        return _begin(self.key, function, inputs, reads_integers, is_plain, defaults)

    def end(self, dims: tuple[int, ...]) -> tuple[int, ...]:
        """See `Decisions`."""
        return _end(self.key, dims)

    def finish(self, results: tuple[int, ...]) -> None:
        """See `Decisions`; starts over if this was the first trace."""
        _finish(self.key, results)


def _start(model: int) -> int:
    trace = CompileContext.current_trace_id()
    assert trace is not None
    if _TRACES.frame != trace.compile_id:
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


def _outside(key: int, *what: Any) -> int:
    return _TRACES.running[key][1].outside(*what)


def _view(key: int, base: int, dims: int) -> int:
    return _TRACES.running[key][1].view(base, dims)


def _begin(key: int, *what: Any) -> Step:
    decisions = _TRACES.running[key][1]
    step = decisions.begin(*what)
    # The first trace is thrown away. It calls what the model calls, which is quicker to trace.
    return step if decisions.known is not None else Step(step.number, KEEP)


def _end(key: int, dims: tuple[int, ...]) -> tuple[int, ...]:
    return _TRACES.running[key][1].end(dims)


def _finish(key: int, results: tuple[int, ...]) -> None:
    transform, decisions = _TRACES.running[key]
    decisions.finish(results)
    transform.layers, found = decisions.layers, decisions.factors()
    if decisions.known == found:
        return
    _TRACES.found[key:] = [found]  # those that came after this one may be others now
    from torch._dynamo.exc import UnspecializeRestartAnalysis

    raise UnspecializeRestartAnalysis(
        restart_reason="unit_scale: the factors of gradients are known now"
    )


_TRACED: tuple[Any, ...] = (_start, _outside, _view, _begin, _end, _finish)
for _function in _TRACED:
    _function._dynamo_marked_constant = True
