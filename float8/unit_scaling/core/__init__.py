"""`core.functional`: the parts of unit-scaled operations; a package name of ``unit-scaling``."""

from __future__ import annotations

from float8.unit_scaling.core import functional

__all__ = ["functional"]
