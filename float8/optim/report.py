"""The quality of an optimizer's states: bytes, underflow, and noise against a float32 twin.

A state in few bits can fail without an error in two ways. A value below the smallest code of its
group becomes 0 (linear codes) or is raised to the smallest code (expanded codes, whose zeros are
true zeros). And the rounding of every step adds up, or keeps a slow average where it is. `report`
counts the first; it measures the second against an optimizer with float32 states.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from float8.arguments import check_type
from float8.optim.moment import Moment, matrix_shape
from float8.optim.optimizer import QuantizedOptimizer, local
from float8.optim.state_dicts import parameters_of


@dataclass
class StateReport:
    """All states of one name, float32 ones and those in few bits together.

    Attributes:
        elements: how many there are.
        nbytes: how many bytes they take, scales and exponents included.
        coded: how many are in few bits; the next three count among these.
        zero: with a code of 0, in a group that is not all zero. Of linear codes, underflow.
        smallest: with the smallest code. Of expanded codes, at or below the end of their range.
        nan: neither finite nor infinite any more.
        sqnr: signal to quantisation noise against the twin in dB; None without one.
    """

    elements: int = 0
    nbytes: int = 0
    coded: int = 0
    zero: int = 0
    smallest: int = 0
    nan: int = 0
    sqnr: float | None = None


def report(
    optimizer: QuantizedOptimizer, twin: torch.optim.Optimizer | None = None
) -> dict[str, StateReport]:
    """Measure the states; of this rank's shards, if they are sharded.

    Args:
        optimizer: one of `float8.optim`, after at least one step.
        twin: an optimizer with float32 states of the same names and parameters of the same order,
            which took the same steps.

    Returns:
        name of the state -> `StateReport`.
    """
    check_type(optimizer, QuantizedOptimizer, "report", "optimizer", "an optimizer of float8.optim")
    names = [*optimizer.moment_options, "master"]
    reports: dict[str, StateReport] = {}
    power: dict[str, list[float]] = {name: [0.0, 0.0] for name in names}
    exact_states = _states_of_twin(optimizer, twin)
    for p, exact in zip(parameters_of(optimizer), exact_states, strict=True):
        for name in names:
            value = optimizer.state.get(p, {}).get(name)
            if value is None:
                continue
            _count(reports.setdefault(name, StateReport()), local(value))
            if exact.get(name) is not None:
                _compare(power[name], local(value), local(exact[name]))
    for name, found in reports.items():
        found.sqnr = _decibel(*power[name]) if twin is not None else None
    return reports


def _states_of_twin(
    optimizer: QuantizedOptimizer, twin: torch.optim.Optimizer | None
) -> list[dict[str, Tensor]]:
    """Per parameter: the states of the twin, none without one."""
    mine = parameters_of(optimizer)
    if twin is None:
        return [{}] * len(mine)
    theirs = parameters_of(twin)
    if [p.shape for p in mine] != [q.shape for q in theirs]:
        raise ValueError("the twin has other parameters: give it those of a copy of the model")
    return [twin.state.get(q, {}) for q in theirs]


def _count(found: StateReport, value: Tensor) -> None:
    found.elements += value.numel()
    found.nbytes += value.nbytes
    if not isinstance(value, Moment):
        return
    codes = value.codes.float().abs().view(matrix_shape(value.shape))
    smallest = 2.0**-24 if value.kind == "float16" else 2.0**-9
    groups = torch.arange(codes.shape[1], device=codes.device) // value.group
    alive = torch.zeros_like(value.scale, dtype=torch.bool)
    alive.index_put_(
        (torch.arange(codes.shape[0], device=codes.device)[:, None], groups[None]),
        codes != 0,
        accumulate=True,
    )
    found.coded += codes.numel()
    found.zero += int(((codes == 0) & alive[:, groups]).sum())
    found.smallest += int((codes == smallest).sum())
    found.nan += int(codes.isnan().sum())


def _compare(power: list[float], value: Tensor, exact: Tensor) -> None:
    plain = value.dequantize() if isinstance(value, Moment) else value
    power[0] += float(exact.double().square().sum())
    power[1] += float((plain.double() - exact.double()).square().sum())


def _decibel(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf
