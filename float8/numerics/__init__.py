"""The numbers of a model's float8 layers. Three jobs:

**Watch the casts of a training**

    inspect          measure the casts of a model, forward and backward, while a block is open
    inspect_every    the same, every n training steps, into a file and a ``SummaryWriter``
    Report           the result: a table, a file
    load_run         the reports of a file
    Alarm            a problem of a cast that lasts: logged, in the file, given to ``on_alarm``
    load_alarms      the alarms of a file

**Judge the result of a model**

    compare          float8 against high precision on one batch: which layers hurt the result
    accurate_layers  a filter for conversion that leaves such layers out
    find_nan         the first module and tensor that is not finite
    calibrate        static scales for inference

**Show a page**: ``python -m float8.numerics.report run.json -o report.html`` makes one of a file.

=================== ================================================================================
statistics.py       the statistics of one cast: formulas, measurement, merging
gradient_error.py   what the casts of a layer leave of its weight's gradient
alarms.py           what is wrong with a cast, and what to do about it; problems that last
snapshot.py         `Report`: tables and files of casts
passes.py           one forward and backward of a model, without a lasting change; the walk over it
inspection.py       `inspect`: the casts that the walk measures
monitor.py          `inspect_every`
comparison.py       `compare`, `accurate_layers`
nonfinite.py        `find_nan`
calibration.py      `calibrate`
report.py           the page, with page.html, page.css and page.js
=================== ================================================================================

May import: packages of lower levels.
"""

from __future__ import annotations

import importlib
from typing import Any

# Imported when asked for: most programs use none of it, or one.
_ON_DEMAND = {
    "Alarm": "alarms",
    "accurate_layers": "comparison",
    "calibrate": "calibration",
    "compare": "comparison",
    "find_nan": "nonfinite",
    "inspect": "inspection",
    "inspect_every": "monitor",
    "load_alarms": "snapshot",
    "load_run": "snapshot",
}


def __getattr__(name: str) -> Any:
    if name in _ON_DEMAND:
        return getattr(importlib.import_module(f"float8.numerics.{_ON_DEMAND[name]}"), name)
    raise AttributeError(f"module 'float8.numerics' has no attribute {name!r}")


__all__ = list(_ON_DEMAND)
