"""One layout of every kind that checkpoints have, and layers that each of them stores."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from float8 import E4M3, Float8Tensor
from float8.checkpoints import CompressedTensors, FineGrained, ModelOpt
from float8.checkpoints.layouts import Layout
from float8.formats import ScaleFormat
from float8.granularity import Blockwise, Rowwise

BLOCKS, MX = Blockwise(128, 128), Blockwise(1, 32)
LAYOUT_CASES = {
    "fine_grained": FineGrained(),
    "fine_grained_3x5": FineGrained((3, 5)),
    "fine_grained_pow2": FineGrained(scale_format=ScaleFormat.POWER_OF_TWO),
    "fine_grained_e8m0": FineGrained(scale_format=ScaleFormat.E8M0),
    "tensorwise": CompressedTensors(),
    "tensorwise_static": CompressedTensors(static_inputs=True),
    "rowwise": CompressedTensors(Rowwise()),
    "rowwise_static": CompressedTensors(Rowwise(), static_inputs=True),
    "blocks": CompressedTensors(BLOCKS),
    "mx": CompressedTensors(MX),
    "modelopt": ModelOpt(),
}
every_layout = pytest.mark.parametrize("layout", LAYOUT_CASES.values(), ids=LAYOUT_CASES)


class Layer(NamedTuple):
    """A layer as a layout stores it."""

    name: str
    weight: Float8Tensor
    input_scale: Tensor | None


def layer_of(layout: Layout, shape=(200, 320), dtype=torch.bfloat16, name="a.up_proj") -> Layer:
    x = torch.randn(shape).to(dtype) * torch.logspace(-3, 3, shape[0]).to(dtype)[:, None]
    weight = Float8Tensor.from_high_precision(
        x, E4M3, layout.granularity, scale_format=layout.scale_format
    )
    return Layer(name, weight, torch.tensor(0.03125) if layout.static_inputs else None)
