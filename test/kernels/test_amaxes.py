"""The amaxes of many tensors in one pass are those of each, in any mixture."""

import pytest
import torch
from assertions import assert_bitwise

from float8.kernels import amax, amaxes

BF16, F16 = torch.bfloat16, torch.float16


def made(shape, dtype=torch.float32, special=None):
    x = torch.randn(shape).to(dtype)
    if special is not None:
        x.view(-1)[-1] = special
    return x


@pytest.mark.parametrize(
    "tensors",
    [
        [made((5, 123))],
        [made((5, 123), BF16), made((7,), BF16), made((2, 3, 5), BF16).transpose(0, 2)],
        [made((5, 3), BF16, -torch.inf), made((1, 1), F16), made((4, 4), special=torch.nan)],
        [made((0, 3)), made((2, 2), BF16), made((3, 0), F16)],
        [made((0, 3))],
        [torch.zeros(3, 3)],
    ],
    ids=["one", "alike", "mixed and special", "some empty", "all empty", "zeros"],
)
def test_each_is_its_own_amax(tensors):
    expected = [amax(x, (-1,) * x.dim()).reshape(()) for x in tensors]
    assert_bitwise(amaxes(tensors), torch.stack(expected))
