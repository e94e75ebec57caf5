"""`layout_for`: the layout in which a model is stored, from its name or from the model's recipe."""

from __future__ import annotations

from typing import Any

from torch import nn

from float8.arguments import described, did_you_mean
from float8.checkpoints.compressed_tensors import CompressedTensors
from float8.checkpoints.fine_grained import FineGrained
from float8.checkpoints.float8_layers import transformers_config
from float8.checkpoints.layout import Layout
from float8.checkpoints.layouts import LAYOUTS
from float8.checkpoints.readers import Shapes, transformers_refuses
from float8.config import OperandCast, ScalingType
from float8.convert.conversion import own_config
from float8.formats import ScaleFormat
from float8.granularity import Blockwise, Rowwise, block_name

# The granularity of a recipe's weights -> the layout that stores such scales.
_BY_GRANULARITY = {
    "128x128": "fine_grained",
    "tensorwise": "compressed_tensors",
    "rowwise": "compressed_tensors",
    "1x32": "compressed_tensors",
}
# The default of a recipe -> what stores the same scales where Transformers reads no such file.
_INSTEAD: dict[Layout, Layout] = {
    CompressedTensors(Blockwise(1, 32)): FineGrained((1, 32), ScaleFormat.E8M0)
}
# The variants of compressed_tensors.
_VARIANTS = {"rowwise": Rowwise(), "128x128": Blockwise(128, 128), "1x32": Blockwise(1, 32)}


def layout_for(
    model: nn.Module, layout: Layout | str | None, shapes: Shapes | None = None
) -> Layout:
    """The layout in which a converted model is stored.

    A `Layout` is returned as it is. A name stands for the variant that stores the scales of the
    model's recipe. None stands for the layout that stores those scales: ``fine_grained`` of 128x128
    blocks, ``compressed_tensors`` of rows, whole tensors and MX blocks. A model of Transformers
    with experts in MX blocks gets ``fine_grained``. Inputs are static where all layers cast theirs
    with constants. ``shapes`` are those of the layers in float8, by which the default is chosen.

    Raises TypeError for another type, and ValueError for an unknown name. Without a name, raises
    ValueError if the model has no layer in float8, layers of several granularities, or layers of a
    granularity that no layout stores.
    """
    if isinstance(layout, Layout):
        return layout
    if layout is not None and not isinstance(layout, str):
        raise TypeError(
            f"layout must be a Layout, such as FineGrained(), or one of {', '.join(LAYOUTS)}, got "
            f"{described(layout)}"
        )
    if layout is not None and layout not in LAYOUTS:
        raise ValueError(
            f"unknown layout {layout!r}; known: {', '.join(LAYOUTS)}{did_you_mean(layout, LAYOUTS)}"
        )
    plans = [c.plan for m in model.modules() if (c := own_config(m)) is not None]
    casts = [plan.output.b for plan in plans if plan.output.b is not None]
    is_default = layout is None
    if layout is None:
        layout = _layout_of_recipe(casts)
    inputs = [plan.output.a for plan in plans]
    is_static = bool(inputs) and all(
        cast is not None and cast.scaling_type is ScalingType.STATIC for cast in inputs
    )
    made: Any = LAYOUTS[layout]
    if layout == "fine_grained":
        # Engines then round the scales of inputs to powers of two, as the recipe does.
        powers = bool(casts) and all(c.scale_format is ScaleFormat.POWER_OF_TWO for c in casts)
        found: Layout = made(scale_format=ScaleFormat.POWER_OF_TWO) if powers else made()
    elif layout == "compressed_tensors":
        granularities = {block_name(cast.block) for cast in casts}
        variant = _VARIANTS.get(granularities.pop()) if len(granularities) == 1 else None
        found = made(granularity=variant) if variant else made(static_inputs=is_static)
    else:
        found = made()
    instead = _INSTEAD.get(found)
    if instead is None or not is_default or transformers_config(model) is None:
        return found
    refused = [transformers_refuses(each, shapes or {}) for each in (found, instead)]
    return instead if refused[0] and not refused[1] else found


def _layout_of_recipe(casts: list[OperandCast]) -> str:
    granularities = sorted({block_name(cast.block) for cast in casts})
    known = ", ".join(f'"{name}"' for name in LAYOUTS)
    if not granularities:
        raise ValueError(
            "the model has no layer in float8: convert it first, by convert_to_float8_training or "
            "convert_to_float8_inference"
        )
    if len(granularities) > 1:
        raise ValueError(
            f"the model's weights have scales of several granularities, {', '.join(granularities)};"
            f" say how to store them by layout=, one of {known}"
        )
    name = _BY_GRANULARITY.get(granularities[0])
    if name is None:
        raise ValueError(
            f"no layout stores weights with scales by {granularities[0]}; layout=, one of {known}, "
            "casts them anew from high precision"
        )
    return name
