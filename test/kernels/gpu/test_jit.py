"""The device functions have the bits of their twins in ``reference.py``."""

import pytest
import torch

pytest.importorskip("triton")

from assertions import assert_bitwise
from interpreter import launcher
from shapes import DEVICES, FORMATS

from float8.kernels import reference

N = 1 << 14


def every_kind_of_float():
    """Random bits, so every exponent; neighbours of powers of two; the special values."""
    bits = torch.randint(-(2**31), 2**31, (N,), dtype=torch.int64).to(torch.int32)
    x = bits.view(torch.float32)
    edges = torch.exp2(torch.arange(-149, 128, dtype=torch.float64)).float()
    edges = torch.cat([edges, edges.nextafter(edges * 2), edges.nextafter(edges * 0)])
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 448.0, 57344.0])
    x[: len(edges)], x[-len(special) :] = edges, special
    return x


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", FORMATS)
def test_twins(dtype, power_of_two, device):
    x = every_kind_of_float().to(device)
    probe = launcher("probe_jit", "probe", device)
    scale, factor, bits, codes, fitting = probe(x, dtype, power_of_two)
    expected = reference.scale_from_amax(x.abs(), torch.finfo(dtype).max, power_of_two)
    assert_bitwise(scale, expected, what="scale")
    assert_bitwise(factor, expected.reciprocal(), what="reciprocal")
    assert_bitwise(bits.view(torch.float32), x.abs(), what="magnitude")
    one = torch.ones(1, device=device)
    assert_bitwise(codes, reference.cast(x, one, (-1,), dtype), what="codes")
    own = reference.cast(x, expected, (1,), dtype, fits=True)
    assert_bitwise(fitting, own, what="codes under the scale of their own amax")


def test_integers_order_amaxes_with_nan_on_top():
    x = torch.tensor([torch.nan, 0.0, 3.0, -5.0, torch.inf, 1e-45])
    x = torch.cat([x, torch.zeros(10)])
    bits = launcher("probe_jit", "probe", "cpu")(x, torch.float8_e4m3fn, False)[2]
    assert bits.argsort(stable=True).tolist()[-5:] == [5, 2, 3, 4, 0]
