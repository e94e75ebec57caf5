"""E8M0 scales: exact for every amax, and torchao's but for the exceptions that the file states."""

from __future__ import annotations

import oracle
import pytest
import torch
from assertions import assert_bitwise
from shapes import HIGH_PRECISION, pairs
from torch import Tensor

from float8 import Blockwise, Float8Tensor, ScaleFormat
from float8.kernels import e8m0

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
E8M0 = (ScaleFormat.E8M0, ScaleFormat.E8M0_FLOOR)
EVERY_BFLOAT16 = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def bytes_of(scale: Tensor) -> Tensor:
    assert scale.dtype == torch.float8_e8m0fnu
    return scale.view(torch.uint8).int()


def cast(x: Tensor, dtype: torch.dtype, scale_format: ScaleFormat) -> Float8Tensor:
    return Float8Tensor.from_high_precision(x, dtype, Blockwise(1, 32), scale_format=scale_format)


@pytest.mark.parametrize("field", [1, 254])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_no_float32_amax_saturates_nor_could_its_scale_be_halved(dtype, field):
    """All significands under one exponent."""
    amax = (torch.arange(2**23, dtype=torch.int32) + (field << 23)).view(torch.float32)
    found = e8m0.e8m0_scale_from_amax(amax, oracle.largest(dtype), rounds_up=True)
    largest = oracle.scale_values(found).mul_(oracle.largest(dtype))
    assert (amax <= largest).all()
    assert ((amax > largest / 2) | (bytes_of(found) == 0)).all()


@pytest.mark.parametrize(("dtype", "floor"), [(E4M3, 247), (E5M2, 240)], ids=str)
def test_a_block_with_an_inf_has_the_bytes_that_the_file_states(dtype, floor):
    x = torch.ones(1, 32)
    x[0, 3] = -torch.inf
    for scale_format, byte in zip(E8M0, (254, floor), strict=True):
        found = cast(x, dtype, scale_format)
        assert bytes_of(found.scale).tolist() == [[byte]]
        assert found.float8_data.float().isnan().nonzero().tolist() == [[0, 3]]
    assert f"{floor} (E{'4M3' if dtype == E4M3 else '5M2'})" in e8m0.__doc__


def test_every_byte_comes_back():
    scale = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    exact = oracle.scale_values(scale)
    assert_bitwise(e8m0.as_float32(scale), exact.float())
    assert_bitwise(e8m0.e8m0_reciprocal(scale), (1 / exact).float())
    assert e8m0.as_float32(exact.float()).dtype == torch.float32


@pytest.mark.parametrize("op", ["e8m0_scale_from_amax", "as_float32", "e8m0_reciprocal"])
def test_what_the_compiler_calls(op):
    scale = torch.rand(3, 5).to(torch.float8_e8m0fnu)
    arguments = (torch.rand(3, 5), 448.0, True) if "amax" in op else (scale,)
    registered = getattr(torch.ops.float8, f"e8m0_{op.removeprefix('e8m0_')}").default
    assert_bitwise(registered(*arguments), getattr(e8m0, op)(*arguments))
    # The check of the schema multiplies its inputs, which torch cannot for E8M0.
    torch.library.opcheck(registered, arguments, test_utils="test_faketensor")


# --- blocks


def blocks(dtype: torch.dtype) -> Tensor:
    """Blocks of 32 whose amaxes take every exponent, close to powers of two and format maxima."""
    torch.manual_seed(0)
    if dtype == torch.bfloat16:
        amax = EVERY_BFLOAT16[::5].float()
    else:
        powers = torch.exp2(torch.arange(-149, 128).double())
        near = torch.tensor([1, 1.75, 1.5], dtype=torch.float64).outer(powers).float().flatten()
        up, down = torch.tensor(torch.inf), torch.tensor(0.0)
        close = [near, near.nextafter(up), near.nextafter(down), near * (1 + 2.0**-20)]
        amax = torch.cat([*close, near * (1 + 2.0**-17), torch.rand(len(near)) * near])
        special = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0])
        amax = torch.cat([amax.clamp(max=torch.finfo(dtype).max), special])
    x = amax.unsqueeze(1) * (torch.rand(len(amax), 32) * 2 - 1)
    x[torch.arange(len(amax)), torch.randint(32, amax.shape)] = amax
    return x.to(dtype)


@pairs(
    modes=[("RCEIL", ScaleFormat.E8M0), ("FLOOR", ScaleFormat.E8M0_FLOOR)],
    dtype=[E4M3, E5M2],
    source=HIGH_PRECISION,
)
def test_the_oracles_bits_and_torchaos_with_the_exceptions_that_are_stated(modes, dtype, source):
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    x = blocks(source)
    x = torch.cat([x, torch.full_like(x[:, :5], 3.0)], 1)  # a tail, which torchao does not take
    name, scale_format = modes
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % 32))
    padded = padded.float() if source == torch.float16 else padded  # it takes no float16
    their_scale, theirs = mx.to_mx(padded, dtype, 32, mx.ScaleCalculationMode[name])
    theirs = theirs[:, : x.shape[1]]
    ours = cast(x, dtype, scale_format)
    found, other = bytes_of(ours.scale), bytes_of(their_scale)
    data, scale = oracle.quantize(x, (1, 32), dtype, scale_format)
    assert_bitwise(ours.scale, scale, scale_format, "scale")
    assert_bitwise(ours.float8_data, data, scale_format, "data")

    # RCEIL: a rounded logarithm, where amax / max(format) is just above a power of two.
    ratio = padded.double().abs().unflatten(1, (-1, 32)).amax(2) / oracle.largest(dtype)
    excess = ratio / torch.exp2(ratio.log2().floor()) - 1
    rounded = (excess > 0) & (excess < 2.0**-18) & (name == "RCEIL") & (found != other)
    assert torch.equal(found - rounded.int(), other)
    assert rounded.any() == (name == "RCEIL" and source == torch.float32)
    # Byte 0: x times 1 or 2^126.
    factor = 1.0 if name == "RCEIL" else 2.0**126
    is_zero = (found == 0).repeat_interleave(32, 1)[:, : x.shape[1]]
    assert_bitwise(theirs[is_zero], oracle.encode((x.double() * factor)[is_zero], dtype))
    # An inf is the largest finite value.
    largest = oracle.largest(dtype) * x[x.isinf()].sign()
    is_inf = x.isinf()
    assert_bitwise(theirs[is_inf].float(), largest.float())
    assert ours.float8_data[is_inf].float().isnan().all()
    # All else.
    same = ~(is_inf | is_zero | rounded.repeat_interleave(32, 1)[:, : x.shape[1]])
    assert same.float().mean() > 0.5 and (same & x.isnan()).any()
    assert_bitwise(ours.float8_data[same], theirs[same])


@pytest.mark.parametrize("mode", ["floor", "rceil"])
def test_one_scale_for_32x32_is_that_of_torchaos_experts(mode):
    """Of bfloat16, whose amaxes torchao's rounded logarithm takes for what they are."""
    name = "torchao.prototype.moe_training.kernels.mxfp8.quant"
    torchao = pytest.importorskip(name)._mxfp8_quantize_reference_3d
    w = torch.randn(3, 96, 160) * 2.0 ** torch.randint(-20, 20, (3, 96, 1))
    how = {"block_size": 32, "scale_block_dim1": 32, "scale_block_dim2": 32}
    w = w.bfloat16()
    theirs, their_scale = torchao(w, **how, scaling_mode=mode, blocked_scale_output=False)
    scale_format = {"floor": ScaleFormat.E8M0_FLOOR, "rceil": ScaleFormat.E8M0}[mode]
    for each, data, scale in zip(w, theirs, their_scale, strict=True):
        ours = Float8Tensor.from_high_precision(
            each, E4M3, Blockwise(32, 32), scale_format=scale_format
        )
        assert_bitwise(ours.scale, scale.squeeze(-1).view(torch.float8_e8m0fnu), mode, "scale")
        assert_bitwise(ours.float8_data, data.contiguous(), mode, "data")
        exact, exact_scale = oracle.quantize(each, (32, 32), E4M3, scale_format)
        assert_bitwise(ours.float8_data, exact, mode, "data")
        assert_bitwise(ours.scale, exact_scale, mode, "scale")
