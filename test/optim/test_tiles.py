"""Tiles cover a matrix once, in the order of memory, and cut no group."""

import pytest
import torch

from float8.optim.tiles import tiles


@pytest.mark.parametrize(
    ("shape", "group", "size"),
    [
        ((5, 123), 16, 50),
        ((1, 1000), 128, 256),
        ((7, 300), 128, 64),  # a group is more than a tile may have: one group it is
        ((3, 128), 128, 10**6),
        ((0, 7), 4, 8),
        ((7, 0), 4, 8),
        ((1, 1), 128, 1),
    ],
)
def test_every_element_is_in_one_tile_and_no_group_is_cut(shape, group, size):
    seen = torch.zeros(shape, dtype=torch.int64)
    order = []
    for rows, cols in tiles(shape, group, size):
        seen[rows, cols] += 1
        assert cols.start % group == 0
        assert cols.stop % group == 0 or cols.stop == shape[1]
        assert (rows.stop - rows.start) * (cols.stop - cols.start) <= max(size, group)
        inside = torch.arange(seen.numel()).view(shape)[rows, cols].flatten()
        assert torch.equal(inside, torch.arange(len(inside)) + inside[0]), "not in a run"
        order.append(int(inside[0]))
    assert bool((seen == 1).all())
    assert order == sorted(order)
