"""Gradients that travel between ranks as float8: half the bytes of a bfloat16 reduction.

The method is that of FP8-LM (arXiv 2310.18313, section 2.1), on torch's own collectives. Read in
this order: `reduction` (the arithmetic and its collectives), `state` (the counts), `attach`
(`float8_gradients`, which puts both where DDP or FSDP2 reduces gradients).
"""

from __future__ import annotations

from float8.distributed.gradients.attach import float8_gradients

__all__ = ["float8_gradients"]
