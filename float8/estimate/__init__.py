"""L4: the cost model. Will float8 be faster here, by how much, and for which layers?

==================== ===========================================================================
`devices.py`         what a device can do, figure by figure, each with its source
`casts.py`           which passes over memory a cast takes, and the bytes that they move
`roofline.py`        the time of a layer: three GEMMs and their casts; the memory that it saves
`layers.py`          which layers, and what a device refuses
`predict.py`         `estimate` and `faster_layers`
`table.py`           the table, and the rows behind it
`lookup.py`          a device by name, by file, or the one at hand
`measure.py`         the machine at hand, measured
`results.py`         the result files of the benchmarks, read
`fit.py`             figures fitted to times, by `least_squares.py`
`check.py`           predicted against measured
`__main__.py`        ``python -m float8.estimate``
==================== ===========================================================================

The package exports the function `estimate` under this room's name, so that `float8.estimate(model)`
works; the room itself is imported by ``from float8.estimate import ...``.

May import: everything of lower levels but ``float8.tensor.dispatch``.
"""

from float8.estimate.check import Check, predicted_against_measured
from float8.estimate.devices import DEVICES, Device, Figure, Product
from float8.estimate.fit import fit
from float8.estimate.measure import measure
from float8.estimate.predict import estimate, faster_layers
from float8.estimate.table import Estimate

__all__ = [
    "DEVICES",
    "Check",
    "Device",
    "Estimate",
    "Figure",
    "Product",
    "estimate",
    "faster_layers",
    "fit",
    "measure",
    "predicted_against_measured",
]
