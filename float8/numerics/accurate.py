"""`accurate_layers`: a filter for conversion that leaves out the layers that were measured as bad.

::

    with inspect(model) as report:                       # or report = compare(model, batch)
        loss(model(x), y).backward()
    fresh = make_model()
    convert_to_float8_training(fresh, module_filter_fn=accurate_layers(report, min_sqnr=20))

What is compared with ``min_sqnr`` is the lowest SQNR of a layer: of a `Report`, that of its
operands' casts (about 32 dB is E4M3's best, 26 dB E5M2's); of a `Comparison`, that of the model's
output and of its gradient with this layer alone in float8, which is what the layer does to the
result. The two differ: SQNR weighs by power, so that a weight with one huge element has a fine SQNR
though all its others were flushed, and `compare` sees that. None says nothing and is passed over;
NaN is below everything.

A layer that the report does not know has not been measured, and a guess would be silent in either
direction, so the filter raises. Where such layers are expected, leave them out before it is asked,
``all_of(skip_names("lm_head"), accurate_layers(report, 20))``, or say what becomes of them.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Sequence
from typing import Any

from torch import nn

from float8.arguments import check_type, described
from float8.convert.filters import ModuleFilter
from float8.numerics.comparison import COLUMNS, Comparison
from float8.numerics.inspection import name_in_model
from float8.numerics.rows import OPERANDS
from float8.numerics.snapshot import Report


def accurate_layers(
    report: Report | Comparison,
    min_sqnr: float,
    *,
    by: Sequence[str] | None = None,
    unknown: bool | None = None,
) -> ModuleFilter:
    """A ``module_filter_fn`` that converts the layers that lose little, and no other.

    Works on any model of the same layer names; prefixes of ``torch.compile``, DDP and
    Fabric do not matter.

    Args:
        report: of `float8.numerics.inspect`, or of `float8.numerics.compare`.
        min_sqnr: in dB; a layer with less is left in high precision.
        by: which numbers count: operands of a `Report` ("input", "weight", "grad_output"), columns
            of a `Comparison` ("alone_output", "alone_gradient", "output", "grad_input",
            "grad_weight"). By default all operands, and the two columns of the layer alone.
        unknown: of a layer that was not measured: True converts it, False does not, None raises.

    Returns:
        (module, name) -> whether to convert it; for `float8.filters.all_of` too. It raises a
        ValueError for a layer that was not measured.

    Raises:
        ValueError: ``by`` names something else or what no layer has, or ``min_sqnr`` is NaN.
        TypeError: ``report`` is neither, or ``min_sqnr`` no number.
    """
    check_type(min_sqnr, (int, float), "accurate_layers", "min_sqnr", "a number of dB")
    if math.isnan(min_sqnr):
        raise ValueError("min_sqnr must be a number of dB, got nan")
    lowest = _lowest(report, by)

    def is_accurate(module: nn.Module, fqn: str) -> bool:
        found = lowest.get(_unwrapped(fqn))
        if found is not None:
            return found >= min_sqnr
        if unknown is None:
            raise ValueError(_not_known(fqn, list(lowest)))
        return unknown

    return is_accurate


def _lowest(report: Report | Comparison, by: Sequence[str] | None) -> dict[str, float]:
    """Layer -> its lowest SQNR; without those that have none."""
    if isinstance(report, Report):
        chosen = _checked(by, OPERANDS, OPERANDS)
        pairs = [(row["layer"], row["sqnr"]) for row in report.rows() if row["operand"] in chosen]
    elif isinstance(report, Comparison):
        chosen = _checked(by, COLUMNS, ("alone_output", "alone_gradient"))
        pairs = [(row["layer"], row[name]) for row in report.rows() for name in chosen]
    else:
        raise TypeError(
            "accurate_layers takes what float8.inspect or float8.compare returned, got "
            f"{described(report)}"
        )
    lowest: dict[str, float] = {}
    for layer, sqnr in pairs:
        if sqnr is not None:
            value, name = -math.inf if math.isnan(sqnr) else sqnr, _unwrapped(layer)
            lowest[name] = min(value, lowest.get(name, math.inf))
    if pairs and not lowest:
        raise ValueError(
            f"no layer of the report has an SQNR of {', '.join(chosen)}: name others by=(...), or "
            "compare without alone=False"
        )
    return lowest


def _checked(
    by: Sequence[str] | None, known: Sequence[str], default: Sequence[str]
) -> Sequence[str]:
    if isinstance(by, str):
        raise ValueError(f"by must be a sequence of names, as ({by!r},)")
    if by is not None:
        check_type(by, Collection, "accurate_layers", "by", "a sequence of names")
    wrong = [name for name in by or () if name not in known]
    if wrong or (by is not None and not by):
        raise ValueError(f"by takes some of {', '.join(known)}, got {list(by or ())}")
    return by or default


def _unwrapped(fqn: str) -> str:
    parts = name_in_model(fqn).split(".")
    return ".".join(part for part in parts if part != "module")  # DDP's


def _not_known(fqn: str, known: Sequence[Any]) -> str:
    near = difflib.get_close_matches(fqn, known, n=3, cutoff=0.5) or list(known[:3])
    return (
        f"{fqn or 'the module itself'} has no SQNR in the report, which knows {len(known)} layers"
        f"{', such as ' + ', '.join(near) if near else ''}: it was not converted then, or no data "
        "reached it. Leave it out with all_of(skip_names(...), accurate_layers(...)), or decide "
        "with unknown=True (convert) or unknown=False"
    )
