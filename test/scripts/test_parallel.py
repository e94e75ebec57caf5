"""A training in two processes under FSDP2 is that of one, resumes, and stops as one."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from parallel_program import options_of, trained
from processes import failures

from scripts import demo
from scripts.train_gpt import Trainer
from scripts.training.parallel import leave

pytestmark = pytest.mark.slow

TINY = ["--layers", "1", "--width", "32", "--heads", "2", "--context", "16", "--batch", "4"]
TINY += ["--device", "cpu", "--eval-batches", "2"]
RECIPES = ("bf16", "tensorwise", "delayed", "rowwise")


def losses(trainer: Trainer) -> torch.Tensor:
    history = trainer.history
    return torch.tensor(history.train_loss + [loss for _, loss in history.val_loss]).double()


def test_two_processes_train_as_one(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound for bf16 is twice bf16's own error: one process with float32 products in its place.

    Two runs that round differently have it once each. A float8 recipe has an error of its own. Its
    distance to bf16 estimates it: the bound is three times that.
    """
    folder, text = str(tmp_path), str(data)
    found = {}
    for recipe in RECIPES:
        trainer = trained(options_of(recipe, folder, nproc=1), text)
        found[recipe], saved = losses(trainer), trainer.saved_for_backward()
        (tmp_path / f"{recipe}.json").write_text(json.dumps(found[recipe].tolist()))
        (tmp_path / f"{recipe}_saved.json").write_text(json.dumps(saved))
    plain = torch.autocast
    with monkeypatch.context() as patch:
        patch.setattr(torch, "autocast", lambda kind, _: plain(kind, enabled=False))
        exact = losses(trained(options_of("bf16", folder + "/exact", nproc=1), text))
    own = 2 * (found["bf16"] - exact).abs().max().item()
    bounds = {r: own + 3 * (found[r] - found["bf16"]).abs().max().item() for r in RECIPES}
    resumes, resumed = (
        "stopped_by_one_rank_it_resumes_to_the_same_losses",
        str(tmp_path / "resumed"),
    )
    claims = {
        **{f"{recipe}: losses": ("losses_equal_those_of_one_process", recipe, text, folder, bound)
           for recipe, bound in bounds.items()},
        **{f"{recipe}: resumes": (resumes, recipe, text, resumed)
           for recipe in ("tensorwise", "delayed")},
        "a planted fault": ("a_batch_that_is_not_divided_is_seen", "bf16", text, folder, own),
        **{f"{recipe}: bytes": ("weights_travel_as_float8", recipe, text, folder)
           for recipe in ("tensorwise", "blockwise")},
        "unit": ("the_unit_scaled_model_is_refused", text, folder),
        "another number of processes": ("a_checkpoint_of_one_process_is_refused", text, folder),
        "bad input": ("bad_input_is_told_once", text, folder),
    }  # fmt: skip
    assert failures("parallel_program", claims) == {}


def test_the_demo_under_torchrun_stops_at_ctrl_c_resumes_and_prints_both_runs(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = [*TINY, "--data", str(data), "--steps", "60", "--eval-interval", "10"]
    arguments += ["--nproc", "2", "--recipes", "tensorwise", "--out-dir", str(tmp_path)]
    command = [sys.executable, str(Path(demo.__file__)), *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    while not (tmp_path / "tensorwise_0_2.pt").exists() and process.poll() is None:
        time.sleep(0.01)  # the checkpoint of step 10: 50 more are to come
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to every process of the group
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130, out
    assert out.count("stopped: continue with the same command and --resume --steps 60") == 1
    assert not (tmp_path / "demo.json").exists()

    assert demo.main([*arguments, "--resume"]) == 0
    table = capfd.readouterr().out
    report = json.loads((tmp_path / "demo.json").read_text())
    runs = [(run["recipe"], run["processes"]) for run in report["runs"]]
    assert runs == [("tensorwise", 1), ("tensorwise", 2)]
    assert report["options"]["nproc"] == 2
    one, two = report["runs"]
    assert len(two["train_loss"]) == len(one["train_loss"]) == 60
    row = next(line for line in table.splitlines() if line.startswith("tensorwise x2"))
    assert f"{two['gap_to_alone_percent']:+.2f}" in row
    assert f"{two['final_val_loss']:.4f}" in row
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("processes", [1, 2])
def test_one_of_several_processes_ends_at_once(
    processes: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    print("the table", end="")
    with pytest.raises(SystemExit, match="3"):
        leave(3)
    assert ended == [3] * (processes > 1)
    assert capfd.readouterr().out == "the table"
