"""The largest magnitudes of many tensors in one pass are those of each tensor alone."""

import pytest
import torch
from assertions import assert_bitwise

from float8 import kernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_they_are_those_of_each_tensor(dtype):
    torch.manual_seed(0)
    tensors = [torch.randn(shape).to(dtype) for shape in ((3, 5), (64, 33), (1, 1), (0, 4))]
    tensors += [tensors[1].t(), tensors[1][:, ::2], torch.zeros(4, 4, dtype=dtype)]
    for number in (torch.nan, torch.inf, -torch.inf):
        for at in (0, 7, 40, 98):
            x = torch.randn(9, 11).to(dtype)
            x.view(-1)[at] = number
            tensors.append(x)
    found = kernels.amaxes(tensors)
    expected = torch.cat([kernels.amax(x, (-1, -1)).view(1) for x in tensors])
    assert_bitwise(found, expected)


def test_empty_tensors_alone():
    """As on a rank of FSDP2 whose shards are all empty."""
    assert_bitwise(kernels.amaxes([torch.ones(0, 4), torch.ones(3, 0)]), torch.zeros(2))
