"""`accurate_layers`: who is converted after a report, who is not, and who was never measured."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import nn

from float8.convert.convert import convert_to_float8_training
from float8.convert.filters import all_of, skip_names
from float8.linear.layer import Float8Linear
from float8.numerics.accurate import accurate_layers
from float8.numerics.comparison import Comparison, LayerComparison, compare
from float8.numerics.inspection import inspect
from float8.numerics.rows import Row
from float8.numerics.snapshot import Report


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({name: nn.Linear(16, 16) for name in ("good", "bad", "none", "head")})


ROW = Row(
    layer="good", operand="input", gemm="output", format="e4m3", scaling="dynamic",
    granularity="tensorwise", elements=1, calls=1, zeros=0, nonfinite=0, amax=1.0, scale_min=1.0,
    scale_max=1.0, flushed=0.0, saturated=0.0, sqnr=31.0, kurtosis=3.0, staleness=None,
)  # fmt: skip


def report(prefix: str = "") -> Report:
    rows = [
        ROW,
        dataclasses.replace(ROW, operand="weight", sqnr=math.inf),
        dataclasses.replace(ROW, operand="grad_output", sqnr=24.0),
        dataclasses.replace(ROW, layer="bad", sqnr=-math.inf),
        dataclasses.replace(ROW, layer="bad", operand="weight", sqnr=30.0),
        dataclasses.replace(ROW, layer="none", sqnr=None),
    ]
    return Report([dataclasses.replace(row, layer=prefix + row.layer) for row in rows])


def answers(keep, names=("good", "bad")) -> list[bool]:
    layers = model()
    return [keep(layers[name], name) for name in names]


@pytest.mark.parametrize(
    ("min_sqnr", "by", "expected"),
    [
        (20.0, None, [True, False]),
        (24.0, None, [True, False]),
        (24.5, None, [False, False]),
        (24.5, ("input", "weight"), [True, False]),
        (30.0, ("weight",), [True, True]),
        (-math.inf, None, [True, True]),
    ],
)
def test_the_lowest_sqnr_of_a_layers_operands_decides(min_sqnr, by, expected):
    assert answers(accurate_layers(report(), min_sqnr, by=by)) == expected


def comparison() -> Comparison:
    layers = [
        LayerComparison("good", 40.0, 35.0, 12.0, 10.0, None),
        LayerComparison("bad", 40.0, math.nan, 30.0, 30.0, 30.0),
        LayerComparison("none", None, None, None, None, None),
    ]
    return Comparison(layers, 20.0, 20.0)


@pytest.mark.parametrize(
    ("min_sqnr", "by", "expected"),
    [
        (30.0, None, [True, False]),
        (36.0, None, [False, False]),
        (36.0, ["alone_output"], [True, True]),
        (20.0, ["output", "grad_weight"], [False, True]),
    ],
)
def test_of_a_comparison_the_layer_alone_decides(min_sqnr, by, expected):
    assert answers(accurate_layers(comparison(), min_sqnr, by=by)) == expected


@pytest.mark.parametrize("made", [report(), comparison()], ids=["report", "comparison"])
@pytest.mark.parametrize("name", ["head", "none"])
def test_a_layer_that_was_not_measured_is_an_error_or_what_one_says(made, name):
    with pytest.raises(ValueError, match=f"{name} has no SQNR in the report, which knows 2 layers"):
        answers(accurate_layers(made, 20), [name])
    assert answers(accurate_layers(made, 20, unknown=True), [name]) == [True]
    assert answers(accurate_layers(made, 20, unknown=False), [name]) == [False]


def test_the_error_names_what_is_near():
    with pytest.raises(ValueError, match="such as good"):
        answers(accurate_layers(Report([ROW]), 20), ["head"])


@pytest.mark.parametrize("there", ["", "_orig_mod.", "module.", "_forward_module.module."])
@pytest.mark.parametrize("here", ["", "_orig_mod.", "module."])
def test_prefixes_of_wrappers_do_not_matter(there, here):
    keep = accurate_layers(report(there), 20)
    assert [keep(None, here + name) for name in ("good", "bad")] == [True, False]


def test_it_composes_with_other_filters_and_converts_a_fresh_model():
    keep = all_of(skip_names("head", "none"), accurate_layers(report(), 20))
    fresh = convert_to_float8_training(model(), module_filter_fn=keep)
    assert [n for n, m in fresh.named_modules() if isinstance(m, Float8Linear)] == ["good"]


def test_a_plain_model_stays_plain_where_the_filter_raises():
    fresh = model()
    with pytest.raises(ValueError, match="none has no SQNR"):
        convert_to_float8_training(fresh, module_filter_fn=accurate_layers(report(), 20))
    assert not any(isinstance(m, Float8Linear) for m in fresh.modules())


def layers_in_a_row() -> nn.Sequential:
    torch.manual_seed(0)
    stack = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))
    with torch.no_grad():
        stack[0].weight[0, 0] = 3e5  # one scale for the tensor: the other weights are flushed
    return stack


@pytest.mark.parametrize("how", ["inspect", "compare"])
def test_a_layer_is_left_out_by_what_was_measured(how):
    x, first = torch.randn(16, 32), convert_to_float8_training(layers_in_a_row())
    x[:, 0] = 0  # which meets the outlier: it has no part in the result
    if how == "inspect":
        with inspect(first) as made:
            first(x).backward(torch.randn(16, 32))
        keep = accurate_layers(made, 25, by=("input", "weight"))
    else:
        keep = accurate_layers(compare(first, x), 15)
    fresh = convert_to_float8_training(layers_in_a_row(), module_filter_fn=keep)
    converted = [n for n, m in fresh.named_modules() if isinstance(m, Float8Linear)]
    # All of the weight's power is in its outlier, and that survives: only the result tells.
    assert converted == (["0", "2"] if how == "inspect" else ["2"])


@pytest.mark.parametrize("by", ["input", ("inputs",), ("alone_output",), ()])
def test_numbers_that_a_report_does_not_have_are_refused(by):
    with pytest.raises(ValueError, match="by "):
        accurate_layers(report(), 20, by=by)


def test_numbers_that_no_layer_has_are_refused():
    found = compare(convert_to_float8_training(layers_in_a_row()), torch.randn(16, 32), alone=False)
    with pytest.raises(ValueError, match="no layer of the report has an SQNR of alone_output"):
        accurate_layers(found, 20)
    assert answers(accurate_layers(found, 5, by=("output",), unknown=False)) == [False, False]


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="nan"):
        accurate_layers(report(), math.nan)
    with pytest.raises(TypeError, match="got a dict"):
        accurate_layers({"layer": 3}, 20)
