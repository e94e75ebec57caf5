"""The arithmetic of a reduction, against numbers computed by hand or in float64."""

import pytest
import torch

from float8.distributed.gradients import reduction
from float8.formats import E4M3, E5M2


@pytest.mark.parametrize("columns", [0, 1, 15, 16, 17, 1000, 1024, 1025, 5000, 1 << 20])
def test_tiles_cover_a_shard_and_pad_little(columns):
    tiles, extent = reduction.extents(columns)
    assert columns <= tiles * extent <= columns + 16 * tiles
    assert extent <= reduction.TILE and extent % 16 == 0
    assert reduction.extents(tiles * extent, extent) == (tiles, extent), "padded shards too"


@pytest.mark.parametrize("tile", [1, 10, 16])
def test_small_tiles_have_sixteen_elements_and_no_padding(tile):
    assert reduction.extents(1 << 12, tile) == (1 << 8, 16)


def test_tiles_keep_every_element_in_its_shard():
    x = torch.arange(3 * 50.0).view(3, 50)
    tiles = reduction.in_tiles(x, 16)
    assert tiles.shape == (3, 4, 16)
    assert torch.equal(tiles.flatten(1)[:, :50], x)
    assert tiles.flatten(1)[:, 50:].eq(0).all()


def test_a_shard_that_needs_no_padding_is_not_copied():
    x = torch.randn(2, 2048)
    assert reduction.in_tiles(x).data_ptr() == x.data_ptr()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_element_makes_every_scale_nan(bad):
    x = torch.randn(2, 3, 16)
    x[1, 2, 5] = bad
    amax = reduction.amax(x)
    assert not amax[1, 2, 0].isfinite() and amax.isfinite().sum() == 5
    assert reduction.shared_scale(amax, E4M3).isnan().all()


def test_the_shared_scale_is_that_of_the_largest_element():
    x = torch.randn(2, 3, 16)
    scale = reduction.shared_scale(reduction.amax(x), E5M2)
    torch.testing.assert_close(scale[..., 0], x.abs().amax(2) / 57344)


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
def test_nothing_saturates_where_all_ranks_agree_and_mu_is_one(fmt):
    x = torch.randn(1, 8, 64)
    scale = reduction.shared_scale(reduction.amax(x), fmt)
    for world in (1, 2, 3, 7):
        data = reduction.cast(x, scale, fmt).repeat(world, 1, 1)
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


def test_the_sum_is_that_of_float64():
    data = (torch.randn(64, 4, 32) * 100).to(torch.float8_e4m3fn)
    exact = data.double().sum(0)
    torch.testing.assert_close(reduction.summed(data).double(), exact, rtol=1e-6, atol=1e-4)


def test_nonzero_elements_that_become_zero_are_counted():
    x = torch.tensor([0.0, 1.0, -1e-9, 1e-9, -2.0])
    assert reduction.count_flushed(x, x.to(torch.float8_e4m3fn)) == 2
