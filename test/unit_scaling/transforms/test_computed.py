"""A module that keeps tensors which were computed from parameters is refused by its name."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import prune, spectral_norm

from float8.unit_scaling.transforms import float8, simulate_fp8, track_scales, unit_scale

TRANSFORMS = (unit_scale, simulate_fp8, track_scales, float8)


class Keeps(nn.Linear):
    """Keeps a result of its forward, as models with an auxiliary loss do."""

    def __init__(self, as_buffer=False):
        super().__init__(8, 8)
        if as_buffer:
            self.register_buffer("last", None, persistent=False)

    def forward(self, x):
        self.last = super().forward(x)
        return self.last


def weight_norm(layer):
    with pytest.warns(FutureWarning, match="weight_norm"):
        return nn.utils.weight_norm(layer)


def that_has_run(layer):
    layer(torch.randn(2, 8))
    return layer


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: weight_norm(nn.Linear(8, 8)), r"\(Linear\) has weight, .*remove_weight_norm"),
        (lambda: prune.l1_unstructured(nn.Linear(8, 8), "weight", 0.5), r".* prune\.remove"),
        (lambda: that_has_run(spectral_norm(nn.Linear(8, 8))), ".* remove_spectral_norm"),
        (lambda: that_has_run(Keeps()), r"\(Keeps\) has last, .* set it to None"),
        (lambda: that_has_run(Keeps(as_buffer=True)), r"\(Keeps\) has last, .* set it to None"),
    ],
)
def test_what_cannot_be_copied_is_refused_by_module_and_attribute(transform, make, message):
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(make()))
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(model)
    with pytest.raises(ValueError, match=rf"^1\.0 {message}"):
        transform(model)


def test_the_ways_out_that_the_message_names_are_ways_out():
    kept = that_has_run(Keeps())
    kept.last = kept.last.detach()
    normed = nn.utils.remove_weight_norm(weight_norm(nn.Linear(8, 8)))
    pruned = prune.remove(prune.l1_unstructured(nn.Linear(8, 8), "weight", 0.5), "weight")
    unit_scale(nn.Sequential(kept, normed, pruned))(torch.randn(2, 8))


@pytest.mark.parametrize("normed", [nn.utils.parametrizations.spectral_norm, spectral_norm])
def test_a_weight_of_unknown_scale_is_refused_by_unit_scale_alone(normed):
    """It can be copied, but its standard deviation is not that of the parameter it is made of."""
    model = nn.Sequential(nn.Linear(8, 8), normed(nn.Linear(8, 8)))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"^unit_scale: 1 computes its weight.*remove_spectral"):
        unit_scale(model)
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    simulate_fp8(model)(torch.randn(2, 8))
