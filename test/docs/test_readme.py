"""README.md is short, leads to every page, and says what the code and the result files say.

`test_pages.py` runs its snippets and its commands.
"""

from __future__ import annotations

import json
import re

from fresh import ROOT

from float8.config import RECIPES

README = (ROOT / "README.md").read_text(encoding="utf-8")
LINKS = re.findall(r"\]\(([^)\s]+)\)", README)


def section(title: str) -> str:
    return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_every_link_of_this_repository_leads_to_a_file():
    own = [link for link in LINKS if "://" not in link]
    assert own
    missing = [link for link in own if not (ROOT / link.partition("#")[0]).exists()]
    assert missing == []


def test_every_page_of_the_documentation_is_one_link_away():
    pages = {str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md")}
    api = {page for page in pages if page.startswith("docs/api/")}
    assert pages - api - set(LINKS) == set()


def test_every_recipe_is_recommended_to_somebody():
    rows = [line for line in section("Which recipe").splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 7
    named = set(re.findall(r"`(\w+)`", "".join(rows)))
    assert set(RECIPES) - named == set()


def test_the_memory_of_a_model_is_that_of_the_result_file():
    path = ROOT / "benchmarks" / "results" / "cpu_memory.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    of_it = [row for row in rows if row["mode"] == "llama2-7b" and "peak_mib" in row]
    peak = {row["layer"]: row["peak_mib"] / 1024 for row in of_it}
    quoted = re.search(r"Llama-2-7B: (\d+) GiB in bf16, (\d+) GiB \(traced\)", README)
    assert quoted is not None
    least = peak["tensorwise+saved_activations+float8_adamw"]
    assert [int(q) for q in quoted.groups()] == [round(peak["bf16"]), round(least)]
