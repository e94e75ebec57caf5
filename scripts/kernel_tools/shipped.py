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
    cast_blockwise,
    cast_mx,
    cast_rowwise,
    cast_tokens,
    cast_tokens_mx,
    cast_weight,
    grouped_mm,
    norm_cast,
    optimizer_step,
    swiglu_cast,
    transpose,
)
from float8.kernels.gpu.blockwise_mm import TILES, Tile
from float8.kernels.gpu.cast_tokens import ALIGNMENT
from float8.kernels.gpu.grouped_mm import BY_128, ONE, ROW, SQUARE
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
    forms = [(tile, *rows, E4M3, BF16) for tile in TILES for rows in ((1, 128), (1, 1))]
    forms += [
        (TILES[0], 128, 1, E4M3, BF16),
        (TILES[0], 1, 128, E5M2, BF16),
        (TILES[0], 1, 128, E4M3, F32),
    ]
    return [_blockwise_mm_variant(*form, M, K) for form in forms]


def _blockwise_mm_variant(
    tile: Tile, a_rows: int, b_rows: int, a_dtype: torch.dtype, out_dtype: torch.dtype,
    M: int, K: int,
) -> Variant:  # fmt: skip
    """With scales as `cast_blockwise` and cuBLASLt have them; a bias where float32 is written."""
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
    x, scale, amax = meta(M, K), meta(1, 1, dtype=F32), meta(dtype=F32)
    dynamic = {
        "e4m3, rows and columns": (E4M3, False, True, True),
        "e5m2, rows and columns": (E5M2, False, True, True),
        "e4m3, rows": (E4M3, False, True, False),
    }
    given = {
        "e4m3, rows and columns": (E4M3, True, True),
        "e5m2, rows and columns, amax": (E5M2, True, True, amax),
        "e4m3, columns": (E4M3, False, True),
    }
    return [
        *_forms("cast, ", cast._cast_dynamic, dynamic, x),
        *_forms("cast by a given scale, ", cast._cast, given, x, scale),
    ]


def _cast_blockwise(M: int, K: int) -> list[Variant]:
    """The forms that the blockwise recipe launches on bfloat16."""
    forms: dict[str, tuple[Any, ...]] = {
        "1x128, rows and columns": (1, 128, True, True),
        "1x128, rows": (1, 128, True, False),
        "128x128, rows and columns": (128, 128, True, True),
        "128x128, columns": (128, 128, False, True),
    }
    return _forms("cast_blockwise, e4m3, ", cast_blockwise._launch, forms, meta(M, K), E4M3, True)


def _cast_mx(M: int, K: int) -> list[Variant]:
    """The forms that the recipe mxfp8 launches on bfloat16, and a cast to a Float8Tensor."""
    forms = {
        "rows and columns": (definition.E8M0, True, True, True),
        "rows": (definition.E8M0, True, True, False),
        "columns": (definition.E8M0, True, False, True),
        "rows and columns, floor": (definition.E8M0_FLOOR, True, True, True),
        "rows, plain scales": (definition.E8M0, False, True, False),
    }
    return _forms("cast_mx, e4m3, ", cast_mx._launch, forms, meta(M, K), E4M3)


def _cast_rowwise(M: int, K: int) -> list[Variant]:
    """The forms that the rowwise recipe launches on bfloat16, and rows that do not fit."""
    x, long = meta(M, K), meta(M, 2 * cast_rowwise._LONGEST_ROW)
    forms: dict[str, tuple[Any, ...]] = {
        "rows": (x, E4M3, True, True, False),
        "rows in chunks": (long, E4M3, True, True, False),
        "rows and columns": (x, E4M3, True, True, True),
        "columns": (x, E4M3, True, False, True),
    }
    return _forms("cast_rowwise, e4m3, ", cast_rowwise._launch, forms)


def _cast_tokens(M: int, K: int) -> list[Variant]:
    """The forms that the recipes launch on bfloat16."""
    x, offs, scale = meta(M, K), meta(64, dtype=torch.int32), meta(1, 1, dtype=F32)
    exact, rounded = definition.FLOAT32, definition.scale_format_of(True)
    forms: dict[str, tuple[Any, ...]] = {
        "e4m3, tensor": (ONE, E4M3, exact, None, ALIGNMENT, True, True),
        "e5m2, tensor": (ONE, E5M2, exact, None, ALIGNMENT, True, True),
        "e4m3, tensor, rows": (ONE, E4M3, exact, None, ALIGNMENT, True, False),
        "e4m3, given scale": (ONE, E4M3, exact, scale, ALIGNMENT, True, True),
        "e4m3, 1 x K": (ROW, E4M3, rounded, None, ALIGNMENT, True, True),
        "e4m3, 1 x K, columns": (ROW, E4M3, rounded, None, ALIGNMENT, False, True),
        "e4m3, 1 x 128": (BY_128, E4M3, rounded, None, ALIGNMENT, True, True),
        "e4m3, 1 x 128, columns": (BY_128, E4M3, rounded, None, ALIGNMENT, False, True),
    }
    return [
        variant("cast_tokens, amaxes", cast_tokens._line_amaxes, x, offs, True),
        *_forms("cast_tokens, ", cast_tokens._launch, forms, x, offs),
    ]


def _cast_tokens_mx(M: int, K: int) -> list[Variant]:
    """The forms that the recipe mxfp8 launches on bfloat16."""
    forms = {"both": (True, True), "rows": (True, False), "columns": (False, True)}
    return _forms(
        "cast_tokens_mx, e4m3, ", cast_tokens_mx._launch, forms, meta(M, K),
        meta(64, dtype=torch.int32), cast_tokens_mx._BLOCK, E4M3, definition.E8M0, None,
        cast_tokens_mx.ALIGNMENT,
    )  # fmt: skip


def _cast_weight(M: int, K: int) -> list[Variant]:
    """The form of a weight whose rows are whole groups."""
    master, master_scale = meta(M, K, dtype=F16), meta(M, ceil_div(K, 128), dtype=F32)
    data, scale = meta(M, K, dtype=E4M3), meta(dtype=F32)
    arguments = master, master_scale, data, scale, 128, meta(1, dtype=F32)
    return [variant("cast_weight", cast_weight._launch, *arguments)]


def _grouped_mm(M: int, K: int) -> list[Variant]:
    """Both forms of each product in the largest tile, and of blockwise ones in that of 4 warps."""
    forms: list[tuple[Tile, bool, tuple[Block, Block], torch.dtype, bool]] = []
    for by_tokens, pair in ((False, (BY_128, SQUARE)), (True, (BY_128, BY_128))):
        forms += [(tile, by_tokens, pair, E4M3, False) for tile in TILES[::2]]
        forms += [(TILES[0], by_tokens, (ONE, ONE), E5M2, False)]
        forms += [(TILES[0], by_tokens, (ROW, ROW), E4M3, False)]
    forms += [(TILES[0], False, pair, E4M3, True) for pair in ((ONE, ONE), (ROW, ROW))]
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
    amax, cast_to = meta(dtype=F32), (BF16, E4M3, False)
    statistics, launch = norm_cast._statistics, norm_cast._launch
    forms = []
    for op, bias in (("rms_norm_cast", None), ("layer_norm_cast", weight)):
        norm = norm_cast.Norm(weight, bias, 1e-5, bias is not None)
        known = (x, norm, None if bias is None else statistic, statistic, BF16)
        whole = (x, norm, scale, *cast_to)
        sums = {"statistics and amax": (True,), "statistics": (False,)}
        given = f"{op}: a given scale"
        forms += [
            *_forms(f"{op}: ", statistics, sums, *known),
            variant(f"{op}: tiles", launch, x, norm, None, *cast_to, True),
            variant(f"{given}, tiles, amax", launch, *whole, True, amax, own=False),
            variant(f"{given}, whole rows, amax", launch, *whole, True, amax, own=True),
            variant(f"{given}, whole rows, not transposed", launch, *whole, False, own=True),
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
        ("fp32 lion", F32, {"rule": "lion", "random": "m"}),
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
    }[rule]
    number = meta(dtype=F32) if captured else None
    p, p_scale, _ = state(p_dtype, False)
    second = state(v, v.itemsize == 1) if rule == "adamw" else (None, None, None)
    return variant(
        f"optimizer_step: {name}", optimizer_step._launch, rule, numbers, number,
        0.0 if captured else 7.0, number, p, p_scale if master else None,
        meta(M, C, dtype=g or p_dtype), *state(E4M3, False), *second, 128,
        [x in random for x in "pmv"], 7, 7, number, number,
        meta(dtype=F32) if master else None,
    )  # fmt: skip


def _swiglu_cast(M: int, K: int) -> list[Variant]:
    """The forms that the recipes launch on bfloat16."""
    gate, up = meta(M, K), meta(M, K)
    scale, amax = meta(1, 1, dtype=F32), meta(dtype=F32)
    cast_to = (BF16, E4M3, False)
    forms: dict[str, tuple[Any, ...]] = {
        "tiles": (None, *cast_to, True),
        "a given scale, amax": (scale, *cast_to, True, amax),
        "a given scale, not transposed": (scale, *cast_to, False),
    }
    factors = {"a given scale, factors": (scale, *cast_to, True, None, meta(1, K, dtype=F32))}
    title, launch = "swiglu_cast: ", swiglu_cast._launch
    return [
        variant(f"{title}amax", swiglu_cast._partial_amaxes, gate, up, BF16),
        *_forms(title, launch, forms, gate, up),
        variant(f"{title}amaxes of columns", swiglu_cast._launch_amaxes, gate, up, BF16),
        *_forms(title, launch, factors, gate, up),
        variant("swiglu_backward", swiglu_cast._launch_backward, gate, gate, up),
    ]


def _transpose(M: int, K: int) -> list[Variant]:
    """The form that the recipes launch."""
    return [variant("transpose", transpose._launch, meta(M, K, dtype=E4M3))]


# file of `float8/kernels/gpu/` -> its forms, for matrices (M, K)
SHIPPED: dict[str, Callable[[int, int], list[Variant]]] = {
    function.__name__[1:]: function
    for function in (
        _amax, _blockwise_mm, _cast, _cast_blockwise, _cast_mx, _cast_rowwise, _cast_tokens,
        _cast_tokens_mx, _cast_weight, _grouped_mm, _norm_cast, _optimizer_step, _swiglu_cast,
        _transpose,
    )
}  # fmt: skip
FILES = tuple(SHIPPED)


def variants(files: Sequence[str] = FILES, M: int = 4096, K: int = 4096) -> list[Variant]:
    """The shipped forms for matrices (M, K), in the order of ``float8/kernels/gpu/``."""
    return [form for name in files for form in SHIPPED[name](M, K)]
