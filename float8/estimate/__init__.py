"""The cost model: predicts whether float8 is faster on a device, by how much, for which layers.

- `devices.py`: what a device can do, with sources; a device by its name
- `roofline.py`: the time of a layer, its GEMMs and casts together, and the memory that it saves
- `predict.py`: `estimate` and `faster_layers`, for models and for shapes
- `table.py`: the result, and how it is printed
- `__main__.py`: ``python -m float8.estimate``

`benchmarks/measure_device.py` measures the machine at hand, or fits a device to result files;
`benchmarks/check_estimate.py` compares predictions with measurements, by default with those that
others published (`benchmarks/published.json`).

``float8`` exports the function `estimate` under this package's name: ``float8.estimate(model)``
works, ``from float8.estimate import ...`` imports from the package, and the function has `DEVICES`.
"""

from float8.estimate.devices import DEVICES
from float8.estimate.predict import estimate, faster_layers

__all__ = ["DEVICES", "estimate", "faster_layers"]

estimate.DEVICES = DEVICES  # type: ignore[attr-defined]
