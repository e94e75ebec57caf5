"""Grouped GEMMs in the cost model: their operations, bytes and padding, counted again by hand."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import float8
from float8.config import RECIPES, Float8LinearConfig, GemmConfig
from float8.estimate import estimate
from float8.estimate.devices import ANY_PASS, BF16, DEVICES
from float8.estimate.roofline import (
    Shape,
    Use,
    cast_seconds,
    gemm_bytes,
    gemm_seconds,
    layer_seconds,
    saved_bytes,
    sums_fast,
)
from float8.kernels.grouped_products import GROUPED_CANDIDATES, multiply_groups
from float8.kernels.products import Candidate
from float8.linear.plan import LinearPlan, plan_for

MEASURED = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "h100_2026-11-27"
H100 = DEVICES["H100"]
# Every pass at 83 % of the bandwidth, so that it can be computed by hand.
B200 = replace(DEVICES["B200"], passes={ANY_PASS: DEVICES["B200"].passes[ANY_PASS]})
QWEN3 = Shape(4096 * 8, 2048, 1536, 128)  # Qwen3-30B-A3B's gate and up: 4096 tokens, 8 experts each


def planned(config: Float8LinearConfig, arch: str = "sm_90") -> LinearPlan:
    return plan_for(config, arch, torch.bfloat16, grouped=True)


@pytest.mark.parametrize("multiple", [1, 16, 32, 128])
@pytest.mark.parametrize(("tokens", "experts"), [(40, 8), (800, 8), (4096, 8), (12800, 128)])
def test_padding_is_the_mean_over_all_sizes_of_a_group(tokens, experts, multiple):
    sizes = range(2 * tokens // experts + 1)
    padded = [-(-size // multiple) * multiple - size for size in sizes]
    expected = experts * sum(padded) / len(padded)
    assert Shape(tokens, 1, 1, experts).padding(multiple) == pytest.approx(expected)


# kind -> the dense rate, and the parts of it by groups of 512 and of 4,096 tokens, for products of
# tokens by experts and of tokens by tokens
BY_HAND = {
    BF16: (989.4e12 * 0.803, (0.97, 0.92), (0.97, 0.92)),
    "rowwise": (1978.9e12 * 0.709 * 0.99, (0.57, 0.76), (0.35, 0.75)),
    "rowwise fast": (1978.9e12 * 0.709 * 0.99, (0.90, 1.05), (0.70, 0.95)),
}


@pytest.mark.parametrize("kind", BY_HAND)
@pytest.mark.parametrize(
    ("tokens", "K", "N", "E"),
    [(2**17, 4096, 4096, 8), (2**13, 1024, 4096, 8), (4096, 2048, 1536, 128), (64, 512, 512, 8)],
)
def test_grouped_gemms_by_hand(kind, tokens, K, N, E):
    """On an H100: 2 us to fill and drain, 2 us a launch, 3.35 TB/s at 92 %, results last."""
    shape, own, operand = Shape(tokens, K, N, E), kind.split()[0], 2 if kind == BF16 else 1
    x, w, g = tokens * K, E * K * N, tokens * N
    peak, of_experts, of_tokens = BY_HAND[kind]
    for name, read, written, parts in (
        ("output", x + w, g, of_experts), ("grad_input", g + w, x, of_experts),
        ("grad_weight", g + x, w, of_tokens),
    ):  # fmt: skip
        per_flop = np.interp(E / tokens, [1 / 4096, 1 / 512], [1 / parts[1], 1 / parts[0]]) / peak
        computing = 2 * (tokens + shape.padding(128)) * K * N * per_flop + 2e-6
        moved = operand * read + 2 * written
        assert gemm_bytes(own, shape, name) == moved
        moving = moved / 3.35e12 / 0.92
        expected = max(computing + 2 * written / 3.35e12 / 0.92, moving) + 2 * 2e-6
        predicted = gemm_seconds(H100, own, shape, name, kind != own)
        assert predicted == pytest.approx(expected), name


# kind -> the candidates that run its products, as gemms.txt names them, with the tiles that ship
TILES = ["(128, 128, 8, 4)", "(64, 128, 4, 3)", "(64, 64, 4, 4)"]
PRECISE = [f"triton not fast {tile}" for tile in TILES]
FAST = [f"triton fast {tile}" for tile in ["(128, 256, 8, 3)", *TILES]]
CANDIDATES = {
    "tensorwise": PRECISE,
    "tensorwise fast": FAST,
    "rowwise": [*PRECISE, "torch rowwise"],
    "rowwise fast": [*FAST, "torch rowwise fast"],
    "blockwise": [f"triton blocks {tile}" for tile in TILES],
}


@pytest.mark.parametrize("kind", CANDIDATES)
@pytest.mark.parametrize("sizes", ["65536,2048,1536,128", "32768,4096,14336,8"])
@pytest.mark.parametrize(("form", "gemm"), [("experts", "output"), ("tokens", "grad_weight")])
def test_grouped_gemms_are_as_fast_as_they_were_on_the_h100(kind, sizes, form, gemm):
    """The table of parts, against the file that it was read from: the fastest candidate."""
    text = (MEASURED / "gemms.txt").read_text()
    found = re.findall(rf"^{form} {sizes} (.+?) +([\d.]+) us", text, re.MULTILINE)
    fastest = min(float(us) for name, us in found if name in CANDIDATES[kind])
    shape = Shape(*map(int, sizes.split(",")))
    predicted = gemm_seconds(H100, kind.split()[0], shape, gemm, "fast" in kind)
    assert predicted == pytest.approx(fastest / 1e6, rel=0.015)


def test_steps_of_experts_take_as_long_as_measured():
    """Within 8 %, casts included. In both files the sums of gradients were precise."""
    precise = GemmConfig(use_fast_accum=False)
    own = {"gemm_config_grad_input": precise, "gemm_config_grad_weight": precise}
    seen = 0
    for file in ("bench_grouped_mm_mixtral.json", "bench_grouped_mm.json"):
        for row in json.loads((MEASURED / file).read_text())["rows"]:
            if row["layer"] in ("F.grouped_mm", "tensorwise", "rowwise", "blockwise"):
                config = RECIPES.get(row["layer"])
                plan = None if config is None else planned(replace(config, **own))
                shape = Shape(*(row[size] for size in "TKNE"))
                predicted = layer_seconds(H100, shape, plan, Use()).total
                assert predicted == pytest.approx(row["ms"] / 1e3, rel=0.08), row["shape"]
                seen += 1
    assert seen == 2 * 4


def test_a_product_sums_fast_where_its_config_says_so_or_few_terms_are_summed():
    shape = Shape(4096 * 8, 4096, 4112, 8)
    terms = {"output": 4096, "grad_input": 4112, "grad_weight": 4096}
    for name, count in terms.items():
        assert [sums_fast(asked, shape, name) for asked in (True, False)] == [True, False]
        assert sums_fast(None, shape, name) == (count <= 4096)
    assert not sums_fast(None, replace(shape, M=shape.M + 8), "grad_weight")


def test_each_product_has_the_time_of_its_own_sums():
    fast, precise = (GemmConfig(use_fast_accum=value) for value in (True, False))
    names = "output", "grad_input", "grad_weight"
    for chosen in names:
        own = {f"gemm_config_{name}": fast if name == chosen else precise for name in names}
        plan = planned(replace(RECIPES["rowwise"], **own))
        expected = sum(gemm_seconds(H100, "rowwise", QWEN3, n, n == chosen) for n in names)
        assert layer_seconds(H100, QWEN3, plan, Use()).gemms == pytest.approx(expected)


# recipe -> bytes per element of x and w moved by casts (FUSED of test_roofline), and launches of
# all casts
S = 1 / 32
CASTS = {
    "tensorwise": (6, 8, 2 + 3 + 2),
    "rowwise": (6, 8, 3 + 4 + 3),
    "blockwise": (4 + 2 * S, 6, 1 + 2 + 1),
    "mxfp8": (4 + 2 * S, 6 + 2 * S, 1 + 2 + 1),
    "mxfp8_2d": (4 + 2 * S, 6, 1 + 2 + 1),
}


def test_casts_of_experts_by_hand():
    shape = QWEN3
    filled = (shape.M + shape.padding(128)) / shape.M  # each group's tokens, to whole tiles
    x, w, g = shape.M * shape.K, shape.E * shape.K * shape.N, shape.M * shape.N
    for recipe, (tokens, weights, launches) in CASTS.items():
        moved = tokens * (x + g) * filled + weights * w
        expected = moved / (7.7e12 * 0.83) + launches * 2e-6
        plan = planned(RECIPES[recipe])
        assert cast_seconds(B200, shape, plan, Use()) == pytest.approx(expected), recipe


def test_saved_bytes_of_experts_by_hand():
    T, K, N, E = 4096, 512, 1024, 8
    shape = Shape(T, K, N, E)
    # A GPU reserves the most that padding to 16 (128) tokens could take: 15 (127) tokens a group.
    tokens, for_mx = T + 128, T + 1024
    expected = {
        "tensorwise": tokens * K + 4 + 4 * E,  # the scale of x, and of each expert
        "rowwise": tokens * K + 4 * K * E,
        "blockwise": tokens * K + 4 * K * (tokens // 128 + E) + 4 * E * (N // 128) * (K // 128),
        "mxfp8": for_mx * K + K * (for_mx // 32 + E),
    }
    for recipe, saved in expected.items():
        assert saved_bytes(shape, planned(RECIPES[recipe]), Use()) == saved, recipe
    assert saved_bytes(shape, None, Use()) == 2 * T * K


# --- shapes and models


@pytest.fixture
def runs_everything(monkeypatch):
    """Every GPU runs every grouped product, whatever the table of candidates says today."""
    every = Candidate("a kernel of this test", lambda *_: None, multiply_groups)
    for product in GROUPED_CANDIDATES:
        monkeypatch.setitem(GROUPED_CANDIDATES, product, (every,))


class Experts(nn.Module):
    """E experts of two stacks, (E, N, K) or (E, K, N)."""

    def __init__(self, K: int, N: int, E: int, is_transposed: bool = False):
        super().__init__()
        up, down = ((E, K, N), (E, N, K)) if is_transposed else ((E, N, K), (E, K, N))
        self.up, self.down = (nn.Parameter(torch.empty(s, device="meta")) for s in (up, down))
        self.is_transposed = is_transposed

    def forward(self, x, offs):
        raise NotImplementedError


float8.register_experts(Experts)


@pytest.mark.usefixtures("runs_everything")
def test_experts_are_shapes_of_four():
    result = estimate([(4096, 512, 1024, 8), QWEN3], device="B200", recipes="mxfp8")
    assert [str(row.shape) for row in result.rows] == ["4096,512,1024,8", "32768,2048,1536,128"]
    assert "32768,2048,1536,128" in str(result)
    large = estimate([(2**17, 8192, 8192, 8)], device="B200", recipes="mxfp8")
    assert large.rows[0].recipes["mxfp8"].speedup > 1


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("is_converted", [False, True])
def test_stacks_of_experts_are_layers_of_a_model(is_transposed, is_converted):
    model = nn.ModuleDict({"moe": Experts(64, 32, 8, is_transposed), "out": nn.Linear(64, 48)})
    if is_converted:
        float8.convert_to_float8_training(model)
    found = estimate(model, 256, experts_per_token=2)
    assert {row.layer: row.shape for row in found.rows} == {
        "moe.up": Shape(512, 64, 32, 8),
        "moe.down": Shape(512, 32, 64, 8),
        "out": Shape(256, 64, 48),
    }


@pytest.mark.usefixtures("runs_everything")
def test_the_filter_takes_experts_by_the_time_of_all_their_products():
    few, many = (float8.faster_layers("mxfp8", tokens, "B200", experts_per_token=2)
                 for tokens in (16, 2**17))  # fmt: skip
    experts = Experts(8192, 8192, 8)
    assert many(experts, "moe") and not few(experts, "moe")
    model = nn.ModuleDict({"moe": experts})
    rows = estimate(model, 16, "B200", "mxfp8", experts_per_token=2).rows
    plain, mx = sum(r.bf16_s for r in rows), sum(r.recipes["mxfp8"].seconds.total for r in rows)
    assert few.reason(experts, "moe") == f"its predicted speed-up on B200 is {plain / mx:.2f}x"


def test_what_grouped_gemms_refuse_is_not_predicted(monkeypatch):
    refuses = Candidate("a kernel", lambda *_: "has a reason of its own", multiply_groups)
    monkeypatch.setitem(GROUPED_CANDIDATES, "rowwise", (refuses,))
    (row,) = estimate([(4096, 512, 1024, 8)], recipes=["rowwise", "delayed", "mxfp8"]).rows
    assert "output: sm_90 does not run a grouped rowwise product" in row.recipes["rowwise"].refused
    assert "a kernel has a reason of its own" in row.recipes["rowwise"].refused
    assert "experts have no history of amaxes" in row.recipes["delayed"].refused
    assert "grouped mx product" in row.recipes["mxfp8"].refused
    (row,) = estimate([(4096, 520, 1024, 8)], recipes="tensorwise").rows
    assert "contraction=520 not a multiple of 16" in row.recipes["tensorwise"].refused
    assert not float8.faster_layers("rowwise", 4096)(Experts(512, 1024, 8), "moe")
