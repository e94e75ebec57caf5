"""The version of this package, the only place that holds it; `setup.py` reads this file."""

__version__ = "1.0.0"
