"""Norms and activations that return float8, and finding the layers that consume a norm's output.

``fused.py``: the modules; ``autograd.py``: their autograd functions; ``norm_readers.py``: which
layers consume a norm's output; ``norm_fusion.py``: replacing the norms of a converted model.
"""
