"""What the optimizers refuse, and what to do instead.

Everything here raises ValueError for a value and TypeError for a type, names the parameter, its
shape and its dtype, and says how to go on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from float8.formats import HIGH_PRECISION_DTYPES
from float8.tensor import Float8Tensor

FIRST_MOMENTS = {"float8": "float8", "float32": None}
SECOND_MOMENTS = {"float8": "float8_expanded", "float16": "float16", "float32": None}
STATE_ROUNDINGS = ("auto", "nearest", "stochastic")

AMSGRAD = (
    "amsgrad=True is not supported: the running maximum of the second moment only ever grows, and "
    "in 8 bits every rounding upwards would stay in it for ever; use amsgrad=False, or "
    "torch.optim.AdamW for these parameters"
)


def check_number(name: str, value: Any, low: float, high: float | None = None) -> None:
    """Raise ValueError unless ``low <= value`` (and ``< high``); tensors must have one element.

    Raises:
        TypeError: neither a number nor a tensor; text too, as YAML reads 1e-3 without a point.
    """
    if not isinstance(value, Real | Tensor):
        raise TypeError(f"{name} must be a number or a tensor with one element, got {value!r}")
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name} as a tensor must have one element, got {tuple(value.shape)}")
        if value.device.type != "cpu":
            return  # looking would stall the stream
    number = float(value)
    if not (low <= number and (high is None or number < high)):
        bounds = f"at least {low:g}" + ("" if high is None else f" and below {high:g}")
        raise ValueError(f"{name} must be {bounds}, got {number}")


def check_betas(betas: Any) -> None:
    """Raise ValueError or TypeError unless these are two numbers in [0, 1)."""
    if not isinstance(betas, Sequence) or len(betas) != 2:
        raise TypeError(f"betas must be two numbers in [0, 1), as in (0.9, 0.999), got {betas!r}")
    for index, beta in enumerate(betas):
        check_number(f"betas[{index}]", beta, 0.0, 1.0)


def check_storage(group: Mapping[str, Any]) -> None:
    """Raise ValueError or TypeError for options about how states are kept."""
    for name, known in (("first_moment", FIRST_MOMENTS), ("second_moment", SECOND_MOMENTS)):
        if name in group and group[name] not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {group[name]!r}")
    if group["state_rounding"] not in STATE_ROUNDINGS:
        roundings = ", ".join(STATE_ROUNDINGS)
        raise ValueError(
            f"state_rounding must be one of {roundings}, got {group['state_rounding']!r}"
        )
    for name, least in (("group_size", 1), ("min_size", 0)):
        value = group[name]
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} must be an int, got {value!r}")
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")


def describe(index: int, p: Tensor, names: Sequence[str] | None) -> str:
    """How an error calls a parameter: by its name, or by its place in the group."""
    name = f"parameter {index}" if names is None else f"parameter {names[index]!r}"
    return f"{name} of shape {tuple(p.shape)} and dtype {p.dtype}"


def check_parameter(p: Tensor, what: str) -> None:
    """Raise TypeError for a parameter that the optimizers cannot train."""
    if p.layout != torch.strided:
        raise TypeError(f"{what} is {p.layout}: only dense parameters are supported")
    if p.dtype not in HIGH_PRECISION_DTYPES:
        known = ", ".join(str(d) for d in HIGH_PRECISION_DTYPES)
        raise TypeError(
            f"{what} is not supported: use {known} (param.data = param.data.float()), or give it "
            "to an optimizer of torch.optim"
        )
    if isinstance(p, Float8Tensor) and p.data_and_scale[1].numel() != 1:
        raise TypeError(
            f"{what} is a Float8Tensor with block {p.block}: parameters kept in float8 need one "
            "scale; make it with granularity=Tensorwise()"
        )
    if isinstance(p, Float8Tensor) and p.data_t is not None:
        raise TypeError(
            f"{what} carries the codes of its transpose, which a step would leave stale; make the "
            "parameter from .data_and_scale alone"
        )


def check_gradient(grad: Tensor, what: str) -> None:
    """Raise RuntimeError, as torch.optim does, for a sparse gradient, and TypeError for a dtype."""
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"the gradient of {what} is sparse ({grad.layout}): states are kept in groups of "
            "neighbours, which a sparse gradient would decode for every touched element; use "
            "sparse=False in the embedding, or torch.optim.SparseAdam for this parameter"
        )
    if grad.dtype not in HIGH_PRECISION_DTYPES:
        raise TypeError(
            f"the gradient of {what} is {grad.dtype}, and steps are computed in float32: keep the "
            "model in float32, bfloat16 or float16 (model.float()), or use torch.optim"
        )
