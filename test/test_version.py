"""The version is said once in the package, and `setup.py` says the same."""

from __future__ import annotations

import re

from fresh import ROOT

import float8
from float8.version import __version__


def test_the_package_and_its_setup_have_one_version():
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    assert re.findall(r'version="([^"]+)"', setup) == [__version__] == [float8.__version__]
