"""A checkpoint inside a transformed model is refused; one around it is right."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from assertions import assert_bitwise
from torch import nn
from torch.utils.checkpoint import checkpoint

from float8.unit_scaling.transforms import float8, simulate_fp8, track_scales, unit_scale


class Net(nn.Module):
    def __init__(self, kind=None):
        super().__init__()
        self.kind, self.first, self.second = kind, nn.Linear(16, 16), nn.Linear(16, 16)

    def block(self, x):
        return x + self.second(F.gelu(self.first(x)))

    def forward(self, x):
        if self.kind is None:
            return self.block(x)
        return checkpoint(self.block, x, use_reentrant=self.kind == "reentrant")


TRANSFORMS = pytest.mark.parametrize(
    "transform", [unit_scale, simulate_fp8, float8, track_scales], ids=lambda f: f.__name__
)
KINDS = pytest.mark.parametrize("kind", ["reentrant", "other"])


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # without gradients
@TRANSFORMS
@KINDS
def test_inside_it_is_refused(transform, kind):
    x = torch.randn(4, 16, requires_grad=True)
    with pytest.raises(RuntimeError, match="put the checkpoint around the transformed model"):
        transform(Net(kind))(x)


@TRANSFORMS
@KINDS
def test_around_it_gives_the_same_gradients(transform, kind):
    model, g = transform(Net()), torch.randn(4, 16)
    results = []
    for checkpointed in (False, True):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
        model.zero_grad()
        if checkpointed:
            checkpoint(model, x, use_reentrant=kind == "reentrant").backward(g)
        else:
            model(x).backward(g)
        results.append([x.grad, *(p.grad.clone() for p in model.parameters())])
    for mine, theirs in zip(*results, strict=True):
        assert_bitwise(mine, theirs)


@TRANSFORMS
def test_other_saved_tensor_hooks_and_no_grad_are_none(transform):
    class Offloads(Net):
        def forward(self, x):
            with torch.no_grad():
                x = x + F.gelu(x) * 0
            with torch.autograd.graph.save_on_cpu():
                return self.block(x)

    transform(Offloads())(torch.randn(4, 16)).sum().backward()
