"""Converting models: choosing layers, replacing them, and reporting the conversion.

``convert.py``: conversion for training, and back; ``inference.py``: frozen float8 weights. Both
make a plan (``conversion.py``), which leaves layers by the user's choice (``filters.py``) and for
reasons of their own (``reasons.py``). Its report joins names (``folding.py``). ``after_step.py``:
what a recipe needs after a step, and which layers the first one called.
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
