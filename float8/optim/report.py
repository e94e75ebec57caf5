"""The quality of an optimizer's states: bytes, underflow, and noise against a float32 twin.

A state in few bits can fail without an error in two ways. A value below the smallest code of its
group becomes 0 (linear codes) or is raised to the smallest code (expanded codes, whose zeros are
true zeros). And the rounding of every step adds up, or keeps a slow average where it is. `report`
counts the first; it measures the second against an optimizer with float32 states.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from float8.arguments import check_type
from float8.kernels import sqnr
from float8.kernels.moments import matrix_of
from float8.optim.moment import Moment
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
    params = parameters_of(optimizer)
    states_of_twin = {} if twin is None else twin.state
    twins = params if twin is None else parameters_of(twin)
    reports: dict[str, StateReport] = {}
    power: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])  # of signal and noise
    for p, q in zip(params, twins, strict=True):
        for name in (*optimizer.moment_options, "master"):
            value = optimizer.state.get(p, {}).get(name)
            if value is None:
                continue
            value = local(value)
            _count(reports.setdefault(name, StateReport()), value)
            exact = states_of_twin.get(q, {}).get(name)
            if exact is not None:
                plain = value.dequantize() if isinstance(value, Moment) else value
                exact = local(exact).double()
                power[name][0] += sqnr.power(exact)
                power[name][1] += sqnr.power(plain.double() - exact)
    for name, found in reports.items():
        found.sqnr = None if twin is None else sqnr.decibels(*power[name])
    return reports


def _count(found: StateReport, value: Tensor | Moment) -> None:
    found.nbytes += value.nbytes
    if not isinstance(value, Moment):
        found.elements += value.numel()
        return
    codes = matrix_of(value.codes).float().abs()
    found.elements += codes.numel()
    smallest = 2.0**-24 if value.kind == "float16" else 2.0**-9
    groups = (codes != 0).split(value.group, 1)
    alive = torch.cat([group.any(1, keepdim=True).expand_as(group) for group in groups], 1)
    found.coded += codes.numel()
    found.zero += int(((codes == 0) & alive).sum())
    found.smallest += int((codes == smallest).sum())
    found.nan += int(codes.isnan().sum())
