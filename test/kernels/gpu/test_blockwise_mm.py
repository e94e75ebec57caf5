"""`blockwise_mm`: the GEMM of 1x128 and 128x128 scales agrees with exact arithmetic.

Interpreted, sums of 128 are float32's own, and results are compared in float32. On a GPU the tensor
core sums them with fewer bits: there results are compared in bfloat16, whose rounding hides that.
"""

from __future__ import annotations

import re

import oracle
import pytest
import torch

pytest.importorskip("triton")

from assertions import assert_bitwise, assert_error_within_baseline, error
from interpreter import launcher
from shapes import DEVICES, HIGH_PRECISION, SPECIALS, Case, pairs
from torch import Tensor

from float8.kernels import definition
from float8.kernels.gpu import blockwise_mm as module
from float8.kernels.gpu import fastest_tile
from scripts.kernel_tools.forms import compile_for
from scripts.kernel_tools.shipped import variants

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BLOCKS = {
    (1, 128): ((1, 128), (128, 128)),
    (128, 1): ((128, 128), (1, 128)),
    (1, 1): ((1, 128),) * 2,
}
EVERY_PAIR = pytest.mark.parametrize("rows", BLOCKS, ids=lambda r: f"{r[0]}x128-{r[1]}x128")
FORMAT_PAIRS = ((E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3))
EVERY_DEVICE = pytest.mark.parametrize("device", DEVICES)
# One element, no multiple of anything, several tiles and blocks with tails, whole blocks, nothing,
# more tiles down than a group of programs holds.
SHAPES = (
    (1, 1, 1),
    (5, 123, 7),
    (130, 272, 133),
    (64, 384, 128),
    (64 * 17 + 3, 16, 144),
    (16, 0, 16),
)


def operands(shape, rows, formats=(E4M3, E4M3), device="cpu", fill="wide") -> list[Tensor]:
    """a, a_scale, b, b_scale; magnitudes over 2^20, so that scales differ from block to block."""
    M, K, N = shape
    parts = []
    for size, block, dtype, seed in zip((M, N), BLOCKS[rows], formats, (1, 2), strict=True):
        x = Case((size, K), fill=fill, exponent=seed, seed=seed).make()
        x *= torch.exp2(torch.arange(K) // 128 % 3 * 4.0)  # adjacent blocks differ
        codes, scale = oracle.quantize(x, block, dtype)
        parts += [codes.view(dtype).to(device), scale.to(device)]
    return parts


def exactly(parts, rows) -> Tensor:
    a, a_scale, b, b_scale = (part.cpu() for part in parts)
    a_block, b_block = BLOCKS[rows]
    return oracle.matmul(a, a_scale, a_block, b, b_scale, b_block)


def multiply(parts, rows, device, bias=None, out_dtype=None, **options) -> Tensor:
    out_dtype = out_dtype or comparable(device)
    return launcher("blockwise_mm", "_launch", device)(*parts, *rows, bias, out_dtype, **options)


def comparable(device: str) -> torch.dtype:
    return torch.float32 if device == "cpu" else torch.bfloat16


def check(actual, parts, rows, replay) -> None:
    """The error is at most twice that of the definition, in the same dtype."""
    blocks = BLOCKS[rows]
    baseline = definition.scaled_mm(*(p.cpu() for p in parts), *blocks, None, actual.dtype)
    assert_error_within_baseline(actual, exactly(parts, rows), baseline, replay=replay)


@EVERY_DEVICE
@pairs(shape=SHAPES, formats=FORMAT_PAIRS, rows=list(BLOCKS), tile=[None, *module.GEMM_TILES])
def test_the_product(shape, formats, rows, tile, device):
    parts = operands(shape, rows, formats, device)
    actual = multiply(parts, rows, device, tile=tile)
    assert actual.shape == (shape[0], shape[2]) and actual.is_contiguous()
    check(actual, parts, rows, (shape, formats, rows, tile))


@pytest.mark.cuda
@EVERY_PAIR
def test_every_tile_gives_the_same_bits(rows):
    """So ranks may choose differently, and a choice changes no training.

    On a CPU the interpreter multiplies tiles by BLAS, whose sums depend on a tile's shape.
    """
    parts = operands((131, 400, 144), rows, device="cuda")
    run = launcher("blockwise_mm", "_launch", "cuda")
    first, *others = (
        run(*parts, *rows, None, comparable("cuda"), tile=tile) for tile in module.GEMM_TILES
    )
    for tile, result in zip(module.GEMM_TILES[1:], others, strict=True):
        assert_bitwise(result, first, (rows, tile))


@EVERY_DEVICE
@pairs(
    shape=[(5, 144, 24), (0, 16, 16), (16, 0, 16), (16, 16, 0)],
    bias_dtype=[None, *HIGH_PRECISION],
    out_dtype=HIGH_PRECISION,
    rows=list(BLOCKS),
)
def test_a_bias_is_added_before_the_sum_is_rounded(shape, bias_dtype, out_dtype, rows, device):
    parts, bias = operands(shape, rows, device=device), None
    in_float32 = multiply(parts, rows, device, out_dtype=torch.float32)
    if bias_dtype is not None:
        bias = Case((2 * shape[2],), bias_dtype, exponent=12, seed=3).make(device)[::2]
        in_float32 = in_float32 + bias.float()
    actual = multiply(parts, rows, device, bias, out_dtype)
    assert_rounded(actual, in_float32, device)


def assert_rounded(actual: Tensor, in_float32: Tensor, device: str) -> None:
    expected = in_float32.to(actual.dtype)
    if actual.dtype == torch.bfloat16 and device == "cpu":
        # Triton's interpreter may truncate.
        truncated = (in_float32.view(torch.int32) & -0x10000).view(torch.float32)
        expected = torch.where(actual == expected, expected, truncated.to(actual.dtype))
    assert_bitwise(actual, expected, "rounded")


@EVERY_DEVICE
@pairs(layout=["outer contiguous", "sliced", "rows of a wider matrix"], rows=list(BLOCKS))
def test_strides_change_nothing(layout, rows, device):
    shape = (130, 144, 136)
    parts = operands(shape, rows, device=device)
    expected = multiply(parts, rows, device)
    for i in (0, 2) if layout.startswith("rows") else (1, 3):
        x = parts[i]
        if layout == "outer contiguous":
            parts[i] = x.t().contiguous().t()
        elif layout == "sliced":
            parts[i] = torch.stack([x, x + 1], dim=-1).flatten(1)[:, ::2]
        else:
            wide = torch.full((x.shape[0], 199), 0x7F, dtype=torch.uint8, device=device)  # NaNs
            wide[:, 13:157] = x.view(torch.uint8)
            parts[i] = wide.view(x.dtype)[:, 13:157]
        assert parts[i].stride() != x.stride() and parts[i].shape == x.shape
    actual = multiply(parts, rows, device)
    check(actual, parts, rows, (rows, layout))
    if device == "cpu":  # on a GPU strides are part of what is compiled
        assert_bitwise(actual, expected, (rows, layout))


@EVERY_DEVICE
@EVERY_PAIR
def test_faults_are_caught(rows, device):
    """A kernel that reads another block's scale, or the other operand's, fails `check`."""
    shape = (64, 384, 64)
    parts = operands(shape, rows, device=device)
    check(multiply(parts, rows, device), parts, rows, shape)
    a, a_scale, b, b_scale = parts
    swapped = (b_scale, a_scale) if rows == (1, 1) else (a_scale.flip(0), b_scale.flip(0))
    faulty = {
        "a's adjacent scale along K": (a, a_scale.roll(1, 1), b, b_scale),
        "b's adjacent scale along K": (a, a_scale, b, b_scale.roll(-1, 1)),
        "first block's everywhere": (a, a_scale[:, :1].expand_as(a_scale), b, b_scale),
        "swapped or upside down": (a, swapped[0], b, swapped[1]),
        "reciprocals": (a, 1 / a_scale, b, 1 / b_scale),
        "the last step left out": (a, zero_last(a_scale), b, b_scale),
    }
    for fault, planted in faulty.items():
        actual = multiply([part.contiguous() for part in planted], rows, device)
        with pytest.raises(AssertionError, match="claimed at most"):
            check(actual, parts, rows, fault)


def zero_last(scale: Tensor) -> Tensor:
    return torch.cat([scale[:, :-1], torch.zeros_like(scale[:, -1:])], dim=1)


@EVERY_DEVICE
@EVERY_PAIR
@pytest.mark.parametrize("special", ["inf", "nan", "zeros"])
def test_special_rows(special, rows, device):
    """An infinite or NaN element spoils the rows that its scale is of alone; zeros are exact."""
    x = Case((130, 144)).make()
    if special == "zeros":
        x[3] = 0.0
    else:
        x[3, 140] = SPECIALS[special](torch.float32)
    parts = quantized((x, Case((24, 144), seed=1).make()), rows, device)
    found = multiply(parts, rows, device).cpu().float()
    # Triton's interpreter takes NaN codes for numbers, so the infinite scale must show.
    assert torch.equal(found.isfinite(), exactly(parts, rows).isfinite())
    assert found[129].isfinite().all()
    assert not (found[3] if special == "zeros" else found[3].isfinite()).any()


def quantized(matrices, rows, device) -> list[Tensor]:
    parts = []
    for x, block in zip(matrices, BLOCKS[rows], strict=True):
        codes, scale = oracle.quantize(x, block, E4M3)
        parts += [codes.view(E4M3).to(device), scale.to(device)]
    return parts


@pytest.mark.cuda
def test_a_long_contraction_is_as_exact_as_a_short_one():
    """What promotion is for: all terms positive, 128 times as many, the relative error the same."""
    relative = []
    for K in (128, 16384):
        sides = [Case((64, K), seed=seed).make().abs() for seed in (1, 2)]
        parts = quantized(sides, (1, 1), "cuda")
        exact = exactly(parts, (1, 1))
        actual = multiply(parts, (1, 1), "cuda", out_dtype=torch.float32)
        relative.append(error(actual, exact) / float(exact.norm()))
    assert relative[1] <= 2 * relative[0], relative


# --- the choice of a tile


def test_a_tile_lies_inside_a_block_and_fits_shared_memory():
    for tile in module.GEMM_TILES:
        assert 128 % tile.M == 128 % tile.N == 0
        assert 128 * (tile.M + tile.N) * tile.stages <= 227 * 1024  # sm_90, sm_100
        assert 128 * (tile.M + tile.N) * (tile.stages - 1) <= 99 * 1024  # sm_89, sm_120


@pytest.mark.cuda
def test_on_a_gpu_the_first_product_of_a_class_is_timed(monkeypatch):
    monkeypatch.setattr(fastest_tile, "_CHOSEN", {})
    parts = operands((300, 400, 320), (1, 128), device="cuda")
    results = [module._launch(*parts, 1, 128, None, torch.bfloat16) for _ in range(2)]
    assert_bitwise(results[1], results[0])
    assert set(fastest_tile._CHOSEN.values()) <= set(module.GEMM_TILES)
    assert len(fastest_tile._CHOSEN) == 1


# --- the op


@pytest.mark.parametrize("shape", [(3,), (5, 24)])
def test_a_bias_of_another_shape_is_refused(shape):
    parts = operands((5, 256, 24), (1, 128))
    with pytest.raises(RuntimeError, match="expand"):
        module._launch(*parts, 1, 128, torch.ones(shape), torch.bfloat16)


@EVERY_DEVICE
@pairs(shape=[(5, 144, 24), (16, 0, 16)], rows=list(BLOCKS), out_dtype=HIGH_PRECISION[:2])
def test_opcheck(shape, rows, out_dtype, device):
    """Fake and autograd are what the op says, on every device; on a CPU it is its definition."""
    parts = quantized((torch.ones(shape[:2]), torch.ones(shape[2], shape[1])), rows, device)
    bias = torch.ones(shape[2], dtype=out_dtype, device=device)
    # Not test_schema, which compares its inputs by multiplying them: not defined for float8.
    checks = ("test_faketensor", "test_aot_dispatch_static", "test_autograd_registration")
    arguments = (*parts, *rows, bias, out_dtype)
    torch.library.opcheck(module.blockwise_mm, arguments, test_utils=checks)
    if device == "cpu":
        expected = definition.scaled_mm(*parts, *BLOCKS[rows], bias, out_dtype)
        assert_bitwise(module.blockwise_mm(*arguments), expected, rows)


# --- the machine code


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "instruction", "kibibytes"),
    [
        ("sm_89", r"mma\.sync\.aligned\.m16n8k32\S*\.e4m3\.e4m3", 99),
        ("sm_90", r"wgmma\.mma_async\S*\.m64n128k32\.f32\.e4m3\.e4m3", 227),
        ("sm_100", r"tcgen05\.mma\S*\.kind::f8f6f4", 227),
        ("sm_103", r"tcgen05\.mma\S*\.kind::f8f6f4", 227),
        ("sm_120", r"mma\.sync\.aligned\.m16n8k32\S*\.e4m3\.e4m3", 99),
    ],
)
def test_tensor_cores_multiply_float8_copied_16_bytes_at_a_time(arch, instruction, kibibytes):
    """In the largest tile, whose shared memory is what a block of that architecture may have."""
    compiled = compile_for(variants(("blockwise_mm",))[0], arch)
    assert compiled.metadata.shared <= kibibytes * 1024
    ptx = compiled.asm["ptx"]
    assert re.search(instruction, ptx)
    copies = re.findall(r"cp\.async\.\S+ \[.*?\], \[.*?\], (\w+)", ptx)
    assert set(copies) == {"0x10"} or set(copies) == {"16"}, copies
