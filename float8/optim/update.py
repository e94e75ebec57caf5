"""One step of one parameter, on plain tensors: decode, compute, encode, tile by tile.

A `Work` is all that a step of a parameter needs, as matrices (R, C): the parameter, its gradient
and its states, each float32 or the `Parts` of a moment. An update is a function of dense float32
tensors, ``update(p, g, *states) -> (p, *states)``, from ``float8/kernels/moments.py`` with its
numbers filled in. `advance` runs it and writes everything back in place; `advance_fused` has a CUDA
kernel do so, where there is one.

In eager mode at most one tile is in float32 at any time, and small parameters whose states are
float32 are advanced together, as one vector: a call costs more than their arithmetic. Under
torch.compile there are no tiles: the compiler makes loops of the whole.

Of a parameter kept in float8 the update advances the float16 master, and the codes follow: MS-AMP's
O3 (FP8-LM, arXiv 2310.18313, section 2.2) keeps weights as tensorwise E4M3 and, because an update
is far smaller than the step between two codes, a float16 master with scales beside them. The first
pass advances the master, the second finds its largest magnitude, the third casts. The codes are
cast from what the master holds after its rounding, so that a checkpoint of the master alone gives
the same codes again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8 import kernels
from float8.kernels import optimizer_step, stochastic
from float8.kernels.optimizer_step import Rule, Stored
from float8.optim.moment import Parts, matrix_of
from float8.optim.tiles import TILE, part, tiles
from float8.tensor import Float8Tensor

Update = Callable[..., tuple[Tensor, ...]]
State = Tensor | Parts


class Scaled(NamedTuple):
    """A float8 gradient with one scale: ``value = codes * scale``."""

    codes: Tensor
    scale: Tensor

    def tile(self, rows: slice, cols: slice) -> Scaled:
        """Some rows and columns."""
        return Scaled(part(self.codes, rows, cols), self.scale)

    def decode(self) -> Tensor:
        """The values in float32."""
        return self.codes.float() * self.scale


def gradient_of(grad: Tensor) -> Tensor | Scaled:
    """A gradient as a matrix: float8 with one scale is decoded tile by tile, or else at once."""
    if not isinstance(grad, Float8Tensor):
        return matrix_of(grad)
    data, scale = grad.data_and_scale
    if scale.numel() == 1:
        return Scaled(matrix_of(data), scale.reshape(()))
    return matrix_of(grad.dequantize(torch.float32))


class Work(NamedTuple):
    """One parameter's step.

    Attributes:
        parameter: (R, C) float32, bfloat16 or float16, or the codes of a float8 parameter; written.
        scale: of a float8 parameter, one element; written. None for others.
        master: of a float8 parameter; written. None for others.
        gradient: (R, C), any float dtype, or in float8.
        states: float32 (R, C) or `Parts`; written.
        group: how many neighbours in a row belong together.
        seed: which parameter this is, for stochastic rounding.
        rounds_at_random: whether a bfloat16 or float16 parameter is rounded so.
        master_rounds: whether the master is.
        states_round: whether each of the states is, if it is in float8.
        step: which step this is, a Python number or a 0-dim tensor, counted from 1.
        original: what ``parameter`` is a copy of, if its rows are not contiguous.
        first: the index of the first element, where the parameter is a shard of a larger one.
    """

    parameter: Tensor
    scale: Tensor | None
    master: Parts | None
    gradient: Tensor | Scaled
    states: Sequence[State]
    group: int
    seed: int
    rounds_at_random: bool
    master_rounds: bool
    states_round: Sequence[bool]
    step: float | Tensor
    original: Tensor | None
    first: int = 0

    def index_of(self, rows: slice, cols: slice) -> int:
        """The index of a tile's first element in the whole parameter."""
        return self.first + rows.start * self.parameter.shape[1] + cols.start


def advance(work: Work, update: Update) -> None:
    """Advance one parameter and its states by one step, in place."""
    for rows, cols in walk(work.parameter, work.group):
        target = tile_of(work.parameter if work.master is None else work.master, rows, cols)
        states = [tile_of(state, rows, cols) for state in work.states]
        gradient = read(tile_of(work.gradient, rows, cols)).float()
        value, *new = update(read(target).float(), gradient, *map(read, states))
        if isinstance(target, Tensor):
            write_parameter(target, value, work, work.index_of(rows, cols))
        else:
            random = _chance(work, -1, value, rows, cols) if work.master_rounds else None
            target.encode(value, random)
        for number, (state, new_value) in enumerate(zip(states, new, strict=True)):
            at_random = work.states_round[number] and isinstance(state, Parts)
            random = _chance(work, number, new_value, rows, cols) if at_random else None
            write(state, new_value, random)
    if work.master is not None:
        assert work.scale is not None
        recast(work.parameter, work.scale, work.master)
    _write_back(work)


def takes_kernel(fused: bool | None, work: Work) -> bool:
    """Whether the fused CUDA kernel runs this step.

    Raises:
        ValueError: ``fused`` is True and the kernel refuses, with its reason.
    """
    if fused is False:
        return False
    gradient = work.gradient.scale if isinstance(work.gradient, Scaled) else work.gradient
    return optimizer_step.takes_kernel(fused, _target(work), gradient, _stored(work), work.group)


def advance_fused(
    work: Work, rule: Rule, grad_scale: Tensor | None, found_inf: Tensor | None
) -> None:
    """`advance` by the CUDA kernel, which `takes_kernel` must have said to run.

    Args:
        work: the parameter's step.
        rule: the update's numbers.
        grad_scale, found_inf: see `float8.kernels.optimizer_step.fused_step`.
    """
    step = work.step if isinstance(work.step, Tensor) else int(work.step)
    amax = None if work.master is None else torch.zeros(1, device=work.parameter.device)
    optimizer_step.fused_step(
        rule,
        _target(work),
        read(work.gradient),
        _stored(work),
        work.group,
        rounds=(
            work.rounds_at_random if work.master is None else work.master_rounds,
            *work.states_round,
        ),
        seed=work.seed,
        offset=step.to(torch.int32) if isinstance(step, Tensor) else step,
        first=work.first,
        grad_scale=grad_scale,
        found_inf=found_inf,
        amax=amax,
    )
    if work.master is not None:
        assert amax is not None
        assert work.scale is not None
        optimizer_step.cast_weight(
            _target(work), work.parameter, work.scale, work.group, amax, found_inf
        )
    _write_back(work)


def _target(work: Work) -> Stored:
    return Stored(work.parameter) if work.master is None else Stored(*work.master[:3])


def _stored(work: Work) -> list[Stored]:
    return [Stored(s) if isinstance(s, Tensor) else Stored(*s[:3]) for s in work.states]


def _write_back(work: Work) -> None:
    if work.original is not None:
        work.original.copy_(work.parameter.view(work.original.shape))


def walk(matrix: Tensor, group: int) -> Iterator[tuple[slice, slice]]:
    """The tiles of a matrix; under torch.compile it is one tile."""
    size = max(matrix.numel(), 1) if torch.compiler.is_compiling() else None
    return tiles(matrix.shape, group, size)


def advance_together(works: Sequence[Work], update: Update) -> None:
    """Advance small parameters with float32 states, of one dtype and device, as one vector."""
    sizes = [work.parameter.numel() for work in works]
    columns = zip(*([w.parameter, read(w.gradient), *w.states] for w in works), strict=True)
    flat = [torch.cat([part.reshape(-1).float() for part in column]) for column in columns]
    targets = zip(*([w.parameter, *w.states] for w in works), strict=True)
    for column, value in zip(targets, update(*flat), strict=True):
        pieces = [v.view_as(t) for v, t in zip(value.split(sizes), column, strict=True)]
        torch._foreach_copy_(list(column), pieces)


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


def may_be_batched(work: Work) -> bool:
    """Whether `advance_together` takes it: small, states in float32, rounded to nearest."""
    is_plain = all(isinstance(state, Tensor) for state in work.states)
    is_usual = work.master is None and work.original is None and not work.rounds_at_random
    return is_plain and is_usual and work.parameter.numel() <= TILE // 8


def tile_of(state: Any, rows: slice, cols: slice) -> Any:
    """A view of some rows and columns."""
    return part(state, rows, cols) if isinstance(state, Tensor) else state.tile(rows, cols)


def read(state: State | Scaled) -> Tensor:
    """The values in float32."""
    return state if isinstance(state, Tensor) else state.decode()


def write(state: State, value: Tensor, chance: Tensor | None = None) -> None:
    """Overwrite the values; see `Parts.encode`."""
    if isinstance(state, Tensor):
        state.copy_(value)
    else:
        state.encode(value, chance)


def _chance(work: Work, number: int, like: Tensor, rows: slice, cols: slice) -> Tensor:
    """Uniform in [0, 1) for a tile of the state of this number (-1: the master) in this step."""
    step = work.step.to(torch.int32) if isinstance(work.step, Tensor) else int(work.step)
    seed = stochastic.seed_of_state(work.seed, number)
    return stochastic.chances(like, seed, step, work.index_of(rows, cols))


def write_parameter(p: Tensor, value: Tensor, work: Work, first: int) -> None:
    """Round ``value`` to p's dtype: to nearest, or up and down at random.

    Args:
        p: a tile of the parameter.
        value: float32.
        work: whose seed and step choose the random numbers.
        first: the number, within the parameter, of the tile's first element.
    """
    if not work.rounds_at_random or p.dtype == torch.float32:
        p.copy_(value)
        return
    step = work.step.to(torch.int32) if isinstance(work.step, Tensor) else int(work.step)
    p.copy_(stochastic.stochastic_round(value, p.dtype, work.seed, step, first))


def recast(codes: Tensor, scale: Tensor, master: Parts) -> None:
    """Rewrite a float8 parameter's codes and scale from its master, in place.

    Args:
        codes: (R, C) of a float8 dtype.
        scale: one element.
        master: of the same shape.
    """
    amaxes = [_finite_amax(master.tile(*tile).decode()) for tile in walk(codes, master.group)]
    if not amaxes:
        return
    new_scale = kernels.scale_from_amax(torch.stack(amaxes).amax(0), torch.finfo(codes.dtype).max)
    for rows, cols in walk(codes, master.group):
        value = master.tile(rows, cols).decode()
        part(codes, rows, cols).copy_(kernels.cast(value, new_scale, (-1, -1), codes.dtype, True))
    scale.copy_(new_scale.view(scale.shape))


def _finite_amax(x: Tensor) -> Tensor:
    # A NaN is one element's trouble; as the scale it would be every element's.
    return kernels.amax(torch.where(x.isfinite(), x, 0.0), (-1, -1))
