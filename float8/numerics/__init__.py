"""See the numbers: what casts do to the operands of a model's float8 layers.

    inspect          watch the casts of a model, forward and backward, for as long as it is open
    inspect_every    the same, every n training steps, into a file and a ``SummaryWriter``
    Report           what was seen: a table, a picture, a file, scales
    load_run         the reports of a file
    compare          float8 against high precision on one batch: which layers hurt the result
    accurate_layers  a filter for conversion that leaves such layers out
    find_nan         the first module and tensor that is not finite
    calibrate        static scales for inference

``python -m float8.numerics.report run.json -o report.html`` makes a page of a file.

``rows.py`` < ``table.py``, ``plot.py`` < ``snapshot.py``, ``statistics.py`` < ``inspection.py`` <
``monitor.py``; ``batches.py``, ``untouched.py`` < ``passes.py`` < ``comparison.py`` <
``accurate.py``; ``culprit.py`` < ``nonfinite.py``; ``distribution.py`` < ``calibration.py``;
``findings.py`` < ``page.py`` < ``report.py``: the page. May import: what is below L4, no other room
of L4.
"""

from __future__ import annotations

import importlib
from typing import Any

# Imported when asked for: most programs that train use none of it, or one.
_ON_DEMAND = {
    "Calibration": "calibration",
    "Comparison": "comparison",
    "Finding": "culprit",
    "Monitor": "monitor",
    "Report": "snapshot",
    "Row": "rows",
    "accurate_layers": "accurate",
    "calibrate": "calibration",
    "compare": "comparison",
    "find_nan": "nonfinite",
    "inspect": "inspection",
    "inspect_every": "monitor",
    "load_run": "snapshot",
}


def __getattr__(name: str) -> Any:
    if name in _ON_DEMAND:
        return getattr(importlib.import_module(f"float8.numerics.{_ON_DEMAND[name]}"), name)
    raise AttributeError(f"module 'float8.numerics' has no attribute {name!r}")


__all__ = [
    "Calibration",
    "Comparison",
    "Finding",
    "Monitor",
    "Report",
    "Row",
    "accurate_layers",
    "calibrate",
    "compare",
    "find_nan",
    "inspect",
    "inspect_every",
    "load_run",
]
