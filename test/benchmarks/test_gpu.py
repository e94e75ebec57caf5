"""The queue of experiments: what runs, in which order, what is kept, and what it says is known."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu import QUEUE, Experiment
from benchmarks.measuring.report import ROOT

PROGRAM = """
import json, sys, time
name, file = sys.argv[1], sys.argv[sys.argv.index("-o") + 1]
try:
    rows = int(open("rows").read())
except OSError:
    rows = 1
json.dump({"columns": {}, "rows": rows * [{"name": name}]}, open(file, "w"))
print("output of", name, flush=True)
if name == "hangs":
    time.sleep(60)
sys.exit({"fails": 1, "late": 3}.get(name, 0))
"""


class Process(subprocess.Popen[bytes]):
    """A process whose time limit begins at its first output: a busy machine starts one slowly."""

    def __init__(self, words: list[str], stdout: BinaryIO, **options: Any) -> None:
        self.log, self.logged = stdout, os.fstat(stdout.fileno()).st_size
        super().__init__(words, stdout=stdout, **options)

    def wait(self, timeout: float | None = None) -> int:
        while self.poll() is None and os.fstat(self.log.fileno()).st_size == self.logged:
            time.sleep(0.01)
        return super().wait(timeout)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Another root, with a program and a file on which experiments depend; a GPU called G."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "bench.py").write_text(PROGRAM)
    (tmp_path / "kernel.py").write_text("one")
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr(gpu, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(gpu.HERE, "sm_89", lambda: True)
    monkeypatch.setattr(gpu, "TOYS", {"bench.py": ""})
    # What fits depends on the experiments' seconds only, not on how busy this machine is.
    monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=lambda: 0.0))
    monkeypatch.setattr(gpu.subprocess, "Popen", Process)
    where = {"date": "2026-01-01", "commit": "c" * 40, "dirty": False, "device": "G"}
    monkeypatch.setattr(gpu.report, "environment", lambda device: where)
    monkeypatch.setattr(gpu.report, "device_name", lambda device: "G")
    return tmp_path


def queue(monkeypatch, **seconds: int) -> None:
    rows = [
        Experiment(name, its, ("kernel.py",), f"what {name} decides", f"bench.py {name}", part=10)
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
    assert run(repository / "other", seconds=12) == []
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
    assert json.loads((out / "hangs.json").read_text())["rows"] == [{"name": "hangs"}]
    said = capsys.readouterr().out
    assert "output of hangs" in said and "failed: fails" in said
    assert run(out) == ["hangs"]  # what was cut off is begun again, what failed is not
    assert run(out, "--again") == ["hangs"]  # this folder has the others
    assert run(out, "--again", "--only", "good") == ["good"]
    assert run(repository / "new", "--only", "good") == ["good"]


def test_what_lacked_time_is_begun_again_and_the_longer_result_stays(repository, monkeypatch):
    queue(monkeypatch, late=10)
    out = repository / "out"
    for rows in (3, 2, 4):
        (repository / "rows").write_text(str(rows))
        assert run(out) == ["late"]
        assert gpu.index_of(out)["late"]["ended"] == "cut off"
        assert len(json.loads((out / "late.json").read_text())["rows"]) == max(3, rows)
    (repository / "kernel.py").write_text("two")  # what the rows were measured of is gone
    (repository / "rows").write_text("1")
    run(out)
    assert len(json.loads((out / "late.json").read_text())["rows"]) == 1
    assert not [*out.glob("*.earlier.json"), *out.glob("*.part")]


def test_one_that_resumes_is_begun_where_it_does_not_end(repository, monkeypatch):
    queue(monkeypatch, first=400, second=10)
    first, second = gpu.QUEUE
    for resumes, order in ((False, ["second", "first"]), (True, ["first", "second"])):
        monkeypatch.setattr(gpu, "QUEUE", (replace(first, resumes=resumes), second))
        assert run(repository / f"{resumes}", seconds=100) == order


INTERRUPTED = """
import os, signal, subprocess, sys, threading
from benchmarks import gpu
out, pid, number = sys.argv[1:]
popen = subprocess.Popen

def started(words, **options):
    process = popen([sys.executable, "-c", "import time; time.sleep(60)"], **options)
    open(f"{out}/split.json", "w").write('{"rows": [{}]}')
    open(pid, "w").write(str(process.pid))
    threading.Timer(1, os.kill, (os.getpid(), int(number))).start()
    return process

gpu.report.environment("cpu")  # it starts processes, too
gpu.report.environment = lambda _, found=gpu.report.environment("cpu"): found
gpu.subprocess.Popen = started
signal.signal(signal.SIGTERM, signal.default_int_handler)
gpu.main(["run", "--toy", "--only", "split", "-o", out])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_was_measured_outlives_an_interrupted_call(number, tmp_path):
    out, pid = tmp_path / "out", tmp_path / "pid"
    words = [sys.executable, "-c", INTERRUPTED, str(out), str(pid), str(int(number))]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, check=False, timeout=120)
    assert done.returncode, done.stderr
    child = int(pid.read_text())
    if number == signal.SIGKILL:
        os.kill(child, signal.SIGKILL)  # nothing can end it then
    else:
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)
        with tarfile.open(out / gpu.ARCHIVE) as archive:
            assert {"split.json", gpu.INDEX} <= set(archive.getnames())
    assert gpu.index_of(out)["split"]["ended"] == "cut off"
    assert gpu.measured_rows(out / "split.json") == 1


def test_a_result_at_toy_size_is_no_result(repository, monkeypatch):
    queue(monkeypatch, one=10)
    assert run(repository / "out", "--toy") == ["one"]
    assert run(repository / "out", "--toy") == []
    assert run(repository / "out") == ["one"]


def test_the_report_has_what_was_measured_before_an_experiment_ended(repository, monkeypatch):
    queue(monkeypatch, one=10, other=10)
    row = {"layer": "rowwise", "ms": 2.0, "error": "peak: out of memory"}
    result = {"benchmark": "b", "columns": {}, "environment": {}, "rows": [row, {"error": "no"}]}
    entry = {"date": "2026", "commit": "c", "device": "G", "digest": "d", "ended": "cut off"}
    folder = gpu.RESULTS / "a"
    folder.mkdir(parents=True)
    (folder / gpu.INDEX).write_text(json.dumps({"one": entry}))
    (folder / "one.json").write_text(json.dumps(result))
    text = gpu.tables()
    assert "G at c, cut off ([file]" in text and "| rowwise | 2.00 |" in text
    assert "- what other decides" in text and "- what one decides" not in text


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
        file = each.command.split()[0]
        assert (gpu.ROOT / "benchmarks" / file).is_file() and file in gpu.TOYS


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
