"""What the package refuses, and what it says: one table of calls and messages."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from runs import HEALTHY
from torch import nn

from float8 import (
    CastConfig,
    Float8LinearConfig,
    ScalingType,
    convert_to_float8_training,
    high_precision,
)
from float8.numerics import (
    accurate_layers,
    calibrate,
    compare,
    inspect,
    inspect_every,
    load_run,
)
from float8.numerics.snapshot import Report

X = torch.randn(8, 16)
OFF = CastConfig(scaling_type=ScalingType.DISABLED)
RUN = '{"format": "float8.numerics", "version": 4'
BAD_ROW = '[{"step": 1, "skipped": {}, "rows": [{"layer": "a"}]}]'


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


class Words(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, str]:
        return x.long(), "x"


REFUSALS = {
    "not converted": (lambda: inspected(plain()), "Sequential has no float8 layer; convert it"),
    "a monitor of it": (lambda: inspect_every(plain()).start_step(), "has no float8 layer"),
    "compared": (lambda: compare(plain(), X), "convert the model first"),
    "unknown layers": (lambda: compare(model(), X, layers=["0", "no.*"]), "called 'no.*', of 0, 1"),
    "in high precision": (compared_in_high_precision, "outside of float8.high_precision"),
    "NaN": (lambda: compare(broken(), X), "float8.find_nan"),
    "not measured": (
        lambda: accurate_layers(four_layers(), 9)(None, "ffn.ups"),
        "did you mean 'ffn.up'?",
    ),
    "method": (lambda: calibrate(model(), [X]).static_scales("best"), "of sqnr, amax, got 'best'"),
    "no batch": (lambda: calibrate(model(), []).static_scales(), "0: no batch reached it"),
    "no layer": (
        lambda: calibrate(plain(), [X], config=Float8LinearConfig(OFF, OFF, OFF)),
        "no linear layer to calibrate: its config casts no input",
    ),
    "a fast path": (
        lambda: calibrate(nn.TransformerEncoderLayer(16, 2, 32), [X]),
        "set_fastpath_enabled(False)",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_says_what_is_wrong(name):
    call, message = REFUSALS[name]
    with pytest.raises(ValueError) as raised:  # noqa: PT011  the message is compared below
        call()
    assert message in str(raised.value)


@pytest.mark.parametrize("batches", [X, {"x": X}])
def test_a_batch_is_no_iterable_of_batches(batches):
    with pytest.raises(TypeError, match="iterable of batches, got a"):
        calibrate(plain(), batches)


def test_an_output_without_numbers_cannot_be_compared():
    layers = nn.Sequential(model(), Words())
    with pytest.raises(TypeError, match="tuple without a floating point"):
        compare(layers, X)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (b"\x89PNG\xff", "not a report"),
        (b"[]", "not a report"),
        (b'{"format": "float8.numerics", "version": 2, "snapshots": []}', "'float8.numerics', 2"),
        (f"{RUN}}}".encode(), "snapshots"),
        (f'{RUN}, "model": "", "snapshots": [3]}}'.encode(), "not a report"),
        (f'{RUN}, "model": "", "snapshots": {BAD_ROW}}}'.encode(), "histogram"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(file, message, tmp_path):
    path = tmp_path / "x.json"
    path.write_bytes(file)
    for read in (load_run, lambda path: inspect_every(model(), path=path)):
        with pytest.raises(ValueError, match=r"x\.json is not a report") as raised:
            read(path)
        assert message in str(raised.value)


@pytest.mark.parametrize("name", ["no/such/run.json", "file/run.json", "folder"])
def test_a_path_that_cannot_be_written_is_an_error_before_the_training(tmp_path, name):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match=name):
        inspect_every(model(), path=tmp_path / name)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["file", "folder"]
