"""The properties of a value that follow from its computation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from decided import decisions_of
from torch import Tensor, nn

from float8.unit_scaling.transforms.history import name_of, tensors_in, with_tensors
from float8.unit_scaling.transforms.unit_scale import unit_scale


class Runs(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.w, self.body = nn.Parameter(torch.randn(3, 3)), body

    def forward(self, x):
        return self.body(self.w, x)


def recorded(body, x):
    """The history of a forward, and the values that it returned."""
    decisions = decisions_of(unit_scale(Runs(body)), x)
    return decisions.history, decisions.results


def test_a_name_is_one_for_a_method_and_its_operators():
    functions = (Tensor.add, Tensor.__add__, Tensor.add_, torch.add)
    assert {name_of(f) for f in functions} == {"add"}
    assert name_of(F.layer_norm) == name_of(torch.layer_norm) == "layer_norm"
    assert name_of(Tensor.__rsub__) == "rsub"


def test_values_know_what_they_come_from():
    history, (x, y, z) = recorded(lambda w, x: (x, y := x * 2, (y + x).exp()), torch.randn(2, 3))
    assert [bool(z.origins >> v.number & 1) for v in (x, y, z)] == [True, True, False]
    assert history.calls[-1].name == "exp" and z.call == len(history.calls) - 1


def test_views_and_casts_are_aliases_and_what_has_changed_in_place_is_not():
    def views(w, x):
        same = [x, x.t(), x.T, x.view(6), x.double(), x.reshape(3, 2).contiguous(), x.contiguous()]
        return same, x.clone().add_(1)

    _, (*same, changed) = recorded(views, torch.randn(2, 3))
    assert {v.alias for v in same} == {same[0].number}
    assert changed.alias == changed.number and changed.origins >> same[0].number & 1


def test_a_tensor_that_was_changed_has_another_value():
    def changes(w, x):
        y = x * 2
        y.mul_(2)
        y[0] = 0.0
        return y

    history, (y,) = recorded(changes, torch.randn(2, 3))
    names = [call.name for call in history.calls]
    assert names == ["mul", "mul", "setitem"] and y.call == 2


def test_what_comes_from_parameters_alone_is_learned_but_not_what_ids_choose():
    ids = torch.tensor([0, 2])
    bodies = {
        "weight": (lambda w, x: w.t() * 2, True),
        "product": (lambda w, x: x @ w, False),
        "embedding": (lambda w, x: F.embedding(ids, w), False),
    }
    for name, (body, expected) in bodies.items():
        history, (value,) = recorded(body, torch.randn(2, 3))
        assert value.is_learned == expected, name
        assert history.depends_on_parameters(value), name


def test_scores_are_products_of_activations_up_to_the_next_rule():
    def attends(w, x):
        q = x @ w
        scores = q @ x.t()
        return q, scores / 2, scores.view(-1), F.softmax(scores, -1)

    _, values = recorded(attends, torch.randn(2, 3))
    assert [v.is_scores for v in values] == [False, True, True, False]


def test_integers_are_not_followed():
    history, results = recorded(lambda w, x: x + 1, torch.arange(3))
    assert results == [] and history.calls[0].inputs == []


@pytest.mark.parametrize("kind", [list, tuple])
def test_paths_lead_to_tensors_and_replace_them(kind):
    x, y, z = torch.randn(3, 2).unbind()
    whole = ((kind([x, 1]),), {"mask": y})
    places = tensors_in(whole)
    assert [path for path, _ in places] == [(0, 0, 0), (1, "mask")]
    for path, _ in places:
        new = tensors_in(with_tensors(whole, {path: z}))
        assert [t is z for _, t in new] == [p == path for p, _ in places]
    assert whole[0][0][0] is x and type(with_tensors(whole, {})[0][0]) is kind
