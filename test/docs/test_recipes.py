"""The page of recipes names every recipe, with its costs."""

import re
from pathlib import Path

from linear.test_autograd import COSTS

from float8.config import RECIPES

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")


def test_every_recipe_has_its_row_and_its_section():
    table = PAGE.split("## The recipes\n")[1].split("\n### ")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE) == list(RECIPES)
    sections = re.findall(r"^### (\w+)$", PAGE, flags=re.MULTILINE)
    assert sections == list(RECIPES)


def test_every_section_says_what_when_and_at_which_cost():
    for name in RECIPES:
        section = PAGE.split(f"### {name}\n")[1].split("\n#")[0]
        words = re.findall(r"^- \*\*(\w+)\*\*", section, flags=re.MULTILINE)
        assert words == ["What", "Config", "When", "Cost", "Watch"], name


def test_the_first_table_recommends_every_recipe():
    table = PAGE.split("## Which recipe do I take")[1].split("\n\n")[1]
    rows = [line for line in table.splitlines() if line.startswith("|")]
    assert [name for name in RECIPES if not any(f"`{name}`" in row for row in rows)] == []


def test_the_costs_are_those_that_are_counted():
    rows = re.findall(r"^\| `(\w+)` \|[^|]+\| (\d+) \| (\d+) \|", PAGE, flags=re.MULTILINE)
    counted = [(name, str(COSTS[name][-1]), str(COSTS[name][0])) for name in RECIPES]
    assert rows == counted
