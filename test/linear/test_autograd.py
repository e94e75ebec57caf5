"""A step on a GPU, without one: the products and their layouts, the bytes and launches of casts.

FakeTensors go through forward and backward (`fake_cuda`). A `CastMeter` adds up what the ops that
run read and write. The bounds are those of the best kernels there can be for a bfloat16 operand
that two GEMMs read: 2 (for the amax) + 2 (for the cast) + 1 + 1 bytes per element with dynamic
scales, 2 + 1 + 1 with scales that are known before.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from fake_cuda import empty, fake_cuda
from fake_cuda import step as fake_step
from meter import TORCH_PRODUCTS, CastMeter
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")


from float8.config import RECIPES
from float8.linear.autograd import STATELESS
from float8.linear.float8_weight import cast_of

aten = torch.ops.aten
M, K, N = 512, 1024, 4096  # three products of two that differ


def architecture(config):
    return "sm_100" if config.cast_config_input.scale_format.is_e8m0 else "sm_90"


# --- products


class Products(TorchDispatchMode):
    """Records the operands of every product, and refuses what the hardware would refuse."""

    def __init__(self):
        super().__init__()
        self.scales, self.plain, self.pads = [], 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in TORCH_PRODUCTS:
            a, b, scale_a, scale_b = args[:4]
            if func is not aten._scaled_mm.default:  # each operand stands beside its scales
                b, scale_a, scale_b = scale_a.t(), b, scale_b.t()
            assert a.stride() == (a.shape[1], 1), "a must be row-major"
            assert b.stride() == (1, b.shape[0]), "b must be column-major"
            assert a.shape[1] % 16 == b.shape[1] % 16 == 0
            assert (a.dtype, b.dtype) != (torch.float8_e5m2,) * 2
            assert scale_a.dtype == scale_b.dtype
            self.scales.append((tuple(scale_a.shape), tuple(scale_b.shape)))
        self.plain += func in (aten.mm.default, aten.addmm.default)
        self.pads += func is aten.constant_pad_nd.default
        return func(*args, **(kwargs or {}))


def products(config, m=M, k=K, n=N):
    with fake_cuda(architecture(config)), Products() as mode:
        x, w, bias = empty(m, k), empty(n, k), empty(n)
        out, grad_x, grad_w, grad_bias, saved = fake_step(config, x, w, empty(m, n), bias)
    assert (out.shape, grad_x.shape, grad_w.shape) == ((m, n), (m, k), (n, k))
    assert {t.dtype for t in (out, grad_x, grad_w, grad_bias)} == {torch.bfloat16}
    assert any(t is w for t in saved), "the weight is kept by reference"
    return mode


@pytest.mark.parametrize("recipe", RECIPES)
def test_all_products_reach_the_tensor_cores_in_the_right_layout(recipe):
    mode = products(RECIPES[recipe])
    is_mixed = recipe == "rowwise_with_gw_hp"
    assert (len(mode.scales), mode.plain) == ((2, 1) if is_mixed else (3, 0))


# Where blocks do not come in fours, the op that multiplies pads their scales; no operand is padded.
SCALES = [
    ("tensorwise", (M, K, N), [((1, 1), (1, 1))] * 3),
    ("rowwise", (M, K, N), [((M, 1), (1, N)), ((M, 1), (1, K)), ((N, 1), (1, K))]),
    ("blockwise", (M, K, N), [((M, 8), (8, 32)), ((M, 32), (32, 8)), ((N, 4), (4, K))]),
    ("blockwise", (256, 640, 768), [((256, 5), (5, 6)), ((256, 6), (6, 5)), ((768, 2), (2, 640))]),
]


@pytest.mark.parametrize(("recipe", "sizes", "scales"), SCALES)
def test_scales_have_the_shapes_that_the_hardware_reads(recipe, sizes, scales):
    mode = products(RECIPES[recipe], *sizes)
    assert mode.scales == scales and mode.pads == 0


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize("shape", [(24, 40, 72), (64, 64, 1), (1, 64, 64), (64, 1, 64)])
def test_sizes_that_need_padding_are_padded_when_asked(recipe, shape):
    assert len(products(replace(RECIPES[recipe], pad_inner_dim=True), *shape).scales) == 3


# --- bytes and launches


def step(config, is_cached=False, microbatches=1):
    """The bytes per element of x, g and w of one optimizer step, and its launches."""
    with fake_cuda(architecture(config)), CastMeter() as meter:
        w, cast = empty(N, K), None
        if is_cached:
            layer = SimpleNamespace(float8_config=config, states=STATELESS)
            cast = cast_of(layer, w, w.dtype)
        for _ in range(microbatches):
            fake_step(config, empty(M, K), w, empty(M, N), None, cast)
    # Scales are a few bytes more: four per 128 elements where there are most.
    sizes = (M * K, M * N, N * K)
    return *(round(meter.bytes_by_numel.get(size, 0) / size) for size in sizes), meter.launches


# Bytes per element of: x, g, w cast twice a step, w cast for both GEMMs at once. Launches: two per
# dynamic tensorwise cast (amax; scale and cast), one per other; w is cast twice, the second time
# with the scale that the first one found. Columns of one scale each take a zeroed buffer, an amax
# pass and the cast. A product repeats a tensorwise scale beside rowwise ones for each row. A launch
# of its own writes a delayed cast's amax.
COSTS = {
    "tensorwise": (6, 6, 5 + 3, 6, 2 + 2 + 2 + 1),
    "delayed": (4, 4, 3 + 3, 4, 4 + 3),
    "unit": (4, 4, 3 + 3, 4, 4),
    "rowwise": (6, 6, 3 + 5, 6, 3 + 1 + 3 + 3),
    "rowwise_with_gw_hp": (3, 3, 3 + 5, 3 + 5, 1 + 1 + 1 + 2 + 1),
    "blockwise": (4, 4, 3 + 3, 4, 4),
    "mxfp8": (4, 4, 3 + 3, 4, 4),
    "mxfp8_2d": (4, 4, 3 + 3, 4, 4),
}


@pytest.mark.parametrize("recipe", COSTS)
def test_a_step_costs_what_a_hand_written_one_would(recipe):
    (x, g, w, w_cached, launches), config = COSTS[recipe], RECIPES[recipe]
    assert step(config) == (x, g, w, launches + 3)  # and three products
    if recipe != "delayed":
        assert step(config, True, microbatches=4)[:3] == (4 * x, 4 * g, w_cached)


@pytest.mark.parametrize("recipe", ["tensorwise", "unit", "rowwise", "blockwise"])
def test_operands_of_grouped_gemms_cost_as_much_as_those_of_a_layer(recipe):
    """No pass for the groups."""
    per_token, _, per_weight, *_ = COSTS[recipe]
    with fake_cuda("sm_89"), CastMeter() as meter:
        offs = empty(4, dtype=torch.int32)
        fake_step(RECIPES[recipe], empty(M, K), empty(4, N, K), empty(M, N), offs=offs)
    size = 4 * N * K
    assert round(meter.bytes_by_numel.pop(size) / size) == per_weight
    # The transposes of tokens have more elements: their padding.
    assert round(sum(meter.bytes_by_numel.values()) / (M * K + M * N)) == per_token


def test_the_meter_notices_plain_pytorch():
    """The planted fault: the emulated casts move many times the bytes in many launches."""
    x, _, _, launches = step(replace(RECIPES["tensorwise"], emulate=True))
    assert x > 12 and launches > 30
