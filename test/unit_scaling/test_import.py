"""Importing unit scaling is quick and gives all public names."""

from __future__ import annotations

import pytest
from fresh import facts_of

import float8.unit_scaling as uu
from float8.unit_scaling.utils import analyse_module

PROGRAM = """
import importlib, sys, time, float8
before, begin = set(sys.modules), time.process_time()
import float8.unit_scaling
facts["seconds"] = time.process_time() - begin
facts["loaded"] = sorted(set(sys.modules) - before)
import float8.unit_scaling.analysis
facts["with_analysis"] = sorted(sys.modules)
"""


@pytest.fixture(scope="module")
def fresh():
    return facts_of(PROGRAM)


def test_importing_is_quick_and_loads_no_compiler_no_plots_and_nothing_lazy(fresh):
    heavy = ("triton", "torch._dynamo", "torch._inductor", "matplotlib", "pandas", "einops",
             "float8.unit_scaling.transforms", "float8.unit_scaling.analysis")  # fmt: skip
    assert [name for name in fresh["loaded"] if name.startswith(heavy)] == []
    took = fresh["seconds"]
    assert took < 0.3, f"import float8.unit_scaling takes {took:.2f} s more than import float8"


def test_importing_the_analysis_imports_no_plotting_and_no_tables(fresh):
    heavy = {"matplotlib", "pandas", "triton", "pygments", "torch._dynamo.convert_frame"}
    assert heavy.isdisjoint(fresh["with_analysis"])


def test_lazy_names_are_listed_and_there():
    assert set(uu.__all__) <= set(dir(uu)) and all(hasattr(uu, name) for name in uu.__all__)
    assert analyse_module is uu.utils.analyse_module is uu.analysis.analyse_module
