"""`bench_comm`: every form is counted and compared with its targets."""

from __future__ import annotations

import json

import pytest

from benchmarks import bench_comm
from benchmarks.bench_comm import DDP, FORMS, FSDP2, QUICK
from benchmarks.models.llama import Llama


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    file = tmp_path_factory.mktemp("comm") / "out.json"
    status = bench_comm.main(["--quick", "--processes", "2", "-o", str(file)])
    return status, json.loads(file.read_text())


def test_every_target_is_met(written):
    status, report = written
    assert {target["met"] for target in report["targets"]} == {"yes"}, report["targets"]
    assert status == 0
    assert [row["form"] for row in report["rows"]] == [form.name for form in FORMS]
    assert report["table"][0].split()[0] == "processes"


def test_the_baselines_send_what_the_model_says(written):
    """Computed from the parameters: 2 bytes each; halves leave a rank of two."""
    rows = {row["form"]: row for row in written[1]["rows"]}
    parameters = sum(p.numel() for p in Llama(QUICK).parameters())
    # Gathered twice, scattered once; and as DDP, where an all-reduce sends both of its halves.
    assert rows[FSDP2]["bytes"] == {
        "all_gather": 2 * parameters * 2 / 2,
        "reduce_scatter": parameters * 2 / 2,
    }
    assert rows[DDP]["bytes"]["all_reduce"] == rows[DDP]["gradients"] == parameters * 2
    assert rows[FSDP2]["unsharded"] == parameters * 2
    assert rows[FSDP2]["weights_ratio"] == rows[DDP]["gradients_ratio"] == 1


def test_float8_sends_a_byte_per_weight_and_one_collective_for_all_scales(written):
    rows = {row["form"]: row for row in written[1]["rows"]}
    model = Llama(QUICK)
    weights = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    norms = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    precomputed = rows[f"{FSDP2}, tensorwise, precomputed"]
    assert precomputed["bytes"]["all_gather"] == weights + 2 * norms
    assert precomputed["unsharded"] == weights + 2 * norms
    assert precomputed["scale_collectives"] == 1
    assert precomputed["bytes"]["all_reduce"] == 4 * 4  # four weights, one float32 each
    layers = rows[f"{FSDP2}, tensorwise"]
    assert layers["scale_collectives"] == 4  # one per weight, and none again in backward


def test_a_missed_and_an_unmeasured_target_are_told():
    row = {"form": f"{FSDP2}, delayed", "processes": 2, "weights_ratio": 0.53}
    verdicts = bench_comm.targets([row])
    assert [verdict["met"] for verdict in verdicts] == ["no", "not measured"]
