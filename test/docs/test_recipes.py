"""The page of recipes names every recipe."""

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
