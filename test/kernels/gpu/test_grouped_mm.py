"""`grouped_mm`: each group's product agrees with exact arithmetic, whatever lies beside the group.

Everything that no group covers holds NaN: rows of tokens beyond the last group, and the unused
columns and scales of the transposed layout. Interpreted results are compared in float32, those of a
GPU in bfloat16, as in `test_blockwise_mm.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import oracle
import pytest
import torch

pytest.importorskip("triton")

from assertions import assert_bitwise, assert_error_within_baseline
from interpreter import launcher
from shapes import DEVICES, HIGH_PRECISION, Case, pairs
from torch import Tensor

from float8.kernels import definition
from float8.kernels.gpu import grouped_mm as module
from float8.kernels.gpu.blockwise_mm import GEMM_TILES
from float8.kernels.groups import padded_tokens
from scripts.kernel_tools.forms import compile_for
from scripts.kernel_tools.shipped import variants

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ONE, ROW, BY_128, SQUARE = (-1, -1), (1, -1), (1, 128), (128, 128)
BLOCKS = {
    "tensorwise": (ONE, ONE),
    "rowwise": (ROW, ROW),
    "rowwise by tensorwise": (ROW, ONE),
    "1x128 by 128x128": (BY_128, SQUARE),
    "1x128": (BY_128, BY_128),
}
FORMATS = ((E4M3, E4M3), (E5M2, E4M3))
ALIGN = 16
EVERY_DEVICE = pytest.mark.parametrize("device", DEVICES)
# Tokens of each expert: nothing a multiple of a tile, empty groups at both ends and inside, several
# tiles and steps of 128 in one group, one expert, no token at all.
SIZES = ((0, 5, 130, 0, 17, 0), (1,), (64, 128, 16))
TILE = GEMM_TILES[-1]


@dataclass
class Product:
    """The arguments of the launcher, and what each group's product is."""

    arguments: list[Tensor]
    blocks: tuple[tuple[int, int], tuple[int, int]]
    groups: list[tuple[Tensor, Tensor, Tensor, Tensor]]  # a, a_scale, b, b_scale of each
    offs: Tensor
    out_shape: tuple[int, ...]
    by_tokens: bool

    def multiply(self, device, out_dtype=None, **options) -> Tensor:
        parts = [part.to(device) for part in (*self.arguments, self.offs)]
        out_dtype = out_dtype or (torch.float32 if device == "cpu" else torch.bfloat16)
        options = {"tile": TILE, "use_fast_accum": False, **options}
        launch = launcher("grouped_mm", "_launch", device)
        out = launch(*parts, *self.blocks, out_dtype, ALIGN, **options)
        assert out.shape == self.out_shape and out.is_contiguous() and out.dtype == out_dtype
        return out.cpu()

    def check(self, actual, replay) -> None:
        """The error is at most four times that of the definition, in the same dtype."""
        a_block, b_block = self.blocks
        exact, baseline = [], []
        for a, a_scale, b, b_scale in self.groups:
            exact.append(oracle.matmul(a, a_scale, a_block, b, b_scale, b_block))
            pair = a, a_scale, b, b_scale, a_block, b_block
            baseline.append(definition.scaled_mm(*pair, None, actual.dtype))
        join = torch.stack if self.by_tokens else torch.cat
        exact, baseline = join(exact), join(baseline)
        assert_error_within_baseline(actual[: len(exact)], exact, baseline, 4.0, replay)


def quantized(shape, block, dtype, seed) -> tuple[Tensor, Tensor]:
    """Magnitudes over 2^20, so that rows differ; adjacent blocks of the contraction differ more."""
    x = Case(shape, fill="wide", exponent=seed % 5, seed=seed).make()
    x *= torch.exp2(torch.arange(shape[1]) // 128 % 3 * 4.0)
    codes, scale = oracle.quantize(x, block, dtype)
    return codes.view(dtype), scale


def nan_codes(shape, dtype) -> Tensor:
    return torch.full(shape, 0x7F, dtype=torch.uint8).view(dtype)


def cat(parts, dim=0) -> Tensor:
    bytes_ = [p.view(torch.uint8) if p.element_size() == 1 else p for p in parts]
    return torch.cat(bytes_, dim).view(parts[0].dtype)


def offs_of(sizes) -> Tensor:
    return torch.tensor(sizes).cumsum(0).to(torch.int32)


def by_experts(sizes, K, N, blocks, formats=(E4M3, E4M3), spare=7, make=quantized) -> Product:
    """``spare`` rows of NaN, with scales of NaN, behind the last group."""
    T, (a_block, b_block) = sum(sizes), blocks
    a, a_scale = make((T, K), a_block, formats[0], 1)
    experts = [make((N, K), b_block, formats[1], 7 + 3 * e) for e in range(len(sizes))]
    b, b_scale = cat([w[None] for w, _ in experts]), torch.stack([s for _, s in experts])
    groups, begin = [], 0
    for size, (w, w_scale) in zip(sizes, experts, strict=True):
        rows = slice(begin, begin + size)
        groups.append((a[rows], a_scale if a_block == ONE else a_scale[rows], w, w_scale))
        begin += size
    a = cat([a, nan_codes((spare, K), formats[0])])
    if a_block != ONE:
        a_scale = cat([a_scale, torch.full((spare, a_scale.shape[1]), torch.nan)])
        a_scale = a_scale.t().contiguous().t()
    return Product([a, a_scale, b, b_scale], blocks, groups, offs_of(sizes), (T + spare, N), False)


def by_tokens(sizes, M, N, blocks, formats=(E4M3, E4M3), spare=7, make=quantized) -> Product:
    """Each group's columns from a multiple of 16 on; NaN behind the last group."""
    E, P = len(sizes), -(-(sum(sizes) + spare + len(sizes) * (ALIGN - 1)) // ALIGN) * ALIGN
    arguments, sides = [], []
    for rows, block, dtype, seed in zip((M, N), blocks, formats, (1, 2), strict=True):
        data = nan_codes((rows, P), dtype)
        parts, start = [], 0
        one = torch.full((1, 1), 0.75)
        scale = {ONE: one, ROW: torch.full((E, rows), torch.nan)}.get(
            block, torch.full((P // 128 + E, rows), torch.nan).t()
        )
        for group, size in enumerate(sizes):
            codes, found = make((rows, size), block, dtype, seed + 5 * group)
            if block == ONE:
                found = one
            elif block == ROW:
                scale[group] = found[:, 0]
            else:
                first = start // 128 + group
                scale[:, first : first + found.shape[1]] = found
            columns = -(-size // ALIGN) * ALIGN
            place = data.view(torch.uint8)[:, start : start + columns]
            place.zero_()
            place[:, :size] = codes.view(torch.uint8)
            parts.append((codes, found))
            start += columns
        arguments += [data, scale]
        sides.append(parts)
    groups = [(*a, *b) for a, b in zip(*sides, strict=True)]
    return Product(arguments, blocks, groups, offs_of(sizes), (E, M, N), True)


BUILD = {"experts": by_experts, "tokens": by_tokens}


@EVERY_DEVICE
@pairs(
    by=list(BUILD),
    sizes=[*SIZES, (64 * 9, 1, 3)],  # the last: more row tiles than one group of programs holds
    blocks=list(BLOCKS),
    formats=FORMATS,
    shape=[(123, 7), (144, 70), (66, 24)],
    tile=[None, *GEMM_TILES],
    how=[(None, False), (torch.bfloat16, True), *((dtype, False) for dtype in HIGH_PRECISION)],
)
def test_the_product(by, sizes, blocks, formats, shape, tile, how, device):
    blocks = "1x128" if by == "tokens" and SQUARE in BLOCKS[blocks] else blocks
    how = (None, False) if (device, how[0]) == ("cuda", torch.float32) else how
    product = BUILD[by](sizes, *shape, BLOCKS[blocks], formats)
    actual = product.multiply(device, how[0], use_fast_accum=how[1], tile=tile)
    product.check(actual, (by, sizes, blocks, formats, shape, tile, how))
    if by == "tokens":
        assert not any(actual[group].any() for group, size in enumerate(sizes) if size == 0)


@pytest.mark.cuda
@pytest.mark.parametrize("fast", [False, True])
@pairs(by=list(BUILD), sizes=[*SIZES, (300, 0, 700, 24)], shape=[(144, 80), (272, 400)])
def test_every_way_to_multiply_has_the_same_bits(by, sizes, shape, fast):
    """Ranks measure which of them is the fastest, and may choose differently."""
    product = BUILD[by](sizes, *shape, BLOCKS["rowwise"])
    ways = [*GEMM_TILES, *([module.WIDE] if fast else [])]
    if torch.cuda.get_device_capability() == (9, 0):
        ways.append(module.TORCH_TILE)
    results = []
    for way in ways:
        torch.full((2**22,), torch.nan, device="cuda")  # in the memory of the result
        results.append(product.multiply("cuda", use_fast_accum=fast, tile=way))
    for way, result in zip(ways, results, strict=True):
        if not fast:
            product.check(result, way)
        rows = len(result) if by == "tokens" else sum(sizes)
        assert_bitwise(result[:rows], results[0][:rows], (by, sizes, shape, way))


def form_of(by: str, sizes=(5, 0, 67, 9), blocks="1x128", **options) -> Product:
    """One product of each form: more than one tile and step in either."""
    shape = (144, 24) if by == "experts" else (24, 20)
    return BUILD[by](sizes, *shape, BLOCKS[blocks], **options)


EVERY_FORM = pytest.mark.parametrize("by", BUILD)


@EVERY_DEVICE
@EVERY_FORM
@pytest.mark.parametrize("blocks", ["rowwise", "1x128"])
def test_strides_change_nothing(blocks, by, device):
    product = form_of(by, blocks=blocks)
    for i, part in enumerate(product.arguments):
        if i in (0, 2):  # rows of a wider matrix
            wide = nan_codes((*part.shape[:-1], part.shape[-1] + 32), part.dtype)
            view = wide[..., 16:-16]
            view.view(torch.uint8).copy_(part.view(torch.uint8))
        else:
            view = part.mT.contiguous().mT if part.is_contiguous() else part.contiguous()
        assert view.stride() != part.stride() or 1 in part.shape
        product.arguments[i] = view
    product.check(product.multiply(device), (blocks, by))


@EVERY_DEVICE
@EVERY_FORM
@pytest.mark.parametrize("blocks", ["rowwise", "1x128"])
def test_faults_are_caught(blocks, by, device):
    """A kernel that reads at another place than the layout says fails `check`."""
    sizes = (35, 20, 0, 19) if by == "experts" else (35, 20, 0, 130)
    faults = {
        "a's next scale": (1, lambda s: s.roll(1, 0)),
        "b's next scale": (3, lambda s: s.roll(1, -2)),
        "the next expert's scale": (3, lambda s: s.roll(-1, 0)),
        "a's next step": (1, lambda s: s.roll(-1, -1)),
        "b's first step everywhere": (3, lambda s: s[..., :1].expand_as(s)),
        "a's next row": (0, lambda x: rolled(x, 0)),
        "b's next column": (2, lambda x: rolled(x, -1)),
    }
    for fault, (place, plant) in faults.items():
        product = form_of(by, sizes, blocks)
        planted = plant(product.arguments[place]).contiguous()
        if same_values(planted, product.arguments[place]):
            continue  # no such step
        product.arguments[place] = planted
        with pytest.raises(AssertionError, match="claimed at most"):
            product.check(product.multiply(device), fault)
    for fault, change in {"a later start": 1, "an earlier start": -1}.items():
        product = form_of(by, sizes, blocks)
        product.offs[1] += change * ALIGN
        with pytest.raises(AssertionError, match="claimed at most"):
            product.check(product.multiply(device), fault)


def rolled(x: Tensor, dim: int) -> Tensor:
    return x.view(torch.uint8).roll(1, dim).view(x.dtype)


def same_values(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(), b.nan_to_num()) if a.dtype == torch.float32 else False


@EVERY_DEVICE
@EVERY_FORM
@pytest.mark.parametrize("offs", [(700, 40, 900), (-5, 2**30, 3)], ids=str)
def test_offsets_that_do_not_ascend_read_nothing_outside(offs, by, device):
    """A GPU does not check them, which would take waiting; the groups are then wrong."""
    product = form_of(by, (20, 0, 30), "rowwise")
    product.offs.copy_(torch.tensor(offs))
    product.multiply(device)


@EVERY_DEVICE
@EVERY_FORM
@pytest.mark.parametrize("shape", [(0, 16), (16, 0)], ids=str)
def test_empty(shape, by, device):
    product = BUILD[by]((0, 0), *shape, BLOCKS["rowwise"], spare=0)
    assert not product.multiply(device).any()


# --- fast sums


@pytest.mark.parametrize("blocks", ["tensorwise", "rowwise", "1x128"])
@pytest.mark.parametrize("E", [1, 8, 128])
@pytest.mark.parametrize("by", BUILD)
def test_short_sums_are_fast_unless_the_caller_says_otherwise(by, E, blocks, monkeypatch):
    """The contraction of experts, and the mean number of tokens of a group."""
    compiled = []
    monkeypatch.setattr(module, "launch", lambda *_, **form: compiled.append(form["FAST"]))
    for terms, is_short in ((16, True), (4096, True), (4128, False), (28672, False)):
        contraction = terms if by == "experts" else padded_tokens(E * terms, E, ALIGN)
        columns = -(-contraction // 128)
        scales = {
            "tensorwise": [(1, 1), (1, 1)],
            "rowwise": [(32, 1), (1, 48, 1)] if by == "experts" else [(E, 32), (E, 48)],
            "1x128": [(32, columns), (E, 48, columns)],
        }[blocks]
        if by == "tokens" and blocks == "1x128":
            scales = [(n, contraction // 128 + E) for n in (32, 48)]
        elif by == "experts" and blocks == "tensorwise":
            scales[1] = (1, 1, 1)
        a, b = (
            torch.empty(*shape, contraction, dtype=E4M3, device="meta")
            for shape in ((32,), (48,) if by == "tokens" else (E, 48))
        )
        a_scale, b_scale = (torch.empty(shape, device="meta") for shape in scales)
        offs = torch.empty(E, dtype=torch.int32, device="meta")
        for asked in (None, True, False):
            arguments = a, a_scale, b, b_scale, offs, *BLOCKS[blocks], torch.bfloat16, ALIGN, asked
            module._launch(*arguments, tile=TILE)
            is_fast = is_short if asked is None else asked
            assert compiled.pop() == (is_fast and blocks != "1x128"), (terms, asked)


# --- torch's kernel


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize(
    ("by", "shape", "is_tried"),
    [
        ("experts", (144, 48), True),
        ("experts", (123, 48), False),
        ("tokens", (20, 48), True),
        ("tokens", (48, 20), False),
    ],
)
def test_torch_is_tried_where_rows_start_at_multiples_of_16_bytes(
    by, shape, is_tried, fast, monkeypatch
):
    """It raises for other operands, and pads the rows of other results: not what `_fake` says."""
    seen = []

    def fastest(form, x, sizes, tiles, run):
        seen.extend(tiles)
        return TILE

    monkeypatch.setattr(module, "fastest", fastest)
    monkeypatch.setattr(module, "launch", lambda *_, **__: None)
    monkeypatch.setattr(module, "family_of", lambda device: "sm_90")
    product = BUILD[by]((35, 0, 19), *shape, BLOCKS["rowwise"])
    module._launch(*product.arguments, product.offs, *product.blocks, torch.bfloat16, ALIGN, fast)
    assert seen and (module.TORCH_TILE in seen) == is_tried


@pytest.mark.parametrize("fast", [False, True])
def test_torch_gets_a_scale_for_each_row_of_each_expert(fast, monkeypatch):
    """Where all experts share the scales of rows too; and sums as they were asked for."""

    def scales_of_b(a, b, a_scale, b_scale, *, offs, out_dtype, use_fast_accum):
        assert use_fast_accum is fast
        return b_scale

    monkeypatch.setattr(torch, "_scaled_grouped_mm", scales_of_b)
    product = BUILD["experts"]((35, 0, 19), 144, 48, BLOCKS["rowwise"])
    a, a_scale, b, b_scale = product.arguments
    arguments = a, a_scale, b, b_scale[:1], product.offs, *product.blocks, torch.bfloat16
    found = module._launch(*arguments, ALIGN, fast, tile=module.TORCH_TILE)
    assert_bitwise(found, b_scale[:1].expand(3, 48, 1).squeeze(-1).contiguous())


# --- the op


def test_rows_longer_than_32_bits_count_are_refused():
    product = form_of("experts")
    a, *others = product.arguments
    long = torch.empty((2, 2**24), dtype=E4M3, device="meta")[:1, : a.shape[1]]
    with pytest.raises(ValueError, match="grouped_mm: rows of 2\\^24 elements or more"):
        module._launch(long, *others, product.offs, *product.blocks, torch.bfloat16, ALIGN, False)


@EVERY_DEVICE
@EVERY_FORM
def test_opcheck(by, device):
    """Fake and autograd are what the op says; on a CPU it is its definition."""
    product = form_of(by)
    parts = [*product.arguments, product.offs]
    known = [p.nan_to_num() if p.dtype == torch.float32 else p for p in parts]
    if by == "experts":  # rows of no group are not written
        known[:2] = (part[: product.offs[-1]] for part in known[:2])
    checks = ("test_faketensor", "test_aot_dispatch_static", "test_autograd_registration")
    arguments = (*(p.to(device) for p in known), *product.blocks, torch.bfloat16, ALIGN, False)
    torch.library.opcheck(module.grouped_mm_gpu, arguments, test_utils=checks)
    arguments = (*parts, *product.blocks, torch.float32, ALIGN)
    expected = torch.ops.float8.grouped_mm(*arguments)
    product.check(expected, by)
    assert_bitwise(module.grouped_mm_gpu(*arguments, False), expected, by)


# --- the machine code


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_89", "sm_90"])
def test_only_fast_accumulation_leaves_the_whole_sum_to_the_tensor_core(arch):
    """Without it, each step's sum is added in float32: at 128 x 128, 64 additions per thread."""
    for fast in (False, True):
        variant = next(
            v
            for v in variants(("grouped_mm",))
            if v.constants["FAST"] == fast and "rowwise" in v.name
        )
        ptx = compile_for(variant, arch).asm["ptx"]
        additions = len(re.findall(r"\badd(\.\w+)*\.f32", ptx))
        assert additions == (0 if fast else 64), variant.name
