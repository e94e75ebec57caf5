"""`compile` is torch.compile of a transformed model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from float8.unit_scaling.transforms import compile, simulate_fp8, unit_scale


def test_a_transformed_model_compiles_to_one_graph_with_its_numbers_and_gradients():
    model = simulate_fp8(unit_scale(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))))
    compiled = compile(model, backend="eager", fullgraph=True)
    assert isinstance(compiled, nn.Module)
    x, grad = torch.randn(3, 8), torch.randn(3, 4)
    found = []
    for run in (model, compiled):
        run.zero_grad()
        run(x).backward(grad)
        found.append([run(x), *(p.grad.clone() for p in model.parameters())])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_it_takes_modules_only_and_comes_last():
    with pytest.raises(TypeError, match=r"takes an nn\.Module"):
        compile(torch.relu)
    with pytest.raises(TypeError, match="transform it first, then compile"):
        unit_scale(compile(nn.Linear(2, 2)))
