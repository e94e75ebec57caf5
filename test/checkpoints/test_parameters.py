"""Writing a tensor of a file into a part of a parameter, of which this rank has a part."""

from __future__ import annotations

import itertools

import oracle
import pytest
import torch
from assertions import assert_bitwise
from torch import nn

from float8 import Float8Tensor
from float8.checkpoints import loading as parameters
from float8.checkpoints.loading import materialise, write
from float8.checkpoints.names import Slot

E, A, B = 3, 10, 7
SLOTS = {
    "whole": (),
    "an expert": (1, slice(0, 10), slice(0, 7)),
    "its first rows": (1, slice(0, 4), slice(0, 7)),
    "its last rows": (2, slice(4, 10), slice(0, 7)),
    "columns": (slice(1, 3), slice(2, 9), slice(3, 6)),
}
# Where this rank's part begins and how large it is, along each dimension.
PARTS = {
    "all": ((0, E), (0, A), (0, B)),
    "one expert": ((1, 1), (0, A), (0, B)),
    "no expert": ((0, 0), (0, A), (0, B)),
    "rows": ((0, E), (3, 4), (0, B)),
    "columns": ((0, E), (0, A), (4, 3)),
    "rows and experts": ((1, 2), (2, 5), (0, B)),
}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("slot", "part"), list(itertools.product(SLOTS, PARTS)))
def test_a_part_of_a_slot_is_written_and_nothing_else(slot, part, transposed, monkeypatch):
    index = SLOTS[slot]
    whole = torch.arange(float(E * A * B)).view(E, A, B)
    shape = whole[index].mT.shape if transposed else whole[index].shape
    where = Slot("w", index, transposed, shape)
    source = -torch.rand(shape, generator=torch.Generator().manual_seed(0)) - 1
    expected = whole.clone()
    where.of(expected).copy_(source)
    own = tuple(slice(start, start + size) for start, size in PARTS[part])
    local = whole[own].clone()
    monkeypatch.setattr(parameters, "_local", lambda _: (local, tuple(s.start for s in own)))
    write(where, whole, source)
    assert_bitwise(local, expected[own])


@pytest.mark.parametrize("block", [(128, 128), (1, -1), (-1, -1), (1, 32), (100, 50)])
@pytest.mark.parametrize("rows", [(0, 300), (1, 299), (127, 130), (128, 256), (299, 300)])
@pytest.mark.parametrize("columns", [(0, 160), (31, 129)])
def test_rows_that_split_blocks_are_dequantised_with_their_scales(block, rows, columns):
    w = torch.randn(300, 160, generator=torch.Generator().manual_seed(1))
    w *= torch.logspace(-3, 3, 300).unsqueeze(1)
    form = "e8m0" if block == (1, 32) else "float32"
    data, scale = oracle.quantize(w, block, torch.float8_e4m3fn, form)
    data = data.view(torch.float8_e4m3fn)
    box = (slice(*rows), slice(*columns))
    found = parameters._plain(Float8Tensor(data, scale, block, torch.float32), box)
    assert_bitwise(found, oracle.values(data, scale, block).float()[box])


def test_shared_tensors_on_meta_stay_shared_and_others_are_left():
    with torch.device("meta"):
        model = nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Linear(3, 4), "n": nn.BatchNorm1d(4)})
        model["b"].weight = model["a"].weight
        model["n"].register_buffer("rest", torch.zeros(2), persistent=False)
    model["c"] = kept = nn.Linear(2, 2)
    weight = kept.weight
    materialise(model, torch.device("cpu"))
    assert model["a"].weight is model["b"].weight
    assert isinstance(model["a"].weight, nn.Parameter)
    assert not model["n"].running_mean.is_meta
    assert model["n"].rest.is_meta
    assert kept.weight is weight
