"""The arithmetic of a reduction, against numbers computed by hand or in float64."""

import pytest
import torch

from float8.distributed.gradients import reduction
from float8.formats import E4M3, E5M2


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
def test_nothing_saturates_where_all_ranks_agree_and_mu_is_one(fmt):
    x = torch.randn(1, 8, 64)
    scale = reduction.shared_scale(reduction.amax_by_tile(x), fmt)
    for world in (1, 2, 3, 7):
        data = reduction.cast_by_tile(x, scale, fmt).repeat(world, 1, 1)
        mean = reduction.prescaled(reduction.summed(data), torch.tensor(1.0), world)
        assert reduction.count_saturated(mean, fmt) == 0
        assert torch.equal(reduction.recast(mean, fmt), data[0]), "a mean of equals is exact"


@pytest.mark.parametrize(("fmt", "limit"), [(E4M3, 464.0), (E5M2, 61440.0)])
def test_saturation_begins_where_rounding_would_leave_the_format(fmt, limit):
    assert reduction.saturates_above(fmt) == limit
    values = torch.tensor([[fmt.max, limit, limit * 1.0001, -limit * 2, torch.nan]])
    assert reduction.count_saturated(values, fmt) == 2
    assert torch.equal(
        reduction.recast(values, fmt)[0, :4].float(), torch.tensor([1, 1, 1, -1.0]) * fmt.max
    )
