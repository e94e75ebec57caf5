"""Rows that are sent as float8 arrive as the values of their cast, whatever the sizes."""

import pytest
import torch
from assertions import assert_bitwise

from float8 import Float8LinearConfig, kernels
from float8.distributed import token_exchange as module
from float8.distributed.token_exchange import Route


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "mxfp8", "tensorwise", "unit"])
@pytest.mark.parametrize("shape", [(1, 10), (5, 10), (3, 130), (0, 16)], ids=str)
@pytest.mark.parametrize("as_kernels_write", [False, True])
def test_the_values_of_the_cast_arrive(recipe, shape, as_kernels_write, monkeypatch):
    monkeypatch.setattr(module, "_all_to_all", lambda rows, sent, received, group: rows)
    cast_alone = module.cast_alone

    def cast_by_columns(*args, **kwargs):
        """With the strides that ``gpu/cast_blockwise`` gives to scales."""
        found = cast_alone(*args, **kwargs)
        scale = found.scale.t().clone(memory_format=torch.contiguous_format).t()
        return found._replace(scale=scale)

    if as_kernels_write:
        monkeypatch.setattr(module, "cast_alone", cast_by_columns)
    plan = Float8LinearConfig.from_recipe_name(recipe).gemms
    cast = module.row_cast(plan.output.a, plan.grad_weight.b)
    x, rows = torch.randn(shape), shape[0]
    route = Route([rows], [rows], torch.arange(rows), "")
    arrived = module._dispatched(x, route, cast, False)
    assert_bitwise(arrived, kernels.dequantize(*cast_alone(x, cast), x.dtype))
