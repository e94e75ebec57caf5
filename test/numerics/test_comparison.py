"""`compare` against models with one converted layer each, and the filter made of its result."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from assertions import sqnr
from runs import HEALTHY
from torch import Tensor, nn
from unchanged import assert_model_unchanged

from float8.config import Float8LinearConfig
from float8.convert.convert import convert_to_float8_training
from float8.convert.filters import skip_names
from float8.distributed.sync import sync_float8_amax_and_scale_history
from float8.fusion.norm_casts import RMSNormCast
from float8.numerics.comparison import (
    Comparison,
    LayerComparison,
    accurate_layers,
    compare,
    sqnr_of,
)
from float8.numerics.inspection import inspect
from float8.numerics.snapshot import Report

LAYERS = ["0", "3", "6"]


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(48, 64),
        nn.Dropout(0.2),
        nn.GELU(),
        nn.Linear(64, 64),
        nn.BatchNorm1d(64),
        nn.ReLU(inplace=True),
        nn.Linear(64, 32),
    )


def converted(recipe: str = "tensorwise", only: str | None = None) -> nn.Module:
    config = Float8LinearConfig.from_recipe_name(recipe)
    return convert_to_float8_training(
        plain(), config=config, module_filter_fn=lambda m, fqn: only in (None, fqn)
    )


X = torch.randn(32, 48, generator=torch.Generator().manual_seed(2))
Y = torch.randint(32, (32,), generator=torch.Generator().manual_seed(3))


def loss_fn(output: Tensor) -> Tensor:
    return F.cross_entropy(output, Y)


def by_hand(model: nn.Module) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Output, all gradients as one vector, and what hooks see at the layers."""
    seen: dict[str, Tensor] = {}
    for name in LAYERS:
        layer = model.get_submodule(name)
        layer.register_forward_hook(lambda m, a, out, n=name: seen.update({n: out.clone()}))
        if name != "0":  # the batch asks for no gradient
            layer.register_full_backward_hook(
                lambda m, grads, _, n=name: seen.update({n + " grad_input": grads[0]})
            )
    torch.manual_seed(7)
    output = model(X)
    loss_fn(output).backward()
    for name in LAYERS:
        seen[name + " grad_weight"] = model.get_submodule(name).weight.grad
    return output, torch.cat([p.grad.flatten() for p in model.parameters()]), seen


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise_with_gw_hp", "mxfp8"])
def test_every_column_is_that_of_models_converted_one_layer_at_a_time(recipe):
    found = compare(converted(recipe), X, loss_fn=loss_fn, seed=7)
    exact_output, exact_gradient, exact = by_hand(plain())
    output, gradient, seen = by_hand(converted(recipe))
    assert found.output == pytest.approx(sqnr(output, exact_output))
    assert found.gradient == pytest.approx(sqnr(gradient, exact_gradient))
    assert found.loss_high_precision == pytest.approx(float(loss_fn(exact_output).detach()))
    assert found.loss_float8 == pytest.approx(float(loss_fn(output).detach()))
    assert {layer.layer for layer in found.layers} == set(LAYERS)
    for layer in found.layers:
        name = layer.layer
        alone = by_hand(converted(recipe, only=name))
        assert layer.alone_output == pytest.approx(sqnr(alone[0], exact_output))
        assert layer.alone_gradient == pytest.approx(sqnr(alone[1], exact_gradient))
        assert layer.output == pytest.approx(sqnr(seen[name], exact[name]))
        for kind in ("grad_input", "grad_weight"):
            key = f"{name} {kind}"
            expected = pytest.approx(sqnr(seen[key], exact[key])) if key in exact else None
            assert getattr(layer, kind) == expected, key


@pytest.mark.parametrize("raises", [False, True])
def test_nothing_of_the_model_changes(raises):
    model = converted("delayed")
    loss_fn(model(X)).backward()
    sync_float8_amax_and_scale_history(model)
    loss_fn(model(X)).backward()
    model[1].eval()
    x = X.clone().requires_grad_()

    def failing(output: Tensor) -> Tensor:
        raise KeyError("inside")

    with assert_model_unchanged(model):
        if raises:
            with pytest.raises(KeyError):
                compare(model, x, loss_fn=failing)
        else:
            compare(model, x, loss_fn=loss_fn)
    assert x.grad is None


def test_the_layers_to_report_can_be_chosen_and_the_runs_alone_left_out():
    model = converted()
    runs = []
    handle = model.register_forward_hook(lambda *_: runs.append(1))
    found = compare(model, X, layers=["[36]"], loss_fn=loss_fn)
    assert {layer.layer for layer in found.layers} == {"3", "6"}
    assert len(runs) == 4
    runs.clear()
    found = compare(model, X, layers=["6"], alone=False)
    handle.remove()
    assert len(runs) == 2
    (row,) = found.rows()
    assert row["alone_output"] is None
    assert row["alone_gradient"] is None
    assert row["output"] > 20
    assert found.loss_float8 is None  # a random cotangent, no loss


class Readers(nn.Module):
    """A norm that three layers read."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.norm, self.scale = norm(48), nn.Parameter(torch.ones(48))
        self.q, self.k, self.v = (nn.Linear(48, 48, bias=False) for _ in range(3))

    def forward(self, x):
        x = self.norm(x * self.scale)
        return F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))


def test_a_norm_that_writes_float8_changes_no_number():
    plain, fused = (
        compare(convert_to_float8_training(Readers(norm)), X) for norm in (nn.RMSNorm, RMSNormCast)
    )
    expected = {row.pop("layer"): row for row in plain.rows()}
    for row in fused.rows():
        assert row["grad_input"] > 10
        assert expected[row.pop("layer")] == pytest.approx(row, abs=1e-3)


@pytest.mark.parametrize(
    ("reference", "other", "expected"),
    [
        (torch.ones(3), torch.ones(3), math.inf),
        (torch.ones(3), torch.tensor([1.0, math.nan, 1.0]), -math.inf),
        (torch.ones(3), torch.tensor([1.0, math.inf, 1.0]), -math.inf),
        (torch.ones(3), None, 0.0),
        (torch.zeros(3), torch.zeros(3), None),
        (None, torch.ones(3), None),
        (None, None, None),
        (torch.ones(3), torch.ones(4), None),
        (torch.full((3,), 1e30), torch.full((3,), 1e30), math.inf),
        (torch.full((2,), 1e30), torch.full((2,), 0.9e30), pytest.approx(20, rel=1e-5)),
    ],
)
def test_an_sqnr_at_its_edges(reference, other, expected):
    exact, found = ({} if t is None else {"x": [t]} for t in (reference, other))
    assert sqnr_of(exact, found, ["x"]) == expected


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({name: nn.Linear(16, 16) for name in ("good", "bad", "none", "head")})


ROW = replace(HEALTHY, layer="good", scaling="dynamic", staleness=None)


def report(prefix: str = "") -> Report:
    rows = [
        ROW,
        replace(ROW, operand="weight", sqnr=math.inf),
        replace(ROW, operand="grad_output", sqnr=24.0),
        replace(ROW, layer="bad", sqnr=-math.inf),
        replace(ROW, layer="bad", operand="weight", sqnr=30.0),
        replace(ROW, layer="none", sqnr=None),
    ]
    return Report([replace(row, layer=prefix + row.layer) for row in rows])


def answers(keep, names=("good", "bad")) -> list[bool]:
    layers = model()
    return [keep(layers[name], name) for name in names]


def comparison() -> Comparison:
    layers = [
        LayerComparison("good", 40.0, 35.0, 12.0, 10.0, None),
        LayerComparison("bad", 40.0, math.nan, 30.0, 30.0, 30.0),
        LayerComparison("none", None, None, None, None, None),
    ]
    return Comparison(layers, 20.0, 20.0)


def not_alone() -> Comparison:
    layers = [replace(x, alone_output=None, alone_gradient=None) for x in comparison().layers]
    return replace(comparison(), layers=layers)


@pytest.mark.parametrize(
    ("made", "min_sqnr", "expected"),
    [
        (report, 24.0, [True, False]),
        (report, 24.5, [False, False]),
        (report, -math.inf, [True, True]),
        (comparison, 30.0, [True, False]),
        (comparison, 36.0, [False, False]),
        (not_alone, 10.0, [True, True]),
        (not_alone, 11.0, [False, True]),
    ],
)
def test_the_lowest_sqnr_of_operands_or_of_the_layer_alone_decides(made, min_sqnr, expected):
    assert answers(accurate_layers(made(), min_sqnr)) == expected


@pytest.mark.parametrize("made", [report(), comparison()], ids=["report", "comparison"])
@pytest.mark.parametrize("name", ["head", "none"])
def test_a_layer_that_was_not_measured_is_an_error_or_what_one_says(made, name):
    with pytest.raises(ValueError, match=f"{name} has no SQNR in the report, which knows 2 layers"):
        answers(accurate_layers(made, 20), [name])
    assert answers(accurate_layers(made, 20, unknown=True), [name]) == [True]
    assert answers(accurate_layers(made, 20, unknown=False), [name]) == [False]


@pytest.mark.parametrize("there", ["", "_orig_mod.", "module.", "_forward_module.module."])
@pytest.mark.parametrize("here", ["", "_orig_mod.", "module."])
def test_prefixes_of_wrappers_do_not_matter(there, here):
    keep = accurate_layers(report(there), 20)
    assert [keep(None, here + name) for name in ("good", "bad")] == [True, False]


class Restless(nn.Module):
    """Its forward calls its layer once or twice, by turns, and registers its buffer again."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(32, 32), 0
        self.register_buffer("mean", torch.zeros(32))

    def forward(self, x):
        self.register_buffer("mean", x.detach().mean(0), persistent=False)
        self.calls += 1
        for _ in range(1 + self.calls % 2):
            x = self.layer(x)
        return x


def test_other_calls_of_a_layer_are_not_compared_and_buffers_stay_in_the_state_dict():
    model = convert_to_float8_training(
        Restless(), config=Float8LinearConfig.from_recipe_name("rowwise")
    )
    keys = [*model.state_dict()]
    (layer,) = compare(model, torch.randn(16, 32), alone=False).layers
    assert layer.output is None and layer.grad_input is None
    assert [*model.state_dict()] == keys


class ReadsWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(48, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(F.linear(x, self.qkv.weight))


def test_layers_that_were_not_called_are_named_and_show_no_inf():
    model = convert_to_float8_training(ReadsWeights())
    found = compare(model, X, loss_fn=loss_fn)
    assert found.worst(9) == ["proj"] and found.not_called == ["qkv"]
    assert "qkv: it is converted, but was not called" in str(found) and "inf" not in str(found)
    with inspect(model) as report:
        model(X)
    assert "not seen: qkv: it is converted, but was not called" in str(report)
    only = convert_to_float8_training(ReadsWeights(), module_filter_fn=skip_names("proj"))
    found = compare(only, X, loss_fn=loss_fn)
    assert (found.output, found.gradient, found.layers) == (None, None, [])
    assert "inf" not in str(found)
