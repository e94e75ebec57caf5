"""Where a scale comes from: the tensor, a constant, or the amaxes of past steps.

The update of the history is compared, step by step, with the formula that TransformerEngine
publishes for its ``DelayedScaling`` recipe, written in plain Python.
"""

from __future__ import annotations

import math

import oracle
import pytest
import shapes
import torch
from assertions import assert_bitwise
from hypothesis import given
from hypothesis import strategies as st
from shapes import Case
from torch import nn
from torch._inductor import metrics as inductor_metrics
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from float8.config import RECIPES, DelayedScalingConfig, OperandCast, ScalingType
from float8.formats import E4M3, E5M2, ScaleFormat
from float8.granularity import WHOLE
from float8.linear import scaling
from float8.linear.delayed import updated_history
from float8.linear.scaling import (
    BoundCast,
    DelayedState,
    bind_and_cast,
    constant,
    known_scale,
    multiply_scale,
)

INF, NAN = math.inf, math.nan
BLOCKS = {name: g.block_of((0, 0)) for name, g in shapes.GRANULARITIES.items()}


def operand_cast(
    scaling=ScalingType.DYNAMIC, fmt=E4M3, block=(-1, -1), scales=ScaleFormat.FLOAT32, static=None
):
    return OperandCast(scaling, fmt, block, scales, static)


def state(scale: float, current: float = 0.0, ready: bool = True) -> DelayedState:
    return DelayedState(torch.tensor(scale), torch.tensor(current), ready)


def assert_cast_with(data, scale, x, expected_scale, block, dtype, replay) -> None:
    assert_bitwise(scale, expected_scale, replay, "scale")
    assert_bitwise(data, oracle.cast(x, expected_scale, block, dtype), replay, "codes")


# --- one cast


def test_only_static_scales_and_those_with_a_history_are_known_beforehand():
    x, dynamic, delayed = torch.ones(2, 2), operand_cast(), operand_cast(ScalingType.DELAYED)
    assert known_scale(operand_cast(ScalingType.STATIC, static="0.5"), None, x) == 0.5
    assert known_scale(dynamic, None, x) is None
    assert known_scale(dynamic, state(0.25), x) is None
    assert known_scale(delayed, None, x) is None
    assert known_scale(delayed, state(0.25, ready=False), x) is None
    assert_bitwise(known_scale(delayed, state(0.25), x), torch.tensor([[0.25]]))


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("scales", shapes.SCALE_FORMATS)
def test_a_dynamic_scale_is_that_of_this_very_tensor(name, fmt, scales):
    case = Case((37, 300), torch.bfloat16, exponent=-20, layout="transposed", seed=1)
    x, block = case.make(), BLOCKS[name]
    data, scale = bind_and_cast(x, operand_cast(fmt=fmt, block=block, scales=scales))
    expected = oracle.scales(x, block, fmt.dtype, scales)
    assert_cast_with(data, scale, x, expected, block, fmt.dtype, (case, name))


@pytest.mark.parametrize("static", [1.0, 0.3, 2.0**-30])
def test_a_static_scale_is_the_constant_and_saturates(static):
    x = Case((5, 123), exponent=10, specials=("inf",)).make()
    data, scale = bind_and_cast(x, operand_cast(ScalingType.STATIC, static=repr(static)))
    expected = torch.full((1, 1), static)
    assert_cast_with(data, scale, x, expected, (-1, -1), E4M3.dtype, static)


def test_a_delayed_scale_is_the_one_in_use_however_large_the_tensor():
    x = Case((5, 123), exponent=10).make()
    for record in (False, True):
        delayed = state(0.25)
        data, scale = bind_and_cast(x, operand_cast(ScalingType.DELAYED), delayed, record)
        expected = torch.full((1, 1), 0.25)
        assert_cast_with(data, scale, x, expected, (-1, -1), E4M3.dtype, record)
        assert delayed.current_amax == (x.abs().max() if record else 0)


@pytest.mark.parametrize("record", [False, True])
def test_until_a_history_exists_a_delayed_cast_is_dynamic(record):
    x = Case((5, 123), torch.bfloat16, exponent=3).make()
    delayed = state(0.0, ready=False)
    data, scale = bind_and_cast(x, operand_cast(ScalingType.DELAYED), delayed, record)
    expected = oracle.scales(x, (-1, -1), E4M3.dtype)
    assert_cast_with(data, scale, x, expected, (-1, -1), E4M3.dtype, record)
    assert delayed.current_amax == (x.abs().max() if record else 0)


def test_amaxes_of_microbatches_are_recorded_as_their_maximum():
    delayed = state(1.0)
    recorded = []
    for amax in (2.0, 5.0, 3.0, 5.0):  # and a recomputation changes nothing
        bind_and_cast(
            torch.tensor([[amax, -amax / 2]]), operand_cast(ScalingType.DELAYED), delayed, True
        )
        recorded.append(delayed.current_amax.item())
    assert recorded == [2.0, 5.0, 5.0, 5.0]
    assert delayed.scale == 1.0


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_an_amax_that_is_not_finite_is_recorded_as_such(bad):
    delayed = state(1.0, current=2.0)
    bind_and_cast(torch.tensor([[1.0, bad]]), operand_cast(ScalingType.DELAYED), delayed, True)
    assert not delayed.current_amax.isfinite()
    bind_and_cast(torch.tensor([[1.0, 3.0]]), operand_cast(ScalingType.DELAYED), delayed, True)
    assert not delayed.current_amax.isfinite()  # and a later batch does not hide it


@pytest.mark.parametrize("scaling", [ScalingType.DYNAMIC, ScalingType.STATIC])
def test_only_delayed_casts_touch_a_state(scaling):
    delayed = state(0.25)
    static = 1.0 if scaling is ScalingType.STATIC else None
    _, scale = bind_and_cast(torch.ones(2, 2), operand_cast(scaling, static=static), delayed, True)
    assert delayed.current_amax == 0
    assert scale != 0.25


@pytest.mark.parametrize("scaling", [ScalingType.DYNAMIC, ScalingType.DELAYED])
def test_a_scale_found_before_is_used_again_and_nothing_recorded(scaling):
    x = Case((5, 123)).make()
    first, scale = bind_and_cast(x, operand_cast())
    delayed = state(123.0)
    again, same = bind_and_cast(x, operand_cast(scaling), delayed, True, scale=scale)
    assert same is scale
    assert delayed.current_amax == 0
    assert_bitwise(again, first)


def test_the_formats_twin_is_cast_on_amd(monkeypatch):
    from float8 import formats
    from float8.linear import bound_plan

    monkeypatch.setattr(bound_plan, "on_family", lambda fmt, family: formats.E4M3FNUZ)
    x = Case((5, 123)).make()
    data, scale = bind_and_cast(x, operand_cast())
    dtype = torch.float8_e4m3fnuz
    expected = oracle.scales(x, (-1, -1), dtype)
    assert_cast_with(data, scale, x, expected, (-1, -1), dtype, "fnuz")


# --- the history


def published_update(history: list, current: float, scale: float, config, dtype, scales: str):
    """One step as TransformerEngine's documentation of DelayedScaling states it.

    ``amax = max(history)`` or its newest entry; ``FP8_SCALE = FP8_MAX / amax / 2^margin`` (here its
    reciprocal, in float32); where amax is 0 or not finite the scale stays, 0 where there is none.
    """
    history = [current if math.isfinite(current) else 0.0, *history[:-1]]
    amax = history[0] if config.amax_compute_algo == "most_recent" else max(history)
    found = oracle.scale_of(amax * 2.0**config.margin, dtype, scales)
    if amax > 0 and math.isfinite(found):
        scale = found
    return history, scale


SEQUENCES = {
    "rising": [1.0, 2.0, 4.0, 8.0, 16.0],
    "falling": [16.0, 8.0, 4.0, 2.0, 1.0],
    "a peak that is forgotten": [1.0, 100.0, 1.0, 1.0, 1.0, 1.0],
    "zeros at first": [0.0, 0.0, 3.0, 0.0, 0.0, 0.0, 0.0],
    "zeros only": [0.0] * 5,
    "an inf": [1.0, INF, 2.0, 2.0],
    "a nan": [5.0, NAN, NAN, NAN, NAN, 2.0],
    "inf at first": [INF, 3.0],
    "tiny": [1e-45, 1e-40, 2.0**-126],
    "huge": [3.0e38, 1.0, 3.4e38],
}


@shapes.pairs(
    sequence=list(SEQUENCES),
    algo=["max", "most_recent"],
    history=[(1, 0), (3, 0), (3, 2), (4, -1), (16, 3)],  # its length and the margin
    scales=shapes.FLOAT32_SCALES,
)
def test_the_history_follows_the_published_formula(sequence, algo, history, scales):
    length, margin = history
    config = DelayedScalingConfig(length, algo, margin)
    history, scale = torch.zeros(1, length), torch.zeros(1)
    expected = ([0.0] * length, 0.0)
    for step, amax in enumerate(SEQUENCES[sequence]):
        current = torch.tensor([amax])
        history, scale, _ = updated_history(history, current, scale, config, E4M3.max, scales)
        expected = published_update(
            expected[0], current.item(), expected[1], config, E4M3.dtype, scales
        )
        replay = (sequence, algo, length, margin, f"step {step}")
        assert_bitwise(history, torch.tensor([expected[0]]), replay, "history")
        assert_bitwise(scale, torch.tensor([expected[1]]), replay, "scale")


def test_the_formula_by_hand():
    config = DelayedScalingConfig(history_len=3, margin=1)
    history, scale, _ = updated_history(
        torch.tensor([[7.0, 28.0, 500.0]]), torch.tensor([14.0]), torch.tensor([9.0]),
        config, 448.0, False,
    )  # fmt: skip
    assert history.tolist() == [[14.0, 7.0, 28.0]]  # the newest first, the oldest gone
    assert scale.item() == pytest.approx(2 * 28.0 / 448.0)


@given(
    st.lists(
        st.tuples(st.floats(0, 2.0**100, width=32), st.floats(0, 2.0**100, width=32)),
        min_size=1,
        max_size=8,
    )
)
def test_operands_do_not_mix(pairs):
    config = DelayedScalingConfig(4)
    together = torch.zeros(2, 4), torch.zeros(2)
    apart = [(torch.zeros(1, 4), torch.zeros(1)) for _ in range(2)]
    for pair in pairs:
        current = torch.tensor(pair)
        together = updated_history(together[0], current, together[1], config, E5M2.max, False)[:2]
        apart = [
            updated_history(h, current[i : i + 1], s, config, E5M2.max, False)[:2]
            for i, (h, s) in enumerate(apart)
        ]
    assert_bitwise(together[0], torch.cat([h for h, _ in apart]), pairs)
    assert_bitwise(together[1], torch.cat([s for _, s in apart]), pairs)


@given(
    st.lists(st.floats(0, 2.0**127, width=32), min_size=1, max_size=6),
    st.integers(-32, 0),
    st.sampled_from(["max", "most_recent"]),
)
def test_a_delayed_scale_is_finite_and_positive_from_the_first_amax_on(amaxes, margin, algo):
    config = DelayedScalingConfig(3, algo, margin)
    history, scale, has_scale = torch.zeros(1, 3), torch.zeros(1), False
    for amax in [*amaxes, INF, NAN]:
        history, scale, _ = updated_history(
            history, torch.tensor([amax]), scale, config, E4M3.max, False
        )
        assert history.isfinite().all()
        assert scale.isfinite().all()
        has_scale = has_scale or (0 < amax < INF and amax * 2.0**margin < 2.0**127)
        assert (scale > 0).item() == has_scale


def test_a_margin_that_leaves_float32_keeps_the_scale():
    config = DelayedScalingConfig(2, margin=32)
    _, scale, _ = updated_history(
        torch.zeros(1, 2), torch.tensor([2.0**120]), torch.tensor([0.5]), config, E4M3.max, False
    )
    assert scale.item() == 0.5


def test_the_arguments_stay_as_they_were():
    history, current, scale = torch.rand(2, 3), torch.rand(2), torch.rand(2)
    before = [t.clone() for t in (history, current, scale)]
    updated_history(history, current, scale, DelayedScalingConfig(3), E4M3.max, False)
    for now, then in zip((history, current, scale), before, strict=True):
        assert_bitwise(now, then)


def test_a_constant_is_filled_in_once_per_value():
    x = torch.randn(4, 4)
    first, again, other = constant(0.375, x), constant(0.375, x), constant(0.25, x)
    assert first is again and other is not first
    assert (first.item(), other.item(), tuple(first.shape)) == (0.375, 0.25, (1, 1))
    assert constant(0.375, nn.Parameter(x)) is first


def test_tracers_neither_keep_constants_nor_are_handed_kept_ones():
    kept = constant(0.375, torch.randn(4, 4))
    with FakeTensorMode() as mode:
        fake = constant(0.375, mode.from_tensor(torch.randn(4, 4)))
        assert isinstance(fake, FakeTensor)
        constant(0.8125, mode.from_tensor(torch.randn(4, 4)))
    assert constant(0.375, torch.randn(4, 4)) is kept
    assert not isinstance(constant(0.8125, torch.randn(4, 4)), FakeTensor)


def test_a_constant_made_in_inference_mode_may_be_saved_for_backward():
    with torch.inference_mode():
        constant(0.6875, torch.randn(2, 2))
    assert not constant(0.6875, torch.randn(2, 2)).is_inference()


def test_constants_are_bounded(monkeypatch):
    monkeypatch.setattr(scaling, "MAX_CONSTANTS", len(scaling._CONSTANTS))
    x = torch.randn(2, 2)
    assert constant(0.71875, x) is not constant(0.71875, x)


@pytest.mark.parametrize("scaling_type", [ScalingType.STATIC, ScalingType.DYNAMIC])
def test_a_factor_multiplies_a_scale(scaling_type):
    static = "0.5" if scaling_type is ScalingType.STATIC else None
    cast = OperandCast(scaling_type, E4M3, (WHOLE, WHOLE), static_scale=static)
    how = BoundCast(cast, "cpu")
    found = multiply_scale(torch.full((1, 1), 0.5), how, 0.3)
    assert_bitwise(found, torch.full((1, 1), 0.5) * 0.3)


@pytest.mark.slow
def test_compiled_a_cast_by_a_constant_joins_the_op_that_makes_its_operand():
    """One generated kernel; a scale that has to be found first makes two."""
    for recipe, kernels in (("unit", 1), ("tensorwise", 2)):
        cast = RECIPES[recipe].plan.output.a

        def produce_and_cast(x, cast=cast):
            return bind_and_cast(torch.nn.functional.gelu(x) * 2, cast)[0]

        torch._dynamo.reset()
        inductor_metrics.reset()
        torch.compile(produce_and_cast, fullgraph=True)(torch.randn(64, 64))
        assert inductor_metrics.generated_kernel_count == kernels, recipe
