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
from float8 import Float8Linear, sync_float8_amax_and_scale_history

M, K, N = 128, 256, 128
LIBRARY = str(Path(float8.__file__).parent)
CALLS = {"tensorwise": 135, "rowwise": 151, "blockwise": 175, "mxfp8": 215, "delayed": 152}


@pytest.mark.parametrize("recipe", CALLS)
def test_calls_of_a_step_on_a_cpu(recipe):
    layer = Float8Linear(K, N, bias=False, dtype=torch.bfloat16, config=recipe)
    x = torch.randn(M, K, dtype=torch.bfloat16, requires_grad=True)
    g = torch.randn(M, N, dtype=torch.bfloat16)
    for _ in range(2):
        layer(x).backward(g)
        sync_float8_amax_and_scale_history(layer)
    calls = []

    def profile(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(LIBRARY):
            calls.append(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        layer(x).backward(g)
    finally:
        sys.setprofile(None)
    assert 40 < len(calls) <= CALLS[recipe]
