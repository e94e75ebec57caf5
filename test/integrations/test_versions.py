"""A missing framework names its install line, and an untested version its tested range."""

from __future__ import annotations

import warnings
from importlib import metadata

import pytest

from float8.integrations.versions import require


def test_a_missing_package_names_the_line_that_installs_it():
    with pytest.raises(ImportError, match=r"no-such-framework: pip install 'float8\[titan\]'"):
        require("no-such-framework", "titan", ("1.0", "2.0"))


@pytest.mark.parametrize(
    ("version", "warns"),
    [
        ("0.9.9", True),
        ("1.2", False),
        ("1.2.0", False),
        ("1.10.3", False),
        ("1.11.0", True),
        ("1.11", True),
        ("2.0.dev1", True),
    ],
)
def test_a_version_outside_the_tested_range_is_named_with_it(monkeypatch, version, warns):
    monkeypatch.setattr(metadata, "version", lambda package: version)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        require("framework", "extra", ("1.2", "1.11"))
    assert bool(caught) == warns
    if warns:
        text = str(caught[0].message)
        assert ">= 1.2, < 1.11" in text
        assert version in text
