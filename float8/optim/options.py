"""The options of every optimizer of this package, their defaults, and the checks of values.

The checks raise ValueError for a value and TypeError for a type, and name the parameter, its
shape and its dtype, and says what to do instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, TypedDict

import torch
from torch import Tensor

from float8.formats import HIGH_PRECISION_DTYPES
from float8.tensor import Float8Tensor


class Options(TypedDict, total=False):
    """The options that every optimizer takes; all of them belong to the parameter group.

    Attributes:
        maximize: step up the gradient, as under this name in torch.optim.
        capturable: keep ``step`` on the parameter's device, for CUDA graphs.
        fused: True asks for the CUDA kernel, False for plain PyTorch. None takes the kernel where
            it runs: on CUDA for every option but a ``group_size`` that is no power of two or is
            above 2048. It warns once on a GPU or of an option that the kernel does not take.
        first_moment: "float8" or "float32".
        second_moment: "float8" (with expanded range), "float16" (with a scale) or "float32".
        group_size: how many consecutive elements of a row share a scale.
        min_size: parameters with fewer elements keep float32 moments.
        stochastic_rounding: round bfloat16 and float16 parameters stochastically, so that small
            updates are not lost; the same numbers in every run.
        state_rounding: of float8 moments: "nearest", "stochastic", or "auto", which rounds
            stochastically a moment whose decay is so near to 1 that a step changes it by less than
            the distance of two float8 values, as AdamW's second moment.
    """

    maximize: bool
    capturable: bool
    fused: bool | None
    first_moment: str
    second_moment: str
    group_size: int
    min_size: int
    stochastic_rounding: bool
    state_rounding: str


DEFAULTS: Options = {
    "maximize": False,
    "capturable": False,
    "fused": None,
    "first_moment": "float8",
    "second_moment": "float8",
    "group_size": 128,
    "min_size": 4096,
    "stochastic_rounding": False,
    "state_rounding": "auto",
}
# The option of a moment -> its values -> the kind of `Moment`, or None for float32.
KINDS: dict[str, dict[str, str | None]] = {
    "first_moment": {"float8": "float8", "float32": None},
    "second_moment": {"float8": "float8_expanded", "float16": "float16", "float32": None},
}
STATE_ROUNDINGS = ("auto", "nearest", "stochastic")
# How states are kept: the choice of this optimizer, not of a checkpoint.
STORAGE = (*KINDS, "group_size", "min_size", "stochastic_rounding", "state_rounding")

AMSGRAD = (
    "amsgrad=True is not supported: the running maximum of the second moment only ever grows, and "
    "in 8 bits every rounding upwards would stay in it for ever; use amsgrad=False, or "
    "torch.optim.AdamW for these parameters"
)


def with_defaults(
    optimizer: str, moment_options: Mapping[str, str], options: Mapping[str, Any]
) -> dict[str, Any]:
    """``options``, as the user gave them, and the defaults of the rest.

    Raises TypeError, with the name of the optimizer, for an option that it does not have. For
    ``moment_options`` see `float8.optim.optimizer.QuantizedOptimizer`.
    """
    known = {
        name: value
        for name, value in DEFAULTS.items()
        if name not in KINDS or name in moment_options.values()
    }
    for name in options:
        if name not in known:
            raise TypeError(f"{optimizer}.__init__() got an unexpected keyword argument {name!r}")
    return {**known, **options}


def check_options(group: Mapping[str, Any]) -> None:
    """Raise ValueError or TypeError for the options that every optimizer has."""
    check_number("lr", group["lr"], 0.0)
    check_number("weight_decay", group["weight_decay"], 0.0)
    for name, known in (*KINDS.items(), ("state_rounding", STATE_ROUNDINGS)):
        if name in group and group[name] not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {group[name]!r}")
    for name, least in (("group_size", 1), ("min_size", 0)):
        value = group[name]
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} must be an int, got {value!r}")
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")


def check_number(name: str, value: Any, low: float, high: float | None = None) -> None:
    """Raise ValueError unless ``low <= value`` (and ``< high``); tensors must have one element.

    Raises TypeError for what is neither a number nor a tensor; for text too, as YAML reads 1e-3
    without a point.
    """
    if not isinstance(value, Real | Tensor):
        raise TypeError(f"{name} must be a number or a tensor with one element, got {value!r}")
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name} as a tensor must have one element, got {tuple(value.shape)}")
        if value.device.type != "cpu":
            return  # reading it would synchronise the device
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


def describe(index: int, p: Tensor, group: Mapping[str, Any]) -> str:
    """The name of a parameter for error messages, or its place in the group."""
    names = group.get("param_names")
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
    if isinstance(p, Float8Tensor) and p.scale.numel() != 1:
        raise TypeError(
            f"{what} is a Float8Tensor with block {p.block}: parameters kept in float8 need one "
            "scale; make it with granularity=Tensorwise()"
        )
    if isinstance(p, Float8Tensor) and p.data_t is not None:
        raise TypeError(
            f"{what} holds a transposed copy of its data, which a step would leave stale; make the "
            "parameter from .float8_data and .scale alone"
        )


def check_gradient(grad: Tensor, what: str) -> None:
    """Raise RuntimeError, as torch.optim does, for a sparse gradient, and TypeError for a dtype."""
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"the gradient of {what} is sparse ({grad.layout}): states are kept in groups of "
            "elements, and every element that a sparse gradient touches would decode its group; "
            "use sparse=False in the embedding, or torch.optim.SparseAdam for this parameter"
        )
    if grad.dtype not in HIGH_PRECISION_DTYPES:
        raise TypeError(
            f"the gradient of {what} is {grad.dtype}, and steps are computed in float32: keep the "
            "model in float32, bfloat16 or float16 (model.float()), or use torch.optim"
        )
