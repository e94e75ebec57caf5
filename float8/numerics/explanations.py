"""What the columns of the page mean, and how to read a good and a bad value.

The page shows each text beside its column: at the headers, in the opened rows, and all of them in
the legend above the table. The thresholds are those of `float8.numerics.problems`.
"""

from __future__ import annotations

import html
from typing import NamedTuple

from float8.formats import E4M3, E5M2
from float8.numerics import problems

_EXPECTED = problems.EXPECTED_SQNR
_SUSPICIOUS, _BAD = problems.MISSING_SQNR


class Explanation(NamedTuple):
    """One column: its name on the page, its meaning, and how to read it."""

    name: str
    meaning: str
    good: str
    bad: str


def _percent(share: float) -> str:
    return f"{100 * share:g} %"


# By the key of the column in page.js.
EXPLANATIONS = {
    "layer": Explanation(
        "Layer",
        "The name of a layer, as in model.named_modules(). A row is one cast: one operand of this "
        "layer, made float8 for one matrix product. Open the row for the whole histogram and for "
        "advice.",
        "Each layer that was converted has a row.",
        'A layer without rows was not measured. "Not seen", below the health of the run, names it '
        "and the reason.",
    ),
    "operand": Explanation(
        "Operand",
        "What is cast: the layer's input and weight for the forward, grad_output (the gradient of "
        "the layer's output) for the backward. Below it: the format, when its scale is found "
        "(dynamic, delayed or static), and which elements share a scale.",
        "E4M3 for input and weight; E5M2, which reaches further down, for tensorwise gradients.",
        "A recipe that you did not choose: print model.float8_conversion.",
    ),
    "sqnr": Explanation(
        "SQNR dB",
        "Signal to quantisation noise: the power of the operand over the power of the error that "
        "the cast made, in dB. 6 dB less is twice the error.",
        f"About {_EXPECTED['e4m3']:.0f} for E4M3 and {_EXPECTED['e5m2']:.0f} for E5M2: the "
        "rounding of the format, and no other loss.",
        f"Below {_EXPECTED['e4m3'] - _SUSPICIOUS:.0f} (E5M2: "
        f"{_EXPECTED['e5m2'] - _SUSPICIOUS:.0f}) wants a look, below "
        f"{_EXPECTED['e4m3'] - _BAD:.0f} ({_EXPECTED['e5m2'] - _BAD:.0f}) is bad. Saturated, "
        "flushed and kurtosis of the same row give the reason.",
    ),
    "histogram": Explanation(
        "Powers of two",
        "How many elements have which magnitude before the cast, on a logarithmic scale, over the "
        "range of the format under the scale in use.",
        "The bars end just below the right shade, and little of them is in the left one.",
        "Bars in the right shade saturate, bars in the left one are flushed. Bars that end far "
        "from the right shade leave the top of the format unused.",
    ),
    "trend": Explanation(
        "Over the run",
        "The SQNR of this cast at each snapshot, the first on the left. Each line has a scale of "
        "its own; open the row for the numbers.",
        "Level, or level after the first steps.",
        "It falls from snapshot to snapshot: outliers grow, or a delayed or static scale no longer "
        "fits.",
    ),
    "flushed": Explanation(
        "Flushed",
        "The share of the elements that were not zero and became zero: they were smaller than half "
        "of the smallest number of the format under the scale in use.",
        f"Below {_percent(problems.FLUSHED[0])}. More is often harmless in a gradient whose SQNR "
        "is as expected: the lost elements were small, as in the gradient of a softmax.",
        f"Above {_percent(problems.FLUSHED[0])} wants a look, above "
        f"{_percent(problems.FLUSHED[1])} is bad; one level less in a gradient with the expected "
        "SQNR. In an input or weight with the expected SQNR, outliers have nearly all the power. "
        "Let fewer elements share a scale (rowwise, blockwise), or use E5M2.",
    ),
    "saturated": Explanation(
        "Saturated",
        "The share of the elements that were larger than the largest number of the format under "
        "the scale in use, and were cut to it.",
        "0 %. A dynamic scale never saturates.",
        f"Above {_percent(problems.SATURATED[0])} wants a look, above "
        f"{_percent(problems.SATURATED[1])} is bad. A delayed scale needs a margin, a "
        "static one another calibration.",
    ),
    "amax": Explanation(
        "Amax",
        "The largest finite magnitude of the operand before the cast.",
        "About the same at each snapshot, once the learning rate has warmed up.",
        "It doubles from snapshot to snapshot: outliers grow, or the training diverges. Compare "
        "with the loss and with a run in bfloat16.",
    ),
    "scale_max": Explanation(
        "Scale",
        "value = data * scale. Where rows or blocks have scales of their own: the largest, and "
        "below it the smallest.",
        f"About amax / {E4M3.max:g} (E4M3) or amax / {E5M2.max:g} (E5M2): then amax is the "
        "largest number of the format.",
        "Much smaller: elements saturate. Much larger: small elements are flushed. Stale says by "
        "how much.",
    ),
    "kurtosis": Explanation(
        "Kurtosis",
        "How heavy the tails are: E[(x - mean)^4] / variance^2. 3 for a Gaussian, 1.8 for a "
        "uniform distribution. Large values mean outliers: few elements that are much larger than "
        "all others.",
        f"Below {problems.MANY_OUTLIERS:g}: one scale suits all elements. More is harmless where "
        "the SQNR is as expected.",
        f"Above {problems.MANY_OUTLIERS:g} with a low SQNR: one scale for the whole tensor is not "
        "enough. Take recipe rowwise or blockwise, or leave the layer in high precision.",
    ),
    "staleness": Explanation(
        "Stale",
        "How many octaves (factors of two) the amax lies above (+) or below (-) the amax that a "
        "delayed or static scale was made for. A dynamic scale is never stale and shows no number.",
        f"Below +{problems.STALE_ABOVE:g}; of a delayed scale also above {problems.STALE_BELOW:g}. "
        "0 is a scale that fits exactly.",
        f"Above +{problems.STALE_ABOVE:g}, values saturate: add a margin, or take a dynamic "
        f"recipe. A delayed scale below {problems.STALE_BELOW:g} leaves the top of the format "
        "unused: take a shorter history.",
    ),
    "gradient_sqnr": Explanation(
        "Gradient SQNR",
        "The power of the weight's gradient over the power of the error that the layer's casts put "
        "into it, in dB, from 16 random projections.",
        "About the lower SQNR of the two operands, input and grad_output, or more.",
        f"Below {problems.DROWNED_BELOW:.1f} the error drowns the gradient: let fewer elements "
        "share a scale, or compute this gradient in high precision (rowwise_with_gw_hp).",
    ),
    "nonfinite": Explanation(
        "Inf or NaN",
        "How many elements were inf or NaN before the cast. A cast makes none of finite values.",
        "0.",
        "Any other number. float8.find_nan(model, batch) names the first module that made one.",
    ),
}


def as_html() -> str:
    """All explanations as a list of definitions; ``explain-KEY`` is the id of each."""
    return "".join(
        f'<div id="explain-{key}"><dt>{html.escape(one.name)}</dt>'
        f"<dd>{html.escape(one.meaning)}</dd>"
        f'<dd><b class="good">Good</b> {html.escape(one.good)}</dd>'
        f'<dd><b class="bad">Bad</b> {html.escape(one.bad)}</dd></div>'
        for key, one in EXPLANATIONS.items()
    )
