"""What the casts of tensors share: four rows to an int32, a byte each, and none beyond the edge."""

import pytest
import torch

pytest.importorskip("triton")

from interpreter import launcher
from shapes import DEVICES

E4M3 = torch.float8_e4m3fn
ONE = torch.ones(1, 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "rows", [16, 64, 80, 15, 17]
)  # packed where 16 divides them, else byte-wise
def test_every_row_goes_to_its_own_byte(rows, device):
    """All codes of a row are the row's number: a byte in the wrong place has the wrong number."""
    numbers = (torch.arange(rows) % 120).to(torch.uint8).view(E4M3).float()
    x = numbers[:, None].expand(rows, 130).contiguous().to(device)
    data, data_t = launcher("cast", "cast", device)(x, ONE.to(device), E4M3, True, True)
    expected = (torch.arange(rows) % 120).to(torch.uint8)
    assert torch.equal(data.cpu().view(torch.uint8), expected[:, None].expand(rows, 130))
    assert torch.equal(data_t.cpu().view(torch.uint8), expected.expand(130, rows))


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_is_written_beyond_the_edge(device):
    """A program's tile is larger than this matrix; what lies behind the outputs stays."""
    x = torch.ones(16, 16, device=device)
    for op, arguments in (("cast", (ONE.to(device),)), ("cast_dynamic", ())):
        tail = (E4M3, False, True, True) if op == "cast_dynamic" else (E4M3, True, True)
        data, data_t = launcher("cast", op, device)(x, *arguments, *tail)[:2]
        assert data.untyped_storage().nbytes() == data_t.untyped_storage().nbytes() == 256


@pytest.mark.parametrize("device", DEVICES)
def test_a_given_scale_is_read_and_not_written(device):
    scale = torch.full((1, 1), 0.5, device=device)
    before = scale._version
    x = torch.full((16, 16), 3.0, device=device)
    data, _ = launcher("cast", "cast", device)(x, scale, E4M3, True, False)
    assert data.float().eq(6.0).all()
    assert (scale.item(), scale._version) == (0.5, before)
