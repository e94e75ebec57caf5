"""`bench_memory`: LLaMA's rows traced, targets judged, ways that cannot be refused by name."""

from __future__ import annotations

import json

import pytest

from benchmarks import bench_memory as bench
from benchmarks.measuring import savers
from benchmarks.models.llama import MODELS

WAYS = ("bf16", savers.MASTER, *savers.PEERS, "bf16+float8_adamw")
WAYS += ("tensorwise+O3", savers.ALL_TOGETHER)


def row(way: str, mode: str = bench.COAT, blocks: int = 32, **sizes: float) -> dict:
    usual = {"parameters_mib": 100.0, "gradients_mib": 100.0, "activations_mib": 50.0}
    return {"layer": way, "mode": mode, "blocks": blocks, **usual, **sizes}


def test_every_way_has_a_row_with_its_sizes_or_the_reason(tmp_path):
    file = tmp_path / "out.json"
    argv = ["--quick", "--no-demo", "-o", str(file), "--ways", *WAYS]
    assert bench.main(argv) == 0
    written = json.loads(file.read_text())
    rows = {row["layer"]: row for row in written["rows"]}
    assert tuple(rows) == WAYS
    assert {way for way, row in rows.items() if "error" in row} <= savers.PEERS.keys()
    for name in savers.PEERS:
        assert "error" not in rows[name] or "not installed" in rows[name]["error"]
    base, all_ours = rows["bf16"], rows[savers.ALL_TOGETHER]
    assert all_ours["smaller"] == pytest.approx(base["peak_mib"] / all_ours["peak_mib"])
    assert all_ours["smaller"] > 1.5
    assert rows[savers.MASTER]["optimizer_mib"] == pytest.approx(
        base["optimizer_mib"] + 2 * base["parameters_mib"], rel=1e-3
    )
    assert rows["tensorwise+O3"]["parameters_mib"] < 0.6 * base["parameters_mib"]
    assert rows["tensorwise+O3"]["gradients_mib"] < 0.6 * base["gradients_mib"]
    shared = base["parameters_mib"] + base["gradients_mib"] + base["optimizer_mib"]
    assert base["per_gpu_mib"] == pytest.approx(shared / 4 + base["activations_mib"])
    assert all_ours["smaller_per_gpu"] == base["per_gpu_mib"] / all_ours["per_gpu_mib"]
    judged = {(t["layer"], t["against"].split(" /")[0]): t["met"] for t in written["targets"]}
    assert judged == {
        ("bf16+float8_adamw", "optimizer states"): "yes",
        (savers.ALL_TOGETHER, "optimizer states"): "yes",
        (savers.ALL_TOGETHER, "a block's activations"): "yes",
    }


def test_targets_are_judged_at_coats_setting():
    sizes = MODELS[bench.COAT]
    assert (sizes.batch, sizes.tokens, sizes.blocks) == (2, 2048, 32)
    rows = [
        row("bf16", optimizer_mib=800.0, block_mib=10.0, peak_mib=1540.0),
        row(savers.ALL_TOGETHER, optimizer_mib=216.0, block_mib=6.1, peak_mib=1000.0),
    ]
    bench.compare(rows, gpus=4)
    verdicts = [(t["target"], t["measured"], t["met"]) for t in bench.judge(rows)]
    shared = (
        (200 + 800) / 4 + 50,
        (200 + 216) / 4 + 50,
    )  # weights and gradients, states; activations
    assert verdicts == [
        (0.27, pytest.approx(0.27), "yes"),
        (0.60, pytest.approx(0.61), "no"),
        (1.54, pytest.approx(1.54), "yes"),
        (1.54, pytest.approx(shared[0] / shared[1]), "yes"),
    ]


def test_fewer_blocks_are_another_model_and_a_way_that_did_not_run_is_not_measured():
    rows = [row("bf16", blocks=2), {"layer": savers.ALL_TOGETHER, "mode": bench.COAT, "blocks": 2}]
    assert {t["met"] for t in bench.judge(rows)} == {"not measured"}
    assert 1.54 not in {t["target"] for t in bench.judge(rows)}
    small = row(savers.ALL_TOGETHER, mode="demo GPT", parameters_mib=1.0, states_ratio=0.3)
    assert bench.judge([small]) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ways", "bf16", "bf16+float9"], "nothing is called 'float9'"),
        (["--ways", "tensorwise"], "bf16 is what the others are compared with"),
        (["--ways", "bf16", "bf16+O2"], "multiplies in float8, and recipe bf16 does not"),
        (
            ["--quality", "--ways", "bf16", "torchao AdamW8bit"],
            "unknown recipe 'torchao AdamW8bit'",
        ),
        (["--quality", "--ways", "bf16", "bf16+fp32_master"], "nothing is called 'fp32_master'"),
    ],
)
def test_ways_that_nobody_knows_are_refused_before_anything_is_measured(arguments, message, capsys):
    with pytest.raises(SystemExit):
        bench.parse(arguments)
    assert message in capsys.readouterr().err
