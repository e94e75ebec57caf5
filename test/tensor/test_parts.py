"""The parts of a Float8Tensor are checked; test_tensor.py has the messages."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from float8.tensor.parts import check_parts, given_scale, has_no_values


def test_parts_that_fit_pass():
    data = torch.zeros(6, 24).to(torch.float8_e4m3fn)
    check_parts(data, torch.ones(6, 1), (1, -1), torch.bfloat16, data.t().contiguous())


@pytest.mark.parametrize(
    ("scale", "expected"),
    [(2, torch.full((6, 1), 2.0)), (torch.tensor(0.5), torch.full((6, 1), 0.5))],
)
def test_one_scale_is_given_to_every_block(scale, expected):
    found = given_scale(scale, torch.zeros(6, 24), (1, -1))
    assert torch.equal(found, expected) and found.is_contiguous()


def test_fake_and_meta_tensors_have_no_values():
    assert not has_no_values(torch.ones(1))
    assert has_no_values(torch.ones(1, device="meta"))
    with FakeTensorMode():
        assert has_no_values(torch.ones(1))


def test_a_scale_may_be_a_number_of_numpy():
    numpy = pytest.importorskip("numpy")
    assert given_scale(numpy.float32(0.5), torch.zeros(4, 4), (-1, -1)).item() == 0.5
