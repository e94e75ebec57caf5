"""Linear layers that keep the float8 weights of a checkpoint: the config that a layout means.

=================== ======================================= =====================================
layout              inputs                                  weights
=================== ======================================= =====================================
fine_grained        dynamic, 1x128                          128x128
compressed_tensors  dynamic per token, or the file's scale  per tensor, per row
compressed_tensors  dynamic, 1x128 or 1x32                  128x128, 1x32 (MX)
modelopt            the file's scale                        per tensor
=================== ======================================= =====================================

Data and scales are those of the files; E8M0 scales of 128x128 blocks become float32, exactly. The
weights are frozen. Gradients pass to the input: `float8.linear.float8_weight` says how.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from float8.checkpoints.layout import Layout
from float8.checkpoints.matching import dtype_of, join, layer_of, tensor_of
from float8.checkpoints.source import WEIGHT, Source
from float8.checkpoints.stacks import Slot
from float8.config import RECIPES, CastConfig, Float8LinearConfig, ScalingType
from float8.convert.conversion import ConversionPlan, plan_conversion
from float8.convert.filters import NO_REASON
from float8.convert.folding import named
from float8.convert.inference import refuses_device
from float8.formats import E4M3, ScaleFormat
from float8.granularity import Blockwise, Rowwise, Tensorwise
from float8.kernels import e8m0, is_sharded
from float8.linear.float8_weight import as_parameter
from float8.tensor import Float8Tensor

IN_HIGH_PRECISION = "the checkpoint has its weight in high precision"
SHARDED = (
    "its weight is sharded, and fully_shard gathers no frozen float8 weights: give each rank the "
    'whole model, or load with weights="high_precision"'
)


def config_of(layout: Layout, input_scale: Tensor | None = None) -> Float8LinearConfig:
    """The config of a layer that a checkpoint stores in a layout.

    ``input_scale`` is None where the layer's inputs are not cast with a static scale.
    """
    granularity, output = layout.granularity, RECIPES["blockwise"].gemm_config_output
    scales = layout.scale_format
    if scales.is_e8m0 and granularity == Blockwise(1, 32):
        return RECIPES["mxfp8"]
    if scales is not ScaleFormat.FLOAT32:
        scales = ScaleFormat.POWER_OF_TWO
    weight = CastConfig(granularity=granularity, target_dtype=E4M3.dtype, scale_format=scales)
    if isinstance(granularity, Blockwise):
        row = replace(weight, granularity=Blockwise(1, granularity.cols))
        return Float8LinearConfig(row, weight, row, gemm_config_output=output)
    row = replace(weight, granularity=Rowwise())
    gradient = CastConfig() if granularity == Tensorwise() else row
    if input_scale is None:
        return Float8LinearConfig(row, weight, gradient)
    static = CastConfig(
        ScalingType.STATIC, target_dtype=E4M3.dtype, static_scale=float(input_scale)
    )
    return Float8LinearConfig(static, weight, gradient)


def plan_of_float8(
    model: nn.Module, source: Source, slots: Mapping[str, Slot], device: torch.device
) -> ConversionPlan:
    """The layers of a plain model that keep the float8 weights of the files, each with its config.

    ``device`` is that of weights that are on the meta device. Raises ValueError if a layer cannot
    keep its weight; nothing has been changed then.
    """
    names = _stored_layers(source, slots)
    for fqn in names:
        if is_sharded(tensor_of(model, join(fqn, "weight"))):
            raise ValueError(f"nothing was loaded from {source.path}: {named(fqn)}: {SHARDED}")
    any_size = Float8LinearConfig(emulate=True)  # `_refused` asks what the device takes
    plan = plan_conversion(
        model, any_size, lambda _, fqn: fqn in names, "load", replaces_weights=True
    )
    plan.module_filter_fn = None
    shared = {
        id(tensor_of(model, join(fqn, "weight"))): fqn for fqn in names if fqn not in plan.layers
    }
    for fqn, reason in plan.conversion.skipped.items():
        if reason == NO_REASON:
            weight = model.get_submodule(fqn)._parameters.get("weight")
            plan.conversion.skipped[fqn] = (
                f"its weight is that of {shared[id(weight)]} too, and dequantised"
                if id(weight) in shared
                else IN_HIGH_PRECISION
            )
    for fqn, linear in plan.layers.items():
        assert source.layout is not None
        stored = source.layer(names[fqn], dtype_of(linear.weight))
        plan.configs[fqn] = config_of(source.layout, stored.input_scale)
    try:
        plan.check(_refused(plan, device))
    except ValueError as error:
        instead = 'weights="high_precision" loads dequantised weights'
        raise ValueError(f"nothing was loaded from {source.path}: {error}\n{instead}") from error
    return plan


def _refused(plan: ConversionPlan, device: torch.device) -> Iterator[tuple[str, str | None]]:
    """(name, the reason why a layer cannot keep a float8 weight, or None)."""
    for fqn, linear in plan.layers.items():
        weight: Tensor = linear.weight
        place = device if weight.is_meta else weight.device
        yield fqn, refuses_device(weight, plan.configs[fqn], place)


@torch.no_grad()
@torch.inference_mode(False)  # a backward cannot save tensors that were made in inference mode
def keep_float8(
    source: Source, slots: Mapping[str, Slot], plan: ConversionPlan, device: torch.device
) -> None:
    """Replace the weights of converted layers by those of the files, each freed before the next.

    ``plan`` is that of `plan_of_float8`, already carried out. ``device`` is that of weights that
    are on the meta device.
    """
    names = _stored_layers(source, slots)
    for fqn, linear in plan.layers.items():
        old: Tensor = linear.weight
        stored = source.layer(names[fqn], dtype_of(old)).weight
        place = device if old.is_meta else old.device
        data = torch.empty_like(stored.float8_data, device=place).copy_(stored.float8_data)
        is_mx = stored.block == (1, 32)
        scale = stored.scale if is_mx else e8m0.as_float32(stored.scale)
        scale = scale.to(place, copy=True)
        own = Float8Tensor(data, scale, stored.block, stored.dtype)
        linear.weight = as_parameter(old, own, requires_grad=False)


def _stored_layers(source: Source, slots: Mapping[str, Slot]) -> dict[str, str]:
    """Name in the model -> name in the files, of layers in float8 with a weight of their own."""
    keys = {name + WEIGHT: name for name in source.layers}
    own = {key: slots[key] for key in keys if key in slots and not slots[key].index}
    return {layer_of(slot): keys[key] for key, slot in own.items() if not slot.transposed}
