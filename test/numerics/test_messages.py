"""Every error of the package says what is wrong and what to do: one table of calls and messages."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from runs import HEALTHY, ROW
from torch import nn

from float8 import (
    CastConfig,
    Float8LinearConfig,
    ScalingType,
    convert_to_float8_training,
    high_precision,
)
from float8.numerics import (
    Report,
    accurate_layers,
    calibrate,
    compare,
    inspect,
    inspect_every,
    load_run,
)
from float8.numerics.passes import main_tensor, start_of_backward
from float8.numerics.report import page
from float8.numerics.snapshot import as_json, cast_from_json, strict_json, write_run
from float8.numerics.statistics import Histogram, merged

X = torch.randn(8, 16)
ABOUT = {"file": "run.json", "float8": "1", "torch": "2"}
OFF = CastConfig(scaling_type=ScalingType.DISABLED)
RUN = '{"format": "float8.numerics", "version": 2'
BAD_ROW = '[{"step": 1, "rows": [{"layer": "a"}]}]'


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))


def model() -> nn.Module:
    return convert_to_float8_training(plain())


def broken() -> nn.Module:
    layers = model()
    with torch.no_grad():
        layers[0].bias[0] = math.nan
    return layers


def compared_in_high_precision() -> None:
    with high_precision(layers := model()):
        compare(layers, X)


def four_layers() -> Report:
    return Report([replace(HEALTHY, layer=name) for name in ("a", "b", "c", "ffn.up")])


def inspected(layers: nn.Module) -> None:
    with inspect(layers):
        pass


def nested_step() -> None:
    monitor = inspect_every(model())
    with monitor:
        monitor.start_step()


def static_scales(**changes: object) -> None:
    Report([replace(ROW, **changes)]).static_scales()


def without(name: str) -> dict[str, object]:
    return {key: value for key, value in strict_json(ROW.as_dict()).items() if key != name}


MESSAGES = [
    # compare, accurate_layers
    (ValueError, lambda: compare(plain(), X), "no Float8Linear: convert it first"),
    (ValueError, lambda: compare(model(), X, layers=["no.*"]), "no float8 layer is called 'no.*'"),
    (TypeError, lambda: compare(model(), X, layers="3"), "sequence of names"),
    (ValueError, compared_in_high_precision, "outside of it"),
    (ValueError, lambda: compare(broken(), X), "float8.find_nan"),
    (TypeError, lambda: accurate_layers(Report([ROW]), 20, by="input"), "by is a sequence"),
    (ValueError, lambda: accurate_layers(Report([ROW]), 20, by=("inputs",)), "by takes some of"),
    (ValueError, lambda: accurate_layers(Report([ROW]), 20, by=("alone_output",)), "by takes"),
    (ValueError, lambda: accurate_layers(Report([ROW]), 20, by=()), "by takes some of input"),
    (TypeError, lambda: accurate_layers({"layer": 3}, 20), "got a dict"),
    (
        ValueError,
        lambda: accurate_layers(four_layers(), 9)(None, "ffn.ups"),
        "did you mean 'ffn.up'?",
    ),
    # calibrate
    (ValueError, lambda: calibrate(model(), [X], method="mse"), "one of sqnr, amax, percentile"),
    (ValueError, lambda: calibrate(model(), [X]).static_scales("best"), "got 'best'"),
    (ValueError, lambda: calibrate(model(), [X], percentile=0), "percentile must be in (0, 100]"),
    (ValueError, lambda: calibrate(model(), [X], percentile=100.5), "(0, 100], got 100.5"),
    (ValueError, lambda: calibrate(model(), []).static_scales(), "0: no batch reached it"),
    (
        ValueError,
        lambda: calibrate(plain(), [X], module_filter_fn=lambda m, fqn: False),
        "no linear layer to calibrate",
    ),
    (
        ValueError,
        lambda: calibrate(plain(), [X], config=Float8LinearConfig(OFF, OFF, OFF)),
        "its config casts no input",
    ),
    (
        ValueError,
        lambda: calibrate(nn.TransformerEncoderLayer(16, 2, 32), [X]),
        "linear1: in eval mode|set_fastpath_enabled(False)",
    ),
    (TypeError, lambda: calibrate(plain(), X), "iterable of batches, got a"),
    (TypeError, lambda: calibrate(plain(), {"x": X}), "iterable of batches, got a"),
    # runs of a model
    (TypeError, lambda: main_tensor((torch.tensor([1]), "x")), "tuple without a floating point"),
    *(
        (TypeError, lambda x=x: start_of_backward(X, lambda out: x, 0), "return a scalar tensor")
        for x in (torch.ones(3), 1.0, None)
    ),
    # reports
    (ValueError, lambda: Report([ROW]).static_scales("weight"), "no row for operand 'weight'"),
    (ValueError, lambda: static_scales(amax=0.0), "nan: no static scale suits its input (amax 0"),
    (ValueError, lambda: static_scales(nonfinite=2), "2 elements that are not finite"),
    (
        ValueError,
        lambda: merged([ROW, replace(ROW, format="e5m2")]),
        "are different casts: merge",
    ),
    (ValueError, lambda: merged([ROW, replace(ROW, sums=None)]), "cannot be merged"),
    (TypeError, lambda: cast_from_json(without("amax")), "missing 1 required|'amax'"),
    (TypeError, lambda: cast_from_json(without("") | {"colour": 1}), "unexpected|'colour'"),
    (
        ValueError,
        lambda: Report([replace(ROW, histogram=Histogram())]).plot("x.png"),
        "nothing to draw",
    ),
    (ValueError, lambda: page([], ABOUT), "no snapshot"),
    # inspect, inspect_every
    (ValueError, lambda: inspected(plain()), "Sequential has no float8 layer; convert it"),
    (ValueError, lambda: inspect_every(plain()).start_step(), "Sequential has no float8 layer"),
    (TypeError, lambda: inspect_every("model"), "inspect_every"),
    (ValueError, lambda: inspect_every(model(), n=0), "integer >= 1"),
    (TypeError, lambda: inspect_every(model(), n=2.5), "integer >= 1"),
    (ValueError, lambda: inspect_every(model(), keep=0), "integer >= 1"),
    (
        TypeError,
        lambda: inspect_every(model(), writer=X),
        "writer.add_scalar must be a function, got None",
    ),
    (RuntimeError, lambda: inspect_every(model()).end_step(), "no step is open"),
    (RuntimeError, nested_step, "open already"),
]


@pytest.mark.parametrize(("error", "call", "message"), MESSAGES)
def test_what_is_wrong_is_said(error, call, message):
    with pytest.raises(error) as raised:
        call()
    for part in message.split("|"):
        assert part in str(raised.value)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (b"hello", "not a report"),
        (b"\x89PNG\xff", "not a report"),
        (b"[]", "not a report"),
        (b'{"format": "other"}', "not a report"),
        (b'{"format": "float8.numerics", "version": 3, "float8": "9.9"}', "not a report|version|3"),
        (f"{RUN}}}".encode(), "not a report|snapshots"),
        (f'{RUN}, "model": "", "snapshots": [3]}}'.encode(), "not a report"),
        (
            f'{RUN}, "model": "", "snapshots": {BAD_ROW}}}'.encode(),
            "x.json|histogram",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_said(file, message, tmp_path):
    path = tmp_path / "x.json"
    path.write_bytes(file)
    for read in (load_run, lambda path: inspect_every(model(), path=path)):
        with pytest.raises(ValueError) as raised:  # noqa: PT011  the message is compared below
            read(path)
        for part in message.split("|"):
            assert part in str(raised.value)


def test_many_snapshots_are_not_one_report(tmp_path):
    write_run(tmp_path / "run.json", "M", [as_json(Report([ROW]))] * 2)
    with pytest.raises(ValueError, match=r"2 snapshots; float8\.numerics\.load_run"):
        Report.load(tmp_path / "run.json")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no/such/run.json", "No such file or directory"),
        ("file/run.json", "Not a directory"),
        ("folder", "it is a folder"),
    ],
)
def test_a_path_that_cannot_be_written_is_an_error_before_the_training(tmp_path, name, reason):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    path = tmp_path / name
    with pytest.raises(OSError, match=rf"{path} cannot be written \({reason}\): name a file"):
        inspect_every(model(), path=path)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["file", "folder"]
