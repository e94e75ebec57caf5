"""The bytes of a cast, against a second count by hand."""

from dataclasses import replace

import pytest

from float8 import Blockwise
from float8.config import RECIPES, CastConfig, Float8LinearConfig, ScalingType
from float8.estimate.casts import Use, kind_of, passes_of_layer

# recipe -> bytes per element of x, w, g, in a training step by fused kernels. Reads of bfloat16
# are 2, writes of float8 are 1. x and g are wanted in two orientations at one time.
FUSED = {
    "tensorwise": (2 + 2 + 1 + 1, (2 + 2 + 1) + (2 + 1), 2 + 2 + 1 + 1),  # w's scale is kept
    "delayed": (2 + 1 + 1, (2 + 1) + (2 + 1), 2 + 1 + 1),
    "unit": (2 + 1 + 1, (2 + 1) + (2 + 1), 2 + 1 + 1),
    "rowwise": (2 + 1 + 2 + 1, (2 + 1) + (2 + 2 + 1), 2 + 1 + 2 + 1),
    "rowwise_with_gw_hp": (2 + 1, (2 + 1) + (2 + 2 + 1), 2 + 1),
    "blockwise": (2 + 1 + 1, (2 + 1) + (2 + 1), 2 + 1 + 1),
}
CACHED_WEIGHT = {
    "tensorwise": 2 + 2 + 1 + 1,
    "delayed": 2 + 1 + 1,
    "unit": 2 + 1 + 1,
    "rowwise": 2 + 1 + 2 + 1,
    "rowwise_with_gw_hp": (2 + 1) + (2 + 2 + 1),  # two kinds of scales
    "blockwise": 2 + 1 + 1,
}
# The reference always searches in a pass of its own (not for constants), and multiplies a
# transposed view of equal bytes.
REFERENCE = {
    "tensorwise": (2 + 3, (2 + 3) + 3, 2 + 3),
    "delayed": (2 + 3, (2 + 3) + 3, 2 + 3),
    "unit": (3, 3 + 3, 3),
    "rowwise": (2 * (2 + 3), 2 * (2 + 3), 2 * (2 + 3)),
    "rowwise_with_gw_hp": (2 + 3, 2 * (2 + 3), 2 + 3),
    "blockwise": (2 * (2 + 3), (2 + 3) + 3, 2 * (2 + 3)),
}


def bytes_of(recipe: str, use: Use, emulates: bool = False) -> tuple[int, int, int]:
    *operands, _ = passes_of_layer(RECIPES[recipe].plan, use, emulates)
    return tuple(sum(each.bytes_per_element for each in passes) for passes in operands)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_training_step_moves_what_its_fused_kernels_move(recipe):
    assert bytes_of(recipe, Use()) == FUSED[recipe]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_training_step_of_the_reference(recipe):
    assert bytes_of(recipe, Use(), emulates=True) == REFERENCE[recipe]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_cached_weight_is_cast_once_in_both_orientations(recipe):
    _, w, _ = bytes_of(recipe, Use(weights_cached=True))
    assert w == CACHED_WEIGHT[recipe]


@pytest.mark.parametrize("recipe", RECIPES)
def test_forward_alone_casts_input_and_weight_once(recipe):
    x, w, g = bytes_of(recipe, Use(training=False))
    searches = 2 if recipe == "tensorwise" else 0
    assert (x, w, g) == (searches + 3, searches + 3, 0)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_frozen_weight_needs_no_transposed_input_or_gradient(recipe):
    x, w, g = bytes_of(recipe, Use(weight_trains=False))
    searches = 2 if recipe == "tensorwise" else 0
    assert (x, w, g) == (searches + 3, FUSED[recipe][1], searches + 3)


def test_microbatches_share_only_a_cached_weight():
    plan = RECIPES["tensorwise"].plan
    assert passes_of_layer(plan, Use(gradient_accumulation=4), False)[3] == 1
    cached = Use(weights_cached=True, gradient_accumulation=4)
    assert passes_of_layer(plan, cached, False)[3] == 1 / 4


@pytest.mark.parametrize("count", [0, -1, 2.0, None, True, 2**30 + 1])
def test_gradient_accumulation_is_a_count(count):
    with pytest.raises(ValueError, match=f"gradient_accumulation={count}"):
        Use(gradient_accumulation=count)


def test_high_precision_operands_are_not_cast():
    off = CastConfig(ScalingType.DISABLED)
    plan = Float8LinearConfig(off, off, off).plan
    assert passes_of_layer(plan, Use(), False) == ([], [], [], 1)
    assert passes_of_layer(plan, Use(), True) == ([], [], [], 1)


def test_the_plan_decides_not_the_name():
    delayed = RECIPES["delayed"].cast_config_grad_output
    variant = replace(RECIPES["tensorwise"], cast_config_grad_output=delayed)
    *_, g, _ = passes_of_layer(variant.plan, Use(), False)
    assert [(each.name, each.bytes_per_element) for each in g] == [("cast given", 4)]


@pytest.mark.parametrize("extents", [(1, 128), (128, 128)])
def test_a_second_use_in_blocks_beside_another_first_one_finds_its_scales_on_the_chip(extents):
    # Each is cast by itself: tensorwise by two passes, a block of 128 by one, transposed too.
    blocks = CastConfig(granularity=Blockwise(*extents))
    variant = replace(
        RECIPES["tensorwise"],
        cast_config_input_for_grad_weight=blocks,
        cast_config_grad_output_for_grad_weight=blocks,
    )
    x, _, g, _ = passes_of_layer(variant.plan, Use(), False)
    name = f"cast {extents[0]}x{extents[1]} transposed"
    expected = [("amax tensorwise", 2), ("cast tensorwise", 3), (name, 3)]
    assert [(each.name, each.bytes_per_element) for each in x] == expected
    assert [(each.name, each.bytes_per_element) for each in g] == expected


def test_passes_are_named_by_what_they_do():
    x, w, g, _ = passes_of_layer(RECIPES["rowwise"].plan, Use(), emulates=True)
    both = ["amax rowwise", "cast rowwise", "amax rowwise transposed", "cast rowwise transposed"]
    assert [each.name for each in x] == [each.name for each in w] == both == [p.name for p in g]


def test_blocks_that_no_hardware_takes_count_as_lines():
    assert kind_of((1, 32)) == "1x128"


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise", "blockwise"])
def test_a_step_launches_what_the_layer_launches(recipe):
    pytest.importorskip("triton")
    from linear.test_bytes import LAUNCHES

    *operands, _ = passes_of_layer(RECIPES[recipe].plan, Use(), emulates=False)
    assert sum(len(passes) for passes in operands) == LAUNCHES[recipe]


def test_a_rowwise_cast_with_columns_is_three_launches():
    x, w, _, _ = passes_of_layer(RECIPES["rowwise"].plan, Use(), emulates=False)
    columns = "cast rowwise transposed"
    assert [each.name for each in x] == ["fill", "cast rowwise", columns]
    assert [each.name for each in w] == ["cast rowwise", "fill", "amax rowwise transposed", columns]
