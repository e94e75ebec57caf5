"""The linear layer: three GEMMs of two casts each.

================= ==================================================================================
``layer.py``      `Float8Linear`, and its functional form
``plan.py``       what a layer runs on a device family
``autograd.py``   forward and backward, as one autograd function
``casts.py``      the casts of operands, and their state
``smoothing.py``  the autograd function of smooth inputs
``*weight*.py``   weights that are in float8 before the call; `cached_weights`
``resident.py``   weights that are stored in float8
``refusals.py``   what cannot run, and why
``module.py``     `Float8Module`: modules that convert, leave float8, and become plain again
``onnx_graph.py`` a layer in an ONNX file
================= ==================================================================================
"""

from float8.linear.layer import Float8Linear, float8_linear

__all__ = ["Float8Linear", "float8_linear"]
