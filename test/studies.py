"""What tests of quality studies share: a text, and runs made in the test's own process."""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.quality import study


def write_text(folder: Path) -> Path:
    """Four files of random words, always the same: losses on them do not depend on a commit."""
    source = random.Random(0)
    words = ["".join(source.choices("aeinorst", k=source.randint(1, 7))) for _ in range(200)]
    for number in range(4):
        lines = (" ".join(source.choices(words, k=8)) + "\n" for _ in range(200))
        (folder / f"{number}.txt").write_text("".join(lines))
    return folder


def made_here(
    monkeypatch: pytest.MonkeyPatch,
    call: Callable[[Callable[[Any], Any], Any], Any] = lambda train, run: train(run),
) -> None:
    """Make the runs of studies here, one after the other.

    A study starts a process for each run, which takes seconds; `test_study.py` tests that once.

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
