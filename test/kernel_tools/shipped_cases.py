"""Cases that together execute every compiled form that `scripts/kernel_tools/shipped.py` lists.

What Triton compiles in decides the sizes. Sizes and strides of a shipped form are multiples of 16,
the number of experts too, and its number of partial amaxes is the most that a pass has programs
for. So the tall matrices have more tiles than that, and each program of the pass reads several. A
square block's scales have a stride of 16 blocks, which is why contractions are 1936 long.

``scripts.kernel_tools run`` runs all of them, and names the forms that none executed.
"""

from __future__ import annotations

from typing import Any

import torch
from assertions import assert_bitwise
from interpreter import launcher
from kernels.gpu import (
    test_blockwise_mm,
    test_cast_tokens,
    test_casts,
    test_dequantize_groups,
    test_expand_scales,
    test_grouped_mm,
    test_norm_cast,
    test_optimizer_step,
    test_swiglu_cast,
    test_swiglu_gradients,
    test_transpose,
)
from shapes import Case
from torch import Tensor

from float8.granularity import scale_shape
from float8.kernels import definition
from float8.kernels.gpu import grouped_mm
from float8.kernels.update_rules import AdamWRule

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
F32, BF16 = torch.float32, torch.bfloat16
BOTH, ROWS, COLS = (True, True), (True, False), (False, True)
NEAREST, SECOND_AT_RANDOM = (False, False, False), (False, False, True)

# Rows that give an amax pass more tiles than programs.
TALL = 64 * 513 + 16  # 512 programs, tiles of 64 rows
TALL_GATES = 16 * 1025 + 16  # 1024 programs, tiles of 16 rows
TALL_NORM = 4 * 1025 + 12  # 1024 programs, or 512 twice, tiles of 4 rows
STEPS = 1936  # the contraction of a GEMM: 16 blocks, the last one ragged

# Tokens of 64 groups: empty ones, one of several tiles, sizes that are no multiple of anything.
GROUPS_OF_64 = [(5, 0, 33, 130, 1, 16, 64, 7)[i % 8] * (i < 24) for i in range(64)]


def cast(
    name: str, wanted: tuple[bool, bool], dtype: torch.dtype = E4M3, shape: Any = (80, 272),
    rounding: int = 1, finds_amax: bool = False,
) -> None:  # fmt: skip
    """Of special values too."""
    case = Case(shape, BF16, 9, "wide", specials=("nan", "tiny", "zero"))
    scale_format = test_casts.KINDS[name].scale_formats[rounding]
    arguments = (dtype, scale_format, wanted, "cpu", case, finds_amax)
    test_casts.check(name, case.make(), *arguments)


def cast_dynamic(dtype: torch.dtype, wanted: tuple[bool, bool]) -> None:
    x = Case((TALL, 16), BF16, fill="wide").make()
    x[-1, -1] = 77.0  # the largest, in the last tile
    arguments = (dtype, definition.FLOAT32, wanted, "cpu", "tall", False)
    test_casts.check("dynamic", x, *arguments)


def cast_tokens(
    block: tuple[int, int],
    dtype: torch.dtype,
    wanted: tuple[bool, bool],
    scale: float | None = None,
    align: int | None = None,
) -> None:
    """By 64 experts; where the amax of all is computed, of so many tokens that a pass is full."""
    sizes, is_amax = list(GROUPS_OF_64), block == test_cast_tokens.TENSOR and scale is None
    if is_amax:
        sizes[-1] = TALL
    rest = -sum(sizes) % 16 + 16
    x, offs = test_cast_tokens.tokens(sizes, rest, 16 if is_amax else 144, dtype=BF16, fill="wide")
    given = None if scale is None else torch.tensor([[scale]])
    formats = {test_cast_tokens.TENSOR: definition.FLOAT32, test_cast_tokens.MX: definition.E8M0}
    scale_format = formats.get(block, definition.scale_format_of(True))
    rest = ("cpu", block, given, align)
    test_cast_tokens.check(x, offs, block, dtype, scale_format, wanted, *rest)


def norm_cast(norm: str, form: str, finds_amax: bool, cols: bool = True) -> None:
    shape, dtypes = (TALL_NORM, 48), (BF16,) * 3
    rest = ("contiguous", "normal", E4M3, False, cols, finds_amax)
    test_norm_cast.check_form(shape, norm, form, "cpu", dtypes, *rest)


def gradients(joined: bool, given: bool, wanted: tuple[bool, bool, bool], copies: bool) -> None:
    shape = (80, 272) if given else (TALL_GATES, 16)
    how = (shape, BF16, "contiguous", joined, given, "cpu")
    test_swiglu_gradients.check(*how, (E4M3, E5M2), False, *wanted, copies)


def optimizer_step(
    rule: Any, dtype: Any, v_kind: str | None, at_random: tuple[bool, bool, bool],
    shape: tuple[int, int] = (48, 256), captured: bool = False,
) -> None:  # fmt: skip
    m_kind = None if rule == "muon's move" else "e4m3"
    tensors = test_optimizer_step.operands(shape, 128, dtype, m_kind, v_kind)
    options: dict[str, Any] = {"at_random": at_random, "seed": 7, "first": 7}
    options["amax"] = torch.zeros(1) if dtype == "master" else None
    if captured:
        options |= {"lr": torch.tensor(1e-2), "step_tensor": torch.tensor(3.0)}
        options |= {"grad_scale": torch.tensor([4.0]), "found_inf": torch.tensor([0.0])}
    found, expected = test_optimizer_step.both(rule, tensors, 128, "cpu", **options)
    replay = (rule, dtype, v_kind, at_random, shape)
    test_optimizer_step.assert_same_step(found, expected, [*tensors, options["amax"]], replay)


def blockwise_mm(tile: Any, rows: tuple[int, int], formats: Any, out_dtype: torch.dtype) -> None:
    """Random operands to twice the definition's error; small integers to its bits."""
    shape = (M, K, N) = (144, 272 if rows == (1, 1) else STEPS, 144)
    blocks = test_blockwise_mm.BLOCKS[rows]
    bias = Case((N,), BF16, seed=3).make() if out_dtype == F32 else None
    exact = []
    for size, block, dtype in zip((M, N), blocks, formats, strict=True):
        exact += [_integers((size, K), dtype), _powers(scale_shape((size, K), block))]
    for parts in (test_blockwise_mm.operands(shape, rows, formats), exact):
        for i, block in ((1, blocks[0]), (3, blocks[1])):
            if block[0] == 1:  # as casts write them
                parts[i] = parts[i].t().contiguous().t()
        run = launcher("blockwise_mm", "_launch", "cpu")
        found = run(*parts, *rows, bias, out_dtype, tile=tile)
        if parts is exact:
            expected = definition.scaled_mm(*parts, *blocks, bias, F32).to(out_dtype)
            assert_bitwise(found, expected, (tile, rows, formats))
        elif bias is None:
            test_blockwise_mm.check(found, parts, rows, (tile, rows, formats))


def _integers(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randint(-8, 9, shape).float().to(dtype)


def _powers(shape: tuple[int, ...]) -> Tensor:
    """Scales so near to 1 that sums of 2000 products of `_integers` need 24 bits at most."""
    return torch.randint(-1, 2, shape).float().exp2()


def grouped(tile: Any, by: str, blocks: str, formats: Any, fast: bool = False) -> None:
    """Of 32 experts, as `blockwise_mm`; the sign of a sum of zeros is not compared."""
    sizes = [5, 0, 33, 130, 1, 16, 7, *[0] * 24, 9]
    spare = -sum(sizes) % 16 + 16
    build = {"experts": test_grouped_mm.by_experts, "tokens": test_grouped_mm.by_tokens}[by]
    K = STEPS if "128x128" in blocks else 144
    shape = (K, 144) if by == "experts" else (144, 144)
    for make in (test_grouped_mm.quantized, _exact):
        pair = test_grouped_mm.BLOCKS[blocks]
        product = build(sizes, *shape, pair, formats, spare, make)
        found = product.multiply("cpu", BF16, tile=tile, use_fast_accum=fast)
        if make is _exact:
            groups = [definition.scaled_mm(*parts, *pair, None, F32) for parts in product.groups]
            expected = (torch.stack if by == "tokens" else torch.cat)(groups).to(BF16)
            assert_bitwise(found[: len(expected)] + 0, expected + 0, (tile, by, blocks))
        else:
            product.check(found, (tile, by, blocks))


def _exact(
    shape: tuple[int, int], block: tuple[int, int], dtype: torch.dtype, seed: int
) -> tuple[Tensor, Tensor]:
    return _integers(shape, dtype), _powers(scale_shape(shape, block))


TILES = GROUPED_TILES = test_blockwise_mm.module.GEMM_TILES
SAME, MIXED = (E4M3, E4M3), (E5M2, E4M3)
ADAMW = (AdamWRule(1e-3, 0.9, 0.999, 1e-8, 0.1), 7.0)
TENSOR, ROW, BY_128 = test_cast_tokens.TENSOR, test_cast_tokens.ROW, test_cast_tokens.BY_128
NORMS = ("rms, weight", "layer, weight and bias")

# file of `float8/kernels/gpu/` -> cases: a function and its arguments. The suite runs the first.
CASES: dict[str, list[tuple[Any, tuple[Any, ...]]]] = {
    "amax": [
        (cast, ("rowwise", COLS)),
        (cast, ("rowwise", BOTH)),
        (cast_dynamic, (E4M3, ROWS)),
    ],
    "blockwise_mm": [
        (blockwise_mm, (TILES[-1], (1, 1), SAME, BF16)),
        *((blockwise_mm, (tile, (1, 1), SAME, BF16)) for tile in TILES[:-1]),
        *((blockwise_mm, (tile, (1, 128), SAME, BF16)) for tile in TILES),
        (blockwise_mm, (TILES[0], (128, 1), SAME, BF16)),
        (blockwise_mm, (TILES[0], (1, 128), MIXED, BF16)),
        (blockwise_mm, (TILES[0], (1, 128), SAME, F32)),
    ],
    "cast": [
        (cast, ("given", COLS)),
        (cast, ("given", BOTH)),
        (cast, ("given", BOTH, E5M2, (80, 272), 0, True)),
        (cast_dynamic, (E4M3, BOTH)),
        (cast_dynamic, (E5M2, BOTH)),
        (cast_dynamic, (E4M3, ROWS)),
        (cast, ("1x128", ROWS)),
        (cast, ("1x128", BOTH)),
        (cast, ("128x128", BOTH)),
        (cast, ("128x128", COLS)),
        *(
            (cast, (f"mx, {kind}swizzled", wanted, E4M3, (80, 144), 0))
            for kind in ("", "32x32, ")
            for wanted in (COLS, ROWS, BOTH)
        ),
        (cast, ("mx, swizzled", BOTH, E4M3, (80, 144), 1)),
        (cast, ("mx", ROWS, E4M3, (80, 144), 0)),
        (cast, ("rowwise", ROWS, E4M3, (16, 2064))),  # a program holds a row of 4096 elements
        (cast, ("rowwise", ROWS, E4M3, (16, 16400))),  # rows longer than a program holds
        (cast, ("rowwise", BOTH)),
        (cast, ("rowwise", COLS)),
    ],
    "cast_tokens": [
        (cast_tokens, (BY_128, E4M3, COLS)),
        (cast_tokens, (BY_128, E4M3, BOTH)),
        (cast_tokens, (ROW, E4M3, BOTH)),
        (cast_tokens, (ROW, E4M3, COLS)),
        (cast_tokens, (TENSOR, E4M3, BOTH, 0.37)),
        (cast_tokens, (TENSOR, E4M3, BOTH)),
        (cast_tokens, (TENSOR, E5M2, BOTH)),
        (cast_tokens, (TENSOR, E4M3, ROWS)),
        *(
            (cast_tokens, (block, E4M3, wanted, None, 128))
            for block in (ROW, BY_128)
            for wanted in (COLS, BOTH)
        ),
        *((cast_tokens, (test_cast_tokens.MX, E4M3, wanted)) for wanted in (COLS, ROWS, BOTH)),
    ],
    "expand_scales": [
        (test_expand_scales.check, ((130, 1264), BY_128, "cpu", True)),
        *(
            (test_expand_scales.check_groups, ((GROUPS_OF_64[:32], 7), 144, ROW, by_columns, "cpu"))
            for by_columns in (False, True)
        ),
    ],
    "grouped_mm": [
        *(
            (grouped, (tile, by, blocks, formats, True))
            for tile in (grouped_mm.WIDE, GROUPED_TILES[0])
            for by, blocks, formats in (
                ("experts", "rowwise", SAME),
                ("experts", "tensorwise", SAME),
                ("experts", "tensorwise", MIXED),
                ("tokens", "rowwise", SAME),
                ("tokens", "tensorwise", MIXED),
            )
        ),
        (grouped, (GROUPED_TILES[0], "experts", "rowwise", SAME)),
        (grouped, (GROUPED_TILES[0], "experts", "tensorwise", MIXED)),
        (grouped, (GROUPED_TILES[0], "experts", "1x128 by 128x128", SAME)),
        (grouped, (GROUPED_TILES[1], "experts", "1x128 by 128x128", SAME)),
        (grouped, (GROUPED_TILES[0], "tokens", "1x128", SAME)),
        (grouped, (GROUPED_TILES[1], "tokens", "1x128", SAME)),
        (grouped, (GROUPED_TILES[0], "tokens", "rowwise", SAME)),
        (grouped, (GROUPED_TILES[0], "tokens", "tensorwise", MIXED)),
    ],
    "norm_cast": [
        *((norm_cast, (norm, "given", False, False)) for norm in NORMS),
        *((norm_cast, (norm, "given", True)) for norm in NORMS),
        *((norm_cast, (norm, "dynamic", False)) for norm in NORMS),
    ],
    "optimizer_step": [
        (optimizer_step, ("lion", F32, None, (False, True, False))),
        (optimizer_step, ("muon", BF16, None, (False, True, False))),
        (optimizer_step, ("muon's move", BF16, None, NEAREST)),
        (optimizer_step, ("adamw", BF16, "expanded", SECOND_AT_RANDOM)),
        (optimizer_step, ("adamw", BF16, "expanded", NEAREST)),
        (optimizer_step, ("adamw", F32, "float16", NEAREST)),
        (optimizer_step, (ADAMW, BF16, "expanded", (True, True, True), (48, 256), True)),
        (optimizer_step, ("adamw", BF16, "expanded", SECOND_AT_RANDOM, (48, 304))),
        (optimizer_step, ("adamw", "master", "expanded", (True, False, True))),
        (optimizer_step, ("adamw", "e4m3", "float16", (True, False, False))),
    ],
    "swiglu_cast": [
        (test_swiglu_cast.check, ((80, 272), BF16, 0.037, "contiguous", "cpu")),
        *(
            (test_swiglu_cast.check, (shape, BF16, scale, "contiguous", "cpu", E4M3, False, False))
            for shape, scale in (((TALL_GATES, 16), None), ((80, 272), 0.037))
        ),
    ],
    "swiglu_gradients": [
        (gradients, (joined, given, wanted, copies))
        for joined in (True, False)
        for given, wanted, copies in (
            (False, (True, True, False), False),
            (True, (True, True, True), False),
            (True, (False, False, False), False),
            (False, (True, True, False), True),
            (True, (True, True, True), True),
        )
    ],
    "dequantize_groups": [
        (test_dequantize_groups.test_every_code, ((80, 272), E4M3, BF16, "columns", "cpu"))
    ],
    "transpose": [(test_transpose.test_every_byte, ((80, 272), "contiguous", "cpu"))],
}
