"""What is kept of a tensor, to the bit."""

import oracle
import pytest
import torch
from activations.copies import copy_of, rows
from assertions import assert_bitwise
from meter import CastMeter
from shapes import Case, pairs
from torch._subclasses.fake_tensor import FakeTensorMode

from float8.activations.groups import Groups, decode, encode

SHAPES = ((3, 256), (2, 3, 130), (5, 123), (40, 8), (7,), (), (0, 64), (4, 0))


@pairs(
    shape=SHAPES,
    dtype=(torch.float32, torch.bfloat16, torch.float16),
    group=(128, 16, 5),
    fmt=(torch.float8_e4m3fn, torch.float8_e5m2),
    power_of_two=(True, False),
    fill=("normal", "wide", "zeros"),
    layout=("contiguous", "transposed", "sliced"),
)
def test_codes_and_scales_are_the_oracles(shape, dtype, group, fmt, power_of_two, fill, layout):
    case = Case(shape, dtype, fill=fill, layout=layout if len(shape) > 1 else "contiguous")
    x = case.make()
    codes = encode(x, Groups(group, fmt, power_of_two))
    data, scale = oracle.quantize(rows(x, group), (1, group), fmt, power_of_two)
    assert_bitwise(codes.data, data, case)
    if power_of_two:
        assert codes.scale.dtype == torch.uint8
        scale = scale.to(torch.float8_e8m0fnu).view(torch.uint8)
    assert_bitwise(codes.scale, scale, case)
    found = decode(codes, group, tuple(x.shape), dtype)
    exact = copy_of(x, group, fmt, power_of_two)
    assert_bitwise(found, exact.float().to(found.dtype), case)
    if power_of_two:
        assert torch.equal(found.double(), exact), "a code times a power of two is exact"


def test_the_largest_float16_survives():
    # Its nearest code times its scale is 65536, which float16 has not.
    x = torch.full((1, 128), 65504.0, dtype=torch.float16)
    assert decode(encode(x, Groups()), 128, (1, 128), x.dtype).isfinite().all()


@pytest.mark.parametrize("special", [float("nan"), float("inf")])
@pytest.mark.parametrize("power_of_two", [True, False])
def test_what_is_not_finite_spoils_its_own_group_and_is_seen(special, power_of_two):
    x = torch.randn(2, 256)
    x[0, 3] = special
    found = decode(encode(x, Groups(128, power_of_two=power_of_two)), 128, (2, 256), x.dtype)
    assert found[0, :128].isnan().all()
    assert found[0, 128:].isfinite().all() and found[1].isfinite().all()


def test_a_float_keeps_its_value_over_many_binades_in_one_group():
    x = torch.tensor([2.0**-k for k in range(16)] + [0.0] * 112)
    assert torch.equal(decode(encode(x, Groups()), 128, (128,), x.dtype), x)


def test_bytes_per_element():
    x = torch.randn(64, 256)
    for groups, expected in (
        (Groups(128), 1 + 1 / 128),
        (Groups(16), 1 + 1 / 16),
        (Groups(16, power_of_two=False), 1 + 4 / 16),
    ):
        total = sum(part.untyped_storage().nbytes() for part in encode(x, groups))
        assert total == x.numel() * expected


@pytest.mark.parametrize(("group", "by_kernel"), [(128, True), (16, False)])
def test_on_cuda_groups_of_128_are_cast_by_the_kernel(group, by_kernel):
    pytest.importorskip("triton")
    with FakeTensorMode(), CastMeter() as meter:
        x = torch.empty(64, 256, device="cuda", dtype=torch.bfloat16)
        data, scale = encode(x, Groups(group))
    assert ("float8::cast_blockwise" in meter.ops) == by_kernel
    assert (data.shape, scale.shape) == ((64, 256), (64, 256 // group))
    assert scale.is_contiguous() or scale.t().is_contiguous()
