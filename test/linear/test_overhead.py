"""How many functions of the library a training step calls.

Counted, not timed. The calls are those of one warmed-up eager forward and backward of a layer
without bias.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import float8
from float8 import Float8Linear, Float8LinearConfig, sync_float8_amax_and_scale_history

M, K, N = 128, 256, 128
LIBRARY = str(Path(float8.__file__).parent)
CALLS = {"tensorwise": 140, "rowwise": 160, "blockwise": 180, "mxfp8": 214, "delayed": 165}


def warmed_up(recipe):
    """One training step, to be called again."""
    config = Float8LinearConfig.from_recipe_name(recipe)
    layer = Float8Linear(K, N, bias=False, dtype=torch.bfloat16, config=config)
    x = torch.randn(M, K, dtype=torch.bfloat16, requires_grad=True)
    g = torch.randn(M, N, dtype=torch.bfloat16)

    def step():
        layer(x).backward(g)

    step()
    if config.uses_delayed_scaling:
        sync_float8_amax_and_scale_history(layer)
    step()
    return step


def calls_of(step):
    """Calls of functions of the library, of comprehensions and generators too."""
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(LIBRARY)

    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("recipe", CALLS)
def test_calls_of_a_step_on_a_cpu(recipe):
    assert 40 < calls_of(warmed_up(recipe)) <= CALLS[recipe]
