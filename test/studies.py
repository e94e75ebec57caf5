"""Quality studies whose runs are made in the test's own process.

A study starts a process for each run, which takes seconds; `test_study.py` tests that once.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.quality import study


def made_here(
    monkeypatch: pytest.MonkeyPatch,
    call: Callable[[Callable[[Any], Any], Any], Any] = lambda train, run: train(run),
) -> None:
    """Make the runs of studies here, one after the other.

    Args:
        monkeypatch: undoes it.
        call: makes a run: gets the study's function and the run.
    """

    def made(todo, train, jobs, late):
        for run in todo:
            if late():
                return
            try:
                yield run, call(train, run)
            except Exception:
                yield run, {study.FAILED: traceback.format_exc()}

    monkeypatch.setattr(study, "_made", made)
