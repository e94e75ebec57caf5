"""One step of one parameter, on plain tensors: dequantise, update and cast, tile by tile.

A `Work` is all that a step of a parameter needs, as matrices (R, C): the parameter, its gradient
and its states. `advance` runs the update rule and writes everything back in place; `advance_fused`
has a CUDA kernel do so, where there is one.

In eager mode at most one tile is in float32 at any time. Small parameters whose states are float32
are advanced together, as one vector: a call costs more than their arithmetic. Under torch.compile
there is one tile: the compiler makes loops of the whole.

Of a parameter kept in float8 the rule updates a float16 master, and the parameter is cast from it:
MS-AMP's O3 (FP8-LM, arXiv 2310.18313, section 2.2). An update is far smaller than the distance
between two E4M3 values, so it would be lost without the master. The first pass advances the master,
the second finds its largest magnitude, the third casts. The cast reads the master after its
rounding, so that a checkpoint of the master alone gives the same float8 parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from float8 import kernels
from float8.kernels import optimizer_step
from float8.kernels.moments import StateMatrix, part
from float8.kernels.update_rules import Number, UpdateRule
from float8.optim.moment import TILE, Moment, matrix_of, tiles
from float8.tensor import Float8Tensor

MASTER = "float16"  # the kind of `Moment` that a master is


class Work(NamedTuple):
    """One parameter's step.

    Attributes:
        parameter: (R, C) float32, bfloat16 or float16, or the data of a float8 parameter; written.
        scale: of a float8 parameter, one element; written. None for others.
        master: of a float8 parameter; written. None for others.
        gradient: (R, C), see `gradient_of`.
        states: the moments; written.
        group: how many consecutive elements of a row share a scale.
        seed: which parameter this is, for stochastic rounding.
        at_random: whether the parameter (or its master) and each of the states are rounded so.
        step: which step this is, a Python number or a 0-dim tensor, counted from 1.
        original: what ``parameter`` is a copy of, if its rows are not contiguous.
        first: the index of the first element, where the parameter is a shard of a larger one.
    """

    parameter: Tensor
    scale: Tensor | None
    master: StateMatrix | None
    gradient: StateMatrix
    states: Sequence[StateMatrix]
    group: int
    seed: int
    at_random: Sequence[bool]
    step: Number
    original: Tensor | None = None
    first: int = 0

    @property
    def target(self) -> StateMatrix:
        """The tensor that the update rule updates: the master, or the parameter itself."""
        return StateMatrix(self.parameter) if self.master is None else self.master

    def write_back(self) -> None:
        """Write the original of a parameter that was copied."""
        if self.original is not None:
            self.original.copy_(self.parameter.view(self.original.shape))


def gradient_of(grad: Tensor) -> StateMatrix:
    """A gradient as a matrix. In float8 with one scale it is decoded tile by tile, else at once."""
    if not isinstance(grad, Float8Tensor):
        return StateMatrix(matrix_of(grad))
    data, scale = grad.float8_data, grad.scale
    if scale.numel() != 1:
        return StateMatrix(matrix_of(grad.dequantize(torch.float32)))
    data_RC = matrix_of(data)
    rows, cols = data_RC.shape
    return StateMatrix(data_RC, scale.reshape(1, 1).expand(rows, 1), None, max(cols, 1))


def advance(work: Work, rule: UpdateRule) -> None:
    """Advance one parameter and its states by one step, in place."""
    columns = work.parameter.shape[1]
    for rows, cols in tiles_of(work.parameter, work.group):
        optimizer_step.plain_step(
            rule,
            work.step,
            work.target.tile(rows, cols),
            work.gradient.tile(rows, cols).decode(),
            [state.tile(rows, cols) for state in work.states],
            at_random=work.at_random,
            seed=work.seed,
            first=work.first + rows.start * columns + cols.start,
        )
    if work.master is not None:
        assert work.scale is not None
        _cast_master(work.master, work.parameter, work.scale)
    work.write_back()


def takes_kernel(fused: bool | None, work: Work, rule: UpdateRule) -> bool:
    """Whether the fused CUDA kernel runs this step.

    Raises ValueError, with the kernel's reason, if ``fused`` is True and the kernel refuses.
    """
    gradient = work.gradient.codes if work.gradient.scale is None else work.gradient.scale
    return optimizer_step.takes_kernel(fused, rule, work.target, gradient, work.states, work.group)


def advance_fused(
    work: Work, rule: UpdateRule, grad_scale: Tensor | None, found_inf: Tensor | None
) -> None:
    """`advance` by the CUDA kernel, which `takes_kernel` must have said to run.

    For ``grad_scale`` and ``found_inf`` see `float8.kernels.optimizer_step.fused_step`.
    """
    gradient = work.gradient.codes if work.gradient.scale is None else work.gradient.decode()
    amax = None if work.master is None else torch.zeros(1, device=work.parameter.device)
    optimizer_step.fused_step(
        rule,
        work.step,
        work.target,
        gradient,
        work.states,
        work.group,
        at_random=work.at_random,
        seed=work.seed,
        first=work.first,
        grad_scale=grad_scale,
        found_inf=found_inf,
        amax=amax,
    )
    if work.master is not None:
        assert amax is not None
        assert work.scale is not None
        optimizer_step.cast_weight(work.master, work.parameter, work.scale, amax, found_inf)
    if not torch.compiler.is_compiling():  # the kernel's write does not increase it
        torch.autograd.graph.increment_version(work.parameter)
    work.write_back()


def may_be_batched(work: Work) -> bool:
    """Whether `advance_together` takes it: small, states in float32, rounded to nearest."""
    is_plain = all(state.scale is None for state in work.states)
    is_usual = work.master is None and work.original is None and not work.at_random[0]
    return is_plain and is_usual and work.parameter.numel() <= TILE // 8


def buckets(works: Sequence[Work]) -> Iterator[list[Work]]:
    """Works in turn, at most one tile of elements together."""
    bucket: list[Work] = []
    size = 0
    for work in works:
        if bucket and size + work.parameter.numel() > TILE:
            yield bucket
            bucket, size = [], 0
        bucket.append(work)
        size += work.parameter.numel()
    if bucket:
        yield bucket


def advance_together(works: Sequence[Work], rule: UpdateRule) -> None:
    """Advance works that `may_be_batched`, of one step, dtype and device, as one vector."""
    sizes = [work.parameter.numel() for work in works]
    targets = [[w.parameter, *(state.codes for state in w.states)] for w in works]
    inputs = [
        [p, w.gradient.decode(), *states] for w, (p, *states) in zip(works, targets, strict=True)
    ]
    p, g, *states = (
        torch.cat([x.reshape(-1).float() for x in column]) for column in zip(*inputs, strict=True)
    )
    new = rule.update(works[0].step, p, g, *states)
    for column, value in zip(zip(*targets, strict=True), new, strict=True):
        pieces = [v.view_as(x) for v, x in zip(value.split(sizes), column, strict=True)]
        torch._foreach_copy_(list(column), pieces)


def tiles_of(matrix: Tensor, group: int) -> Iterator[tuple[slice, slice]]:
    """The tiles of a matrix; under torch.compile it is one tile."""
    size = max(matrix.numel(), 1) if torch.compiler.is_compiling() else None
    return tiles(matrix.shape, group, size)


def new_master(p: Float8Tensor, group: int, value: Tensor | None = None) -> Moment:
    """A master that holds ``value``, of p's shape, or what the parameter holds."""
    master = Moment.zeros(p.shape, MASTER, group, p.device)
    master.copy_from(p.dequantize(torch.float32) if value is None else value)
    return master


def cast_from_master(p: Float8Tensor, master: Moment) -> None:
    """Rewrite a float8 parameter's data and scale from its master, in place."""
    data, scale = p.float8_data, p.scale
    data_RC = matrix_of(data.contiguous())
    _cast_master(master.matrix(), data_RC, scale)
    if not data.is_contiguous():  # then data_RC is a copy
        data.copy_(data_RC.view(data.shape))


def _cast_master(master: StateMatrix, data_RC: Tensor, scale: Tensor) -> None:
    """Write float8 data (R, C) and its scale, one element, from a master of the same shape."""
    finite_amaxes = []
    for tile in tiles_of(data_RC, master.group):
        value = master.tile(*tile).decode()
        # A NaN in the scale would spoil every element.
        finite_amaxes.append(kernels.amax(torch.where(value.isfinite(), value, 0.0), (-1, -1)))
    if not finite_amaxes:
        return
    dtype = data_RC.dtype
    new_scale = kernels.scale_from_amax(torch.stack(finite_amaxes).amax(0), torch.finfo(dtype).max)
    for tile in tiles_of(data_RC, master.group):
        value = master.tile(*tile).decode()
        part(data_RC, *tile).copy_(kernels.cast(value, new_scale, (-1, -1), dtype, True))
    scale.copy_(new_scale.view(scale.shape))
