"""Grouped GEMMs in the cost model: their operations, bytes and padding, counted again by hand."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import float8
from float8.config import RECIPES, Float8LinearConfig
from float8.estimate import estimate, roofline
from float8.estimate.devices import ANY_PASS, BF16, DEVICES
from float8.estimate.roofline import (
    Shape,
    Use,
    cast_seconds,
    gemm_bytes,
    gemm_seconds,
    saved_bytes,
)
from float8.kernels.grouped_products import GROUPED_CANDIDATES, multiply_groups
from float8.kernels.products import Candidate
from float8.linear.plan import LinearPlan, plan_for

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


@pytest.mark.parametrize(
    ("kind", "operand", "peak"),
    [(BF16, 2, 989.4e12 * 0.803), ("rowwise", 1, 1978.9e12 * 0.709 * 0.99)],
)
@pytest.mark.parametrize(
    ("tokens", "K", "N", "E"), [(2**17, 4096, 4096, 8), (4096, 2048, 1536, 128), (64, 512, 512, 8)]
)
def test_grouped_gemms_by_hand(kind, operand, peak, tokens, K, N, E):
    """On an H100: 2 us to fill and drain, 2 us a launch, 3.35 TB/s at 92 %, results last."""
    shape = Shape(tokens, K, N, E)
    x, w, g = tokens * K, E * K * N, tokens * N
    # Rowwise gradients of small groups are tensorwise ones.
    rowwise = (0.94, 0.7, 0.69) if tokens // E >= 2048 else (0.93, 0.53, 0.43)
    of_dense = {BF16: (0.8, 0.8, 0.8), "rowwise": rowwise}[kind]
    for name, read, written, part in (
        ("output", x + w, g, of_dense[0]), ("grad_input", g + w, x, of_dense[1]),
        ("grad_weight", g + x, w, of_dense[2]),
    ):  # fmt: skip
        computing = 2 * (tokens + shape.padding(128)) * K * N / peak / part + 2e-6
        moved = operand * read + 2 * written
        assert gemm_bytes(kind, shape, name) == moved
        moving = moved / 3.35e12 / 0.92
        expected = max(computing + 2 * written / 3.35e12 / 0.92, moving) + 2 * 2e-6
        assert gemm_seconds(H100, kind, shape, name) == pytest.approx(expected), name


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


def check_casts() -> None:
    shape = QWEN3
    filled = (shape.M + shape.padding(128)) / shape.M  # each group's tokens, to whole tiles
    x, w, g = shape.M * shape.K, shape.E * shape.K * shape.N, shape.M * shape.N
    for recipe, (tokens, weights, launches) in CASTS.items():
        moved = tokens * (x + g) * filled + weights * w
        expected = moved / (7.7e12 * 0.83) + launches * 2e-6
        plan = planned(RECIPES[recipe])
        assert cast_seconds(B200, shape, plan, Use()) == pytest.approx(expected), recipe


def test_casts_of_experts_by_hand():
    check_casts()


@pytest.mark.parametrize(("name", "fault"), [("GROUP_TILE", 1), ("GROUP_TILE", 64), ("WRITE", 2)])
def test_a_planted_fault_in_the_casts_is_caught(name, fault, monkeypatch):
    monkeypatch.setattr(roofline, name, fault)
    with pytest.raises(AssertionError):
        check_casts()


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
