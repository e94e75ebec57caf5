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
FORMS = sorted(p for p in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if p.name != "config.yml")
FIELDS = {"checkboxes", "dropdown", "input", "markdown", "textarea"}


def name_of(path):
    return path.stem


def steps_of(workflow):
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def commands_of(workflow):
    return [step["run"] for step in steps_of(workflow) if "run" in step]


def why_not_run(command):
    """The reason why a workflow cannot run a command of this repository, or None."""
    found = re.fullmatch(r"(bash )?([\w./]+)( [\w./]+)*", command)
    if found is None:
        return "it is no single script with plain arguments"
    if not (ROOT / found[2]).is_file():
        return f"there is no {found[2]}"
    if not found[1] and not os.access(ROOT / found[2], os.X_OK):
        return f"{found[2]} is not executable"
    return None


@pytest.mark.parametrize("path", WORKFLOWS, ids=name_of)
def test_a_workflow_runs_scripts_that_exist(path):
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    commands = commands_of(workflow)
    assert commands
    assert [reason for c in commands if (reason := why_not_run(c))] == []
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["runs-on"] and job["timeout-minutes"]
        assert re.fullmatch(r"actions/checkout@v\d+", job["steps"][0]["uses"])


def test_a_script_that_is_not_there_is_seen():
    assert why_not_run("bash scripts/gpu_chek.sh out") == "there is no scripts/gpu_chek.sh"
    assert why_not_run("setup.py") == "setup.py is not executable"
    assert why_not_run("pip install x && y") is not None


def test_ci_checks_every_change_and_a_gpu_is_used_by_hand():
    ci, gpu = (yaml.safe_load(path.read_text(encoding="utf-8")) for path in WORKFLOWS)
    # YAML 1.1 reads the key `on` as true.
    assert ci[True].keys() == {"push", "pull_request"} and commands_of(ci) == [".ci/run"]
    assert gpu[True].keys() == {"workflow_dispatch"}
    (job,) = gpu["jobs"].values()
    assert "self-hosted" in job["runs-on"]
    (command,) = commands_of(gpu)
    script, folder = command.split()[1:]
    assert script == "scripts/gpu_check.sh"
    assert job["steps"][-1]["with"]["path"] == f"{folder}/results.tar.gz"
    assert "archive=$out/results.tar.gz" in (ROOT / script).read_text(encoding="utf-8")


@pytest.mark.parametrize("path", FORMS, ids=name_of)
def test_an_issue_form_has_what_github_asks_for(path):
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert form["name"] and form["description"] and form["labels"]
    asked = [field for field in form["body"] if field["type"] != "markdown"]
    assert {field["type"] for field in form["body"]} <= FIELDS
    assert len({field["id"] for field in asked}) == len(asked)
    assert all(field["attributes"]["label"] for field in asked)
    assert any(field.get("validations", {}).get("required") for field in asked)


def test_the_forms_are_for_bugs_recipes_and_features():
    assert [path.stem for path in FORMS] == ["bug", "feature", "recipe"]


def test_a_bug_report_prints_its_versions():
    form = yaml.safe_load((GITHUB / "ISSUE_TEMPLATE" / "bug.yml").read_text(encoding="utf-8"))
    (field,) = (f for f in form["body"] if f.get("id") == "versions")
    (block,) = blocks_of(field["attributes"]["description"])
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(block.code, {})
    assert said.getvalue().startswith(f"{float8.__version__} ")


@pytest.mark.parametrize("path", [GITHUB / "ISSUE_TEMPLATE", ROOT / "SECURITY.md"], ids=name_of)
def test_addresses_are_those_of_the_repository_and_its_files(path):
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    addresses = re.findall(r"https?://[^\s)>\"]+", text)
    assert addresses
    assert [x for x in addresses if not x.startswith(f"{REPOSITORY}/")] == []
    paths = [x.removeprefix(f"{REPOSITORY}/blob/main/") for x in addresses if "/blob/" in x]
    assert [p for p in paths if not (ROOT / p).is_file()] == []


def test_the_citation_has_the_fields_that_its_format_requires():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["authors"] == [{"name": "The float8 developers"}]
    assert citation["repository-code"] == REPOSITORY
    assert citation["license"] == "BSD-3-Clause"
