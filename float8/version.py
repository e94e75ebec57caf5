"""The version of this package, which `setup.py` repeats."""

__version__ = "0.8.0"
