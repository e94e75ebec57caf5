"""Norms that return float8, and feed-forwards that are one op of autograd.

``norm_casts.py``: the modules; ``norm_fusion.py``: replacing the norms of a converted model;
``feed_forward.py``: fusing its feed-forwards. ``*_autograd.py``: the autograd functions of norms
and feed-forwards.
"""

from float8.fusion.feed_forward import fuse_feed_forwards, register_feed_forward
from float8.fusion.norm_casts import LayerNormCast, RMSNormCast
from float8.fusion.norm_fusion import fuse_norms, register_norm

__all__ = [
    "LayerNormCast",
    "RMSNormCast",
    "fuse_feed_forwards",
    "fuse_norms",
    "register_feed_forward",
    "register_norm",
]
