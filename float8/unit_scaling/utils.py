"""`analyse_module`, where the package ``unit-scaling`` has it; it belongs to `analysis`."""

from __future__ import annotations

from float8.unit_scaling.analysis import analyse_module

__all__ = ["analyse_module"]
