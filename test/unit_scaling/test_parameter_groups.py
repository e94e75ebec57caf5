"""Groups: every way to name parameters, one group per learning rate, errors that name them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import float8.unit_scaling as uu
from float8.unit_scaling.learning_rates import lr_scale_func_adam
from float8.unit_scaling.parameter_groups import scaled_parameters


def model():
    return nn.Sequential(
        uu.Linear(16, 16, bias=True), uu.Linear(16, 16), uu.Linear(16, 64), uu.LinearReadout(64, 5)
    )


def scaled(params, **options):
    return scaled_parameters(params, lr_scale_func_adam, **{"lr": 2.0, **options})


def tensors(group):
    return [p[1] if isinstance(p, tuple) else p for p in group["params"]]


def learning_rates(groups):
    return {id(p): g["lr"] for g in groups for p in tensors(g)}


WAYS = {
    "parameters": lambda m: m.parameters(),
    "a list": lambda m: list(m.parameters()),
    "a generator": lambda m: (p for p in m.parameters()),
    "named parameters": lambda m: m.named_parameters(),
    "the module": lambda m: m,
    "a group of a generator": lambda m: [{"params": m.parameters()}],
    "a group of a module": lambda m: [{"params": m}],
    "a group per layer": lambda m: [{"params": layer.parameters()} for layer in m],
    "a group per tensor": lambda m: [{"params": p} for p in m.parameters()],
    "a generator of groups": lambda m: ({"params": layer.named_parameters()} for layer in m),
    "some of each": lambda m: [m[0].weight, {"params": m[1:]}, m[0].bias],
    "twice": lambda m: [*m.parameters(), *m.parameters()],
    "twice in a group": lambda m: [{"params": [*m.parameters(), *m.parameters()]}],
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_every_way_to_name_parameters_gives_each_once_with_its_learning_rate(way):
    m = model()
    groups = scaled(way(m))
    assert learning_rates(groups) == {id(p): 2.0 * lr_scale_func_adam(p) for p in m.parameters()}
    assert sum(len(g["params"]) for g in groups) == len(list(m.parameters()))


def test_there_is_one_group_per_learning_rate_in_order_of_appearance():
    m = model()
    groups = scaled(m.parameters())
    assert [g["lr"] for g in groups] == [0.5, 2.0]
    assert [tensors(g) for g in groups] == [
        [m[0].weight, m[1].weight, m[2].weight],
        [m[0].bias, m[3].weight],
    ]


def test_a_large_model_makes_few_groups():
    decoder = uu.TransformerDecoder(hidden_size=32, vocab_size=48, layers=6, heads=2)
    assert len(scaled(decoder)) == 4  # embedding; stack of width 32, of width 128; readout


def test_groups_keep_their_own_options():
    m = model()
    groups = scaled(
        [
            {"params": m[0].parameters(), "lr": 1.0, "betas": (0.5, 0.6)},
            {"params": m[1].parameters(), "weight_decay": 0.5},
        ],
        weight_decay=0.25,
    )
    assert [(g["lr"], g["weight_decay"], g.get("betas")) for g in groups] == [
        (0.25, 1.0, (0.5, 0.6)),
        (1.0, 0.25, (0.5, 0.6)),
        (0.5, 1.0, None),
    ]


def test_the_arguments_stay_as_they_were():
    m, lr = model(), torch.tensor(2.0)
    group = {"params": list(m.parameters()), "betas": (0.5, 0.6)}
    scaled([group], lr=lr)
    assert group == {"params": list(m.parameters()), "betas": (0.5, 0.6)}
    assert lr == 2.0


def test_names_stay():
    groups = scaled(model())
    assert [[name for name, _ in g["params"]] for g in groups] == [
        ["0.weight", "1.weight", "2.weight"],
        ["0.bias", "3.weight"],
    ]


def test_groups_of_an_optimizer_with_names_can_be_scaled_again():
    groups = torch.optim.SGD(model().named_parameters(), lr=1.0).param_groups
    assert [name for name, _ in scaled(groups)[0]["params"]] == ["0.weight", "1.weight", "2.weight"]


def test_tied_parameters_train_once():
    m = nn.Sequential(uu.Linear(4, 4), uu.Linear(4, 4))
    m[1].weight = m[0].weight
    (group,) = scaled([p for layer in m for p in layer.parameters()])
    assert tensors(group) == [m[0].weight]


def test_a_tensor_learning_rate_stays_one_and_each_group_has_its_own():
    lr = torch.tensor(2.0)
    first, second = scaled(model(), lr=lr)
    assert (float(first["lr"]), float(second["lr"])) == (0.5, 2.0)
    first["lr"].fill_(7.0)
    assert (float(second["lr"]), float(lr)) == (2.0, 2.0)


@pytest.mark.parametrize("lr", [0.5, torch.tensor(0.5)])
def test_independent_weight_decay_is_the_same_for_all_per_step(lr):
    for group in scaled(model(), lr=lr, weight_decay=0.125):
        assert float(group["lr"]) * group["weight_decay"] == pytest.approx(0.125)
    for group in scaled(model(), lr=lr, weight_decay=0.125, independent_weight_decay=False):
        assert group["weight_decay"] == 0.125


def test_a_learning_rate_of_zero_needs_no_decay():
    assert [g["lr"] for g in scaled(model(), lr=0.0)] == [0.0, 0.0]
    with pytest.raises(ValueError, match="let a scheduler start at 0"):
        scaled(model(), lr=0.0, weight_decay=0.1)


def test_parameters_without_a_role_are_named():
    m = nn.Sequential(uu.Linear(4, 4), nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"1.weight of shape \(3, 4\), 1.bias of shape \(3,\)"):
        scaled(m)
    with pytest.raises(ValueError, match=r"a parameter of shape \(3, 4\).*MupModule"):
        scaled(m.parameters())
    many = nn.ModuleList(nn.Linear(2, 2) for _ in range(9))
    with pytest.raises(ValueError, match="and 10 more"):
        scaled(many)


def test_parameters_without_a_role_train_with_the_global_rate_if_allowed():
    m = nn.Sequential(uu.Linear(16, 4), nn.Linear(4, 3))
    rates = learning_rates(scaled(m, allow_non_unit_scaling_params=True))
    assert [rates[id(p)] for p in m.parameters()] == [0.5, 2.0, 2.0]


@pytest.mark.parametrize(
    "params",
    [nn.Parameter(torch.zeros(2)), {"params": []}, "weight", 3, {nn.Parameter(torch.zeros(2))}],
    ids=["a tensor", "a dict", "a string", "a number", "a set"],
)
def test_what_has_no_parameters_or_no_order_is_refused(params):
    with pytest.raises(TypeError, match="ordered iterable"):
        scaled(params)


@pytest.mark.parametrize("entry", [3, ("name", 3), (torch.zeros(2), "name"), None])
def test_what_is_no_parameter_is_refused(entry):
    with pytest.raises(TypeError, match="a tensor or a"):
        scaled([entry])


def test_a_learning_rate_is_needed():
    with pytest.raises(ValueError, match="needs lr="):
        scaled(model(), lr=None)
    with pytest.raises(ValueError, match=r"needs 'params', got one with \['lr'\]"):
        scaled([{"lr": 1.0}])
