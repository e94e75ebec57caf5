"""Gradients that travel between ranks as float8: half the bytes of a bfloat16 reduction.

The method is that of FP8-LM (arXiv 2310.18313, section 2.1), on torch's own collectives. Read in
this order: `wire` (what a byte on the wire means, no communication), `reduce` (the two
collectives), `controller` (the factor mu), `state` (what is counted), then `ddp` and `fsdp`, which
put it where torch reduces gradients. `attach.float8_gradients` chooses between them, and
``python -m float8.distributed.gradients.measure`` prints the error that it costs.
"""

from __future__ import annotations

from float8.distributed.gradients.attach import float8_gradients
from float8.distributed.gradients.controller import ScalingController
from float8.distributed.gradients.state import Float8Gradients, GradientReport

__all__ = ["Float8Gradients", "GradientReport", "ScalingController", "float8_gradients"]
