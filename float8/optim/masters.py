"""Masters: what a parameter kept in float8 is in truth, a `Moment` of kind float16."""

from __future__ import annotations

from torch import Tensor, float32

from float8.optim.moment import Moment, matrix_of
from float8.optim.update import recast
from float8.tensor import Float8Tensor

MASTER = "float16"


def new_master(p: Float8Tensor, group: int, value: Tensor | None = None) -> Moment:
    """A master that holds ``value``, or what the parameter holds.

    Args:
        p: the parameter.
        group: how many neighbours in a row share a scale.
        value: float tensor of p's shape.
    """
    master = Moment.zeros(p.shape, MASTER, group, p.device)
    master.copy_from(p.dequantize(float32) if value is None else value)
    return master


def follow(p: Float8Tensor, master: Moment) -> None:
    """Rewrite the parameter's codes and scale from its master, in place."""
    data, scale = p.data_and_scale
    codes = matrix_of(data.contiguous())
    recast(codes, scale, master.parts())
    if not data.is_contiguous():  # then codes are a copy
        data.copy_(codes.view(data.shape))
