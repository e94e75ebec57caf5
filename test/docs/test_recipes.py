"""The page of recipes names every recipe, with the speeds that the page of speed predicts."""

import re
from pathlib import Path

from float8.config import RECIPES

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")


def table(title):
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


def test_every_recipe_has_its_row():
    rows = re.findall(r"^\| `(\w+)` \|", table("The recipes"), flags=re.MULTILINE)
    assert rows == list(RECIPES)


def test_the_speeds_are_those_of_the_page_of_speed():
    predicted = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    predicted = predicted.split("## Predictions by recipe\n")[1].split("\n## ")[0]
    line = r"^\| `(\w+)` \| (\S+) \| [^|]*\| (\S+) \|"
    expected = {name: speeds for name, *speeds in re.findall(line, predicted, re.MULTILINE)}
    line = r"^- `(\w+)`: (\S+), (\S+); "
    found = re.findall(line, table("The recipes"), re.MULTILINE)
    assert {name: speeds for name, *speeds in found} == expected
