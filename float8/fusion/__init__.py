"""Norms and gates that return float8, and fusing the norms of a model with the layers behind them.

``producers.py``: the modules; ``autograd.py``: their autograd functions; ``norm_readers.py``: which
layers read a norm's result; ``norm_fusion.py``: replacing the norms of a converted model.
"""

from float8.fusion.feed_forward import fuse_feed_forwards, register_feed_forward
from float8.fusion.norm_fusion import fuse_norms, register_norm
from float8.fusion.norm_readers import register_norm_pairs
from float8.fusion.producers import LayerNormCast, RMSNormCast, SwiGLUCast, swiglu_scale

__all__ = [
    "LayerNormCast",
    "RMSNormCast",
    "SwiGLUCast",
    "fuse_feed_forwards",
    "fuse_norms",
    "register_feed_forward",
    "register_norm",
    "register_norm_pairs",
    "swiglu_scale",
]
