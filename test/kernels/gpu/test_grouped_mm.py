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

from assertions import assert_error_within_baseline
from interpreter import launcher
from shapes import DEVICES, HIGH_PRECISION, Case, pairs
from torch import Tensor

from float8.kernels import definition
from float8.kernels.gpu import grouped_mm as module
from scripts import kernel_report

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ONE, ROW, BY_128, SQUARE = (-1, -1), (1, -1), (1, 128), (128, 128)
BLOCKS = {
    "tensorwise": (ONE, ONE),
    "rowwise": (ROW, ROW),
    "rowwise by tensorwise": (ROW, ONE),
    "1x128 by 128x128": (BY_128, SQUARE),
    "1x128": (BY_128, BY_128),
}
BY_TOKENS = [name for name, pair in BLOCKS.items() if SQUARE not in pair]
FORMATS = ((E4M3, E4M3), (E5M2, E4M3))
ALIGN = 16
EVERY_DEVICE = pytest.mark.parametrize("device", DEVICES)
# Tokens of each expert: nothing a multiple of a tile, empty groups at both ends and inside, several
# tiles and steps of 128 in one group, one expert, no token at all.
SIZES = ((0, 5, 130, 0, 17, 0), (1,), (64, 128, 16), (0, 0, 3))
TILE = module.TILES[-1]


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


def by_experts(sizes, K, N, blocks, formats=(E4M3, E4M3), spare=7) -> Product:
    """``spare`` rows of NaN, with scales of NaN, behind the last group."""
    T, (a_block, b_block) = sum(sizes), blocks
    a, a_scale = quantized((T, K), a_block, formats[0], 1)
    experts = [quantized((N, K), b_block, formats[1], 7 + 3 * e) for e in range(len(sizes))]
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


def by_tokens(sizes, M, N, blocks, formats=(E4M3, E4M3), spare=7) -> Product:
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
            codes, found = quantized((rows, size), block, dtype, seed + 5 * group)
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


@EVERY_DEVICE
@pairs(sizes=SIZES, blocks=list(BLOCKS), formats=FORMATS, shape=[(123, 7), (272, 133)])
def test_tokens_by_experts(sizes, blocks, formats, shape, device):
    product = by_experts(sizes, *shape, BLOCKS[blocks], formats)
    product.check(product.multiply(device), (sizes, blocks, formats, shape))


@EVERY_DEVICE
@pairs(sizes=SIZES, blocks=BY_TOKENS, formats=FORMATS, shape=[(5, 7), (66, 133)])
def test_tokens_by_tokens(sizes, blocks, formats, shape, device):
    product = by_tokens(sizes, *shape, BLOCKS[blocks], formats)
    product.check(product.multiply(device), (sizes, blocks, formats, shape))
    for group, size in enumerate(sizes):
        assert size or not product.multiply(device)[group].any()
