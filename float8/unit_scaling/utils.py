"""`analyse_module` of `analysis`, under the name that the package ``unit-scaling`` gives it."""

from __future__ import annotations

from float8.unit_scaling.analysis import analyse_module

__all__ = ["analyse_module"]
