"""The linear layer: three GEMMs of two casts each.

``layer.py``: `Float8Linear` and its functional form; ``plan.py``: what a layer runs on a device;
``autograd.py``: forward and backward as one autograd function, and ``smoothing.py``: the same for
smooth inputs; ``scaling.py``: the scale and cast of one operand; ``cast.py``, ``static_input.py``:
the casts of a layer; ``delayed.py``: the state of delayed scaling, and its update once per step;
``refusals.py``: what cannot run, and why; ``float8_weight.py``, ``weight_cache.py``,
``resident_state.py``: weights that are in float8 before the call; ``onnx_graph.py``: ONNX files;
``switch.py``: leaving float8; ``registration.py``: what packages above register.
"""

from float8.linear.layer import Float8Linear, float8_linear

__all__ = ["Float8Linear", "float8_linear"]
