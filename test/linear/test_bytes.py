"""How many bytes of device memory, and how many launches, a training step's casts cost on CUDA.

Counted without a GPU: FakeTensors go through the layer's forward and backward, and a `CastMeter`
adds up what the ops that run read and write. The bounds are those of the best kernels there can be
for a bfloat16 operand that two GEMMs read: 2 (for the amax) + 2 (for the cast) + 1 + 1 bytes per
element with dynamic scales, 2 + 1 + 1 with scales that are known before.
"""

from __future__ import annotations

import importlib
from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import pytest
import torch
from meter import CastMeter
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")

from float8.config import RECIPES
from float8.linear.autograd import NO_FACTORS, STATELESS, Call, Float8LinearFunction
from float8.linear.bound_plan import plan_for, plan_on
from float8.linear.float8_weight import cast_weight, scales_alone
from float8.linear.scaling import DelayedState, cast_again, cast_matrix, cast_orientations
from float8.linear.weight_scales import scales_of_weights

scaled_mm = importlib.import_module("float8.kernels.scaled_mm")  # float8.kernels has its function
M, K, N = 512, 1024, 4096  # three products of two that differ


class Context:
    """What the autograd function needs of its context."""

    def save_for_backward(self, *tensors):
        self.saved_tensors = tensors


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, device="cuda", dtype=dtype)


def states_of(config):
    if not config.uses_delayed_scaling:
        return STATELESS
    scalar = {"dtype": torch.float32}
    return tuple(DelayedState(empty(**scalar), empty(**scalar), True) for _ in range(3))


def step(config, cached=False, microbatches=1, scales_only=False, bias=False):
    """The meter of one optimizer step's forwards and backwards, after the first.

    On an sm_90, or an sm_100 for MX formats.

    Static scales are there by then (`test_kernel_path.py` sees that nothing is filled in again).
    """
    with ExitStack() as stack:
        arch = "sm_100" if config.cast_config_input.scale_format.is_e8m0 else "sm_90"
        stack.enter_context(mock.patch.object(scaled_mm, "architecture", return_value=arch))
        stack.enter_context(FakeTensorMode())
        stack.enter_context(torch.no_grad())
        meter = stack.enter_context(CastMeter())
        scale = empty(1, 1, dtype=torch.float32)
        stack.enter_context(mock.patch("float8.linear.scaling.constant", return_value=scale))
        states, w_NK, weight = states_of(config), empty(N, K), None
        plan = plan_on(config, w_NK.device, torch.bfloat16)
        if cached:
            weight = cast_weight(w_NK, plan, states[1])
        if scales_only:
            scales = scales_of_weights([(w_NK, plan)], {id(w_NK): scale})
            weight = scales_alone(w_NK, plan, scales[0])
        for _ in range(microbatches):
            ctx, bias_N = Context(), empty(N) if bias else None
            ctx.needs_input_grad = (True, True, bias, False)
            call = Call(plan, states, True, weight, NO_FACTORS, saves=True)
            Float8LinearFunction.forward(ctx, empty(M, K), w_NK, bias_N, call)
            Float8LinearFunction.backward(ctx, empty(M, N))
    return meter


def bytes_per_element(meter, rows, cols):
    # Scales are a few bytes more: four per 128 elements where there are most.
    return round(meter.bytes_by_numel.get(rows * cols, 0) / (rows * cols), 0)


# bytes per element of: x, g, w cast twice a step (unless cached), w cast for both GEMMs at once
BYTES = {
    "tensorwise": (6, 6, 5 + 3, 6),
    "delayed": (4, 4, 3 + 3, 4),
    "unit": (4, 4, 3 + 3, 4),
    "rowwise": (6, 6, 3 + 5, 6),
    "rowwise_with_gw_hp": (3, 3, 3 + 5, 3 + 5),  # w: rows, then one scale for the tensor
    "blockwise": (4, 4, 3 + 3, 4),
    "mxfp8": (4, 4, 3 + 3, 4),
}


@pytest.mark.parametrize("name", BYTES)
def test_bytes_per_element(name):
    x, g, w, cached = BYTES[name]
    meter = step(RECIPES[name])
    assert bytes_per_element(meter, M, K) == x
    assert bytes_per_element(meter, M, N) == g
    assert bytes_per_element(meter, N, K) == w
    assert bytes_per_element(step(RECIPES[name], cached=True), N, K) == cached


@pytest.mark.parametrize("name", ["tensorwise", "delayed", "unit", "rowwise", "blockwise"])
def test_the_gradient_of_a_bias_reads_g_no_second_time(name):
    """The cast adds the columns of its tiles; two small launches add those sums, and round them."""
    plain, meter = step(RECIPES[name]), step(RECIPES[name], bias=True)
    forward = 4 * (name == "blockwise")  # its GEMM adds no bias to the output
    assert bytes_per_element(meter, M, N) == bytes_per_element(plain, M, N) + forward
    assert meter.launches == plain.launches + 2 + (forward > 0)
    assert bytes_per_element(step(RECIPES["mxfp8"], bias=True), M, N) == BYTES["mxfp8"][1] + 2


@pytest.mark.parametrize("name", BYTES)
def test_a_cached_weight_is_cast_once_for_all_microbatches(name):
    meter = step(RECIPES[name], cached=True, microbatches=4)
    assert bytes_per_element(meter, N, K) == BYTES[name][3]
    assert bytes_per_element(meter, M, K) == 4 * BYTES[name][0]


@pytest.mark.parametrize("recipe", [name for name in BYTES if name != "delayed"])
def test_a_known_amax_saves_the_pass_that_finds_it(recipe):
    """Weights of one scale are read once by each cast; others are cast as always."""
    expected = {"tensorwise": 3 + 3, "rowwise_with_gw_hp": 3 + 3}.get(recipe, BYTES[recipe][2])
    for microbatches in (1, 4):
        meter = step(RECIPES[recipe], microbatches=microbatches, scales_only=True)
        assert bytes_per_element(meter, N, K) == microbatches * expected


# per weight element of a step: what the optimizer has recorded costs nothing
@pytest.mark.parametrize(("is_recorded", "expected"), [(True, 4), (False, 2 + 4)])
def test_cached_weights_are_cast_in_one_read_after_their_amax(is_recorded, expected):
    with (
        mock.patch.object(scaled_mm, "architecture", return_value="sm_90"),
        FakeTensorMode(),
        torch.no_grad(),
        CastMeter() as meter,
    ):
        w_NK = empty(N, K)
        plan = plan_on(RECIPES["tensorwise"], w_NK.device, torch.bfloat16)
        recorded = {id(w_NK): empty(1, dtype=torch.float32)} if is_recorded else {}
        scales = scales_of_weights([(w_NK, plan)], recorded)
        cast_weight(w_NK, plan, None, scales[0])
    assert bytes_per_element(meter, N, K) == expected


@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
def test_a_smooth_input_costs_what_its_field_says(name):
    """The amaxes of channels and x * s; w / s, twice; and the products of both gradients."""
    x, _, w, _ = BYTES[name]
    meter = step(replace(RECIPES[name], smooth_input=True))
    assert bytes_per_element(meter, M, K) == x + 6 + 4
    assert bytes_per_element(meter, N, K) == w + 8 + 4
    assert bytes_per_element(meter, M, N) == BYTES[name][1]


# Two launches per dynamic tensorwise cast (amax; scale and cast), one per other; w is cast twice,
# the second time with the scale that the first one found. Columns of one scale each take a zeroed
# buffer, an amax pass and the cast. A tensorwise scale beside a rowwise one is repeated for every
# row.
LAUNCHES = {
    "tensorwise": 2 + 2 + 2 + 1,
    "delayed": 4,
    "unit": 4,
    "rowwise": 3 + 1 + 3 + 3,
    "rowwise_with_gw_hp": 1 + 1 + 1 + 2 + 1,
    "blockwise": 4,
    "mxfp8": 4,
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_step_launches_what_a_hand_written_one_would(name):
    assert step(RECIPES[name]).launches == LAUNCHES[name] + 3


# Bytes per element, and launches: of tokens x and g, and of experts cast for one GEMM at a time.
GROUPED = {
    "tensorwise": (6, 2, 5 + 3, 2 + 1),
    "unit": (4, 1, 3 + 3, 2),
    "rowwise": (6, 3, 3 + 5, 1 + 3),
    "blockwise": (4, 1, 3 + 3, 2),
}


@pytest.mark.parametrize("name", GROUPED)
def test_operands_of_grouped_gemms(name):
    """As many bytes as those of a layer: no pass for the groups, and no launch for each."""
    with FakeTensorMode(), torch.no_grad(), ExitStack() as stack:
        scale = empty(1, 1, dtype=torch.float32)
        stack.enter_context(mock.patch("float8.linear.scaling.constant", return_value=scale))
        offs, w = empty(4, dtype=torch.int32), empty(4, N, K)
        plan = plan_for(RECIPES[name], w, grouped=True)
        for tokens, operand in ((empty(M, K), plan.x), (empty(M, N), plan.g)):
            with CastMeter() as meter:
                cast_orientations(
                    tokens, operand, None, False, first=True, second=True, decode=False,
                    keeps=False, offs=offs, scales=(None, None), column_sums=None,
                )  # fmt: skip
            moved = sum(meter.bytes_by_numel.values())  # the transpose has more elements: padding
            assert round(moved / tokens.numel()) == GROUPED[name][0]
            assert meter.launches == GROUPED[name][1]
        with CastMeter() as meter:
            _, scale = cast_matrix(w, plan.w.first, None, False, None)
            cast_again(w, plan.w.first, scale) if name in ("tensorwise", "unit") else cast_matrix(
                w.mT, plan.w.second, None, False, None
            )
        assert bytes_per_element(meter, 4 * N, K) == GROUPED[name][2]
        assert meter.launches == GROUPED[name][3]


def test_the_meter_notices_plain_pytorch():
    """The planted fault: the emulated casts move many times the bytes in many launches."""
    meter = step(replace(RECIPES["tensorwise"], emulate=True))
    assert bytes_per_element(meter, M, K) > 12
    assert meter.launches > 30
