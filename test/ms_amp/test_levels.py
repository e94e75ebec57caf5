"""The weight that a level stores."""

from __future__ import annotations

import oracle
import pytest
import torch
from assertions import assert_bitwise
from torch import nn

from float8 import (
    Float8Tensor,
    convert_to_float8_training,
)
from float8.ms_amp.levels import LEVELS, stored_weight


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_is_cast_once_and_keeps_its_attributes(level, dtype):
    torch.manual_seed(0)
    layer = convert_to_float8_training(nn.Linear(32, 48).to(dtype))
    layer.weight.role = "output"
    new = stored_weight(layer.weight, layer, LEVELS[level])
    assert new.requires_grad
    assert new.role == "output"
    if level == "O3":
        codes, scale = oracle.quantize(layer.weight.detach(), (-1, -1), torch.float8_e4m3fn)
        assert isinstance(new, Float8Tensor)
        assert_bitwise(new.float8_data, codes)
        assert_bitwise(new.scale, scale)
        assert new.dtype == dtype
    else:
        assert_bitwise(new.detach(), layer.weight.detach().half())
        assert new.grad_dtype is None
