"""The forms that ship: each launch of the recipes on bfloat16 matrices, and enough others to see
each compile-time flag.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from float8.granularity import Block, block_name, ceil_div, scale_shape
from float8.kernels import definition
from float8.kernels.gpu import (
    amax,
    blockwise_mm,
    cast,
    cast_tokens,
    dequantize_groups,
    expand_scales,
    grouped_mm,
    norm_cast,
    optimizer_step,
    swiglu_cast,
    swiglu_gradients,
    transpose,
)
from float8.kernels.gpu.blockwise_mm import GEMM_TILES, Tile
from float8.kernels.matrix import BY_32, BY_128, ROW, SQUARE_32, SQUARE_128, TENSOR
from scripts.kernel_tools.forms import Variant, meta, variant

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def _forms(
    title: str, launcher: Callable[..., Any], forms: Mapping[str, tuple[Any, ...]], *shared: Any
) -> list[Variant]:
    """Name -> the arguments after those that all forms share."""
    return [variant(title + name, launcher, *shared, *form) for name, form in forms.items()]


def _amax(M: int, K: int) -> list[Variant]:
    """The variants that the recipes launch on a bfloat16 matrix."""
    x = meta(M, K)
    lines = {", rows and columns": (True, True), ", columns": (False, True)}
    return [
        variant("amax", amax.partial_amaxes, x),
        *_forms("amax", amax.line_amaxes, lines, x),
    ]


def _blockwise_mm(M: int, K: int) -> list[Variant]:
    """Every tile with the pairs of blocks that the recipe multiplies, and other forms once."""
    forms = [(tile, *rows, E4M3, BF16) for tile in GEMM_TILES for rows in ((1, 128), (1, 1))]
    forms += [
        (GEMM_TILES[0], 128, 1, E4M3, BF16),
        (GEMM_TILES[0], 1, 128, E5M2, BF16),
        (GEMM_TILES[0], 1, 128, E4M3, F32),
    ]
    return [_blockwise_mm_variant(*form, M, K) for form in forms]


def _blockwise_mm_variant(
    tile: Tile, a_rows: int, b_rows: int, a_dtype: torch.dtype, out_dtype: torch.dtype,
    M: int, K: int,
) -> Variant:  # fmt: skip
    """With scales as `cast` and cuBLASLt have them; a bias where float32 is written."""
    N, blocks = 4096, ceil_div(K, 128)

    def scales(lines: int, rows: int) -> Tensor:
        if rows == 1:
            return meta(blocks, lines, dtype=F32).t()
        return meta(ceil_div(lines, rows), blocks, dtype=F32)

    a, b = meta(M, K, dtype=a_dtype), meta(N, K, dtype=E4M3)
    bias = meta(N) if out_dtype == F32 else None
    formats = {E4M3: "e4m3", E5M2: "e5m2", BF16: "bf16", F32: "fp32"}
    return variant(
        f"blockwise_mm {tile.M}x{tile.N}, {a_rows}x128 by {b_rows}x128, "
        f"{formats[a_dtype]} to {formats[out_dtype]}",
        blockwise_mm._launch, a, scales(M, a_rows), b, scales(N, b_rows), a_rows, b_rows, bias,
        out_dtype, tile,
    )  # fmt: skip


def _cast(M: int, K: int) -> list[Variant]:
    """The forms that the recipes launch on bfloat16, and enough others to see each flag."""
    x, long = meta(M, K), meta(M, 2 * cast.LONGEST_ROW)
    scale = meta(1, 1, dtype=F32)
    exact, rounded = definition.FLOAT32, definition.scale_format_of(True)
    up, down = definition.E8M0, definition.E8M0_FLOOR
    both, by_rows, by_columns = (True, True), (True, False), (False, True)
    forms: dict[str, tuple[Any, ...]] = {
        "cast, e4m3, rows and columns": (x, None, TENSOR, E4M3, exact, False, *both),
        "cast, e5m2, rows and columns": (x, None, TENSOR, E5M2, exact, False, *both),
        "cast, e4m3, rows": (x, None, TENSOR, E4M3, exact, False, *by_rows),
        f"{_GIVEN}, e4m3, rows and columns": (x, scale, TENSOR, E4M3, exact, False, *both),
        f"{_GIVEN}, e5m2, rows and columns, amax": (
            x, scale, TENSOR, E5M2, exact, False, *both, True,
        ),
        f"{_GIVEN}, e4m3, columns": (x, scale, TENSOR, E4M3, exact, False, *by_columns),
        **{
            f"cast_blockwise, e4m3, {block_name(block)}, {name}": (
                x, None, block, E4M3, rounded, False, *wanted,
            )
            for block, name, wanted in (
                (BY_128, "rows and columns", both),
                (BY_128, "rows", by_rows),
                (SQUARE_128, "rows and columns", both),
                (SQUARE_128, "columns", by_columns),
            )
        },
        "cast_mx, e4m3, rows and columns": (x, None, BY_32, E4M3, up, True, *both),
        "cast_mx, e4m3, rows": (x, None, BY_32, E4M3, up, True, *by_rows),
        "cast_mx, e4m3, columns": (x, None, BY_32, E4M3, up, True, *by_columns),
        "cast_mx, e4m3, rows and columns, floor": (x, None, BY_32, E4M3, down, True, *both),
        "cast_mx, e4m3, 32x32, rows and columns": (x, None, SQUARE_32, E4M3, up, True, *both),
        "cast_mx, e4m3, 32x32, rows": (x, None, SQUARE_32, E4M3, up, True, *by_rows),
        "cast_mx, e4m3, 32x32, columns": (x, None, SQUARE_32, E4M3, up, True, *by_columns),
        "cast_mx, e4m3, rows, plain scales": (x, None, BY_32, E4M3, up, False, *by_rows),
        "cast_rowwise, e4m3, rows": (x, None, ROW, E4M3, rounded, False, *by_rows),
        "cast_rowwise, e4m3, rows in chunks": (long, None, ROW, E4M3, rounded, False, *by_rows),
        "cast_rowwise, e4m3, rows and columns": (x, None, ROW, E4M3, rounded, False, *both),
        "cast_rowwise, e4m3, columns": (x, None, ROW, E4M3, rounded, False, *by_columns),
    }  # fmt: skip
    return _forms("", cast._launch, forms)


_GIVEN = "cast by a given scale"


def _cast_tokens(M: int, K: int) -> list[Variant]:
    """The forms that the recipes launch on bfloat16."""
    x, offs, scale = meta(M, K), meta(64, dtype=torch.int32), meta(1, 1, dtype=F32)
    exact, rounded, e8m0 = definition.FLOAT32, definition.scale_format_of(True), definition.E8M0
    forms: dict[str, tuple[Any, ...]] = {
        "cast_tokens, e4m3, tensor": (TENSOR, E4M3, exact, None, 16, True, True),
        "cast_tokens, e5m2, tensor": (TENSOR, E5M2, exact, None, 16, True, True),
        "cast_tokens, e4m3, tensor, rows": (TENSOR, E4M3, exact, None, 16, True, False),
        "cast_tokens, e4m3, given scale": (TENSOR, E4M3, exact, scale, 16, True, True),
        "cast_tokens, e4m3, 1 x K": (ROW, E4M3, rounded, None, 16, True, True),
        "cast_tokens, e4m3, 1 x K, columns": (ROW, E4M3, rounded, None, 16, False, True),
        "cast_tokens, e4m3, 1 x 128": (BY_128, E4M3, rounded, None, 16, True, True),
        "cast_tokens, e4m3, 1 x 128, columns": (BY_128, E4M3, rounded, None, 16, False, True),
        "cast_tokens, e4m3, 1 x K, as mx": (ROW, E4M3, rounded, None, 128, True, True),
        "cast_tokens, e4m3, 1 x K, columns, as mx": (ROW, E4M3, rounded, None, 128, False, True),
        "cast_tokens, e4m3, 1 x 128, as mx": (BY_128, E4M3, rounded, None, 128, True, True),
        "cast_tokens, e4m3, 1 x 128, columns, as mx": (
            BY_128,
            E4M3,
            rounded,
            None,
            128,
            False,
            True,
        ),
        "cast_tokens_mx, e4m3, both": (BY_32, E4M3, e8m0, None, 128, True, True),
        "cast_tokens_mx, e4m3, rows": (BY_32, E4M3, e8m0, None, 128, True, False),
        "cast_tokens_mx, e4m3, columns": (BY_32, E4M3, e8m0, None, 128, False, True),
    }
    return [
        variant("cast_tokens, amaxes", amax.line_amaxes, x, True, True, offs),
        *_forms("", cast_tokens._launch, forms, x, offs),
    ]


def _dequantize_groups(M: int, K: int) -> list[Variant]:
    """The form that restores a copy of `saved_activations`."""
    scale = meta(ceil_div(K, 128), M, dtype=torch.uint8).t()
    launch = dequantize_groups._launch
    return [variant("dequantize_groups", launch, meta(M, K, dtype=E4M3), scale, 128, BF16)]


def _expand_scales(M: int, K: int) -> list[Variant]:
    """Of a matrix, whatever its blocks are, and of tokens of 32 groups in both orientations."""
    offs, by_128 = meta(32, dtype=torch.int32), meta(ceil_div(K, 128), M, dtype=F32).t()
    forms: dict[str, tuple[Any, ...]] = {
        "expand_scales": (by_128, BY_128, M, K),
        "expand_scales, groups of rows": (by_128, BY_128, M, K, offs),
        "expand_scales, groups of columns": (meta(32, M, dtype=F32), ROW, M, K, offs, True),
    }
    return _forms("", expand_scales._launch, forms)


def _grouped_mm(M: int, K: int) -> list[Variant]:
    """Each product in its largest tiles, and blockwise ones in that of 4 warps."""
    forms: list[tuple[Tile, bool, tuple[Block, Block], torch.dtype, bool]] = []
    for by_tokens, pair in ((False, (BY_128, SQUARE_128)), (True, (BY_128, BY_128))):
        forms += [(tile, by_tokens, pair, E4M3, False) for tile in GEMM_TILES[:2]]
        forms += [(GEMM_TILES[0], by_tokens, (TENSOR, TENSOR), E5M2, False)]
        forms += [(GEMM_TILES[0], by_tokens, (ROW, ROW), E4M3, False)]
    for tile in (grouped_mm.WIDE, GEMM_TILES[0]):
        forms += [(tile, False, (TENSOR, TENSOR), E4M3, True)]
        for by_tokens in (False, True):
            forms += [(tile, by_tokens, (TENSOR, TENSOR), E5M2, True)]
            forms += [(tile, by_tokens, (ROW, ROW), E4M3, True)]
    return [_grouped_mm_variant(*form, M, K) for form in forms]


def _grouped_mm_variant(
    tile: Tile, by_tokens: bool, pair: tuple[Block, Block], a_dtype: torch.dtype, fast: bool,
    M: int, K: int,
) -> Variant:  # fmt: skip
    """M tokens of 32 experts with weights (4096, K), and scales in the layouts of the casts."""
    N, E = 4096, 32
    shapes = ((N, M), (K, M)) if by_tokens else ((M, K), (N, K))
    a, b = (meta(*s, dtype=dtype) for s, dtype in zip(shapes, (a_dtype, E4M3), strict=True))
    scales = []
    for x, block in zip((a, b), pair, strict=True):
        rows, columns = scale_shape(x.shape, block)
        if by_tokens and block == ROW:
            scales.append(meta(E, x.shape[0], dtype=F32))
        elif block == BY_128:
            scales.append(meta(columns + E * by_tokens, rows, dtype=F32).t())
        else:
            of_experts = (E,) if x is b and not by_tokens else ()
            scales.append(meta(*of_experts, rows, columns, dtype=F32))
    if not by_tokens:
        b = meta(E, N, K, dtype=E4M3)
    kind = "tokens" if by_tokens else "experts"
    names = " by ".join(block_name(block) for block in pair)
    format = "e4m3" if a_dtype == E4M3 else "e5m2"
    return variant(
        f"grouped_mm by {kind} {tile.M}x{tile.N}, {names}, {format}{', fast' * fast}",
        grouped_mm._launch, a, scales[0], b, scales[1], meta(E, dtype=torch.int32), *pair, BF16, 16,
        fast, tile,
    )  # fmt: skip


def _norm_cast(M: int, K: int) -> list[Variant]:
    """The variants that the recipes launch on bfloat16."""
    x, weight = meta(M, K), meta(K)
    statistic, scale = meta(M, 1, dtype=F32), meta(1, 1, dtype=F32)
    cast_to = BF16, E4M3, False
    statistics, launch = norm_cast._statistics, norm_cast._launch
    forms = []
    for op, bias in (("rms_norm_cast", None), ("layer_norm_cast", weight)):
        norm = weight, bias, 1e-5
        known = (x, *norm, None if bias is None else statistic, statistic, BF16)
        whole = (x, *norm, bias is not None, scale, *cast_to)
        sums = {"statistics and amax": (True,), "statistics": (False,)}
        given = f"{op}: a given scale"
        forms += [
            *_forms(f"{op}: ", statistics, sums, *known),
            variant(op, launch, *whole[:5], None, *cast_to, True),
            variant(f"{given}, amax", launch, *whole, True, True),
            variant(f"{given}, not transposed", launch, *whole, False),
        ]
    return forms


def _optimizer_step(M: int, K: int) -> list[Variant]:
    """Variants for bfloat16, float32, CUDA graphs, masters, and rows that groups do not divide."""
    forms: list[tuple[str, torch.dtype, dict[str, Any]]] = [
        ("bf16, e4m3, expanded e4m3", BF16, {"random": "v"}),  # AdamW's defaults
        ("the same, to nearest", BF16, {}),
        ("fp32, e4m3, fp16", F32, {"v": F16}),
        ("bf16 all at random, captured", BF16, {"random": "pmv", "captured": True}),
        ("bf16, ragged groups", BF16, {"random": "v", "ragged": True}),
        ("master", F16, {"g": BF16, "master": True, "random": "pv"}),
        ("fp16, gradient in e4m3", F16, {"g": E4M3, "v": F16, "random": "p"}),  # MS-AMP's O2
        ("fp32 lion", F32, {"rule": "lion", "random": "m"}),
        ("bf16 direction of muon", BF16, {"rule": "muon_direction", "random": "m"}),
        ("bf16 move of muon", BF16, {"rule": "muon_move"}),
    ]
    return [_optimizer_step_variant(name, (M, K), dtype, **form) for name, dtype, form in forms]


def _optimizer_step_variant(
    name: str, shape: tuple[int, int], p_dtype: torch.dtype, *, g: torch.dtype | None = None,
    v: torch.dtype = E4M3, master: bool = False, rule: str = "adamw",
    ragged: bool = False, captured: bool = False, random: str = "",
) -> Variant:  # fmt: skip
    M, K = shape
    C = K - 2 if ragged else K

    def state(dtype: torch.dtype, has_exponent: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        scale = meta(M, ceil_div(C, 128), dtype=F32)
        return meta(M, C, dtype=dtype), scale, scale if has_exponent else None

    numbers = {
        "adamw": [1e-3, 0.9, 0.999, 1e-8, 0.1, 1.0, 0.0],
        "lion": [1e-4, 0.9, 0.99, 0.1, 0.0],
        "muon_direction": [0.95, 1.0, 0.0, 0.0, 0.0],
        "muon_move": [0.02, 1.0, 0.1, 0.0],
    }[rule]
    number = meta(dtype=F32) if captured else None
    p, p_scale, _ = state(p_dtype, False)
    none = (None, None, None)
    first = none if rule == "muon_move" else state(E4M3, False)
    second = state(v, v.itemsize == 1) if rule == "adamw" else none
    return variant(
        f"optimizer_step: {name}", optimizer_step._launch, rule, numbers, number,
        0.0 if captured else 7.0, number, p, p_scale if master else None,
        meta(M, C, dtype=g or p_dtype), meta(dtype=F32) if g == E4M3 else None,
        *first, *second, 128,
        [x in random for x in "pmv"], 7, 7, number, number,
        meta(dtype=F32) if master else None,
    )  # fmt: skip


def _swiglu_cast(M: int, K: int) -> list[Variant]:
    """The forms that the recipes launch on bfloat16."""
    y, scale = meta(M, K), meta(1, 1, dtype=F32)
    forms = {
        "tiles": (None, E4M3, False),
        "a given scale, amax": (scale, E4M3, False, True),
        "a given scale": (scale, E4M3, False),
    }
    return [
        variant("swiglu_cast: amax", swiglu_cast._partial_amaxes, y, y),
        *_forms("swiglu_cast: ", swiglu_cast._launch, forms, y, y),
    ]


def _swiglu_gradients(M: int, K: int) -> list[Variant]:
    """Of one layer's output and of two, by scales that are given or computed."""
    y, scale = meta(M, K), meta(1, 1, dtype=F32)
    forms = {
        f"{'one layer' if joined else 'two layers'}, {name}": (
            *scales,
            E4M3,
            E5M2,
            False,
            joined,
            *wanted,
        )
        for joined in (True, False)
        for name, scales, wanted in (
            ("tiles", (None, None), (True, True, False)),
            ("given scales, amaxes", (scale, scale), (True, True, True)),
            ("given scales, rows", (scale, scale), (False, False, False)),
        )
    }
    codes, groups = meta(M, K, dtype=E4M3), (meta(M, ceil_div(K, 128), dtype=F32),) * 2
    copies = {
        f"{name}, of copies": (*form, *groups) for name, form in forms.items() if "rows" not in name
    }
    amaxes, launch = swiglu_gradients._partial_amaxes, swiglu_gradients._launch
    return [
        variant("swiglu_gradients: amaxes", amaxes, y, y, y),
        variant("swiglu_gradients: amaxes, of copies", amaxes, y, codes, codes, *groups),
        *_forms("swiglu_gradients: ", launch, forms, y, y, y, scale),
        *_forms("swiglu_gradients: ", launch, copies, y, codes, codes, scale),
    ]


def _transpose(M: int, K: int) -> list[Variant]:
    """The form that the recipes launch."""
    return [variant("transpose", transpose._launch, meta(M, K, dtype=E4M3))]


# op of `float8/kernels/gpu/`, or its first pass -> its forms, for matrices (M, K)
SHIPPED: dict[str, Callable[[int, int], list[Variant]]] = {
    function.__name__[1:]: function
    for function in (
        _amax, _blockwise_mm, _cast, _cast_tokens, _dequantize_groups, _expand_scales,
        _grouped_mm, _norm_cast, _optimizer_step, _swiglu_cast, _swiglu_gradients, _transpose,
    )
}  # fmt: skip
FILES = tuple(SHIPPED)


def variants(files: Sequence[str] = FILES, M: int = 4096, K: int = 4096) -> list[Variant]:
    """The shipped forms for matrices (M, K), in the order of ``float8/kernels/gpu/``."""
    return [form for name in files for form in SHIPPED[name](M, K)]
