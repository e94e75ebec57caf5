"""The roofline's arithmetic and the bytes of casts, computed a second time by hand."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from float8 import Float8Linear, cached_weights
from float8.config import RECIPES, CastConfig, Float8LinearConfig, ScalingType
from float8.estimate.devices import ANY_PASS, BF16, DEVICES, KERNEL_RATES, Device
from float8.estimate.roofline import (
    Shape,
    Use,
    gemm_seconds,
    layer_seconds,
    passes_of_layer,
    saved_bytes,
    sums_fast,
)
from float8.linear.plan import LinearPlan, plan_for

S = 1 / 32  # bytes of scales per element, where 128 elements share 4 bytes or 32 one byte
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
B200 = DEVICES["B200"]
# Every pass at 83 % of the bandwidth, so that it can be computed by hand.
H100 = replace(DEVICES["H100"], passes={ANY_PASS: DEVICES["H100"].passes[ANY_PASS]})
CUBE = Shape(8192, 8192, 8192)
ELEMENTS = 8192 * 8192


def planned(config: Float8LinearConfig, arch: str = "sm_90") -> LinearPlan:
    return plan_for(config, arch, torch.bfloat16)


def by_hand(
    float8_bytes: float, passes: int, ratio: float = 1.0, float8_gemms: int = 3
) -> tuple[float, float]:
    """Seconds of an 8192-cube layer on an H100 in bfloat16 and in float8, from scratch.

    989.4 TFLOP/s at 80.3 %, 1978.9 at 70.9 %, of which rowwise reaches 0.99 and blocks 0.803; 2 us
    to fill and drain, 2 us a launch; 3.35 TB/s, of which writes reach 92 % and casts 83 %. A result
    is 2048 tiles, in 16 waves of 132. Each product does 2 * 8192^3 operations.
    """
    beside = 2 * ELEMENTS / 3.35e12 / 0.92 + 2e-6 + 2e-6
    work = 2 * 8192**3 * (16 * 132 / 2048)
    bf16 = work / 989.4e12 / 0.803 + beside
    float8 = work / 1978.9e12 / (0.709 * ratio) + beside
    cast = float8_bytes * ELEMENTS / 3.35e12 / 0.83 + passes * 2e-6
    return 3 * bf16, float8_gemms * float8 + (3 - float8_gemms) * bf16 + cast


# recipe -> bytes per element moved by all casts (all three operands are alike here), launches, and
# the speed of its GEMMs against tensorwise ones
CASTS = {
    "tensorwise": (6 + 8 + 6, 2 + 3 + 2, 1.0),
    "delayed": (4 + 6 + 4, 1 + 2 + 1 + 3, 1.0),  # and 3 amaxes are recorded
    "rowwise": (6 + 8 + 6, 3 + (1 + 3) + 3, 0.99),
    "blockwise": (4 + 2 * S + 6 + 4 + 2 * S, 1 + 2 + 1, 0.803),
}


def test_the_8192_cube_takes_what_it_takes_by_hand():
    for recipe, (moved, passes, ratio) in CASTS.items():
        bf16, float8 = by_hand(moved, passes, ratio)
        assert layer_seconds(H100, CUBE, None, Use()).total == pytest.approx(bf16, rel=1e-9)
        predicted = layer_seconds(H100, CUBE, planned(RECIPES[recipe]), Use())
        assert predicted.total == pytest.approx(float8, rel=1e-9), recipe


def test_a_product_of_few_operations_takes_as_long_as_its_bytes():
    # One row times a matrix: the matrix is read once, 2 bytes an element or 1.
    for kind, operand_bytes in ((BF16, 2), ("tensorwise", 1)):
        moved = operand_bytes * (16 + 28672) * 8192 + 2 * 16 * 28672
        expected = moved / (3.35e12 * 0.92) + 2e-6
        assert gemm_seconds(H100, kind, Shape(16, 8192, 28672)) == pytest.approx(expected, rel=1e-9)


def test_forward_alone_is_one_product_and_two_casts():
    bf16, float8 = by_hand(5 + 5, 2 + 2)
    forward = Use(training=False)
    assert layer_seconds(H100, CUBE, None, forward).total == pytest.approx(bf16 / 3)
    one = by_hand(0, 0)[1] / 3
    predicted = layer_seconds(H100, CUBE, planned(RECIPES["tensorwise"]), forward)
    assert predicted.gemms == pytest.approx(one)
    assert predicted.total == pytest.approx(float8 - 2 * one)


def test_microbatches_share_the_cast_of_a_cached_weight():
    plan = planned(RECIPES["delayed"])
    cached = Use(cached_microbatches=1)
    alone = layer_seconds(H100, CUBE, plan, cached).casts
    shared = layer_seconds(H100, CUBE, plan, Use(cached_microbatches=8)).casts
    once = 4 * ELEMENTS / 3.35e12 / 0.83 + 2 * 2e-6  # its amax is recorded
    assert alone - shared == pytest.approx(once * 7 / 8)


def test_every_backward_dequantises_a_cached_weight():
    plan = planned(replace(RECIPES["blockwise"], dequantize_in_backward=True))
    cached = Use(cached_microbatches=1)
    shared = Use(cached_microbatches=8)
    by_use = [layer_seconds(H100, CUBE, plan, use).casts for use in (Use(), cached, shared)]
    # Casts of x and of w, and both dequantised: each moves 3 bytes per element (x has scales too).
    once = 3 * ELEMENTS / 3.35e12 / 0.83 + 2e-6
    scales = S * ELEMENTS / 3.35e12 / 0.83
    assert by_use == pytest.approx([n * once + scales for n in (5, 4, 3 + 1 / 8)])


def test_shapes_are_not_mixed_up():
    # output 2*M*K*N each; only the casts and bytes tell M, K and N apart: x M*K, w N*K, g M*N.
    shape, plan = Shape(4096, 1024, 16384), planned(RECIPES["tensorwise"])
    moved = 6 * 4096 * 1024 + 8 * 16384 * 1024 + 6 * 4096 * 16384
    expected = moved / 3.35e12 / 0.83 + 7 * 2e-6
    assert layer_seconds(H100, shape, plan, Use()).casts == pytest.approx(expected)


# --- what follows from it


RUNS = [(d, r) for d in DEVICES for r in RECIPES if "mxfp8" not in r or d in ("B200", "B300")]


SIZES = st.integers(1, 1024).map(lambda i: 16 * i)


@given(
    st.sampled_from(RUNS),
    SIZES.filter(lambda size: size >= 512),
    SIZES.filter(lambda size: size >= 512),
    SIZES,
    st.integers(1, 64),
)
def test_more_tokens_never_lower_the_speedup(runs, K, N, M, times):
    name, recipe = runs
    device, plan = DEVICES[name], planned(RECIPES[recipe], DEVICES[name].arch)

    def speedup(tokens: int, device: Device) -> float:
        plain, float8 = (layer_seconds(device, Shape(tokens, K, N), p, Use()) for p in (None, plan))
        return plain.total / float8.total

    assert speedup(M * times, device) >= speedup(M, device) * 0.97, "waves of tiles cost up to 2 %"


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_powers_of_two_cost_what_mx_products_do_where_they_run_so(recipe):
    names = "output", "grad_input", "grad_weight"
    for device, kind in ((B200, "mx"), (H100, recipe)):
        for shape in (CUBE, replace(CUBE, E=8)):
            plan = plan_for(RECIPES[recipe], device.arch, torch.bfloat16, shape.E is not None)
            fast = {
                name: sums_fast(getattr(plan, name).use_fast_accum, shape, name) for name in names
            }
            gemms = sum(gemm_seconds(device, kind, shape, name, fast[name]) for name in names)
            assert layer_seconds(device, shape, plan, Use()).gemms == gemms


def test_a_config_without_float8_is_nn_linear():
    off = CastConfig(ScalingType.DISABLED)
    plan = planned(Float8LinearConfig(off, off, off))
    assert layer_seconds(H100, CUBE, plan, Use()) == layer_seconds(H100, CUBE, None, Use())
    assert saved_bytes(CUBE, plan, Use()) == saved_bytes(CUBE, None, Use())


# --- memory


def test_saved_memory_by_hand():
    shape = Shape(2048, 1024, 4096)
    assert saved_bytes(shape, None, Use()) == 2 * 2048 * 1024
    tensorwise = 2048 * 1024 + 4 + 4  # the float8 input, its scale, and the weight's scale
    assert saved_bytes(shape, planned(RECIPES["tensorwise"]), Use()) == tensorwise
    rowwise = 2048 * 1024 + 4 * 1024  # a scale for each column of x, which grad_weight contracts
    assert saved_bytes(shape, planned(RECIPES["rowwise"]), Use()) == rowwise
    assert saved_bytes(shape, planned(RECIPES["rowwise"]), Use(training=False)) == 0
    mx = 2048 * 1024 + 2048 * 1024 // 32  # a byte for each 32 tokens
    assert saved_bytes(shape, planned(RECIPES["mxfp8"]), Use()) == mx


def test_a_cache_takes_the_memory_that_is_predicted():
    for dequantizes in (False, True):
        config = replace(RECIPES["blockwise"], dequantize_in_backward=dequantizes)
        layer = Float8Linear(256, 384, bias=False, config=config)
        with cached_weights(layer):
            stores = {x.untyped_storage() for x in layer.cached_weights["weight"].tensors()}
        kept = sum({x.data_ptr(): x.nbytes() for x in stores}.values())
        if not dequantizes:  # on a GPU; on a CPU the transposed copy is a view
            kept += 256 * 384
        shape, plan = Shape(512, 256, 384), planned(config)
        uses = Use(cached_microbatches=1, weight_trains=False), Use(weight_trains=False)
        scales = saved_bytes(shape, plan, uses[1])  # forward's, which backward reads
        assert saved_bytes(shape, plan, uses[0]) == kept, dequantizes
        assert scales == 3 * 2 * 4


# The file is older than mxfp8.
@pytest.mark.parametrize("recipe", [r for r in RECIPES if r != "unit" and "mxfp8" not in r])
def test_saved_memory_is_what_was_measured(recipe):
    rows = json.loads((RESULTS / "cpu_bench_linear.json").read_text())["rows"]
    measured = {r["layer"]: r for r in rows if r.get("mode", "eager") == "eager"}[recipe]
    M, K, N = (int(size) for size in measured["shape"].split("(")[1][:-1].split(","))
    predicted = saved_bytes(Shape(M, K, N), planned(RECIPES[recipe]), Use())
    assert predicted / 2**20 == pytest.approx(measured["saved_mib"], rel=1e-4)


def test_a_float32_weight_is_converted_in_forward_and_backward():
    shape, plan = Shape(2048, 1024, 4096), planned(RECIPES["delayed"])
    one = (4 + 2) * 1024 * 4096 / 3.35e12 / 0.83 + 2e-6
    for use, times in (
        (Use(), 2),
        (Use(training=False), 1),
        (Use(cached_microbatches=1), 1),
        (Use(cached_microbatches=4), 1 / 4),
    ):
        converts = layer_seconds(H100, shape, plan, replace(use, converts_weight=True))
        extra = converts.casts - layer_seconds(H100, shape, plan, use).casts
        assert extra == pytest.approx(times * one)


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 1, 1.5), (1, True, 1)])
def test_a_shape_is_three_counts(sizes):
    with pytest.raises((TypeError, ValueError), match="must be an integer >= 1"):
        Shape(*sizes)


# recipe -> bytes per element of x, w, g, in a training step by fused kernels. Reads of bfloat16
# are 2, writes of float8 are 1. x and g are wanted in two orientations at one time.
FUSED = {
    "tensorwise": (2 + 2 + 1 + 1, (2 + 2 + 1) + (2 + 1), 2 + 2 + 1 + 1),  # w's scale is kept
    "delayed": (2 + 1 + 1, (2 + 1) + (2 + 1), 2 + 1 + 1),
    "unit": (2 + 1 + 1, (2 + 1) + (2 + 1), 2 + 1 + 1),
    "rowwise": (2 + 1 + 2 + 1, (2 + 1) + (2 + 2 + 1), 2 + 1 + 2 + 1),
    "rowwise_with_gw_hp": (2 + 1, (2 + 1) + (2 + 2 + 1), 2 + 1),
    "blockwise": (2 + 1 + 1 + 2 * S, (2 + 1) + (2 + 1), 2 + 1 + 1 + 2 * S),
    "mxfp8": (2 + 1 + 1 + 2 * S, (2 + 1 + S) + (2 + 1 + S), 2 + 1 + 1 + 2 * S),
    "mxfp8_2d": (2 + 1 + 1 + 2 * S, (2 + 1) + (2 + 1), 2 + 1 + 1 + 2 * S),
}
CACHED_WEIGHT = {
    "tensorwise": 2 + 2 + 1 + 1,
    "delayed": 2 + 1 + 1,
    "unit": 2 + 1 + 1,
    "rowwise": 2 + 1 + 2 + 1,
    "rowwise_with_gw_hp": (2 + 1) + (2 + 2 + 1),  # two kinds of scales
    "blockwise": 2 + 1 + 1,
    "mxfp8": 2 + 1 + 1 + 2 * S,
    "mxfp8_2d": 2 + 1 + 1,
}
# Written in one orientation, of x and w.
SCALES = {"blockwise": (S, 0), "mxfp8": (S, S), "mxfp8_2d": (S, 0)}


def bytes_of(recipe: str, use: Use) -> tuple[float, float, float]:
    operands = passes_of_layer(planned(RECIPES[recipe]), use)
    return tuple(sum(each.bytes_per_element for each in passes) for passes in operands)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_use_moves_what_its_kernels_move(recipe):
    assert bytes_of(recipe, Use()) == FUSED[recipe]
    assert bytes_of(recipe, Use(cached_microbatches=1))[1] == CACHED_WEIGHT[recipe]
    x_scales, w_scales = SCALES.get(recipe, (0, 0))
    once = 3 + (2 if recipe == "tensorwise" else 0)
    assert bytes_of(recipe, Use(training=False)) == (once + x_scales, once + w_scales, 0)
    frozen = once + x_scales, FUSED[recipe][1], once + x_scales  # no transposed input or gradient
    assert bytes_of(recipe, Use(weight_trains=False)) == frozen


def test_the_plan_decides_not_the_name():
    delayed = RECIPES["delayed"].cast_config_grad_output
    variant = replace(RECIPES["tensorwise"], cast_config_grad_output=delayed)
    *_, g = passes_of_layer(planned(variant), Use())
    assert [(each.name, each.bytes_per_element) for each in g] == [("fill", 0), ("cast given", 4)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_pass_of_a_recipe_has_the_rate_of_its_kernel(recipe):
    for use in (Use(), Use(cached_microbatches=1), Use(training=False), Use(weight_trains=False)):
        operands = passes_of_layer(planned(RECIPES[recipe]), use)
        names = {each.name for passes in operands for each in passes}
        assert names - {"fill"} <= set(KERNEL_RATES)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise", "blockwise"])
def test_a_step_launches_what_the_layer_launches(recipe):
    pytest.importorskip("triton")
    from linear.test_autograd import COSTS

    operands = passes_of_layer(planned(RECIPES[recipe]), Use())
    assert sum(len(passes) for passes in operands) == COSTS[recipe][-1]


@pytest.mark.parametrize(
    "recipe", ["tensorwise", "delayed", "unit", "rowwise", "rowwise_with_gw_hp"]
)
def test_plain_casts_move_what_the_ops_on_an_amd_gpu_move(recipe):
    """Against the meter, which adds the bytes of every op that runs."""
    from fake_cuda import empty, fake_cuda, step
    from meter import CastMeter

    M, K, N = 1024, 512, 256
    with fake_cuda("gfx94"), CastMeter() as meter:
        step(RECIPES[recipe], empty(M, K), empty(N, K), empty(M, N))
    operands = passes_of_layer(planned(RECIPES[recipe]), Use(plain_casts=True))
    for size, passes in zip((M * K, N * K, M * N), operands, strict=True):
        predicted = sum(each.bytes_per_element for each in passes)
        assert predicted == pytest.approx(meter.bytes_by_numel[size] / size, rel=0.1)
    assert sum(map(len, operands)) == pytest.approx(meter.launches - 3, rel=0.25)
