"""What the README says is true: its Python runs as written, and its table names every recipe."""

import re
from pathlib import Path

import pytest

from float8.config import RECIPES

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_snippets_run_as_written(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write files
    exec(compile(SNIPPETS[number], f"README.md, snippet {number}", "exec"), {})


def test_there_are_snippets():
    assert len(SNIPPETS) >= 3


def test_every_recipe_has_its_row():
    section = README.split("## Recipes")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE)
    assert rows == list(RECIPES)


def test_every_command_names_a_file_that_exists():
    commands = re.findall(r"(?:bash|python) ((?:scripts|benchmarks)/[\w/.]+)", README)
    assert commands
    assert all((ROOT / command).is_file() for command in commands)


def test_every_framework_names_a_file_that_exists():
    section = README.split("## In your framework")[1].split("\n## ")[0]
    files = re.findall(r"^\|.*\| `([\w/.]+)` \|$", section, re.MULTILINE)
    assert len(files) == 7
    assert all((ROOT / file).is_file() or (ROOT / "float8" / file).is_file() for file in files)
