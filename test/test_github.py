"""Workflows, issue forms and CITATION.cff parse, and name files and functions that exist."""

from __future__ import annotations

import contextlib
import io
import os
import re

import pytest
from fresh import ROOT
from pages import blocks_of

import float8

yaml = pytest.importorskip("yaml")

REPOSITORY = "https://github.com/float8-developers/float8"
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))


def name_of(path):
    return path.stem


@pytest.mark.parametrize("path", WORKFLOWS, ids=name_of)
def test_a_workflow_runs_scripts_that_exist(path):
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["runs-on"] and job["timeout-minutes"]
        commands = [step["run"] for step in job["steps"] if "run" in step]
        assert commands
        for command in commands:
            script = command.removeprefix("bash ").split()[0]
            assert (ROOT / script).is_file(), command
            assert command.startswith("bash ") or os.access(ROOT / script, os.X_OK), command


def test_addresses_are_those_of_the_repository_and_its_files():
    files = [*GITHUB.glob("ISSUE_TEMPLATE/*"), ROOT / "SECURITY.md"]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    addresses = re.findall(r"https?://[^\s)>\"]+", text)
    assert [x for x in addresses if not x.startswith(f"{REPOSITORY}/")] == []
    paths = [x.removeprefix(f"{REPOSITORY}/blob/main/") for x in addresses if "/blob/" in x]
    assert paths and [p for p in paths if not (ROOT / p).is_file()] == []
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert (citation["repository-code"], citation["license"]) == (REPOSITORY, "BSD-3-Clause")


def test_a_bug_report_prints_its_versions():
    form = yaml.safe_load((GITHUB / "ISSUE_TEMPLATE" / "bug.yml").read_text(encoding="utf-8"))
    (field,) = (f for f in form["body"] if f.get("id") == "versions")
    (block,) = blocks_of(field["attributes"]["description"])
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(block.code, {})
    assert said.getvalue().startswith(f"{float8.__version__} ")
