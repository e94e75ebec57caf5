"""The linear layer: three GEMMs of two casts each.

``layer.py``: `Float8Linear` and its functional form; ``autograd.py``: forward and backward as one
autograd function; ``scaling.py``: the scale and cast of one operand; ``cast.py``: an operand's
cast; ``delayed.py``: the state of delayed scaling, and its update once per step; ``refusals.py``:
what cannot run, and why; ``float8_weight.py``, ``weight_cache.py``: weights that are in float8
before the call; ``switch.py``: leaving float8 in a thread, a module, or a call.
"""

from float8.linear.layer import Float8CastingLinear, Float8Linear, float8_linear

__all__ = ["Float8CastingLinear", "Float8Linear", "float8_linear"]
