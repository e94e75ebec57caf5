"""What is recorded of a forward, and what recording leaves alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from float8.unit_scaling.transforms.recording import (
    Recorder,
    at,
    line_of_error,
    name_of,
    on_fake_tensors,
    tensors_in,
    with_at,
)


class Watch(TorchFunctionMode):
    def __init__(self, recorder):
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return self.recorder.record(func, args, kwargs or {})


def recorded(run):
    recorder = Recorder()
    with Watch(recorder):
        result = run(recorder)
    return recorder, result


def test_a_name_is_one_for_a_method_and_its_operators():
    functions = (Tensor.add, Tensor.__add__, Tensor.add_, torch.add)
    assert {name_of(f) for f in functions} == {"add"}
    assert name_of(F.layer_norm) == name_of(torch.layer_norm) == "layer_norm"
    assert name_of(Tensor.__rsub__) == "rsub"


def test_values_know_what_they_come_from():
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    recorder, z = recorded(lambda r: (x * 2 + y).exp())
    value = recorder.value(z)
    assert {recorder.value(x).number, recorder.value(y).number} <= value.origins
    assert recorder.calls[-1].name == "exp" and __file__ in recorder.calls[-1].line


def test_views_and_casts_are_aliases_and_what_has_changed_in_place_is_not():
    x = torch.randn(2, 3)

    def run(recorder):
        before = recorder.value(x)
        views = [x.t(), x.T, x.view(6), x.double(), x.reshape(3, 2).contiguous(), x.contiguous()]
        assert {recorder.value(v).alias for v in views} == {before.number}
        x.add_(1)
        after = recorder.value(x)
        assert after.alias == after.number != before.number
        assert before.number in after.origins
        x[0] = 0.0
        assert recorder.value(x) is not after

    recorded(run)


def test_what_comes_from_parameters_alone_is_learned():
    w, x = nn.Parameter(torch.randn(3, 3)), torch.randn(2, 3)

    def run(recorder):
        recorder.value(w, "w")
        assert recorder.value(w.t() * 2).learned and not recorder.value(x @ w).learned

    recorded(run)


def test_integers_are_not_followed():
    x = torch.arange(3)
    recorder, _ = recorded(lambda r: x + 1)
    assert recorder.values == [] and recorder.calls[0].inputs == []


def test_paths_lead_to_tensors_and_replace_them():
    x, y = torch.randn(2), torch.randn(2)
    whole = (([x, 1],), {"mask": y})
    for path, tensor in tensors_in(whole):
        assert at(whole, path) is tensor
        new = with_at(whole, path, 7)
        assert at(new, path) == 7
        assert next(t for _, t in tensors_in(new)) is (x if tensor is y else y)
    assert whole[0][0][0] is x


class Busy(nn.Module):
    """Draws numbers, changes buffers, and keeps tensors in attributes."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.seen = None
        self.shift = torch.zeros(3)

    def forward(self, x):
        self.seen = x
        self.shift += 1
        return self.norm(F.dropout(x + torch.rand(3) + self.shift, 0.5))


def test_running_on_fake_tensors_changes_nothing_of_the_model():
    model = Busy()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    x, shapes = torch.randn(4, 3), []
    state = torch.get_rng_state()
    on_fake_tensors(model, [x], lambda m, flat: shapes.append(m(*flat).shape))
    assert shapes == [(4, 3)]
    assert model.seen is None and torch.equal(model.shift, torch.zeros(3))
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_the_line_of_an_error_is_the_models():
    with pytest.raises(RuntimeError) as caught:
        F.linear(torch.randn(2, 3), torch.randn(2, 4))
    assert __file__ in line_of_error(caught.value)
