"""What the README says is true: its Python runs as written, and its table names every recipe."""

import json
import re
import statistics
from pathlib import Path

import pytest

from benchmarks.measuring.contenders import SCALED
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


def test_every_measured_ratio_is_the_one_in_its_result_file():
    """The README's table of layers against the files that it names."""
    rows = re.findall(
        r"^\| `(\w+)` \| ([\d.]+)x \| ([\d.]+)x \| ([\d.]+)x \|", README, re.MULTILINE
    )
    eager, compiled = (_ratios(name) for name in ("cpu_bench_linear", "cpu_bench_linear_compile"))
    assert [row[0] for row in rows] == list(SCALED)
    for recipe, *quoted in rows:
        measured = (eager[recipe][0], compiled[recipe][0], eager[recipe][1])
        assert [float(q) for q in quoted] == [float(f"{m:.3g}") for m in measured], recipe


def test_every_ratio_of_both_modes_is_the_one_in_its_result_file():
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+)x \| ([\d.]+)x \|$", README, re.MULTILINE)
    assert [row[0] for row in rows] == list(SCALED)
    path = ROOT / "benchmarks" / "results" / "cpu_noamx_bench_linear.json"
    measured = {(r["layer"], r["mode"]): r["ratio"] for r in json.loads(path.read_text())["rows"]}
    for recipe, *quoted in rows:
        found = [measured[recipe, mode] for mode in ("eager", "compiled")]
        assert [float(q) for q in quoted] == [float(f"{m:.3g}") for m in found], recipe


def _ratios(name):
    layers = [row for row in _rows(name) if "saved_ratio" in row]  # the floor saves nothing
    return {row["layer"]: (row["ratio"], round(row["saved_ratio"], 2)) for row in layers}


def test_every_command_names_a_file_that_exists():
    commands = re.findall(r"(?:bash|python) ((?:scripts|benchmarks)/[\w/.]+)", README)
    assert commands
    assert all((ROOT / command).is_file() for command in commands)


def test_the_cost_of_looking_is_the_one_in_its_result_file():
    text = README.split("`cpu_numerics.json`")[1].split("\n\n")[0]
    ratio = {(row["layer"], row["watched"]): row["ratio"] for row in _rows("cpu_numerics")}
    quoted = dict(re.findall(r"([\d.]+)x\s+\(`(\w+)`\)", text))
    assert {recipe: float(q) for q, recipe in quoted.items()} == {
        recipe: round(r, 3) for (recipe, watched), r in ratio.items() if watched == "every 50"
    }
    steps = re.search(r"takes ([\d.]+), ([\d.]+) and ([\d.]+) steps", text)
    assert steps is not None
    each = [ratio[recipe, "each step"] for recipe in ("tensorwise", "delayed", "rowwise")]
    assert [float(q) for q in steps.groups()] == [round(r, 2) for r in each]


def test_every_framework_names_a_file_that_exists():
    section = README.split("## In your framework")[1].split("\n## ")[0]
    files = re.findall(r"^\|.*\| `([\w/.]+)` \|$", section, re.MULTILINE)
    assert len(files) == 7
    assert all((ROOT / file).is_file() or (ROOT / "float8" / file).is_file() for file in files)


def test_the_table_of_bytes_is_the_one_that_is_counted():
    from linear.test_bytes import BYTES, LAUNCHES

    rows = re.findall(r"^\| `(\w+)` \| (\d) \| (\d) \| (\d) \| (\d+) \|", README, re.MULTILINE)
    assert [row[0] for row in rows] == list(RECIPES)
    for name, *quoted in rows:
        x, g, w, cached = BYTES[name]
        assert x == g
        assert [int(q) for q in quoted] == [x, w, cached, LAUNCHES[name]], name


def test_the_table_of_memory_is_the_one_in_its_result_files():
    section = README.split("| run |")[1].split("\n\n")[0]
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines()[2:]]
    traced = {r["layer"]: r for r in _rows("cpu_memory") if r["mode"] == "llama2-7b"}
    gaps: dict[str, list[float]] = {}
    for row in _rows("cpu_memory_quality"):
        gaps.setdefault(row["layer"], []).append(row.get("gap_percent", 0.0))
    assert len(table) == 10
    for run, *cells, loss in table:
        sizes = [f"{traced[run][k] / 1024:.1f}" for k in SIZES_OF_A_RUN]
        ratios = [f"{traced[run][k]:.2f}x" for k in ("smaller", "smaller_per_gpu")]
        assert cells == sizes + ratios, run
        if loss:
            own = gaps[run]
            assert loss == f"{statistics.fmean(own):+.2f} ± {statistics.stdev(own):.2f} %", run


def test_the_times_of_an_optimizer_step_are_those_of_the_result_file():
    ratio = {(r["optimizer"], r["mode"]): r["ratio"] for r in _rows("cpu_optim")}
    text = README.split("`cpu_optim.json`")[1].split("\n\n")[0]
    quoted = [float(x) for x in re.findall(r"([\d.]+)x", text)[:4]]
    measured = [ratio[o, m] for m in ("compiled", "eager") for o in ("float8", "float8 + float16")]
    assert quoted == [float(f"{r:.{n}g}") for r, n in zip(measured, (3, 3, 2, 2), strict=True)]


SIZES_OF_A_RUN = ("optimizer_mib", "activations_mib", "peak_mib")


def _rows(name):
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))["rows"]
