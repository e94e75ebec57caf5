"""Stacks set the depth of their parameters, all or none."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from torch import nn

import float8.unit_scaling as uu

STACKS = {
    "list": lambda *layers: uu.DepthModuleList(layers),
    "generator": lambda *layers: uu.DepthModuleList(layer for layer in layers),
    "sequential": uu.DepthSequential,
    "named": lambda *layers: uu.DepthSequential(OrderedDict(zip("abc", layers, strict=False))),
}
EVERY = pytest.mark.parametrize("stack", STACKS.values(), ids=STACKS)


def depths(model):
    return [p.mup_scaling_depth for p in model.parameters()]


def three():
    return [uu.Linear(4, 4, bias=True), uu.MLP(4, 2), uu.RMSNorm(4, elementwise_affine=True)]


@EVERY
def test_every_parameter_gets_the_number_of_layers(stack):
    assert depths(stack(*three())) == [3] * 6
    assert depths(stack(three()[0])) == [1, 1]


@EVERY
def test_a_parameter_without_a_role_is_named_and_nothing_is_set(stack):
    layers = [uu.Linear(4, 4), nn.Linear(4, 4)]
    with pytest.raises(ValueError, match=r"weight of shape \(4, 4\) has no mup_type"):
        stack(*layers)
    assert depths(layers[0]) == [None]


@EVERY
def test_stacks_do_not_nest(stack):
    inner, outer = uu.DepthSequential(uu.Linear(4, 4), uu.Linear(4, 4)), uu.Linear(4, 4)
    with pytest.raises(ValueError, match="do not nest"):
        stack(outer, inner)
    assert (depths(outer), depths(inner)) == ([None], [2, 2])


def test_slices_are_plain_and_keep_the_depth():
    layers = three()
    for model, plain in (
        (uu.DepthSequential(*layers), nn.Sequential),
        (uu.DepthModuleList(three()), nn.ModuleList),
    ):
        part = model[1:]
        assert type(part) is plain
        assert depths(part) == [3] * 4
        assert part[0] is model[1]
        assert model[-1] is model[2]
