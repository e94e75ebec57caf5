"""Parts of stacks in float8: the scales of each expert and projection, and when there are none."""

from __future__ import annotations

import pytest
import torch
from assertions import assert_bitwise

from float8 import E4M3, CastConfig, Float8LinearConfig, Float8Tensor, ScalingType
from float8.checkpoints.expert_weights import cast_stack, part_of
from float8.checkpoints.stacks import Slot
from float8.granularity import Blockwise, Rowwise, Tensorwise

E, K = 3, 200  # K: a block of 128 columns and one of 72
GRANULARITIES = {
    "tensorwise": Tensorwise(),
    "rowwise": Rowwise(),
    "blockwise": Blockwise(128, 128),
}


def stack_of(rows):
    """Experts whose magnitudes differ, and whose halves do too."""
    x = torch.randn(E, 2 * rows, K) * torch.tensor([0.01, 1, 100]).view(-1, 1, 1)
    x[:, rows:] *= 7
    return x


def halves(rows, expert=1):
    """The slots of gate and up of an expert."""
    parts = slice(0, rows), slice(rows, 2 * rows)
    return [Slot("w", (expert, s, slice(0, K)), False, torch.Size([rows, K])) for s in parts]


@pytest.mark.parametrize("recipe", GRANULARITIES)
def test_each_expert_is_cast_as_if_alone(recipe):
    stack = stack_of(48)
    cast = cast_stack(stack, Float8LinearConfig.from_recipe_name(recipe))
    fmt = Float8LinearConfig.from_recipe_name(recipe).plan.output.b.scale_format
    for i in range(E):
        alone = Float8Tensor.from_high_precision(
            stack[i], E4M3, GRANULARITIES[recipe], scale_format=fmt
        )
        whole = Slot("w", (i, slice(0, 96), slice(0, K)), False, torch.Size([96, K]))
        part = part_of(cast, whole)
        assert part.block == alone.block
        assert_bitwise(part.float8_data, alone.float8_data)
        assert_bitwise(part.scale, alone.scale)


@pytest.mark.parametrize("recipe", GRANULARITIES)
@pytest.mark.parametrize("rows", [48, 128, 130, 256])
def test_parts_dequantise_to_the_values_of_the_stack(recipe, rows):
    stack = stack_of(rows)
    cast = cast_stack(stack, Float8LinearConfig.from_recipe_name(recipe))
    gate, up = (part_of(cast, slot) for slot in halves(rows))
    values = cast.dequantize()[1]
    assert_bitwise(gate.dequantize(), values[:rows])
    if recipe == "blockwise" and rows == 130:
        assert up is None  # its first block would be rows 130 to 257: of two of the stack's
        return
    assert_bitwise(up.dequantize(), values[rows:])
    if recipe == "tensorwise":
        assert torch.equal(gate.scale, up.scale)


@pytest.mark.parametrize("rows", [128, 256])
def test_aligned_halves_have_the_bits_of_halves_cast_on_their_own(rows):
    stack, config = stack_of(rows), Float8LinearConfig.from_recipe_name("blockwise")
    fmt = config.plan.output.b.scale_format
    for slot in halves(rows):
        part = part_of(cast_stack(stack, config), slot)
        alone = Float8Tensor.from_high_precision(
            slot.of(stack), E4M3, Blockwise(128, 128), scale_format=fmt
        )
        assert_bitwise(part.float8_data, alone.float8_data)
        assert_bitwise(part.scale, alone.scale)


def test_weights_in_high_precision_are_not_cast():
    config = Float8LinearConfig(*[CastConfig(ScalingType.DISABLED)] * 3)
    assert cast_stack(stack_of(16), config) is None


def test_a_static_scale_is_that_of_every_expert():
    config = Float8LinearConfig.from_recipe_name("unit")
    cast = cast_stack(stack_of(16), config)
    assert cast.scale.shape == (E, 1, 1)
    gate, _ = (part_of(cast, slot) for slot in halves(16))
    assert_bitwise(gate.dequantize(), cast.dequantize()[1, :16])


def test_transposed_parts_swap_data_and_scales():
    cast = cast_stack(stack_of(128), Float8LinearConfig.from_recipe_name("blockwise"))
    slot = Slot("w", (2, slice(0, 128), slice(0, K)), True, torch.Size([K, 128]))
    part = part_of(cast, slot)
    assert part.shape == (K, 128)
    assert_bitwise(part.dequantize(), cast.dequantize()[2, :128].mT)
