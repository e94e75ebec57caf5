"""A row as a report of `float8.numerics` has it, to vary with ``dataclasses.replace``."""

from float8.numerics.rows import Histogram, Row, Sums

ROW = Row(
    layer="nan",  # a name like any other
    operand="input",
    gemm="output",
    format="e4m3",
    scaling="delayed",
    granularity="tensorwise",
    elements=10,
    calls=1,
    zeros=1,
    nonfinite=0,
    amax=3.0,
    scale_min=0.25,
    scale_max=0.5,
    flushed=0.1,
    saturated=0.2,
    sqnr=30.0,
    kurtosis=3.0,
    staleness=-1.0,
    histogram=Histogram(-2, (1, 0, 8)),
    sums=Sums(1.0, 20.0, 3.0, 60.0, 0.02),
)
