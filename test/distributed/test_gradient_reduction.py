"""The arithmetic of a reduction, against numbers computed by hand or in float64."""

import pytest
import torch

from float8.distributed import gradient_reduction as reduction
from float8.formats import E4M3, E5M2


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
def test_a_mean_of_equals_is_exact(fmt):
    x = torch.randn(1, 8, 64)
    x[0, 3] = 0.0
    scale = reduction.scale_by_tile(reduction.amax_by_tile(x), fmt)
    for world in (1, 2, 3, 7):
        data = reduction.cast_by_tile(x, scale, fmt)
        mean = reduction.summed(data.repeat(world, 1, 1)).div(world)
        again, own = reduction.cast_mean(mean.unsqueeze(0), scale[0], fmt)
        assert torch.equal(again, data)
        assert torch.equal(own[0, :3], scale[0, :3])


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
def test_a_small_mean_has_the_range_of_the_format(fmt):
    mean = torch.randn(1, 5, 32, dtype=torch.float64).float()
    scale = torch.tensor([1.0, 2.0**-100, 2.0**40, 3.0, 0.1]).unsqueeze(1)
    for power in (0, -9, -30):  # how far cancellation has moved the mean below its summands
        small = mean * 2.0**power
        data, own = reduction.cast_mean(small, scale, fmt)
        assert (data.float().abs().amax(2) == fmt.max).all()
        off = (data.double() * own - small.double() * scale.unsqueeze(0)).abs()
        step = torch.finfo(fmt.dtype).eps / 2 * (small * scale).abs().double()
        assert (off <= step * 1.001 + own * fmt.smallest_subnormal / 2).all()
