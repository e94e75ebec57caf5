"""The quality of an optimizer's states: bytes and underflow.

A state in few bits can fail without an error: a value below the smallest code of its group becomes
0 (linear codes) or is raised to the smallest code (expanded codes, whose zeros are true zeros).
`report` counts such values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from float8.arguments import check_type
from float8.kernels.moments import matrix_of
from float8.optim.moment import Moment
from float8.optim.optimizer import QuantizedOptimizer, local


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
    """

    elements: int = 0
    nbytes: int = 0
    coded: int = 0
    zero: int = 0
    smallest: int = 0
    nan: int = 0


def report(optimizer: QuantizedOptimizer) -> dict[str, StateReport]:
    """Measure the states; of this rank's shards, if they are sharded.

    Args:
        optimizer: one of `float8.optim`, after at least one step.

    Returns:
        name of the state -> `StateReport`.
    """
    check_type(optimizer, QuantizedOptimizer, "report", "optimizer", "an optimizer of float8.optim")
    reports: dict[str, StateReport] = {}
    for state in optimizer.state.values():
        for name, value in state.items():
            if name != "step":
                _count(reports.setdefault(name, StateReport()), local(value))
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
