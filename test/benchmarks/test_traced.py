"""Compiled blocks traced without a GPU keep the bytes and take the time that an H100 measured."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import bench_model
from benchmarks.measuring import contenders
from benchmarks.measuring.eager import FAST_GRADIENTS, H100, TENSORWISE_PRODUCT, gemm_seconds
from benchmarks.measuring.report import ROOT
from benchmarks.measuring.step import moved_by_casts
from benchmarks.models.transformer import LLAMA
from float8.config import RECIPES
from float8.estimate.roofline import Shape
from float8.linear.plan import plan_for

pytest.importorskip("triton")  # the casts of CUDA tensors are its kernels

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),  # of Triton 3.9
]
FILE = ROOT / "benchmarks" / "results" / "h100_2026-11-27" / "bench_model.json"
BLOCKS, TOKENS = 2, 16384


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    file = tmp_path_factory.mktemp("traced") / "out.json"
    recipes = ["tensorwise", "tensorwise+saved_activations", "tensorwise+fast", "tensorwise+cached"]
    assert bench_model.main(["--traced", "--recipes", *recipes, "-o", str(file)]) == 0
    return {row["layer"]: row for row in json.loads(file.read_text())["rows"]}


def measured(layer):
    found = json.loads(FILE.read_text())["rows"]
    return next(row for row in found if (row["mode"], row["layer"]) == ("compiled", layer))


@pytest.mark.parametrize(
    ("layer", "as_measured", "mib"),
    [
        ("bf16", "nn.Linear", 4614),
        ("tensorwise speed", "tensorwise", 3782),
        ("torchao tensorwise", "torchao tensorwise", 2950),
    ],
)
def test_what_is_kept_and_predicted_is_what_an_h100_measured(rows, layer, as_measured, mib):
    if layer not in rows:
        pytest.skip("torchao is not installed")
    row, on_h100 = rows[layer], measured(as_measured)
    assert int(row["saved_mib"]) == mib
    assert row["saved_mib"] == pytest.approx(on_h100["saved_mib"], abs=0.01)
    assert row["predicted_ms"] == pytest.approx(on_h100["ms"], rel=0.05)


def test_memory_keeps_what_torchao_keeps(rows):
    assert int(rows["tensorwise memory"]["saved_mib"]) == 2950


def test_saved_activations_keep_their_copies_alone_and_no_second_pass_reads_them(rows):
    """Of a block two norms' inputs, gate and up, which torch keeps in two bytes per element."""
    ours, saved = rows["tensorwise speed"], rows["tensorwise+saved_activations speed"]
    elements = BLOCKS * TOKENS * (2 * LLAMA["8b"].width + 2 * LLAMA["8b"].hidden)
    copies = elements * (1 + 1 / 128)
    assert (ours["saved_mib"] - saved["saved_mib"]) * 2**20 == pytest.approx(
        2 * elements - copies, rel=0.001
    )
    # A cast reads two bytes and writes one; backward then reads that one in place of two.
    more = (saved["cast_gb"] - ours["cast_gb"]) * 1e9
    assert more == pytest.approx(2 * copies, rel=0.2)  # a norm's copy is read twice


def test_fast_sums_and_cached_weights_change_the_times_alone_and_the_bytes_of_weights(rows):
    """Six bytes of a weight in place of eight; two products of three take another time."""
    ours, fast, cached = (rows[f"tensorwise{part} speed"] for part in ("", "+fast", "+cached"))
    sizes, times = LLAMA["8b"], ("predicted_ms", "layer")
    assert {key: fast[key] for key in fast if key not in times} == {
        key: ours[key] for key in ours if key not in times
    }
    with torch.device("meta"):
        linears = [m for m in bench_model.Stack(sizes)[0].modules() if hasattr(m, "in_features")]
    gradients = sum(
        gemm_seconds(H100, TENSORWISE_PRODUCT, Shape(TOKENS, m.in_features, m.out_features), name)
        for m in linears
        for name in ("grad_input", "grad_weight")
    )
    less = (ours["predicted_ms"] - fast["predicted_ms"]) / 1e3
    assert less == pytest.approx(BLOCKS * gradients * (1 - FAST_GRADIENTS), rel=1e-3)
    weights = BLOCKS * sum(m.weight.numel() for m in linears)
    assert (ours["cast_gb"] - cached["cast_gb"]) * 1e9 == pytest.approx(2 * weights, rel=1e-3)
    assert cached["predicted_ms"] < ours["predicted_ms"]


def test_casts_move_what_their_passes_do_but_for_the_amaxes_that_inductor_fuses(rows):
    """Of both norms' outputs, attention's, SwiGLU's and its gradients, and one norm's gradient."""
    with torch.device("meta"):
        block = contenders.model_of("", bench_model.Stack(LLAMA["8b"]))[0]
    linears = [m for m in block.modules() if isinstance(m, torch.nn.Linear)]
    plan = plan_for(RECIPES["tensorwise"], "sm_90", torch.bfloat16)
    moved = sum(
        moved_by_casts(plan, (TOKENS * m.in_features, m.weight.numel(), TOKENS * m.out_features))[0]
        for m in linears
    )
    fused = 2 * TOKENS * (4 * LLAMA["8b"].width + 3 * LLAMA["8b"].hidden)
    ours, expected = rows["tensorwise speed"], BLOCKS * (moved - fused) / 1e9
    assert ours["cast_gb"] == pytest.approx(expected, rel=0.01)
    assert ours["launches"] == BLOCKS * (4 * 4)  # x, w twice, g of four layers
