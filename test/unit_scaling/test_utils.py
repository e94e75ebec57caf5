"""`analyse_module` is where the package unit-scaling has it, and it is one function."""

from __future__ import annotations

import float8.unit_scaling as uu
from float8.unit_scaling.utils import analyse_module


def test_analyse_module_is_the_one_of_analysis():
    assert analyse_module is uu.utils.analyse_module is uu.analysis.analyse_module
