"""Segments: the bits of a training in one piece, and checkpoints that are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.measuring.report import ROOT
from benchmarks.quality import segments
from benchmarks.quality.segments import Segment, train

DATA = ROOT / "benchmarks" / "quality"
SIZES = {"layers": 1, "width": 32, "heads": 1, "context": 16, "batch": 2, "held_out": 256}


def segment(first, until, contender="bf16", **fields):
    fields = {"seed": 0, "steps": 6, "learning_rate": 2.0**-3, **SIZES, **fields}
    return Segment(contender=contender, first=first, until=until, **fields)


def in_pieces(folder, *ends, **fields):
    rows = [
        train(segment(first, until, **fields), folder, DATA)
        for first, until in zip((0, *ends), ends, strict=False)
    ]
    return [loss for row in rows for loss in row["train_loss"]], rows[-1]["loss"]


@pytest.mark.parametrize("name", ["bf16", "unit"])
def test_segments_end_with_the_bits_of_one_piece(name, tmp_path):
    whole = in_pieces(tmp_path / "whole", 6, contender=name)
    assert len(whole[0]) == 6
    assert in_pieces(tmp_path / "pieces", 1, 4, 6, contender=name) == whole


@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_a_part_that_is_not_restored_is_seen(part, tmp_path, monkeypatch):
    whole = in_pieces(tmp_path / "whole", 6)
    of = torch.nn.Module if part == "model" else torch.optim.Optimizer
    monkeypatch.setattr(of, "load_state_dict", lambda *_: None)
    assert in_pieces(tmp_path / "pieces", 3, 6) != whole


def test_the_row_of_a_killed_study_is_in_the_checkpoint(tmp_path, monkeypatch):
    row = train(segment(0, 2), tmp_path, DATA)
    monkeypatch.delattr(segments, "train_step")
    assert train(segment(0, 2), tmp_path, DATA) == row


def test_runs_of_several_contenders_and_seeds_have_their_own_checkpoints(tmp_path):
    for one in (segment(0, 1), segment(0, 1, seed=1), segment(0, 1, contender="naive")):
        train(one, tmp_path, DATA)
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(
    ("field", "value"), [("learning_rate", 1.0), ("width", 64), ("steps", 7), ("batch", 3)]
)
def test_a_checkpoint_of_another_training_is_refused(field, value, tmp_path):
    begun = segment(0, 1)
    train(begun, tmp_path, DATA)
    other = replace(segment(1, 2), **{field: value})
    message = f"bf16-0.pt is of a training with {field} {getattr(begun, field)}, not {value}"
    with pytest.raises(ValueError, match=message):
        train(other, tmp_path, DATA)


def test_a_checkpoint_of_another_text_is_refused(tmp_path):
    train(segment(0, 1), tmp_path, DATA)
    with pytest.raises(ValueError, match="a training with text"):
        train(segment(1, 2), tmp_path, ROOT / "benchmarks" / "models")


@pytest.mark.parametrize("begun", [False, True])
def test_a_segment_begins_where_the_checkpoint_is(begun, tmp_path):
    if begun:
        train(segment(0, 1), tmp_path, DATA)
    message = f"a checkpoint after {int(begun)} steps, and this segment begins after 2"
    with pytest.raises(ValueError, match=message):
        train(segment(2, 4), tmp_path, DATA)


def test_a_training_that_diverges_says_when_and_leaves_no_checkpoint(tmp_path):
    row = train(segment(0, 6, learning_rate=1e38), tmp_path, DATA)
    assert row.keys() == {"error"}
    assert "diverged" in row["error"]
    assert not list(tmp_path.iterdir())
