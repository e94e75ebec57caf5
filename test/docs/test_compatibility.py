"""The tables of docs/compatibility.md are those of the code."""

import re

import pytest

pytest.importorskip("triton")  # the kernels that a plan for a GPU imports

from float8.kernels.products import CPU, ROWWISE_PRODUCT, SUPPORT
from scripts import compatibility

PAGE = compatibility.PAGE.read_text(encoding="utf-8")


def test_the_page_has_the_tables_of_the_code():
    assert compatibility.with_tables(PAGE) == PAGE, (
        "docs/compatibility.md is out of date: run `python scripts/compatibility.py --write`"
    )


def test_an_extra_installs_versions_of_which_the_integration_does_not_warn():
    extras = compatibility.setup_arguments()["extras_require"]
    known = re.findall(r"\| `(\S+)` \| [\d.]+ \| `float8\[(\w+)\]`", compatibility.frameworks())
    assert len(known) == 4
    for span, name in known:
        assert extras[name][0].partition(";")[0] == f"{name}{span}"


def test_every_architecture_of_the_code_has_a_row():
    assert {CPU, *SUPPORT} < set(compatibility.GPUS)


def test_a_changed_table_of_the_code_makes_the_page_outdated(monkeypatch):
    monkeypatch.setitem(SUPPORT, "sm_120", {**SUPPORT["sm_120"], ROWWISE_PRODUCT: "takes no rows"})
    row = next(line for line in compatibility.devices().splitlines() if "`sm_120`" in line)
    assert re.search(r"torch._scaled_mm: all \| refused \(\d\) \|", row)
    assert compatibility.with_tables(PAGE) != PAGE


def test_the_models_of_the_checkpoints_tests_are_named():
    pytest.importorskip("transformers")
    from published_models import MODELS

    section = PAGE.split("\n## Models\n")[1].lower()
    said = section.replace("-", "_")
    assert [name for name in MODELS if name not in said] == []
