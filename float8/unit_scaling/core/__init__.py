"""What unit-scaled operations are made of, for building more of them: `functional`.

The package ``unit-scaling`` has this room under the same name.
"""

from __future__ import annotations

from float8.unit_scaling.core import functional

__all__ = ["functional"]
