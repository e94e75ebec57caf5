"""The queue of experiments: what runs, in which order, what is kept, and what it says is known."""

from __future__ import annotations

import json
import os
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu import QUEUE, Experiment

PROGRAM = """
import json, sys, time
name, file = sys.argv[1], sys.argv[sys.argv.index("-o") + 1]
print("output of", name)
json.dump({"columns": {}, "rows": [name]}, open(file, "w"))
if name == "hangs":
    time.sleep(60)
sys.exit(name == "fails")
"""


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Another root, with a program and a file on which experiments depend; a GPU called G."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "bench.py").write_text(PROGRAM)
    (tmp_path / "kernel.py").write_text("one")
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr(gpu, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Experiment, "lacks", property(lambda self: None))
    where = {"date": "2026-01-01", "commit": "c" * 40, "dirty": False, "device": "G"}
    monkeypatch.setattr(gpu.report, "environment", lambda device: where)
    monkeypatch.setattr(gpu.report, "device_name", lambda device: "G")
    return tmp_path


def queue(monkeypatch, **seconds: int) -> None:
    rows = [
        Experiment(name, its, ("kernel.py",), f"what {name} decides", f"bench.py {name}", "")
        for name, its in seconds.items()
    ]
    monkeypatch.setattr(gpu, "QUEUE", tuple(rows))


def run(out: Path, *more: str, seconds: int = 200) -> list[str]:
    """What a call of ``run`` measured, in this order."""
    before = logs(out)
    gpu.main(["run", "-o", str(out), "--seconds", str(seconds), *more])
    stamps = {name: stamp for name, stamp in logs(out).items() if stamp != before.get(name)}
    return sorted(stamps, key=stamps.__getitem__)


def logs(out: Path) -> dict[str, int]:
    return {file.stem: file.stat().st_mtime_ns for file in out.glob("*.log")}


def test_the_first_that_fit_run_and_a_later_call_goes_on(repository, monkeypatch, capsys):
    queue(monkeypatch, long=400, first=10, second=10)
    out = repository / "out"
    assert run(out, seconds=100) == ["first", "second", "long"]  # long: what can be begun, last
    monkeypatch.setattr(gpu, "SHORTEST", 200)
    assert run(repository / "other", seconds=100) == []
    assert "no time left for long, first, second" in capsys.readouterr().out
    assert run(out) == []
    with tarfile.open(out / gpu.ARCHIVE) as archive:
        names = set(archive.getnames())
    files = (f"{n}.{e}" for n in ("long", "first", "second") for e in ("json", "log"))
    assert names == {gpu.INDEX, *files}


def test_what_fails_or_hangs_is_noted_and_the_rest_runs(repository, monkeypatch, capsys):
    queue(monkeypatch, fails=10, hangs=1, good=10)
    out = repository / "out"
    assert gpu.main(["run", "-o", str(out), "--seconds", "100"]) == 1
    ended = {name: entry["ended"] for name, entry in gpu.index_of(out).items()}
    assert ended == {"fails": "failed", "hangs": "cut off", "good": "passed"}
    assert json.loads((out / "hangs.json").read_text())["rows"] == ["hangs"]
    said = capsys.readouterr().out
    assert "output of hangs" in said and "failed: fails" in said
    assert run(out) == ["hangs"]  # what was cut off is begun again, what failed is not
    assert run(out, "--again", "--only", "good") == []  # this folder has it
    assert run(repository / "new", "--only", "good") == ["good"]


def test_a_result_is_stale_when_a_file_on_which_it_depends_changes(repository, monkeypatch, capsys):
    queue(monkeypatch, one=10)
    (experiment,) = gpu.QUEUE

    def listed() -> str:
        capsys.readouterr()
        gpu.main(["list"])
        return capsys.readouterr().out

    assert "never" in listed()
    run(gpu.RESULTS / "g_day")
    assert "  measured at cccccccc on G" in listed()
    assert run(repository / "out") == []
    assert run(repository / "out", "--again") == ["one"]
    (repository / "kernel.py").write_text("two")
    assert "stale, measured at cccccccc on G" in listed()
    assert run(repository / "out") == ["one"]
    (repository / "kernel.py").write_text("one")
    monkeypatch.setattr(gpu, "QUEUE", (replace(experiment, command="bench.py one --more"),))
    assert "stale" in listed()
    monkeypatch.setattr(gpu.report, "device_name", lambda device: "another GPU")
    monkeypatch.setattr(gpu, "QUEUE", (experiment,))
    assert run(repository / "out2") == ["one"]  # not measured on this one


def test_a_failure_does_not_hide_an_older_result(repository, monkeypatch):
    queue(monkeypatch, one=10)
    for folder, date, ended in (("a", "2026-01-01", "passed"), ("b", "2026-02-02", "failed")):
        entry = {"date": date, "commit": "c", "device": "G", "ended": ended, "digest": "d"}
        (gpu.RESULTS / folder).mkdir(parents=True)
        (gpu.RESULTS / folder / gpu.INDEX).write_text(json.dumps({"one": entry}))
    assert gpu.newest(gpu.folders_of(None))["one"]["folder"].name == "a"


def test_the_archive_stays_small(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "MOST_BYTES", 20_000)
    for name, size in (("large.json", 50_000), ("small.json", 5_000), (gpu.INDEX, 10)):
        (tmp_path / name).write_bytes(os.urandom(size))
    gpu.pack(tmp_path)
    with tarfile.open(tmp_path / gpu.ARCHIVE) as archive:
        assert set(archive.getnames()) == {"small.json", gpu.INDEX}


def test_every_row_names_files_and_a_program_that_are_there():
    assert len({each.name for each in QUEUE}) == len(QUEUE)
    for each in QUEUE:
        assert each.digest
        assert (gpu.ROOT / "benchmarks" / each.command.split()[0]).is_file() and each.toy


def test_the_page_has_the_tables_of_the_committed_results(tmp_path, monkeypatch):
    text = gpu.PAGE.read_text(encoding="utf-8")
    page = tmp_path / "measurements.md"
    page.write_text(text, encoding="utf-8")
    found = gpu.tables()
    monkeypatch.setattr(gpu, "tables", lambda: found)
    monkeypatch.setattr(gpu, "PAGE", page)
    gpu.main(["report"])
    assert page.read_text(encoding="utf-8") == text, "run python benchmarks/gpu.py report"


@pytest.mark.slow
def test_every_experiment_runs_at_toy_size(tmp_path):
    failed = gpu.main(["run", "--toy", "-o", str(tmp_path), "--seconds", "900"])
    ended = {name: entry["ended"] for name, entry in gpu.index_of(tmp_path).items()}
    assert not failed and ended == dict.fromkeys((each.name for each in QUEUE), "passed")
    for each in QUEUE:
        rows = json.loads((tmp_path / f"{each.name}.json").read_text())["rows"]
        assert rows and not any("error" in row for row in rows), each.name
