"""Which part of a dimension a rank holds; that parts make a whole is seen on processes."""

import pytest
import torch

from float8.distributed.exchange import Ranks, check_even, part_of


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [0, 1, 4, 7, 12])
def test_parts_are_those_of_torch_chunk(length, size):
    x = torch.arange(2 * length).reshape(2, length)
    chunks = list(x.chunk(size, 1)) if length else []
    for rank in range(size):
        ranks = Ranks("nobody", size, rank)
        expected = chunks[rank] if rank < len(chunks) else x[:, :0]
        assert torch.equal(part_of(x, 1, ranks), expected)
        assert ranks.length_here(length) == expected.shape[1]


def test_on_a_device_lengths_are_not_looked_at():
    check_even(torch.empty(2, 3, device="meta"), 0, Ranks("nobody", 2, 0), "a layer")
