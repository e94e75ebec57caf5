"""What the README says is true: its Python runs as written, and its table names every recipe."""

import re
from pathlib import Path

import pytest

from float8.config import RECIPES

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_snippets_run_as_written(number):
    exec(compile(SNIPPETS[number], f"README.md, snippet {number}", "exec"), {})


def test_there_are_snippets():
    assert len(SNIPPETS) >= 3


def test_every_recipe_has_its_row():
    rows = re.findall(r"^\| `(\w+)` \|", README, flags=re.MULTILINE)
    assert rows == list(RECIPES)


def test_every_command_names_a_file_that_exists():
    commands = re.findall(r"(?:bash|python) ((?:scripts|benchmarks)/\S+)", README)
    assert commands
    assert all((ROOT / command).is_file() for command in commands)
