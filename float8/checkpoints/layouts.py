"""The table of layouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from float8.checkpoints.compressed_tensors import CompressedTensors
from float8.checkpoints.fine_grained import FineGrained
from float8.checkpoints.layout import Layout
from float8.checkpoints.modelopt import ModelOpt

# The name that users write -> the class. A row also makes `layout_of` read the format.
LAYOUTS: dict[str, type[Layout]] = {
    layout.name: layout for layout in (FineGrained, CompressedTensors, ModelOpt)
}


def layout_of(config: Mapping[str, Any]) -> Layout:
    """The layout that a ``quantization_config`` describes.

    Raises ValueError, with its ``quant_method``, if no layout reads it.
    """
    for layout in LAYOUTS.values():
        if (found := layout.from_config(config)) is not None:
            return found
    method = config.get("quant_method")
    raise ValueError(
        f"quantization_config has quant_method={method!r}; this library reads "
        + ", ".join(sorted(LAYOUTS))
    )
