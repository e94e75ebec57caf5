"""torch.export of a model with float8 weights: other batch sizes, from a file, to the same bits."""

from __future__ import annotations

import io

import pytest
import torch
from assertions import assert_bitwise
from torch import nn

import float8
from float8 import Float8LinearConfig, convert_to_float8_inference

# static scales, or a recipe -> whether dynamo traces the model
WAYS = {
    "static": True,
    "tensorwise": False,
    "rowwise": False,
    "blockwise": True,
    "mxfp8": False,
    "delayed": False,
}


def model_of(way: str, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(144, 160), nn.GELU(), nn.Linear(160, 48)).to(dtype).eval()
    if way == "static":
        return convert_to_float8_inference(model, {"0": 0.02, "2": 0.01})
    config = Float8LinearConfig.from_recipe_name(way)
    if way == "delayed":
        float8.convert_to_float8_training(model, config=config).train()
        model(torch.randn(8, 144, dtype=dtype)).sum().backward()
        float8.sync_float8_amax_and_scale_history(model)
    return convert_to_float8_inference(model, config=config).eval()


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch itself
@pytest.mark.parametrize("way", WAYS)
def test_a_program_from_a_file_computes_the_bits_of_the_model(way):
    model, x = model_of(way), torch.randn(6, 144, dtype=torch.bfloat16)
    shapes = ({0: torch.export.Dim("batch", min=2, max=64)},)
    program = torch.export.export(model, (x,), dynamic_shapes=shapes, strict=WAYS[way])
    file = io.BytesIO()
    torch.export.save(program, file)
    assert file.tell() < 2 * (144 * 160 + 160 * 48) + 200_000
    file.seek(0)
    loaded = torch.export.load(file).module()
    for batch in (x, x[:3], torch.randn(33, 144, dtype=torch.bfloat16)):
        with torch.no_grad():
            assert_bitwise(loaded(batch), model(batch), replay=(way, len(batch)))
