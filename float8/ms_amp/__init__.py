"""MS-AMP's levels: float8 weights, gradients, optimizer states and communication together.

``levels.py``: the table of levels; ``ms_amp.py``: applying one to a model.
"""

from float8.ms_amp.ms_amp import _AfterLoad, ms_amp  # noqa: F401  pickles name both here

__all__ = ["ms_amp"]
