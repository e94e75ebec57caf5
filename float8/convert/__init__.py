"""Converting models: choosing layers, replacing them, and reporting the conversion.

``filters.py``: a user's choice of layers; ``conversion.py``: the plan of a conversion and its
report, in which ``folding.py`` joins names; ``convert.py``: conversion for training, and back;
``inference.py``: frozen float8 weights.
"""

from float8.convert.convert import (
    convert_from_float8_training,
    convert_to_float8_training,
    high_precision,
    register_linear_type,
)

__all__ = [
    "convert_from_float8_training",
    "convert_to_float8_training",
    "high_precision",
    "register_linear_type",
]
