"""`python -m float8.numerics.report`: a path on stdout, or one clear line on stderr."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from fresh import ROOT
from runs import HEALTHY

from float8.numerics.report import main
from float8.numerics.snapshot import Report


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "run.json"
    Report([HEALTHY], model="GPT", step=7).save(path)
    return path


def test_the_page_lies_beside_the_run_and_its_path_is_printed(run, capsys):
    assert main([str(run)]) == 0
    page = run.with_suffix(".html")
    assert capsys.readouterr().out == f"{page}\n"
    text = page.read_text()
    assert "<h1>GPT</h1>" in text
    for said in ("run.json", json.loads(run.read_text())["torch"]):
        assert said in text


def test_it_lies_where_it_is_asked_for(run, tmp_path):
    assert main([str(run), "-o", str(tmp_path / "a page")]) == 0
    assert (tmp_path / "a page").is_file()
    assert not run.with_suffix(".html").exists()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "No such file"),
        ("{", "is not a report of float8.numerics"),
        ("[1]", "is not a report of float8.numerics"),
        ('{"format": "float8.numerics", "version": 9, "float8": "8.0"}', "of version 9"),
        ('{"format": "float8.numerics", "version": 1}', "missing or damaged"),
        (
            '{"format": "float8.numerics", "version": 1, "model": "", "snapshots": []}',
            "there is no snapshot",
        ),
    ],
)
def test_a_file_that_is_no_run_is_one_line_and_status_2(content, complaint, tmp_path, capsys):
    path = tmp_path / "run.json"
    if content is not None:
        path.write_text(content)
    assert main([str(path)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert complaint in said.err
    assert str(path) in said.err


def test_what_cannot_be_written_is_said(run, tmp_path, capsys):
    assert main([str(run), "-o", str(tmp_path)]) == 2
    assert "Is a directory" in capsys.readouterr().err
    assert main([str(run), "-o", str(run)]) == 2
    assert "would overwrite the run" in capsys.readouterr().err


def test_the_module_runs_without_a_warning(run):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "float8.numerics.report", str(run)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
