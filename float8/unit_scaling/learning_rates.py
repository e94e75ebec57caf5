"""The learning rate that u-muP gives a parameter, as a multiple of the global one.

One learning rate ``lr`` is tuned, on a small model, and serves every width and depth. A parameter
trains with ``lr * scale(parameter)``. For Adam, whose updates have unit scale whatever the
gradient's (arXiv 2407.17465, table 2; "fan-in" of an embedding is the width that it writes, which
the table calls its fan-out):

    mup_type               scale                    why
    "weight"               1 / sqrt(fan_in)         a forward multiplies by 1 / sqrt(fan_in), and an
                                                    update's fan_in products add up coherently
    "output"               1                        its forward multiplies by 1 / fan_in already
    "bias", "norm"         1                        each element acts on one feature
    in a stack of depth L  all of these / sqrt(L)   the updates of L residual layers add up

SGD's updates are as large as its gradients. If the readout's backward has its own scale
(``LinearReadout(constraint=None)``, the default) gradients have unit scale and the table above
holds. If it is constrained to the output's (``constraint="to_output_scale"``), everything before it
sees gradients that shrink like 1 / width, and gets the width back here:

    "weight"               sqrt(fan_in)             = fan_in * 1 / sqrt(fan_in)
    "bias", "norm"         the number of elements, which is the width
    "output"               1                        its own gradient does not pass through itself
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from float8.unit_scaling.parameter import MUP_TYPES, ParameterData

LrScale: TypeAlias = Callable[[Any], float]


def lr_scale_for_depth(param: ParameterData) -> float:
    """``1 / sqrt(depth)`` in a stack of residual layers, else 1 (u-muP, table 2, "residual")."""
    return 1.0 if param.mup_scaling_depth is None else float(param.mup_scaling_depth**-0.5)


def lr_scale_func_adam(param: ParameterData) -> float:
    """What the learning rate of Adam and AdamW is multiplied by (u-muP, table 2).

    Args:
        param: a parameter with ``mup_type`` and ``mup_scaling_depth``.

    Returns:
        The factor; the module's docstring has the table.

    Raises:
        ValueError: an unknown ``mup_type``.
    """
    scale = lr_scale_for_depth(param)
    return scale * _fan_in(param) ** -0.5 if _type(param) == "weight" else scale


def lr_scale_func_sgd(readout_constraint: str | None) -> LrScale:
    """What the learning rate of SGD is multiplied by, as a function of the parameter.

    Args:
        readout_constraint: the ``constraint`` of the model's `LinearReadout`, None or
            "to_output_scale".

    Returns:
        A function like `lr_scale_func_adam`; the module's docstring has the table.

    Raises:
        ValueError: another constraint.
    """
    if readout_constraint is None:
        return lr_scale_func_adam
    if readout_constraint == "to_output_scale":
        return _sgd_behind_constrained_readout
    raise ValueError(
        'readout_constraint must be None or "to_output_scale", the constraint of the model\'s '
        f"LinearReadout; got {readout_constraint!r}"
    )


def _sgd_behind_constrained_readout(param: ParameterData) -> float:
    scale = lr_scale_for_depth(param)
    if _type(param) == "output":
        return scale
    width = _fan_in(param)
    return scale * (width**0.5 if _type(param) == "weight" else width)


def _type(param: ParameterData) -> str:
    if param.mup_type not in MUP_TYPES:
        raise ValueError(f"mup_type must be one of {list(MUP_TYPES)}, got {param.mup_type!r}")
    return param.mup_type


def _fan_in(param: ParameterData) -> int:
    """How many products one output element adds: of (out, in, *kernel) all but the first size.

    Of an embedding (tokens, width) this is the width, as table 2 wants; so it is of vectors.
    """
    shape = param.shape
    whole = len(shape) < 2 or param.mup_type in ("bias", "norm")
    return max(1, (shape if whole else shape[1:]).numel())
