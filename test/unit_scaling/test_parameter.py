"""Parameters keep their roles when they are copied, and modules when they are replaced."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing  # registers tensors with ForkingPickler
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import float8.unit_scaling as uu
from float8.unit_scaling.parameter import MupModule, has_parameter_data
from float8.unit_scaling.transforms import unit_scale


class Mine(MupModule):
    """A user's module, two roles, one of them in a stack of 5."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = uu.Parameter(torch.randn(3, 7), "weight", mup_scaling_depth=5)
        self.gain = uu.Parameter(torch.ones(7), "norm")
        self.plain = nn.Parameter(torch.zeros(2))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)

    def forward(self, x):
        return (x * self.gain) @ self.weight.T


def roles(model):
    """(type, depth) of every parameter; None for one without data."""
    return {
        name: (p.mup_type, p.mup_scaling_depth) if has_parameter_data(p) else None
        for name, p in model.named_parameters()
    }


MINE = {"weight": ("weight", 5), "gain": ("norm", None), "plain": None}


def pickled(x):
    return pickle.loads(pickle.dumps(x))


def saved(x):
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def meta_then_cpu(model):
    return model.to("meta").to_empty(device="cpu")


def assigned(model):
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    return model


def loaded_on_meta(model):
    state = model.state_dict()
    model = copy.deepcopy(model).to("meta")
    model.load_state_dict(state, assign=True)
    return model


def swapped(model):
    """`Module.to` for tensor subclasses swaps the contents of parameters."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return assigned(model.to(torch.float64))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def replaced(model):
    for name in MINE:
        setattr(model, name, nn.Parameter(getattr(model, name).detach().clone()))
    return model


CHANGES = [
    copy.deepcopy, pickled, saved, meta_then_cpu, assigned, loaded_on_meta, swapped,
    replaced, lambda m: m.to(torch.bfloat16), lambda m: m.to(torch.float64).half(),
    lambda m: m.requires_grad_(False), lambda m: torch.compile(m)._orig_mod,
]  # fmt: skip


def name_of(change):
    return change.__name__


@pytest.mark.parametrize("second", CHANGES, ids=name_of)
@pytest.mark.parametrize("first", CHANGES, ids=name_of)
def test_a_module_keeps_the_roles_of_its_parameters(first, second):
    assert roles(second(first(Mine()))) == MINE


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved], ids=name_of)
def test_a_parameter_alone_keeps_its_role_in_every_generation(copied):
    p = uu.Parameter(torch.randn(3, 5, dtype=torch.bfloat16), "output", 4).requires_grad_(False)
    for _ in range(3):
        q = copied(p)
        assert type(q) is nn.Parameter
        assert (q.mup_type, q.mup_scaling_depth, q.requires_grad) == ("output", 4, False)
        assert torch.equal(p, q)
        q.data.fill_(7)  # a copy of the copy is a copy of it, not of the first
        p = q


def test_a_saved_parameter_loads_as_weights_only():
    torch.save(uu.Parameter(torch.ones(2), "bias", 3), file := io.BytesIO())
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert (loaded.mup_type, loaded.mup_scaling_depth) == ("bias", 3)


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_fsdp2_shards_have_roles_and_learning_rates(one_process):
    model = nn.Sequential(uu.Linear(7, 5, bias=True), uu.LinearReadout(5, 3))
    expected, lrs = roles(model), [g["lr"] for g in uu.optim.Adam(model, lr=1.0).param_groups]
    for layer in (*model, model):
        fully_shard(layer, mesh=one_process)
    assert roles(model) == expected
    optimizer = uu.optim.Adam(model, lr=1.0)
    assert [g["lr"] for g in optimizer.param_groups] == lrs
    for _ in range(2):
        model(torch.randn(4, 7)).backward(torch.randn(4, 3))
        optimizer.step()
        optimizer.zero_grad()
        assert roles(model) == expected


def test_fsdp2_takes_the_roles_of_a_transformed_model_and_the_optimizer_says_so(one_process):
    model = fully_shard(unit_scale(nn.Sequential(nn.Linear(7, 5))), mesh=one_process)
    with pytest.raises(ValueError, match="FSDP2 replaces the parameters that unit_scale has mark"):
        uu.optim.Adam(model, lr=1.0)
