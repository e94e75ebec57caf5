"""States leave as plain tensors and come back, to the bit where they are kept alike."""

import copy
import io

import pytest
import torch
from assertions import sqnr
from optim_training import assert_same_models, assert_same_states, make, train, values_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from float8 import E4M3, Float8Tensor
from float8.optim import SGD, Adam, AdamW, Lion, float32_state_dict
from float8.optim.moment import Moment

SMALL = {"min_size": 200, "lr": 1e-2}


def trained(cls=AdamW, steps=3, **options):
    model = make()
    optimizer = cls(model.parameters(), **{**SMALL, **options})
    train(model, optimizer, steps)
    return model, optimizer


@pytest.mark.parametrize("cls", [AdamW, Adam, SGD, Lion])
@pytest.mark.parametrize("second", ["float8", "float16"])
def test_a_round_trip_keeps_every_bit(cls, second):
    options = {"second_moment": second} if cls in (AdamW, Adam) else {}
    model, optimizer = trained(cls, **options)
    memory = io.BytesIO()
    torch.save(optimizer.state_dict(), memory)
    memory.seek(0)
    loaded = torch.load(memory, weights_only=True)
    other = copy.deepcopy(model)
    twin = cls(other.parameters(), **{**SMALL, **options})
    twin.load_state_dict(loaded)
    assert_same_states(optimizer, twin)
    train(model, optimizer, 2)
    train(other, twin, 2)
    assert_same_models(model, other)


def test_entries_are_plain_and_follow_the_rows():
    _, optimizer = trained(group_size=32)
    entry = optimizer.state_dict()["state"][0]  # of (130, 32)
    assert entry["step"] == 3
    codes, scale, exponent = (entry["exp_avg_sq"][k] for k in ("codes", "scale", "exponent"))
    assert (codes.dtype, codes.shape) == (torch.uint8, (130, 32))
    assert scale.shape == exponent.shape == (130, 1)
    assert set(entry["exp_avg"]) == {"codes", "scale"}
    bias = optimizer.state_dict()["state"][1]
    assert bias["exp_avg"].dtype == torch.float32, "one row: a shard would cut its groups"


@pytest.mark.ranks(2)
def test_a_shard_that_cuts_no_group_is_saved_in_codes(rank):
    mesh = init_device_mesh("cpu", (2,))
    for dim, is_coded in ((0, True), (1, True), (2, False)):
        p = nn.Parameter(distribute_tensor(torch.randn(6, 8, 32), mesh, [Shard(dim)]))
        p.grad = torch.ones_like(p)
        optimizer = AdamW([p], min_size=0, group_size=16)
        optimizer.step()
        entry = optimizer.state_dict()["state"][0]["exp_avg"]
        assert isinstance(entry, dict) == is_coded, dim
        saved = entry.values() if is_coded else [entry]
        assert all(x.placements == (Shard(dim),) for x in saved), dim
        assert [tuple(x.shape) for x in saved] == [(6, 8, 32), (6, 16)][: len(saved)], dim


TORCH = {AdamW: torch.optim.AdamW, Adam: torch.optim.Adam, SGD: torch.optim.SGD}


@pytest.mark.parametrize("cls", TORCH)
def test_torch_loads_ours_and_we_load_torchs(cls):
    model, optimizer = trained(cls)
    options = {"momentum": 0.9} if cls is SGD else {}
    other = copy.deepcopy(model)
    theirs = TORCH[cls](other.parameters(), lr=1.0, **options)
    theirs.load_state_dict(float32_state_dict(optimizer))
    assert theirs.param_groups[0]["lr"] == 1e-2
    assert "group_size" not in theirs.param_groups[0]
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        for name in optimizer.moment_options:
            assert torch.equal(values_of(optimizer.state[p][name]), theirs.state[q][name])
    train(other, theirs, 2)

    twin = cls(copy.deepcopy(other).parameters(), **SMALL)
    twin.load_state_dict(theirs.state_dict())
    for p, q in zip(other.parameters(), twin.param_groups[0]["params"], strict=True):
        for name in optimizer.moment_options:
            mine = twin.state[q][name]
            assert isinstance(mine, Moment) == (p.numel() >= 200)
            assert sqnr(values_of(mine), theirs.state[p][name]) > 20
    assert "foreach" not in twin.param_groups[0]
    train(other, twin, 1)


@pytest.mark.parametrize(
    "options",
    [
        {"group_size": 7},
        {"second_moment": "float16"},
        {"first_moment": "float32", "second_moment": "float32"},
        {"min_size": 10**9},
    ],
)
def test_states_kept_otherwise_are_quantised_again(options):
    model, optimizer = trained()
    twin = AdamW(copy.deepcopy(model).parameters(), **{**SMALL, **options})
    back = AdamW(copy.deepcopy(model).parameters(), **SMALL)
    twin.load_state_dict(optimizer.state_dict())
    back.load_state_dict(twin.state_dict())
    for name, value in options.items():
        assert twin.param_groups[0][name] == value, "how states are kept is the loader's choice"
    for first, second, third in zip(
        *(o.state.values() for o in (optimizer, twin, back)), strict=True
    ):
        assert second["step"] == third["step"] == 3
        for name in ("exp_avg", "exp_avg_sq"):
            assert sqnr(values_of(second[name]), values_of(first[name])) > 20
            assert sqnr(values_of(third[name]), values_of(first[name])) > 20


def test_masters_are_saved_and_loaded():
    value = torch.randn(20, 64)
    results = []
    p = nn.Parameter(Float8Tensor.from_high_precision(value, E4M3))
    optimizer = AdamW([p], min_size=0)
    optimizer.start_master(p, value)
    p.grad = torch.randn(20, 64)
    optimizer.step()
    q = copy.deepcopy(p)
    twin = AdamW([q], min_size=0)
    twin.load_state_dict(optimizer.state_dict())
    assert_same_states(optimizer, twin)
    for x, o in ((p, optimizer), (q, twin)):
        x.grad = torch.ones(20, 64)
        o.step()
        results.append(x.dequantize().detach())
    assert torch.equal(*results)
    plain = torch.optim.AdamW([nn.Parameter(value)])
    plain.load_state_dict(float32_state_dict(optimizer))
    assert "master" not in plain.state_dict()["state"][0]
    without = AdamW([copy.deepcopy(p)], min_size=0)
    without.load_state_dict(plain.state_dict())
    assert sqnr(without.state_dict()["state"][0]["master"]["codes"].float(), p.dequantize()) < 99
    refused = AdamW([nn.Parameter(value)], min_size=0)
    with pytest.raises(ValueError, match=r"parameter 0 .* has the master of a float8 parameter"):
        refused.load_state_dict(optimizer.state_dict())
    assert not refused.state
    refused.load_state_dict(float32_state_dict(optimizer))


def test_states_of_another_shape_are_refused_and_nothing_changes():
    model, optimizer = trained()
    other = nn.Sequential(nn.Linear(32, 140), nn.GELU(), nn.LayerNorm(140), nn.Linear(140, 16))
    twin = AdamW(other.parameters(), **SMALL)
    with pytest.raises(ValueError, match=r"parameter 0 of shape \(140, 32\).*\(130, 32\)"):
        twin.load_state_dict(optimizer.state_dict())
    assert not twin.state
    with pytest.raises(ValueError, match=r"parameter 0 .*exp_avg has shape \(130, 32\)"):
        twin.load_state_dict(float32_state_dict(optimizer))
    with pytest.raises(ValueError, match="parameter group"):
        AdamW(model[0].parameters()).load_state_dict(optimizer.state_dict())
    state = optimizer.state_dict()
    state["param_groups"][0]["group_size"] = 16
    with pytest.raises(ValueError, match=r"exp_avg.scale has shape \(130, 1\), not \(130, 2\)"):
        AdamW(make().parameters(), **SMALL).load_state_dict(state)


@pytest.mark.parametrize(("cls", "other"), [(AdamW, Lion), (AdamW, SGD), (Lion, SGD)])
def test_another_optimizers_state_is_refused_and_nothing_changes(cls, other):
    """A second moment of zero beside a large step count would move the weights far too much."""
    model, optimizer = trained(other)
    twin = cls(model.parameters(), **SMALL)
    theirs = torch.optim.SGD(model.parameters(), momentum=0.9)
    train(model, theirs, 1)
    for state in (optimizer.state_dict(), theirs.state_dict()):
        with pytest.raises(ValueError, match=r"parameter 0 .* and no exp_avg"):
            twin.load_state_dict(state)
        assert not twin.state
        assert "momentum" not in twin.param_groups[0]
